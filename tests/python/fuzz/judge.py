"""The expected results of a call, by `hopwell.reference`, with the CPU's bounds; `bounds.py` has the bounds of GPUs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hopwell import reference
from hopwell._ops import OPERATORS
from hopwell.reference.sparse_mla import see_window, select

from . import judge_indexer
from .bounds import (
    BOUNDS,
    EXP,
    LARGE,
    PAGED_BOUNDS,
    ROUNDING,
    SMALL,
    TINY,
    Expected,
    compare,
    finite,
    is_gpu,
    on_backend,
)
from .bounds import unless as _unless
from .right import FuzzedCall

OVER_LSE = 44.0  # score − lse up to which the backward is promised: docs/operators/index.md


def _weights(score: Any, lse: Any, reach: Any) -> tuple[Any, Any]:
    """exp(score − lse), and how far off it may be where the exponent may be off by `reach`.

    Of an lse of +inf, which says that there are no keys, beside a score of +inf or NaN nothing is known: no forward
    returns both.
    """
    p = np.exp(score - lse)
    surely_0 = score - lse + reach < -110.0
    unknown = (reach > 0.1) | (p > LARGE) | (np.isposinf(lse) & ~(score < np.inf))
    p = finite(p)
    return p, np.where(surely_0, TINY, np.where(unknown, np.inf, p * (2 * reach + EXP) + TINY))


def _vanishes(p: Any) -> Any:
    """Whether a weight may be 0 in fp32 though it is not: times infinity that would be NaN."""
    return (p > 0) & (p < SMALL)


# ---- sparse MLA


@dataclass
class _Row:
    """A query's valid entries, then its window keys, and how exact their scores are."""

    entries: Any  # of the index row
    keys: Any  # [n], numbered on from kv to window_kv
    kv: Any  # [n, d_qk], finite parts
    odd: Any  # [n]: whether a key's row has NaN or infinities
    score: Any  # [h, n]
    reach: Any  # [h, n]: how far off a score may be


def _rows(a: dict[str, Any], operator: str) -> Any:
    names = ("q", "kv", "indices", "sm_scale", "topk_length", "q_positions", "q_start", "kv_stride", "k_start", "k_end")
    given = {"kv_stride": 1} | a
    selection = select(operator, *(given.get(name) for name in names))
    window = see_window(operator, selection, *(a.get(name) for name in ("window_kv", "window", "w_start", "w_end")))
    scale = abs(selection.sm_scale)
    for s in range(len(selection.q)):
        entries, keys, rows, score = selection.row(s)
        window_keys, window_rows, window_score = window.row(selection, s)
        keys = np.concatenate([keys, len(selection.kv) + window_keys])
        rows, score = np.concatenate([rows, window_rows]), np.concatenate([score, window_score], axis=1)
        kv = finite(rows)
        size = finite(selection.q[s]) @ kv.T
        reach = ROUNDING / 2 * scale * size + scale * TINY * kv.shape[1]
        odd = ~np.isfinite(rows).all(axis=1)
        yield s, _Row(entries, keys, kv, odd, score, _unless((size > LARGE) | (scale * size > LARGE), reach))


def sparse_mla_forward(a: dict[str, Any]) -> list[Expected]:
    out, peak, lse = reference.sparse_mla_forward(**a)
    dtype = str(a["q"].dtype)
    row_slack, out_slack, sums = np.zeros(lse.shape), np.zeros(out.shape), np.zeros(out.shape)
    peak_slack = np.zeros(lse.shape)
    for s, row in _rows(a, "sparse_mla_forward"):
        reach = row.reach.max(axis=1, initial=0.0)  # [h]
        row_slack[s] = 1e-6 + reach
        both = np.isposinf(row.score).any(axis=1) & np.isnan(row.score).any(axis=1)  # NaN, or on some GPUs +inf
        peak_slack[s] = _unless(both, row_slack[s])
        v = row.kv[:, : out.shape[2]]
        p, p_off = _weights(row.score, lse[s][:, None], 2 * reach[:, None])
        unscaled = finite(np.exp(row.score - peak[s][:, None])) @ v
        bad = (_vanishes(p) & row.odd).any(axis=1) | ~np.isfinite(p_off).all(axis=1)
        sums[s] = p @ v
        out_slack[s] = p_off @ v + sums[s] * (2 * reach[:, None] + EXP)
        out_slack[s] = _unless((unscaled > LARGE) | bad[:, None], out_slack[s])
    return [
        Expected("out", out, BOUNDS[dtype], out_slack, sums=sums),
        Expected("max_logits", peak, 1e-6, peak_slack, elementwise=True),
        Expected("lse", lse, 1e-6, row_slack, elementwise=True),
    ]


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


