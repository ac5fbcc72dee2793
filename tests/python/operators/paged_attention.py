"""Decode attention over a paged cache."""

from typing import Any

import numpy as np
import torch
from calls import DTYPES, Call, Rng, normal
from fuzz.arguments import scalar
from fuzz.bounds import EXP, LARGE, PAGED_BOUNDS, ROUNDING, TINY, Expected, finite, unless
from fuzz.call import WORK, FuzzedCall, fit, given
from fuzz.draw import Maker, integers_around, rows_of_indices
from hopwell import reference
from hypothesis import strategies as st
from torch_inputs import paged_inputs

from ._operator import Operator


def call(rng: Rng, dtype: str) -> Call:
    b, q_len, h_q, h_kv, d, block, blocks = 3, 2, 4, 2, 32, 8, 20
    arguments = {
        "q": normal(rng, (b, q_len, h_q, d), dtype),
        "k_cache": normal(rng, (blocks, block, h_kv, d), dtype),
        "v_cache": normal(rng, (blocks, block, h_kv, d), dtype),
        "block_tables": rng.integers(0, blocks, (b, 6)).astype(np.int32),
        "context_lens": np.array([1, 17, 48], np.int32),
        "scale": d**-0.5,
        "pos_bias_u": normal(rng, (h_q, d), "float32"),
        "pos_bias_v": normal(rng, (h_q, d), "float32"),
        "r": normal(rng, (h_q, 30, d), dtype),
        "window": 40,
    }
    bound = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 4e-3}[dtype]
    return Call("paged_attention", arguments, (bound, 1e-5), ("out", "lse"))


