"""MLA over selected rows of paged caches."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from calls import DTYPES, Call, Rng, bound_of, normal
from fuzz.bounds import Expected
from fuzz.call import FuzzedCall, fit, given
from fuzz.draw import E4M3, Maker, integers_around, rows_of_indices
from hopwell import reference
from hypothesis import strategies as st

from ._operator import Operator
from .mla_cache import FORMATS, make_cache
from .sparse_mla import forward_expected


def call(rng: Rng, dtype: str) -> Call:
    """Rows of V3.2 behind block tables, and a second cache; splits."""
    b, q_len, h_q, blocks, block = 3, 2, 3, 9, 5
    caches = []
    for shape in ((blocks, block, 656), (blocks - 2, block + 2, 656)):
        kv = normal(rng, (shape[0] * shape[1], 576), dtype)
        caches.append(reference.mla_cache_append(kv, np.zeros(shape, np.uint8), np.arange(len(kv))))
    arguments = {
        "q": normal(rng, (b, q_len, h_q, 576), dtype, 0.3),
        "cache": caches[0],
        "indices": rng.integers(-3, 40, (b, q_len, 150)).astype(np.int32),
        "sm_scale": 0.3,
        "d_v": 24,
        "block_tables": rng.integers(-1, blocks, (b, 7)).astype(np.int32),
        "context_lens": np.array([12, 35, 23], np.int32),
        "topk_length": rng.integers(70, 151, (b, q_len)).astype(np.int32),
        "extra_cache": caches[1],
        "extra_indices": rng.integers(-3, 40, (b, q_len, 70)).astype(np.int32),
        "extra_topk_length": np.array([70, 3, 64], np.int32),
        "extra_block_tables": rng.integers(0, blocks - 2, (b, 6)).astype(np.int32),
        "attn_sink": normal(rng, (h_q,), "float32"),
        "keys_per_split": 64,
    }
    return Call("sparse_mla_decode", arguments, (bound_of(dtype), 1e-5), ("out", "lse"))


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
def right(draw: st.DrawFn) -> FuzzedCall:
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


def _slots_of_rows(a: dict[str, Any], prefix: str, context_lens: Any, b: int, q_len: int) -> Any:
    """int64 [b, q_len, topk]: the slot of each entry, −1 for one that is not valid."""
    entries, cache = np.asarray(a[f"{prefix}indices"]).astype(np.int64), a[f"{prefix}cache"]
    entries = entries.reshape(b, q_len, entries.shape[-1])
    blocks, block = cache.shape[:2]
    numbers = np.arange(entries.shape[2])

    def per_query(counts: Any) -> Any:
        counts = np.asarray(counts).astype(np.int64)
        return np.broadcast_to(counts if counts.ndim == 2 else counts[:, None], (b, q_len))[..., None]

    valid = (entries >= 0) & (entries < 2**31)
    if f"{prefix}topk_length" in a:
        valid &= numbers < per_query(a[f"{prefix}topk_length"])
    tables = a.get(f"{prefix}block_tables")
    if tables is None:
        return np.where(valid & (entries < blocks * block), entries, -1)
    if context_lens is not None:
        later = 0 if context_lens.ndim == 2 else (q_len - 1 - np.arange(q_len))[:, None]
        valid &= entries < per_query(context_lens) - later
    valid &= entries < tables.shape[1] * block
    slots = np.full(entries.shape, -1)
    for s, i, j in np.argwhere(valid):
        page = int(tables[s, entries[s, i, j] // block])
        if 0 <= page < blocks:
            slots[s, i, j] = page * block + entries[s, i, j] % block
    return slots


def expected(a: dict[str, Any]) -> list[Expected]:
    """As the forward over the rows of both caches; the values are the reference's own."""
    out, lse = reference.sparse_mla_decode(**a)
    q = a["q"] if a["q"].ndim == 4 else a["q"][:, None]
    (b, q_len, h_q, d_qk), kv_scale = q.shape, a.get("kv_scale")
    slots = _slots_of_rows(a, "", a.get("context_lens"), b, q_len)
    kv = reference.read_mla_cache(a["cache"], np.arange(a["cache"].shape[0] * a["cache"].shape[1]), d_qk, kv_scale)
    if "extra_cache" in a:
        extra = _slots_of_rows(a, "extra_", None, b, q_len)
        slots = np.concatenate([slots, np.where(extra < 0, -1, extra + len(kv))], axis=2)
        count = a["extra_cache"].shape[0] * a["extra_cache"].shape[1]
        kv = np.concatenate([kv, reference.read_mla_cache(a["extra_cache"], np.arange(count), d_qk, kv_scale)])
    of_forward = {
        "q": q.reshape(b * q_len, h_q, d_qk),
        "kv": kv,
        "indices": slots.reshape(b * q_len, slots.shape[2]).astype(np.int32),
        "sm_scale": a["sm_scale"],
        "d_v": a["d_v"],
    } | ({"attn_sink": a["attn_sink"]} if "attn_sink" in a else {})
    expected_out, _, expected_lse = forward_expected(of_forward)
    for mine, value in ((expected_out, out), (expected_lse, lse)):
        np.testing.assert_allclose(np.asarray(mine.value).reshape(value.shape), value, rtol=1e-7, atol=1e-12)
    sums = expected_out.sums.reshape(out.shape)
    return [
        replace(expected_out, value=out, slack=expected_out.slack.reshape(out.shape), sums=sums),
        replace(expected_lse, value=lse, slack=expected_lse.slack.reshape(lse.shape)),
    ]