def sparse_mla_decode(a: dict[str, Any]) -> list[Expected]:
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
    expected_out, _, expected_lse = sparse_mla_forward(of_forward)
    for mine, value in ((expected_out, out), (expected_lse, lse)):
        np.testing.assert_allclose(np.asarray(mine.value).reshape(value.shape), value, rtol=1e-7, atol=1e-12)
    sums = expected_out.sums.reshape(out.shape)
    return [
        replace(expected_out, value=out, slack=expected_out.slack.reshape(out.shape), sums=sums),
        replace(expected_lse, value=lse, slack=expected_lse.slack.reshape(lse.shape)),
    ]


def attention_distribution(a: dict[str, Any]) -> list[Expected]:
    value = reference.attention_distribution(**a)
    plain = (
        value if a.get("normalize", "none") == "none" else reference.attention_distribution(**a | {"normalize": "none"})
    )
    slack = np.zeros(value.shape)
    for s, row in _rows(a, "attention_distribution"):
        slack[s, row.entries] = _distribution_slack(row, a["lse"][s], a.get("attn_sink"))
    if plain is not value:
        total = finite(plain.sum(axis=1, keepdims=True))
        off = slack.sum(axis=1, keepdims=True)
        slack = slack / total + finite(value) * off / total
        slack = _unless((total > LARGE) | (plain.sum(axis=1, keepdims=True) != total) | (off > 0.1 * total), slack)
        slack = np.where((plain == 0).all(axis=1, keepdims=True) & (off < SMALL), 0.0, slack)
    return [Expected("attn", value, 2e-3, slack)]


def _distribution_slack(row: _Row, lse: Any, sink: Any = None) -> Any:
    n = len(row.entries)
    below = lse = lse.astype(np.float64)[:, None]
    if sink is not None:
        below = np.where(np.isposinf(lse), np.inf, np.logaddexp(lse, sink.astype(np.float64)[:, None]))
    reach = row.reach[:, :n] + ROUNDING * (finite(lse) + np.minimum(finite(below), 1e6))
    return _weights(row.score[:, :n], below, reach)[1].sum(axis=0)


