"""Decode attention over a paged KV cache, with relative-position bias."""

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

NAME = "paged_attention"


def _cache_shape(k_cache: Array, v_cache: Array, layout: str, d: int) -> tuple[int, int, int]:
    """(blocks, block, h_kv) of a pair of caches in one of the three layouts."""
    expected = {
        "nhd": "[blocks, block, h_kv, d]",
        "hnd": "[blocks, h_kv, block, d]",
        "vllm": "[blocks, h_kv, d/x, block, x] with x = 16 bytes",
    }
    require(layout in expected, NAME, "layout", "nhd, hnd or vllm", layout)
    require(k_cache.ndim == (5 if layout == "vllm" else 4), NAME, "k_cache", expected[layout], describe(k_cache))
    if layout == "vllm":
        blocks, h_kv, _, block, _ = k_cache.shape
        x = 16 // k_cache.itemsize
        require_shape(NAME, "k_cache", k_cache, "[blocks, h_kv, d/x, block, x]", (blocks, h_kv, d // x, block, x))
        require_shape(NAME, "v_cache", v_cache, "[blocks, h_kv, d, block]", (blocks, h_kv, d, block))
        return blocks, block, h_kv
    blocks, block, h_kv = k_cache.shape[:3]
    if layout == "hnd":
        block, h_kv = h_kv, block
    require(k_cache.shape[3] == d, NAME, "k_cache", f"{expected[layout]} with d = {d}", describe(k_cache))
    require_shape(NAME, "v_cache", v_cache, expected[layout], k_cache.shape)
    return blocks, block, h_kv


def _read(cache: Array, layout: str, pages: Int64, slots: Int64, head: int) -> Float64:
    """The vectors of one KV head at (page, slot), [n, d]. Nothing else of the cache is read."""
    if layout == "nhd":
        vectors = cache[pages, slots, head]
    elif layout == "hnd":
        vectors = cache[pages, head, slots]
    elif cache.ndim == 5:  # vllm's K: d is split into d/x groups, so the x of one token lie together
        vectors = cache[pages, head, :, slots, :].reshape(len(pages), cache.shape[2] * cache.shape[4])
    else:  # vllm's V
        vectors = cache[pages, head, :, slots]
    return np.asarray(vectors, dtype=np.float64)


def _weighted_sum(weights: Float64, values: Float64) -> Float64:
    """Σ_j weights[j]·values[j]. Values that are not finite count whole: no weight is 0, it may only round to it."""
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(weights @ np.where(finite, values, 0.0) + np.where(finite, 0.0, values).sum(axis=0))


def _look_up(table: Float64, index: Int64, out_of_range: str) -> Float64:
    """table[index], [n], where indices past the table's end follow the rule. No other entry is read."""
    if out_of_range == "clamp":
        index = np.minimum(index, len(table) - 1)
    values = np.full(len(index), -np.inf if out_of_range == "-inf" else 0.0)
    inside = index < len(table)
    values[inside] = table[index[inside]]
    return values


def _per_head(argument: str, x: Tensor | None, h_q: int, d: int) -> Float64:
    """pos_bias_u or pos_bias_v, [h_q, d]; zero if absent."""
    if x is None:
        return np.zeros((h_q, d))
    array = as_float64(x)
    require_shape(NAME, argument, array, "[h_q, d]", (h_q, d))
    return array


def _bias_tables(
    q: Float64, bias: Tensor | None, bias_kind: str, out_of_range: str, pos_bias_v: Tensor | None, r: Tensor | None
) -> tuple[Float64 | None, bool]:
    """The bias as tables [b, q_len, h_q, extent], and whether they are indexed by distance (else by key).

    The fused form is a distance-indexed bias that is computed first: table[δ] = (q + v)·r[δ].
    """
    b, q_len, h_q, d = q.shape
    require(bias_kind in ("key", "distance"), NAME, "bias_kind", "key or distance", bias_kind)
    require(out_of_range in ("zero", "clamp", "-inf"), NAME, "out_of_range", "zero, clamp or -inf", out_of_range)
    require(bias is None or r is None, NAME, "r", "absent beside bias", "both")
    require(pos_bias_v is None or r is not None, NAME, "pos_bias_v", "given together with r", "pos_bias_v alone")
    if r is not None:
        rows = as_float64(r)
        matches = rows.ndim == 3 and rows.shape[0] in (1, h_q) and rows.shape[2] == d
        require(matches, NAME, "r", f"[{h_q} or 1, extent, {d}]", describe(rows))
        rows = np.broadcast_to(rows, (h_q, rows.shape[1], d))
        with np.errstate(invalid="ignore"):  # rows of r that no visible key needs may hold anything
            tables = np.einsum("bihd,hed->bihe", q + _per_head("pos_bias_v", pos_bias_v, h_q, d), rows)
    elif bias is None:
        return None, False
    elif bias_kind == "distance":
        given = as_float64(bias)
        matches = given.ndim == 3 and given.shape[0] in (1, b) and given.shape[1] == h_q
        require(matches, NAME, "bias", f"[{b} or 1, {h_q}, extent]", describe(given))
        tables = np.broadcast_to(given[:, None], (b, q_len, h_q, given.shape[2]))
    else:
        given = as_float64(bias)
        matches = given.ndim == 4 and given.shape[0] in (1, b) and given.shape[1:3] == (h_q, q_len)
        require(matches, NAME, "bias", f"[{b} or 1, {h_q}, {q_len}, keys]", describe(given))
        tables = np.broadcast_to(given.transpose(0, 2, 1, 3), (b, q_len, h_q, given.shape[3]))
    if out_of_range == "clamp":
        require(tables.shape[3] >= 1, NAME, "bias" if r is None else "r", "of extent 1 or more to clamp to", "extent 0")
    return tables, r is not None or bias_kind == "distance"


def _visible(position: int, window: int | None, pages_of: Int64, blocks: int, block: int) -> tuple[Int64, Int64]:
    """The keys that a query at `position` sees and the pages that hold them, both [n]: 0 ≤ position − key < window."""
    first = max(0, position - window + 1) if window else 0
    keys = np.arange(first, position + 1, dtype=np.int64)
    pages = pages_of[keys // block]
    in_range = (pages >= 0) & (pages < blocks)
    return keys[in_range], pages[in_range]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    layout: str = "nhd",
    pos_bias_u: Tensor | None = None,
    bias: Tensor | None = None,
    bias_kind: str = "key",
    out_of_range: str = "zero",
    pre_scale: bool = True,
    pos_bias_v: Tensor | None = None,
    r: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    out: Array | None = None,
    lse: Array | None = None,
) -> tuple[Array, Array]:
    """Attention of the last q_len tokens of each sequence to its paged keys.

        logit_j = scale·((q + u)·k_j + bias_j) − slope·δ      (bias_j after the scale with pre_scale=False)
        bias_j  = bias[j] | bias[δ] | (q + v)·r[δ]            δ = position − j
        lse     = log Σ_j exp(logit_j);  out = Σ_j exp(logit_j − lse)·v_j

    q [b, q_len, h_q, d] or [b, h_q, d]; caches as in `_cache_shape`; block_tables int32 [b, max_blocks]; context_lens
    int32 [b]; pos_bias_u, pos_bias_v [h_q, d]; r [h_q or 1, extent, d]; alibi_slopes [h_q]; bias
    [b or 1, h_q, q_len, keys] (kind "key") or [b or 1, h_q, extent] (kind "distance").
    Returns out like q and lse [b, q_len, h_q] or [b, h_q].

    Query i stands at position context_len − q_len + i, after context_len was clamped to 0..max_blocks·block, and sees
    the keys 0 ≤ δ < window (window None or 0: 0 ≤ δ) whose page number is in range. A bias of −inf hides the key,
    whatever the scale's sign; hidden keys are not read. A row that sees nothing, or whose logits are all −inf,
    gives out = 0, lse = −inf. Where a row sees values of ±inf or NaN, out is what those alone add up to (±inf or
    NaN), however small their weights.
    """
    queries = as_float64(q)
    shape = queries.shape
    require(len(shape) in (3, 4), NAME, "q", "[b, q_len, h_q, d] or [b, h_q, d]", describe(queries))
    if len(shape) == 3:
        queries = queries[:, None]
    b, q_len, h_q, d = queries.shape
    keys_cache, values_cache = as_array(k_cache), as_array(v_cache)
    blocks, block, h_kv = _cache_shape(keys_cache, values_cache, layout, d)
    require(h_kv > 0 and h_q % h_kv == 0, NAME, "q", f"with h_q a multiple of h_kv = {h_kv}", f"h_q = {h_q}")
    tables, lengths = as_indices(NAME, "block_tables", block_tables), as_indices(NAME, "context_lens", context_lens)
    require(tables.ndim == 2 and len(tables) == b, NAME, "block_tables", f"int32 [{b}, max_blocks]", describe(tables))
    require_shape(NAME, "context_lens", lengths, "[b]", (b,))
    lengths = np.clip(lengths, 0, tables.shape[1] * block)
    require(window is None or window >= 0, NAME, "window", "at least 1, or 0 for every key", window)
    require(bool(np.isfinite(scale)), NAME, "scale", "finite", scale)
    u = _per_head("pos_bias_u", pos_bias_u, h_q, d)
    bias_tables, by_distance = _bias_tables(queries, bias, bias_kind, out_of_range, pos_bias_v, r)
    slopes = np.zeros(h_q) if alibi_slopes is None else as_float64(alibi_slopes)
    require_shape(NAME, "alibi_slopes", slopes, "[h_q]", (h_q,))

    result, result_lse = np.zeros(queries.shape), np.zeros((b, q_len, h_q))
    for n, i, h in np.ndindex(b, q_len, h_q):
        position = int(lengths[n]) - q_len + i
        keys, pages = _visible(position, window, tables[n], blocks, block)
        bias_of = np.zeros(len(keys))
        if bias_tables is not None:
            bias_of = _look_up(bias_tables[n, i, h], position - keys if by_distance else keys, out_of_range)
            kept = ~np.isneginf(bias_of)
            keys, pages, bias_of = keys[kept], pages[kept], bias_of[kept]

        head = h // (h_q // h_kv)
        content = _read(keys_cache, layout, pages, keys % block, head) @ (queries[n, i, h] + u[h])
        logits = scale * (content + bias_of) if pre_scale else scale * content + bias_of
        logits = logits - slopes[h] * (position - keys)
        peak, log_sum, log_p = log_softmax(logits)
        result_lse[n, i, h] = peak + log_sum
        if not np.isneginf(log_sum):
            values = _read(values_cache, layout, pages, keys % block, head)
            result[n, i, h] = _weighted_sum(np.exp(log_p), values)
    return (
        deliver(NAME, "out", result.reshape(shape), out),
        deliver(NAME, "lse", result_lse.reshape(shape[:-1]), lse),
    )
