"""Decode: attention of one or a few query tokens a sequence over selected rows of paged caches of latents."""

import numpy as np

from ._arrays import (
    Array,
    Float64,
    Int64,
    Tensor,
    as_array,
    as_float64,
    as_indices,
    deliver,
    describe,
    log_softmax,
    require,
    require_shape,
)
from .mla_cache import _Cache, _one_scale, read_mla_cache

NAME = "sparse_mla_decode"


def _per_query(argument: str, x: Tensor, b: int, q_len: int) -> Int64:
    """[b, q_len] from [b] or [b, q_len]."""
    counts = as_indices(NAME, argument, x)
    if counts.ndim == 1:
        require_shape(NAME, argument, counts, "[b]", (b,))
        return np.repeat(counts[:, None], q_len, axis=1)
    require_shape(NAME, argument, counts, "[b, q_len]", (b, q_len))
    return counts


def _slots(entries: Int64, table: Int64 | None, visible: int, length: int, blocks: int, block: int) -> Int64:
    """The slots that the valid entries of a row name, in order."""
    entries = entries[: max(length, 0)]
    if table is None:
        return entries[(entries >= 0) & (entries < blocks * block)]
    entries = entries[(entries >= 0) & (entries < min(visible, len(table) * block))]
    pages = table[entries // block]
    there = (pages >= 0) & (pages < blocks)
    return (pages * block + entries % block)[there]


def _selected(
    prefix: str,
    cache: _Cache,
    indices: Tensor,
    topk_length: Tensor | None,
    block_tables: Tensor | None,
    visible: Int64 | None,
    b: int,
    q_len: int,
) -> list[list[Int64]]:
    """For each sequence and query: the slots that it selects in one cache."""
    entries = as_indices(NAME, f"{prefix}indices", indices)
    if entries.ndim == 2 and q_len == 1:
        entries = entries[:, None]
    require(entries.ndim == 3, NAME, f"{prefix}indices", "[b, q_len, topk]", describe(entries))
    topk = entries.shape[2]
    require_shape(NAME, f"{prefix}indices", entries, "[b, q_len, topk]", (b, q_len, topk))
    lengths = np.full((b, q_len), topk)
    if topk_length is not None:
        lengths = _per_query(f"{prefix}topk_length", topk_length, b, q_len)
    tables = None
    if block_tables is not None:
        tables = as_indices(NAME, f"{prefix}block_tables", block_tables)
        require(
            tables.ndim == 2 and len(tables) == b, NAME, f"{prefix}block_tables", "[b, max_blocks]", describe(tables)
        )
    every = np.iinfo(np.int64).max
    return [
        [
            _slots(
                entries[s, i],
                None if tables is None else tables[s],
                every if visible is None else int(visible[s, i]),
                int(lengths[s, i]),
                cache.blocks,
                cache.block,
            )
            for i in range(q_len)
        ]
        for s in range(b)
    ]


def sparse_mla_decode(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    *,
    block_tables: Tensor | None = None,
    context_lens: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    extra_block_tables: Tensor | None = None,
    attn_sink: Tensor | None = None,
    kv_scale: float | Tensor | None = None,
    rope_cache: Tensor | None = None,
    keys_per_split: int = 256,
    out: Array | None = None,
    lse: Array | None = None,
) -> tuple[Array, Array]:
    """Returns (out [b, q_len, h_q, d_v], lse [b, q_len, h_q]); without q_len for a q [b, h_q, d_qk].

    score[h, j] = sm_scale·q[h]·K[slot_j] over the valid entries of a query's row of indices, then of extra_indices;
    out = softmax(score)·K[:, :d_v] / (1 + exp(attn_sink − lse)). Without a valid entry out is 0 and lse +inf. The value
    of a quantised row is that of `read_mla_cache`. keys_per_split says in which order a backend adds, and changes
    nothing here.
    """
    queries = as_float64(q)
    flat = queries.ndim == 3
    if flat:
        queries = queries[:, None]
    require(queries.ndim == 4 and queries.shape[1] >= 1, NAME, "q", "[b, q_len, h_q, d_qk]", describe(queries))
    b, q_len, h_q, d_qk = queries.shape
    require(1 <= d_v <= d_qk, NAME, "d_v", f"between 1 and {d_qk}", d_v)
    require(bool(np.isfinite(sm_scale)), NAME, "sm_scale", "finite", sm_scale)
    require(
        keys_per_split >= 64 and keys_per_split % 64 == 0, NAME, "keys_per_split", "a multiple of 64", keys_per_split
    )
    width = d_qk if rope_cache is None else d_v
    first = _Cache(NAME, cache, width, with_index_rows=False)
    _one_scale(NAME, first, kv_scale)
    sinks = np.full(h_q, -np.inf) if attn_sink is None else as_float64(attn_sink)
    require_shape(NAME, "attn_sink", sinks, "[h_q]", (h_q,))

    require(context_lens is None or block_tables is not None, NAME, "context_lens", "given with block_tables", None)
    visible = None
    if context_lens is not None:
        visible = _per_query("context_lens", context_lens, b, q_len)
        if as_array(context_lens).ndim == 1:  # query i sees itself and all earlier positions
            visible = visible - q_len + 1 + np.arange(q_len)
    chosen = _selected("", first, indices, topk_length, block_tables, visible, b, q_len)

    require((extra_cache is None) == (extra_indices is None), NAME, "extra_indices", "given with extra_cache", None)
    more: list[list[Int64]] | None = None
    if extra_cache is not None and extra_indices is not None:
        second = _Cache(NAME, extra_cache, d_qk, with_index_rows=False)
        require(second.format == first.format, NAME, "extra_cache", "of the format of cache", second.format)
        with_tables = (block_tables is None) == (extra_block_tables is None)
        require(with_tables, NAME, "extra_block_tables", "given with block_tables", None)
        more = _selected("extra_", second, extra_indices, extra_topk_length, extra_block_tables, None, b, q_len)

    def rows(s: int, i: int) -> Float64:
        """K of one query."""
        slots = chosen[s][i]
        found = [read_mla_cache(cache, slots, width, kv_scale)]
        if rope_cache is not None:
            found = [np.concatenate([found[0], read_mla_cache(rope_cache, slots, d_qk - d_v)], axis=1)]
        if more is not None and extra_cache is not None:
            found.append(read_mla_cache(extra_cache, more[s][i], d_qk, kv_scale))
        return np.concatenate(found)

    outs, lses = np.zeros((b, q_len, h_q, d_v)), np.full((b, q_len, h_q), np.inf)
    for s in range(b):
        for i in range(q_len):
            keys = rows(s, i)
            with np.errstate(invalid="ignore", over="ignore"):
                peak, log_sum, log_p = log_softmax(sm_scale * (queries[s, i] @ keys.T))
                empty = np.isneginf(log_sum)
                factor = 1.0 / (1.0 + np.exp((sinks - peak) - log_sum))
                lses[s, i] = np.where(empty, np.inf, peak + log_sum)
                outs[s, i] = np.where(empty[:, None], 0.0, (np.exp(log_p) @ keys[:, :d_v]) * factor[:, None])
    if flat:
        outs, lses = outs[:, 0], lses[:, 0]
    return deliver(NAME, "out", outs, out), deliver(NAME, "lse", lses, lse)
