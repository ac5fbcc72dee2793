"""xtuner's `SparseMLABackend`: the attention and the selection of GLM-5.2 and DeepSeek-V3.2 in its trainer.

    import hopwell.compat.xtuner
    hopwell.compat.xtuner.install()    # before the model is built, with sparse_mla_backend="torch", the default

`sparse_mla` and `dsa_topk_indices` follow `SparseMLAProtocol` and `DSATopKIndicesProtocol` in
`xtuner/v1/ops/sparse_mla/protocol.py` of github.com/InternLM/xtuner at b934f46. xtuner chooses from a fixed list of
backends, and only "torch" needs no other package, so `install` puts both in the place of that one. The same as there:
the documents of a pack, −1 for invalid entries, min(index_topk, keys) entries a query, lse to base e. Differences:
indices are in ascending order and not by score; out and lse of a query without keys are 0 and +inf; lse has no
gradient, which xtuner does not use. On GPUs value_dim is 512 and q and kv are bf16 or fp16; the number of entries is
any, where xtuner's other backends need a multiple of 64.
"""

import importlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tilelang import SparseMLA, lighting_indexer

__all__ = ["SparseMLAOutputs", "dsa_topk_indices", "install", "sparse_mla"]


class SparseMLAOutputs(NamedTuple):
    """What xtuner's attention reads of a backend: out [s, heads, value_dim] and lse float32 [s, heads], to base e."""

    raw_output: Tensor
    softmax_lse: Tensor


def sparse_mla(
    q: Tensor, kv: Tensor, indices: Tensor, scaling: float | None, value_dim: int | None = None
) -> SparseMLAOutputs:
    """Attention of q [s, heads, d] over the keys that `indices` [s, kv_group, topk] names in kv [s_kv, kv_group, d].

    scaling is 1/√d if None, value_dim d. Differentiable in q and kv.
    """
    d = q.shape[-1]
    scale = d**-0.5 if scaling is None else scaling
    out, lse = SparseMLA.apply(q, kv, indices.int(), scale, d if value_dim is None else value_dim)
    return SparseMLAOutputs(out, lse * math.log(2))


@torch.no_grad()
def dsa_topk_indices(
    q: Tensor, k: Tensor, weights: Tensor, seq_ctx: Any, *, index_head_dim: int, index_topk: int
) -> Tensor:
    """The keys of the largest index score, int32 [s, 1, min(index_topk, s_kv)], −1 where a query sees fewer.

    q [1, s, h_index, d_index], k [1, s_kv, d_index], weights [1, s, h_index]. `seq_ctx` has the documents of the pack.
    index_head_dim scales all scores alike, so it does not change the selection.
    """
    start, end = seq_ctx.packed_causal_query_ranges(q.shape[1], q.device)
    topk = min(index_topk, k.shape[1])
    _, indices = lighting_indexer(q[0], k[0], weights[0].float(), start, end, topk)
    return indices[:, None]


def install() -> None:
    """Puts both functions in the place of xtuner's backend "torch". Models built from now on have them."""
    backends: Any = importlib.import_module("xtuner.v1.ops.sparse_mla")
    backends.torch_sparse_mla, backends.torch_dsa_topk_indices = sparse_mla, dsa_topk_indices