@st.composite
def right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype = maker.choose("float32", "float16", "bfloat16")
    b, h_kv, group, d = maker.size(0, 5), maker.size(1, 5), maker.size(1, 4), maker.choose(32, 40, 64, 128, 256)
    flat = maker.chance(4)
    q_len = 1 if flat else maker.choose(1, 2, 3, 16)
    block = maker.choose(1, 2, 3, 4, 7, 8, 16, 17, 32, 256)
    blocks, pages = maker.size(0, 12), maker.choose(0, 1, 2, 5, 9)
    b, h_kv, group, q_len = fit([b, h_kv, group, q_len], max(WORK // max(pages * block * d, 1), 1))
    (blocks,) = fit([blocks], max(WORK // (block * h_kv * d), 1))
    h_q = h_kv * group
    x = 16 // np.dtype(DTYPES[dtype]).itemsize
    layout = maker.choose("nhd", "hnd", "vllm")
    shapes: dict[str, tuple[Any, Any]] = {
        "nhd": ((blocks, block, h_kv, d),) * 2,
        "hnd": ((blocks, h_kv, block, d),) * 2,
        "vllm": ((blocks, h_kv, d // x, block, x), (blocks, h_kv, d, block)),
    }
    tables = rows_of_indices(maker, b, blocks, pages)
    arguments: dict[str, Any] = {
        "q": maker.floats((b, h_q, d) if flat else (b, q_len, h_q, d), dtype),
        "k_cache": maker.floats(shapes[layout][0], dtype),
        "v_cache": maker.floats(shapes[layout][1], dtype),
        "block_tables": maker.values(tables),
        "context_lens": maker.values(integers_around(maker, b, [0, pages * block // 2, pages * block]), rows=False),
        "scale": scalar(maker, 0.2),
    }
    if layout != "nhd" or maker.chance():
        arguments["layout"] = layout
    if maker.chance():
        arguments["window"] = maker.choose(0, maker.integer(1, 20), 2**31, 2**63 - 1)
    if maker.chance(3):
        arguments["pos_bias_u"] = maker.floats((h_q, d), maker.choose("float32", dtype))
    extent = maker.choose(0, 1, 7, 40, pages * block)
    rule = maker.choose("zero", "clamp", "-inf")
    if rule == "clamp":
        extent = max(extent, 1)
    bias = maker.choose("none", "key", "distance", "r", "r and v")
    first = maker.choose(1, b)
    if bias == "key":
        shape = (first, h_q, q_len, extent)
        arguments["bias"] = maker.floats(shape, maker.choose("float32", "float16", "bfloat16"))
    elif bias == "distance":
        shape = (first, h_q, extent)
        arguments["bias"] = maker.floats(shape, maker.choose("float32", "float16", "bfloat16"))
        arguments["bias_kind"] = "distance"
    elif bias != "none":
        arguments["r"] = maker.floats((maker.choose(1, h_q), extent, d), maker.choose("float32", dtype))
        if bias == "r and v":
            arguments["pos_bias_v"] = maker.floats((h_q, d), maker.choose("float32", dtype))
    if bias != "none" or maker.chance(4):
        arguments |= {"out_of_range": rule, "pre_scale": maker.chance()}
    if bias == "none" and rule == "clamp":
        arguments.pop("out_of_range", None)
    if maker.chance(4):
        arguments["alibi_slopes"] = maker.floats((h_q,), "float32", rows=False)
    shape = arguments["q"].shape
    results = {"out": (shape, DTYPES[dtype], True), "lse": (shape[:-1], np.float32, False)}
    return given(maker, "paged_attention", arguments, results)


def expected(a: dict[str, Any]) -> list[Expected]:
    out, lse = reference.paged_attention(**a)
    q = a["q"].astype(np.float64)
    q = q if q.ndim == 4 else q[:, None]
    b, q_len, h_q, d = q.shape
    layout = a.get("layout", "nhd")
    k, v = _tokens_of(a["k_cache"], layout), _tokens_of(a["v_cache"], layout)  # [blocks, block, h_kv, d]
    blocks, block, h_kv, _ = k.shape
    tables = a["block_tables"].astype(np.int64)
    scale = abs(float(a["scale"]))
    u = finite(a["pos_bias_u"]) if "pos_bias_u" in a else 0.0
    slopes = finite(a["alibi_slopes"]) if "alibi_slopes" in a else np.zeros(h_q)
    bias_size = _bias_sizes(a, b, q_len, h_q)  # [b, q_len, h_q]
    out_slack, lse_slack = np.zeros((b, q_len, h_q, d)), np.zeros((b, q_len, h_q))
    dtype = str(a["q"].dtype)
    bound = PAGED_BOUNDS[dtype]
    for n in range(b):
        length = int(np.clip(a["context_lens"][n], 0, tables.shape[1] * block))
        at = np.arange(length)
        pages = tables[n, at // block]
        there = (pages >= 0) & (pages < blocks)
        at, pages = at[there], pages[there]
        if len(at) == 0:
            continue
        heads = np.arange(h_q) // (h_q // h_kv)
        keys, raw = finite(k[pages, at % block]), v[pages, at % block]
        values, odd = finite(raw), ~np.isfinite(raw.astype(np.float64)).all(axis=(1, 2))
        size = np.einsum("ihd,thd->iht", finite(q[n]) + u, keys[:, heads])
        bias = bias_size[n] * (scale if a.get("pre_scale", True) else 1.0)
        everything = scale * size + bias[:, :, None] + slopes[:, None] * length
        reach = (ROUNDING / 2 * everything + scale * TINY * d).max(axis=2)
        reach = unless((size.max(axis=2) > LARGE) | (everything.max(axis=2) > LARGE) | (bias_size[n] > LARGE), reach)
        lse_slack[n] = 1e-6 + reach
        # Whatever the weights are: Σ p|v| is at most the largest |v|; nearer than that only where bounds are tight.
        most = values[:, heads].max(axis=0)  # [h, d]
        out_slack[n] = most * (4 * reach[..., None] + EXP) + TINY * len(at)
        spread = (2 * everything.max(axis=2) > 60) & odd.any()
        out_slack[n] = unless((most * len(at) > LARGE) | spread[..., None], out_slack[n])
    return [
        Expected("out", out, bound, out_slack.reshape(out.shape)),
        Expected("lse", lse, 1e-6, lse_slack.reshape(lse.shape), elementwise=True),
    ]


def _tokens_of(cache: Any, layout: str) -> Any:
    """A cache of any layout as [blocks, block, h_kv, d]."""
    if layout == "nhd":
        return cache
    if layout == "hnd":
        return cache.transpose(0, 2, 1, 3)
    if cache.ndim == 4:
        return cache.transpose(0, 3, 1, 2)
    blocks, h_kv, groups, block, x = cache.shape
    return cache.transpose(0, 3, 1, 2, 4).reshape(blocks, block, h_kv, groups * x)


def _bias_sizes(a: dict[str, Any], b: int, q_len: int, h_q: int) -> Any:
    """The largest |bias| of each row, [b, q_len, h_q]; of the fused form the sum with absolute values."""
    if "r" in a:
        q = finite(a["q"]).reshape(b, q_len, h_q, a["q"].shape[-1]) + (
            finite(a["pos_bias_v"]) if "pos_bias_v" in a else 0.0
        )
        r = np.broadcast_to(finite(a["r"]), (h_q, *a["r"].shape[1:]))
        return np.einsum("bihd,hed->bihe", q, r).max(axis=3, initial=0.0)
    if "bias" not in a:
        return np.zeros((b, q_len, h_q))
    most = finite(a["bias"]).max(axis=-1, initial=0.0)  # [b or 1, h_q] or [b or 1, h_q, q_len]
    return np.broadcast_to(most[:, None] if most.ndim == 2 else most.transpose(0, 2, 1), (b, q_len, h_q))


_CACHES = {
    "nhd": ("blocks block h_kv d!",) * 2,
    "hnd": ("blocks h_kv block d!",) * 2,
    "vllm": ("blocks h_kv d/x! block x!", "blocks h_kv d! block"),
}


def dimensions(a: dict[str, Any]) -> dict[str, str]:
    q = "b q_len h_q d" if a["q"].ndim == 4 else "b h_q d"
    k_cache, v_cache = _CACHES[a.get("layout", "nhd")]
    return {
        "q": q,
        "out": q,
        "lse": q.removesuffix(" d"),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": "b max_blocks",
        "context_lens": "b",
        "pos_bias_u": "h_q d",
        "pos_bias_v": "h_q d",
        "alibi_slopes": "h_q",
        "r": " extent d",
        "bias": " h_q extent" if a.get("bias_kind") == "distance" else " h_q q_len extent",
    }


def samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    return {"": paged_inputs(dtype)}


OPERATOR = Operator(
    name="paged_attention",
    dtypes=("float32", "float16", "bfloat16"),
    call=call,
    right=right,
    expected=expected,
    dimensions=dimensions,
    samples=samples,
    free={("q", 1), ("r", 1), ("block_tables", 1)},
    choices={"layout": "nhd", "bias_kind": "key", "out_of_range": "zero"},
    messages=[
        ({"layout": "dhn"}, "layout must be 'nhd' or 'hnd' or 'vllm'; got 'dhn'"),
        ({"bias_kind": 1}, "bias_kind must be 'key' or 'distance'; got 1"),
        ({"out_of_range": "inf"}, "out_of_range must be 'zero' or 'clamp' or '-inf'; got 'inf'"),
        ({"window": -1}, "window must be at least 1, or 0 for every key; got -1"),
    ],
)