def sparse_mla_backward(a: dict[str, Any]) -> list[Expected]:
    rows = len(a["q"]), len(a["kv"]) if a["indices"] is None else a["indices"].shape[-1]
    attn = np.zeros(rows) if "attn" in a else None
    of_keys = [name for name in ("dkv", "d_window_kv") if name in a and a.get("accumulate")]
    before = {name: a[name].astype(np.float64) for name in of_keys}
    given = {name: value for name, value in a.items() if name not in ("dq", "dkv", "d_window_kv", "attn")}
    # Accumulated in float64.
    dq, dkv, d_sink, *of_window = reference.sparse_mla_backward(**given | {"accumulate": False}, attn=attn)
    d_window_kv = of_window[0] if of_window else None
    dkv, d_window_kv = (
        before[name] + x if name in before else x for name, x in (("dkv", dkv), ("d_window_kv", d_window_kv))
    )
    d_v, scale = a["d_v"], abs(float(a["sm_scale"]))
    _, h_q, d_qk = a["q"].shape
    sink = np.full(h_q, -np.inf) if "attn_sink" not in a else a["attn_sink"].astype(np.float64)
    q, d_out, out = finite(a["q"]), finite(a["d_out"]), finite(a["out"])
    dq_slack, attn_slack, sink_slack = (
        np.zeros(a["q"].shape),
        np.zeros(rows),
        np.zeros(h_q),
    )
    s_kv = len(a["kv"])
    dkv_slack, dkv_size = np.zeros((2, s_kv + len(a.get("window_kv", ())), d_qk))  # of window_kv's rows too
    dq_size = np.zeros(a["q"].shape)
    for s, row in _rows(a, "sparse_mla_backward"):
        lse = a["lse"][s].astype(np.float64)
        delta = (d_out[s] * out[s]).sum(axis=1)
        share = finite(np.exp(-np.logaddexp(0.0, lse - sink)))
        # A share below fp32's normal numbers may be 0.
        sink_slack += _unless((delta > LARGE) & ~np.isposinf(lse), share * delta * (4 * ROUNDING) + TINY * (1 + delta))
        if len(row.keys) == 0:
            continue
        below = np.logaddexp(lse, sink)
        reach = row.reach + ROUNDING * (finite(lse) + np.minimum(finite(below), 1e6))[:, None]
        beyond = row.score - lse[:, None] > OVER_LSE
        row.reach[beyond] = reach[beyond] = np.inf
        p, p_off = _weights(row.score, below[:, None], reach)
        v = row.kv[:, :d_v]
        dp = d_out[s] @ v.T + (d_out[s] * out[s]).sum(axis=1)[:, None]  # and delta
        ds = scale * p * dp
        ds_off = ROUNDING * ds + scale * p_off * dp + TINY
        odd = row.odd | ~np.isfinite([a[name][s].astype(np.float64).sum() for name in ("q", "out", "d_out")]).all()
        unscaled = np.exp(row.score - lse[:, None])  # P before the sink's share is taken off
        bad = (_vanishes(p) & odd) | (unscaled > LARGE) | (dp > LARGE) | (p * dp > LARGE) | (ds > LARGE)
        bad |= ~np.isfinite(p_off) | ((reach > 0.1) & ~(row.score - lse[:, None] + reach < -110.0))
        ds_off, p_off = np.where(bad, 0.0, ds_off), np.where(bad, 0.0, p_off)
        dq_slack[s] = (ds_off + ROUNDING * ds) @ row.kv + TINY * d_qk
        dq_size[s] = ds @ row.kv
        dq_slack[s] = _unless(bad.any(axis=1)[:, None] | (dq_size[s] > LARGE), dq_slack[s])
        part, total = (ds_off + ROUNDING * ds).T @ q[s] + TINY * h_q, ds.T @ q[s]
        part[:, :d_v] += (p_off + ROUNDING * p).T @ d_out[s]
        total[:, :d_v] += p.T @ d_out[s]
        np.add.at(dkv_slack, row.keys, _unless(bad.any(axis=0)[:, None], part))
        np.add.at(dkv_size, row.keys, total)
        of_attn = a["attn_sink"] if a.get("attn_with_sink") else None
        attn_slack[s, row.entries] = _distribution_slack(row, a["lse"][s], of_attn)
    q_type = str(a["q"].dtype)
    results = []
    if a.get("need_dq", True):
        results.append(Expected("dq", dq, BOUNDS[q_type], dq_slack, sums=dq_size))
    dkv_slack = _unless(dkv_size > LARGE, dkv_slack)
    bound = BOUNDS["bfloat16"] if "bfloat16" in (q_type, a.get("dkv_dtype")) else BOUNDS[q_type]

    def of_rows(name: str, gradient: Any, keys: str, rows: slice) -> Expected:
        shape = a[keys].shape
        slack = dkv_slack[rows].reshape(shape) + ROUNDING * finite(before.get(name, 0.0))
        return Expected(name, gradient, bound, slack, sums=dkv_size[rows].reshape(shape))

    if a.get("need_dkv", True):
        results.append(of_rows("dkv", dkv, "kv", slice(s_kv)))
    if "attn_sink" in a:
        results.append(Expected("d_sink", d_sink, BOUNDS[q_type], sink_slack))
    if d_window_kv is not None:
        results.append(of_rows("d_window_kv", d_window_kv, "window_kv", slice(s_kv, None)))
    if attn is not None:
        results.append(Expected("attn", attn, 2e-3, attn_slack))
    return results


# ---- paged attention


def paged_attention(a: dict[str, Any]) -> list[Expected]:
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
        reach = _unless((size.max(axis=2) > LARGE) | (everything.max(axis=2) > LARGE) | (bias_size[n] > LARGE), reach)
        lse_slack[n] = 1e-6 + reach
        # Whatever the weights are: Σ p|v| is at most the largest |v|; nearer than that only where bounds are tight.
        most = values[:, heads].max(axis=0)  # [h, d]
        out_slack[n] = most * (4 * reach[..., None] + EXP) + TINY * len(at)
        spread = (2 * everything.max(axis=2) > 60) & odd.any()
        out_slack[n] = _unless((most * len(at) > LARGE) | spread[..., None], out_slack[n])
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


# ---- NVFP4


def _sizes(codes: Any) -> Any:
    """Codes, two a byte, without their signs."""
    return codes & 0x77


def _scale_sizes(scales: Any) -> Any:
    """Scales without their signs; NaN becomes 0."""
    magnitude = scales.view(np.uint8) & 0x7F
    return np.where(magnitude == 0x7F, np.uint8(0), magnitude).astype(np.uint8).copy(order="K")


