"""The logits of DeepSeek's DeepGEMM, of keys in a row and of keys in pages, with its arguments.

    from hopwell.compat.deep_gemm import fp8_mqa_logits        # instead of: from deep_gemm import ...

Follows `csrc/apis/attention.hpp` and `tests/test_attention.py` of github.com/deepseek-ai/DeepGEMM at 54e2261, as vLLM
and SGLang call it. These are the same as there: names, order and defaults of the arguments, e4m3 q without scales (the
weights contain them), one float32 scale per key, the compressed form of max_seqlen_k, float32 or bf16 logits.

Differences: logits outside a query's keys are always −inf, also where DeepGEMM does not write them (clean_logits=False,
the rest of compressed rows). Logits are contiguous; DeepGEMM aligns rows to 1,024 bytes. Hopwell supports any number of
heads, any d (at most 128 on GPUs), bf16 and (on the CPU) float32 keys and queries, and host tensors. A NaN logit is
−inf. FP4 keys and queries raise a ValueError.

The paged functions take any block, any next_n, and context_lens [b] too, which count the query tokens. A position whose
page does not exist gets −inf. The metadata carries nothing, so lengths may change under it. `indices`, which give
queries of several lengths on SM100, raise a ValueError.

Costs: Hopwell has no kernel that stores logits. The function selects all keys that a query sees, 64 MiB of logits at a
time. Besides the logits this needs at most a few hundred MiB (indices, the scatter). It takes the time of
`lightning_indexer` with topk = s_kv on bf16 products (not on e4m3, at half their rate) plus a few passes over the
logits. If only the best keys are wanted, call `hopwell.torch.lightning_indexer` or `paged_lightning_indexer`, which
avoid these costs.
"""

import torch
from torch import Tensor

from hopwell.torch import ops

from .._checks import integer, require, require_shape
from ._index_scores import rows_at_a_time, write_index_scores
from ._names import named

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
]

_KINDS = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)


def _logits(
    function: str,
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    start: Tensor,
    end: Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
    logits_dtype: torch.dtype,
) -> Tensor:
    pair = isinstance(kv, tuple | list) and len(kv) == 2
    require(
        pair, function, "kv", "a pair of keys and their scales", kv if isinstance(kv, Tensor) else type(kv).__name__
    )
    k, k_scale = kv
    require(q.dtype in _KINDS, function, "q", "float8_e4m3fn (no FP4)", q.dtype)
    require(k.dtype == q.dtype, function, "kv[0]", f"{q.dtype} as q is", k.dtype)
    require_shape(function, "q", q, seq_len=None, heads=None, head_dim=None)
    seq_len, heads, head_dim = q.shape
    require_shape(function, "kv[0]", k, seq_len_kv=None, head_dim=head_dim)
    require(k_scale.dtype == torch.float32, function, "kv[1]", "float32", k_scale.dtype)
    require_shape(function, "kv[1]", k_scale, seq_len_kv=len(k))
    require_shape(function, "weights", weights, seq_len=seq_len, heads=heads)
    for name, bound in (("cu_seq_len_k_start", start), ("cu_seq_len_k_end", end)):
        require(bound.dtype == torch.int32, function, name, "int32", bound.dtype)
        require_shape(function, name, bound, seq_len=seq_len)
    require(
        logits_dtype in (torch.float32, torch.bfloat16), function, "logits_dtype", "float32 or bfloat16", logits_dtype
    )
    require(max_seqlen_k >= 0, function, "max_seqlen_k", "0, or the most keys that a query sees", max_seqlen_k)
    require(isinstance(clean_logits, bool), function, "clean_logits", "True or False", clean_logits)
    require(not (clean_logits and max_seqlen_k), function, "clean_logits", "False with max_seqlen_k", clean_logits)
    logits = q.new_empty((seq_len, max_seqlen_k or len(k)), dtype=logits_dtype)
    write_index_scores(logits, q, k, weights, start, end, k_scale=k_scale, from_start=max_seqlen_k > 0)
    return logits


@torch.no_grad()
def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """logits[i, t] = k_scale[t]·Σ_h weights[i, h]·relu(q[i, h]·k[t]) for the keys that each query sees.

    Args:
        q: float8_e4m3fn [seq_len, heads, head_dim].
        kv: k float8_e4m3fn [seq_len_kv, head_dim] and its scales float32 [seq_len_kv].
        weights: float32 [seq_len, heads], multiplied by q's scales.
        cu_seq_len_k_start, cu_seq_len_k_end: int32 [seq_len]; query i sees the keys from start up to end − 1.
        clean_logits: logits outside a query's keys are −inf; here they always are.
        max_seqlen_k: if not 0, logits are [seq_len, max_seqlen_k] and row i begins with key start[i]; clean_logits must
            be False then.

    Returns:
        float32 [seq_len, seq_len_kv]. Like the original it is not part of the autograd graph.
    """
    return _logits(
        *("fp8_mqa_logits", q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k),
        torch.float32,
    )


