"""The executable specification: every operator in numpy float64, written for reading.

Same names and arguments as `hopwell.<operator>` (without `backend` and `stream`). Inputs are numpy arrays, those of
`ml_dtypes` (bfloat16, float8_e4m3fn) among them, or anything that numpy can take through `__dlpack__`. Results are
unrounded float64, whatever the storage dtype of the operator's outputs, so that they can judge any backend; only
where the contract is about bits (indices, codes and scales) do they have the operator's dtype. An array given
as `out=` and the like is written in its own dtype and returned.

Values that a mask hides are never read here: unused rows and pages may hold NaN. Non-finite values in memory that
*is* used follow the formulae in IEEE arithmetic, unless a docstring says otherwise.
"""

from .. import _reference
from .._reference import *  # noqa: F403
from .mla_cache import read_mla_cache
from .nvfp4 import pack_blocked_scales, unpack_blocked_scales

__all__ = ["pack_blocked_scales", "read_mla_cache", "unpack_blocked_scales"]
__all__ += _reference.__all__
