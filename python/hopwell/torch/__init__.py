"""Hopwell in PyTorch: the operators as `torch.library` custom ops, autograd, and `nn` modules made of them.

>>> from hopwell.torch import nn, sparse_mla, indexer_loss
"""

from hopwell.torch import nn
from hopwell.torch._load_nvfp4 import load_nvfp4
from hopwell.torch._packing import compressed_lengths, key_ranges
from hopwell.torch.ops import (
    attention_distribution,
    indexer_dense_loss,
    indexer_loss,
    indexer_scores,
    kv_compress,
    kv_compress_backward,
    lightning_indexer,
    lightning_indexer_backward,
    normalize_l1,
    nvfp4_dequantize,
    nvfp4_gemv,
    nvfp4_linear,
    nvfp4_linear_backward,
    nvfp4_matmul,
    nvfp4_quantize,
    paged_attention,
    sparse_mla,
    sparse_mla_backward,
    sparse_mla_forward,
)

__all__ = [
    "attention_distribution",
    "compressed_lengths",
    "indexer_dense_loss",
    "indexer_loss",
    "indexer_scores",
    "key_ranges",
    "kv_compress",
    "kv_compress_backward",
    "lightning_indexer",
    "lightning_indexer_backward",
    "load_nvfp4",
    "nn",
    "normalize_l1",
    "nvfp4_dequantize",
    "nvfp4_gemv",
    "nvfp4_linear",
    "nvfp4_linear_backward",
    "nvfp4_matmul",
    "nvfp4_quantize",
    "paged_attention",
    "sparse_mla",
    "sparse_mla_backward",
    "sparse_mla_forward",
]
