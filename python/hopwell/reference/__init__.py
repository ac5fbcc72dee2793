"""The executable specification: every operator in numpy float64, written for reading.

Same names and arguments as `hopwell.<operator>` (without `backend` and `stream`). Inputs are numpy arrays, those of
`ml_dtypes` (bfloat16, float8_e4m3fn) among them, or anything that numpy can take through `__dlpack__`. Results are
unrounded float64, whatever the storage dtype of the operator's outputs, so that they can judge any backend; only
where the contract is about bits (indices, codes and scales) do they have the operator's dtype. An array given
as `out=` and the like is written in its own dtype and returned.

Values that a mask hides are never read here: unused rows and pages may hold NaN. Non-finite values in memory that
*is* used follow the formulae in IEEE arithmetic, unless a docstring says otherwise.
"""

from .attention_distribution import attention_distribution, normalize_l1
from .indexer_dense_loss import indexer_dense_loss
from .kv_compress import kv_compress, kv_compress_backward
from .lightning_indexer import lightning_indexer, lightning_indexer_backward
from .mla_cache import mla_cache_append, read_mla_cache
from .nvfp4 import (
    nvfp4_dequantize,
    nvfp4_gemv,
    nvfp4_linear,
    nvfp4_linear_backward,
    nvfp4_matmul,
    nvfp4_quantize,
    pack_blocked_scales,
    unpack_blocked_scales,
)
from .paged_attention import paged_attention
from .paged_lightning_indexer import paged_lightning_indexer
from .sparse_mla import sparse_mla_backward, sparse_mla_forward
from .sparse_mla_decode import sparse_mla_decode

__all__ = [
    "attention_distribution",
    "indexer_dense_loss",
    "kv_compress",
    "kv_compress_backward",
    "lightning_indexer",
    "lightning_indexer_backward",
    "mla_cache_append",
    "normalize_l1",
    "nvfp4_dequantize",
    "nvfp4_gemv",
    "nvfp4_linear",
    "nvfp4_linear_backward",
    "nvfp4_matmul",
    "nvfp4_quantize",
    "pack_blocked_scales",
    "paged_attention",
    "paged_lightning_indexer",
    "read_mla_cache",
    "sparse_mla_backward",
    "sparse_mla_decode",
    "sparse_mla_forward",
    "unpack_blocked_scales",
]