def dimensions(a: dict[str, Any]) -> dict[str, str]:
    flat = a["q"].ndim == 3
    q = "b h_q d_qk!" if flat else "b q_len h_q d_qk!"
    names = {"q": q, "out": q.replace("d_qk", "d_v"), "lse": q.removesuffix(" d_qk!"), "attn_sink": "h_q"}
    for prefix in ("", "extra_"):
        names[f"{prefix}indices"] = "b topk" if flat else "b q_len topk"
        names[f"{prefix}block_tables"] = "b max_blocks"
        if isinstance(a.get(f"{prefix}cache"), np.ndarray):
            names[f"{prefix}cache"] = "blocks block row!" if a[f"{prefix}cache"].ndim == 3 else "blocks block 1! row!"
        for count in ("context_lens", f"{prefix}topk_length"):
            if isinstance(a.get(count), np.ndarray):
                names[count] = "b" if a[count].ndim == 1 else "b q_len"
    return names


def samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    decode = torch.randn(2, 3, 512).to(dtype), torch.randn(4, 2, 512), torch.randint(-1, 9, (2, 70)).int(), 0.3, 40
    lengths = {"context_lens": torch.tensor([5, 3]).int(), "topk_length": torch.tensor([70, 9]).int()}
    options = {"block_tables": torch.randint(0, 4, (2, 3)).int(), **lengths, "keys_per_split": 64}
    coded = decode[0], torch.zeros(4, 2, 512, dtype=torch.uint8), *decode[2:]
    return {"": decode, "tables": (*coded, options | {"kv_scale": torch.tensor(0.5)})}


OPERATOR = Operator(
    name="sparse_mla_decode",
    call=call,
    right=right,
    expected=expected,
    dimensions=dimensions,
    samples=samples,
    free={
        *((name, axis) for name in ("cache", "extra_cache") for axis in (0, 1)),
        *((name, 2) for name in ("indices", "extra_indices")),
        *((name, 1) for name in ("block_tables", "extra_block_tables")),
    },
    messages=[
        (
            {"cache": np.zeros((9, 5, 600), np.uint8)},
            "cache must be rows of 656 (V3.2), 576 (one scale) bytes for d = 576; got 600",
        ),
        ({"cache": np.zeros((9, 0, 656), np.uint8)}, "cache must be in blocks of 1 to 65536 rows"),
        ({"indices": np.zeros((3, 2, 9))}, "indices must be int32 [b=3, q_len=2, topk]; got "),
        ({"indices": np.zeros((3, 9), np.int32)}, "indices must be int32 [b=3, q_len=2, topk]; got "),
        ({"topk_length": np.zeros(2, np.int32)}, "topk_length must be int32 [b=3]; got "),
        ({"context_lens": np.zeros((3, 3), np.int32)}, "context_lens must be int32 [b=3, q_len=2]"),
        ({"block_tables": None}, "context_lens needs block_tables"),
        (
            {"block_tables": None, "context_lens": None},
            "block_tables and extra_block_tables must both be given, or neither; got extra_block_tables alone",
        ),
        (
            {"extra_cache": None},
            "extra_cache and extra_indices must both be given, or neither; got extra_indices alone",
        ),
        (
            {"extra_indices": None},
            "extra_cache and extra_indices must both be given, or neither; got extra_cache alone",
        ),
        ({"extra_cache": None, "extra_indices": None}, "extra_topk_length needs extra_cache"),
        (
            {"extra_cache": None, "extra_indices": None, "extra_topk_length": None},
            "extra_block_tables needs extra_cache",
        ),
        ({"extra_cache": np.zeros((7, 7, 576), np.uint8)}, "extra_cache must be of the row format of "),
        ({"kv_scale": 0.5}, "kv_scale needs a cache of bytes with one scale"),
        (
            {"rope_cache": np.zeros((9, 5, 552), np.uint8)},
            "cache must be rows of 24 (one scale) bytes for d = 24; got 656",
        ),
        ({"keys_per_split": 0}, "keys_per_split must be a positive multiple of 64; got 0"),
        ({"keys_per_split": 100}, "keys_per_split must be a positive multiple of 64; got 100"),
        ({"keys_per_split": -64}, "keys_per_split must be a positive multiple of 64; got -64"),
        ({"attn_sink": np.zeros(4, np.float32)}, "attn_sink must be float32 [h_q=3]; got "),
        ({"d_v": 0}, "d_v must be between 1 and d_qk = 576; got 0"),
        ({"d_v": 577}, "d_v must be between 1 and d_qk = 576; got 577"),
        ({"sm_scale": float("inf")}, "sm_scale must be finite; got inf"),
    ],
)
