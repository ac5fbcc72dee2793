"""Every operator that `python -m hopwell.bench` compares, and the shapes that it is measured at.

A function of these modules makes random inputs of one shape and gives Hopwell's call and those of the peers. Its
arguments are the shape; their defaults are GPUs'.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

from ..problem import Problem, Shape
from .kv_compress import kv_compress, kv_compress_backward
from .lightning_indexer import indexer_dense_loss, lightning_indexer, lightning_indexer_backward
from .mla_cache import mla_cache_append
from .nvfp4 import (
    nvfp4_dequantize,
    nvfp4_gemv,
    nvfp4_linear,
    nvfp4_linear_backward,
    nvfp4_matmul,
    nvfp4_quantize,
)
from .paged_attention import paged_attention
from .paged_lightning_indexer import paged_lightning_indexer
from .sparse_mla import attention_distribution, normalize_l1, sparse_mla_backward, sparse_mla_forward
from .sparse_mla_decode import sparse_mla_decode


@dataclass
class Operator:
    """Which shapes are measured where; what a shape does not name is the function's default."""

    problem: Callable[..., Problem]
    shapes: list[Shape]
    on_cpu: list[Shape]
    tiny: Shape = field(default_factory=dict)  # of --dry-run

    def settings(self, shape: Shape) -> Shape:
        """The whole shape."""
        defaults = {name: p.default for name, p in inspect.signature(self.problem).parameters.items()}
        return {**defaults, **shape}


