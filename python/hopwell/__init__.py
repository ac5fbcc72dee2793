"""Attention-training and low-precision decode kernels for NVIDIA Hopper and Blackwell that also run on a plain CPU.

    out, max_logits, lse = hopwell.sparse_mla_forward(q, kv, indices, sm_scale=576**-0.5)
    print(hopwell.explain("sparse_mla_forward", q=q, kv=kv, indices=indices, sm_scale=576**-0.5))  # who runs it and why

`help` of an operator has its formula, shapes and dtypes; `hopwell.backends()` are the backends that run here.

Arrays in: torch, numpy (the types of `ml_dtypes` too) or anything with `__dlpack__`, on the host or a CUDA device,
viewed and never copied. Arrays out: of the framework and on the device of the first array; arrays given as `out=` and
the like are written in place and returned; none may lie where another argument does. Bad arguments raise `ValueError`,
with outputs untouched; a device or a missing backend raises `hopwell.Error`. Results do not depend on the number of
threads.

Nothing here is differentiable: a tensor that requires grad is refused unless gradients are off (`torch.no_grad()`).
`hopwell.torch` has the differentiable operators and modules, `hopwell.reference` the executable specification.
"""

import importlib
from types import ModuleType

from . import _operators
from ._hopwell import Error, num_threads, set_num_threads
from ._hopwell import version as _version
from ._operators import *  # noqa: F403
from ._ops import backends, explain

__version__: str = _version()

__all__ = ["Error", "backends", "explain", "num_threads", "set_num_threads"]
__all__ += _operators.__all__


def __getattr__(name: str) -> ModuleType:
    if name in ("compat", "reference", "torch"):  # imported when first looked at
        return importlib.import_module(f"hopwell.{name}")
    raise AttributeError(f"module 'hopwell' has no attribute {name!r}")