def nvfp4_gemv(a: dict[str, Any]) -> list[Expected]:
    sizes = {"a": _sizes(a["a"]), "b": _sizes(a["b"]), "sfa": _scale_sizes(a["sfa"]), "sfb": _scale_sizes(a["sfb"])}
    size = reference.nvfp4_gemv(**sizes, scale_layout=a.get("scale_layout", "plain"))
    slack = (ROUNDING * size + TINY) * abs(_factor(a, "alpha")) + TINY
    bound = BOUNDS[a.get("out_dtype", "float16")]
    return [Expected("c", reference.nvfp4_gemv(**a), bound, slack, elementwise=True)]


def _factor(a: dict[str, Any], name: str) -> float:
    """The factor of a global scale, or of alpha."""
    given = float(a.get(name, 1.0))
    return 1.0 / given if a.get("global_is_reciprocal") else given


def nvfp4_linear(a: dict[str, Any]) -> list[Expected]:
    factor = _factor(a, "weight_global")
    size = reference.nvfp4_linear(
        finite(a["x"]), _sizes(a["weight"]), _scale_sizes(a["weight_scale"]), 1.0,
        scale_layout=a.get("scale_layout", "plain"),
    )  # fmt: skip
    slack = (ROUNDING * size + TINY * 2 * a["weight"].shape[1]) * abs(factor)
    if "bias" in a:
        slack = slack + ROUNDING * finite(a["bias"])
    unscaled = 6.0 * finite(a["x"]).sum(axis=1, keepdims=True)  # codes times x, before the scales
    slack = _unless((size > LARGE) | (unscaled > LARGE), np.where(np.isfinite(slack), slack, 0.0))
    return [Expected("y", reference.nvfp4_linear(**a), BOUNDS[str(a["x"].dtype)], slack)]


def nvfp4_linear_backward(a: dict[str, Any]) -> list[Expected]:
    size = reference.nvfp4_linear_backward(
        finite(a["d_out"]), _sizes(a["weight"]), _scale_sizes(a["weight_scale"]), 1.0,
        scale_layout=a.get("scale_layout", "plain"),
    )  # fmt: skip
    slack = (ROUNDING * size + TINY * len(a["weight"])) * abs(_factor(a, "weight_global"))
    slack = _unless(size > LARGE, np.where(np.isfinite(slack), slack, 0.0))
    return [Expected("d_x", reference.nvfp4_linear_backward(**a), BOUNDS[str(a["d_out"].dtype)], slack)]


def _pooling(a: dict[str, Any]) -> tuple[Any, float]:
    """|kv|, and how far off a weight may be, as a share of it.

    A value is infinite where its column is not judged: kv is not finite, or a gate is so large that exponentials differ
    in fp32.
    """
    bias = finite(a["position_bias"]).max(initial=0.0) if "position_bias" in a else 0.0
    gates = finite(a["gate"])
    unsure = (gates + bias > 1e4) | ~np.isfinite(a["kv"].astype(np.float64)) | (finite(a["kv"]) > LARGE)
    largest = min(float(gates.max(initial=0.0)), 1e4) + float(bias)
    return np.where(unsure, np.inf, finite(a["kv"])), 4 * ROUNDING + largest * 2.0**-22


def kv_compress(a: dict[str, Any]) -> list[Expected]:
    rows = len(a["out"]) if "out" in a else len(a["kv"]) // a["ratio"]
    width = a["kv"].shape[1] // (2 if a["overlap"] else 1)
    given = {name: value for name, value in a.items() if name not in ("out", "out_dtype")}
    value, total = (
        reference.kv_compress(**given | {"kv": kv}, out=np.zeros((rows, width))) for kv in (a["kv"], _pooling(a)[0])
    )
    slack = _unless(~np.isfinite(total), _pooling(a)[1] * finite(total) + TINY)
    bound = BOUNDS[a.get("out_dtype", str(a["kv"].dtype))]
    return [Expected("out", value, bound, slack, elementwise=True)]