@torch.no_grad()
def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`fp8_mqa_logits` with q as a pair (queries, and None for the scales of FP4 queries) and a choice of the dtype."""
    function = "fp8_fp4_mqa_logits"
    pair = isinstance(q, tuple | list) and len(q) == 2
    require(pair, function, "q", "a pair of queries and None", q if isinstance(q, Tensor) else type(q).__name__)
    require(q[1] is None, function, "q[1]", "None (no FP4)", q[1])
    return _logits(
        *(function, q[0], kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, logits_dtype)
    )


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """Returns int32 [num_sms + 1, 2] of zeros, the shape that callers keep. The functions here do not read it."""
    require(indices is None, "get_paged_mqa_logits_metadata", "indices", "None (SM100's form)", indices)
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def _paged_logits(
    function: str,
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    logits_dtype: torch.dtype,
    indices: Tensor | None,
) -> Tensor:
    require(indices is None, function, "indices", "None (SM100's form)", indices)
    require(q.dtype in _KINDS, function, "q", "float8_e4m3fn (no FP4)", q.dtype)
    require_shape(function, "q", q, batch_size=None, next_n=None, heads=None, head_dim=None)
    batch, next_n, heads, _ = q.shape
    require_shape(function, "weights", weights, batch_size_next_n=batch * next_n, heads=heads)
    lengths = context_lens
    fits = lengths.dtype == torch.int32 and list(lengths.shape) in ([batch], [batch, next_n])
    require(fits, function, "context_lens", f"int32 [{batch}, {next_n}] or [{batch}]", lengths)
    fits = logits_dtype in (torch.float32, torch.bfloat16)
    require(fits, function, "logits_dtype", "float32 or bfloat16", logits_dtype)
    width = integer(function, "max_context_len", max_context_len)
    require(width >= 0, function, "max_context_len", "at least 0", width)
    if lengths.ndim == 1:  # 64 bits, because int32's smallest number minus next_n is no int32
        lengths = lengths[:, None].long() - next_n + 1 + torch.arange(next_n, device=lengths.device)
    # Of at most `width` visible positions all are selected.
    lengths = lengths.clamp(0, width).int()
    logits = torch.full((batch, next_n, width + 1), -torch.inf, dtype=logits_dtype, device=q.device)
    of_queries = weights.view(batch, next_n, heads)
    step = max(1, rows_at_a_time(width) // max(next_n, 1))
    for first in range(0, batch, step):
        part = slice(first, first + step)
        with named(function, q_index="q", cache="kv_cache", block_tables="block_table", topk="max_context_len"):
            positions, scores = ops.paged_lightning_indexer(
                q[part], kv_cache, of_queries[part], width, block_table[part], lengths[part]
            )
        assert scores is not None
        # Entries without a position go to the last column, which is cut off.
        positions = torch.where(positions < 0, width, positions).long()
        logits[part].scatter_(2, positions, scores.to(logits_dtype))
    return logits.view(batch * next_n, width + 1)[:, :width]


@torch.no_grad()
def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """logits[i, p] = k_scale[p]·Σ_h weights[i, h]·relu(q[i, h]·k[p]) for the positions p that each query sees.

    Args:
        q: float8_e4m3fn [b, next_n, heads, head_dim].
        kv_cache: uint8 [blocks, block, 1, head_dim + 4]. In a block, the codes of all rows come first, then an fp32
            scale a row.
        weights: float32 [b·next_n, heads], multiplied by q's scales.
        context_lens: int32 [b, next_n], the number of positions that each query sees.
        block_table: int32 [b, max_blocks], the blocks of each sequence's positions.
        schedule_meta: of `get_paged_mqa_logits_metadata`; unused.
        max_context_len: number of columns; positions from it on are omitted.
        clean_logits: positions that a query does not see get −inf; here they always do.
        indices: None.

    Returns:
        float32 [b·next_n, max_context_len]. Like the original it is not part of the autograd graph.
    """
    return _paged_logits(
        *("fp8_paged_mqa_logits", q, kv_cache, weights, context_lens, block_table, max_context_len),
        torch.float32,
        indices,
    )


@torch.no_grad()
def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """`fp8_paged_mqa_logits` with q as a pair (queries, and None for the scales of FP4 queries) and a choice of the
    dtype.
    """
    function = "fp8_fp4_paged_mqa_logits"
    pair = isinstance(q, tuple | list) and len(q) == 2
    require(pair, function, "q", "a pair of queries and None", q if isinstance(q, Tensor) else type(q).__name__)
    require(q[1] is None, function, "q[1]", "None (no FP4)", q[1])
    return _paged_logits(
        *(function, q[0], kv_cache, weights, context_lens, block_table, max_context_len), logits_dtype, indices
    )
