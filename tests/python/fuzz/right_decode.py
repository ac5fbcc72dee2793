"""Right calls of sparse_mla_decode."""

from typing import Any

import numpy as np
from calls import DTYPES
from hopwell import reference
from hypothesis import strategies as st

from .call import FuzzedCall, fit, given
from .draw import E4M3, Maker, integers_around, rows_of_indices
from .right_cache import FORMATS, make_cache


def _cache(maker: Maker, form: str, d_qk: int, row: int, dtype: Any) -> Any:
    """A cache of new rows in all slots, sometimes of any bytes."""
    blocks, block = maker.size(0, 9), maker.choose(1, 2, maker.size(1, 20), 64)
    cache = make_cache(maker, blocks, block, row, dtype)
    if maker.chance(4):
        return cache
    n = blocks * block
    kv = maker.rng.standard_normal((n, d_qk)).astype(np.float32)
    if form == "plain":
        cache[...] = kv.reshape(cache.shape).astype(dtype)
    else:
        reference.mla_cache_append(kv, cache, np.arange(n))
    return cache


def _counts(maker: Maker, b: int, q_len: int, most: int) -> Any:
    """int32 [b] or [b, q_len]: near 0 and `most`, or extremes."""
    shape = maker.choose((b,), (b, q_len))
    values = integers_around(maker, int(np.prod(shape)), [0, most // 2, most])
    return maker.values(values.reshape(shape), rows=False)


def _entries(maker: Maker, cache: Any, b: int, q_len: int, topk: int, flat: bool) -> tuple[Any, Any]:
    """Rows of slots and no block table, or rows of positions and a table."""
    blocks, block = cache.shape[:2]
    pages = maker.choose(0, 0, 1, 3, 7)
    limit = pages * block if pages else blocks * block
    rows = rows_of_indices(maker, b * q_len, limit, topk).reshape((b, topk) if flat else (b, q_len, topk))
    return maker.values(rows), maker.values(rows_of_indices(maker, b, blocks, pages)) if pages else None


@st.composite
def sparse_mla_decode(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    form = maker.choose("plain", "v32", "v32_without_rope", "v4", "v41", "one scale")
    dtype = maker.choose("float32", "bfloat16")
    d_qk, row = FORMATS.get(form, (0, 0))
    if form not in FORMATS:
        d_qk = row = maker.choose(576, 512) if maker.for_kernels else maker.choose(576, maker.size(1, 70))
    cache_dtype = maker.choose(np.uint8, np.int8, E4M3)
    if form == "plain":
        cache_dtype = DTYPES[maker.choose("float32", "bfloat16")]
    flat = maker.chance(4)
    b, q_len, h_q = maker.size(0, 9), 1 if flat else maker.choose(1, 2, 3, 8), maker.size(1, 20)
    topk, extra_topk = maker.choose(maker.size(0, 70), maker.size(0, 300)), maker.size(0, 70)
    b, q_len, h_q, topk = fit([b, q_len, h_q, topk, d_qk])[:4]
    cache = _cache(maker, form, d_qk, row, cache_dtype)
    indices, tables = _entries(maker, cache, b, q_len, topk, flat)
    arguments: dict[str, Any] = {
        "q": maker.floats((b, h_q, d_qk) if flat else (b, q_len, h_q, d_qk), dtype),
        "cache": cache,
        "indices": indices,
        "sm_scale": maker.choose(0.05, 0.3, -0.1),
        "d_v": maker.choose(d_qk, maker.integer(1, d_qk)) if not maker.for_kernels else min(512, d_qk),
        "keys_per_split": 64 * maker.choose(1, 1, 2, 4, 9, 2**50),
    }
    if tables is not None:
        arguments["block_tables"] = tables
        if maker.chance():
            arguments["context_lens"] = _counts(maker, b, q_len, tables.shape[1] * cache.shape[1])
    if maker.chance():
        arguments["topk_length"] = _counts(maker, b, q_len, topk)
    if maker.chance(3):
        extra = _cache(maker, form, d_qk, row, cache_dtype)
        rows, extra_tables = _entries(maker, extra, b, q_len, extra_topk, flat)
        if (tables is None) == (extra_tables is None):
            arguments |= {"extra_cache": extra, "extra_indices": rows}
            if extra_tables is not None:
                arguments["extra_block_tables"] = extra_tables
            if maker.chance():
                arguments["extra_topk_length"] = _counts(maker, b, q_len, extra_topk)
    if maker.chance():
        arguments["attn_sink"] = maker.floats((h_q,), "float32", rows=False)
    if form == "one scale" and maker.chance():
        arguments["kv_scale"] = maker.choose(0.37, maker.values(np.float32(0.1)))
    shape = (*arguments["q"].shape[:-1], arguments["d_v"])
    out_dtype = maker.choose(DTYPES[dtype], np.float32)
    results = {"out": (shape, out_dtype, True), "lse": (shape[:-1], np.float32, False)}
    return given(maker, "sparse_mla_decode", arguments, results)
