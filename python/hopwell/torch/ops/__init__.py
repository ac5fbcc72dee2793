"""The operators as `torch.library` custom ops in the namespace `hopwell`.

Every op has a fake kernel, so `torch.compile` traces through it without a graph break; `sparse_mla`, `indexer_loss`,
`indexer_dense_loss`, `indexer_scores`, `kv_compress` and the scores of `lightning_indexer` are differentiable, and
`nvfp4_linear` for x and bias. The functions here take tensors and return fresh tensors (an op that wrote into its
arguments could not be differentiated); for `out=`-style arguments call `hopwell` itself, which takes tensors too.
`mla_cache_append` is the exception: it writes into its cache, and returns it.
Custom ops have no keyword-only tensors, so arguments that are keyword-only in `hopwell` are positional too here.

`torch.use_deterministic_algorithms(True)` makes the backward operators repeat bit for bit.
"""

from ._indexer_dense_loss import indexer_dense_loss
from ._indexer_scores import indexer_scores
from ._kv_compress import kv_compress, kv_compress_backward
from ._lightning_indexer import indexer_loss, lightning_indexer, lightning_indexer_backward
from ._mla_cache import mla_cache_append, read_mla_cache
from ._nvfp4 import (
    nvfp4_dequantize,
    nvfp4_gemv,
    nvfp4_linear,
    nvfp4_linear_backward,
    nvfp4_matmul,
    nvfp4_quantize,
)
from ._paged_attention import paged_attention
from ._paged_lightning_indexer import paged_lightning_indexer
from ._sparse_mla import attention_distribution, normalize_l1, sparse_mla, sparse_mla_backward, sparse_mla_forward
from ._sparse_mla_decode import sparse_mla_decode

__all__ = [
    "attention_distribution",
    "indexer_dense_loss",
    "indexer_loss",
    "indexer_scores",
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
    "paged_attention",
    "paged_lightning_indexer",
    "read_mla_cache",
    "sparse_mla",
    "sparse_mla_backward",
    "sparse_mla_decode",
    "sparse_mla_forward",
]