def kv_compress_backward(a: dict[str, Any]) -> list[Expected]:
    d_kv, d_gate, d_bias = reference.kv_compress_backward(**a)
    kv, share = _pooling(a)
    d_out = np.where(np.isfinite(a["d_out"].astype(np.float64)), finite(a["d_out"]), np.inf)
    size = reference.kv_compress_backward(**a | {"d_out": d_out})[0]  # weights · |d_out|
    # A column's values, those of other windows among them: unjudged if one of them is.
    largest = np.where(np.isfinite(kv).all(axis=0), finite(kv).max(axis=0, initial=0.0), np.inf)
    tiny = TINY * (1 + finite(d_out).max(initial=0.0))  # weights below fp32's normal numbers
    of_kv = _unless(~np.isfinite(size) | ~np.isfinite(largest), share * finite(size) + tiny)
    factor = 2 * finite(largest) + 1
    of_gate = _unless(~np.isfinite(of_kv) | (size * factor > LARGE), (2 * share * finite(size) + tiny) * factor)
    of_bias = np.broadcast_to(of_gate.sum(axis=0) + ROUNDING * finite(d_gate).sum(axis=0), (a["ratio"], kv.shape[1]))
    bound = BOUNDS[str(a["kv"].dtype)]
    return [
        Expected("d_kv", d_kv, bound, of_kv, elementwise=True),
        Expected("d_gate", d_gate, bound, of_gate, elementwise=True),
        Expected("d_position_bias", d_bias, 1e-4, of_bias),
    ]


def mla_cache_append(a: dict[str, Any]) -> list[Expected]:
    return [Expected("cache", reference.mla_cache_append(**a | {"cache": np.array(a["cache"])}))]


def nvfp4_matmul(a: dict[str, Any]) -> list[Expected]:
    sizes = {"a": _sizes(a["a"]), "b": _sizes(a["b"]), "sfa": _scale_sizes(a["sfa"]), "sfb": _scale_sizes(a["sfb"])}
    size = reference.nvfp4_matmul(**sizes, scale_layout=a.get("scale_layout", "plain"))
    slack = (ROUNDING * size + TINY) * abs(_factor(a, "alpha")) + TINY
    if "bias" in a:
        slack = slack + ROUNDING * finite(a["bias"])
    bound = BOUNDS[a.get("out_dtype", "bfloat16")]
    return [Expected("c", reference.nvfp4_matmul(**a), bound, slack, elementwise=True)]


def nvfp4_quantize(a: dict[str, Any]) -> list[Expected]:
    names = ("codes", "scales", "global_scale")
    return [Expected(name, value) for name, value in zip(names, reference.nvfp4_quantize(**a), strict=True)]


def nvfp4_dequantize(a: dict[str, Any]) -> list[Expected]:
    value = reference.nvfp4_dequantize(**a)
    rounding = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[a.get("dtype", "float32")]
    if a.get("global_is_reciprocal"):
        rounding += 2.0**-24  # of the factor
    return [Expected("x", value, 1.01 * rounding, np.zeros(value.shape), elementwise=True)]


# ---- rows of weights


def normalize_l1(a: dict[str, Any]) -> list[Expected]:
    return [Expected("out", reference.normalize_l1(**a), 1e-6, 1e-7)]


_JUDGES: dict[str, Callable[[dict[str, Any]], list[Expected]]] = {
    name: judge for module in (vars(judge_indexer), globals()) for name, judge in module.items() if name in OPERATORS
}


def expect(call: FuzzedCall, backend: str = "cpu") -> Callable[[tuple[Any, ...]], None]:
    """Asks the reference, before the call is made; returns a function that judges the call's results."""
    arguments = {name: value for name, value in call.arguments.items() if name != "backend"}
    with np.errstate(all="ignore"):
        if call.operator == "lightning_indexer":
            return lambda results: judge_indexer.check_selection(arguments, backend, *results)
        if call.operator == "paged_lightning_indexer":
            return lambda results: judge_indexer.check_paged_selection(arguments, backend, results)
        keep = {
            name: value
            for name, value in arguments.items()
            if name not in call.outputs or call.operator in ("sparse_mla_backward", "kv_compress", "mla_cache_append")
        }
        expected = [on_backend(call.operator, one, backend) for one in _JUDGES[call.operator](keep)]
        if (
            is_gpu(backend)
            and arguments.get("share_keys")
            and not np.isfinite(arguments["kv"].astype(np.float64)).all()
        ):
            for one in expected:  # a NaN reaches the queries that are taken together with one that selects its key
                if one.name in ("out", "dq", "dkv"):
                    one.slack = np.inf

    def judge(results: tuple[Any, ...]) -> None:
        assert len(results) == len(expected)
        for got, wanted in zip(results, expected, strict=True):
            if wanted.value is None:
                assert got is None
            else:
                compare(got, wanted)

    return judge