KEYS = [8192, 32768, 65536, 131072]
BY_KEYS = [{"h_q": h_q, "s_kv": s_kv} for h_q in (128, 64) for s_kv in KEYS]
# DeepSeek-V4's layers over 32,768 tokens, of 64 and 128 heads: compressed sparse attention, then heavily compressed.
V4 = [
    {"s_q": 32768, "h_q": h_q, "s_kv": 32768 // stride, "topk": topk, "d_qk": 512, "window": 128, "kv_stride": stride}
    for h_q, topk, stride in ((64, 512, 4), (128, 1024, 4), (64, 0, 128), (128, 0, 128))
]
POOLS = [{}, {"d": 128}, {"ratio": 128, "overlap": 0}, {"s": 65536}, {"s": 65536, "ratio": 128, "overlap": 0}]
LAYERS = [(28672, 4096), (7168, 16384), (8192, 8192), (4096, 7168), (7168, 2048), (1536, 7168)]
TINY = {"s_q": 16, "h_q": 16, "s_kv": 256, "topk": 64}
TINY_INDEX = {"s_q": 16, "s_kv": 256, "h_index": 4, "topk": 64, "d_index": 32}
FEW_QUERIES = [{"s_q": 8}]
OPERATORS = {
    "sparse_mla_forward": Operator(sparse_mla_forward, [*BY_KEYS, {"h_q": 32}, {"h_q": 16}, *V4], FEW_QUERIES, TINY),
    "sparse_mla_backward": Operator(sparse_mla_backward, [*BY_KEYS, *V4], FEW_QUERIES, TINY),
    "attention_distribution": Operator(attention_distribution, BY_KEYS, FEW_QUERIES, TINY),
    "lightning_indexer": Operator(
        lightning_indexer,
        [
            {},
            {"s_q": 16, "s_kv": 32768},
            {"s_q": 1, "s_kv": 65536},
            {"s_q": 2048, "s_kv": 32768},
            {"s_q": 2048, "s_kv": 32768, "fp8": 1},
        ],
        [{"s_q": 8}],
        TINY_INDEX,
    ),
    "lightning_indexer_backward": Operator(lightning_indexer_backward, [{}], [{"s_q": 8}], TINY_INDEX),
    "indexer_dense_loss": Operator(
        indexer_dense_loss, [{}], [{"s": 64}], {"s": 32, "h_q": 4, "h_index": 4, "d_qk": 64, "d_index": 32}
    ),
    "normalize_l1": Operator(normalize_l1, [{}], [{"rows": 1024}], {"rows": 16, "columns": 64}),
    "kv_compress": Operator(kv_compress, POOLS, [{"s": 1024}], {"s": 64, "d": 32}),
    "kv_compress_backward": Operator(kv_compress_backward, POOLS, [{"s": 1024}], {"s": 64, "d": 32}),
    "mla_cache_append": Operator(mla_cache_append, [{}, {"n": 64}], [{"n": 1024}], {"n": 16}),
    "sparse_mla_decode": Operator(
        sparse_mla_decode,
        [{"h_q": h_q, "b": b} for h_q in (8, 16) for b in (1, 8, 64, 128)]
        + [{"b": 1, "idle": 7}, {"q_len": 2}, {"h_q": 64}, {"h_q": 128}, {"row": 584, "b": 64}, {"h_q": 16, "b": 256}]
        + [{"row": 1152}, *({"row": 1152, "keys_per_split": 2048, "h_q": h_q} for h_q in (8, 64, 128))],
        [{"b": 1, "topk": 512}],
        {"b": 2, "h_q": 4, "topk": 70, "context": 128},
    ),
    "paged_lightning_indexer": Operator(
        paged_lightning_indexer,
        [
            {},
            {"context": 8192},
            {"context": 131072},
            {"context": 1048576},
            {"b": 8},
            {"b": 64, "context": 8192},
            {"b": 64, "context": 8192, "q_len": 2},
            {"fp8": 0},
        ],
        [{"context": 8192}],
        {"b": 2, "q_len": 2, "context": 256, "h_index": 4, "topk": 64},
    ),
    "paged_attention": Operator(
        paged_attention,
        [
            {},
            {"b": 32, "h_q": 16, "h_kv": 16, "d": 64},
            {"context": 8192, "shortest": 128, "h_q": 16, "h_kv": 16, "d": 64},
            {"context": 512, "longest": 65536, "h_q": 16, "h_kv": 16, "d": 64},
            {"context": 512, "longest": 65536},
            {"b": 1, "context": 32768, "h_q": 16, "h_kv": 16, "d": 64},
            {"b": 1, "context": 1000, "h_q": 16, "h_kv": 16, "d": 64},
            {"b": 16, "context": 8192, "h_kv": 8},
        ],
        [{"b": 8, "h_q": 16, "h_kv": 16, "d": 64}],
        {"b": 2, "context": 64, "h_q": 4, "h_kv": 4, "d": 64},
    ),
    "nvfp4_linear": Operator(
        nvfp4_linear,
        [{"N": rows, "K": k, "n": n} for rows, k in LAYERS for n in (1, 8, 16)]
        + [{"N": 28672, "K": 4096, "n": n} for n in (32, 64, 128)],
        [{"N": 7168, "K": 16384}, {"N": 7168, "K": 2048, "n": 8}],
        {"N": 64, "K": 128, "n": 2},
    ),
    "nvfp4_linear_backward": Operator(
        nvfp4_linear_backward,
        [{"N": rows, "K": k, "n": n} for rows, k in ((28672, 4096), (4096, 7168)) for n in (16, 128, 4096)],
        [{"N": 1024, "K": 1024, "n": 64}],
        {"N": 64, "K": 128, "n": 2},
    ),
    "nvfp4_gemv": Operator(nvfp4_gemv, [{}], [{"M": 7168, "K": 4096}], {"M": 64, "K": 128}),
    "nvfp4_matmul": Operator(nvfp4_matmul, [{}], [{"M": 64, "N": 1024}], {"M": 16, "N": 32, "K": 128}),
    "nvfp4_quantize": Operator(nvfp4_quantize, [{}], [{"rows": 1024}], {"rows": 16, "K": 128}),
    "nvfp4_dequantize": Operator(nvfp4_dequantize, [{}], [{"rows": 1024}], {"rows": 16, "K": 128}),
}
