"""What a call has to return, by `hopwell.reference`, and how far off each number may be.

The bounds are those of the contract ("Accuracy every backend must reach"), kept row by row: a share of the reference's
norm, and `slack`, what the rounding of fp32 sums explains: 2^-21 times the same sum with absolute values, carried
through what is computed of it. Where numbers leave fp32's range on the way (or might, in another order of summation)
the slack is infinite, and nothing is said of the value. NaN and ±inf have their places everywhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hopwell import reference
from hopwell.reference._visible import visible_keys
from hopwell.reference.sparse_mla import select

from .right import FuzzedCall

ROUNDING = 2.0**-21
EXP = 2.0**-20  # what an fp32 exp may be off by
TINY = 2.0**-126  # what a product may lose that falls below fp32's normal numbers
LARGE = 1e37  # sums of more than this may overflow on the way
SMALL = 1e-30  # weights of less than this may be 0 in fp32
BOUNDS = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 4e-3}
PAGED_BOUNDS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 4e-3}


@dataclass
class Expected:
    name: str
    value: Any
    bound: float = 0.0  # of the norm of a row, the last dimension; 0 with no slack: exactly the value
    slack: Any = None
    elementwise: bool = False  # every element is a row of its own


def compare(got: Any, expected: Expected) -> None:
    value = np.asarray(expected.value)
    assert got.shape == value.shape, f"{expected.name} is {list(got.shape)}, expected {list(value.shape)}"
    if expected.slack is None:
        np.testing.assert_array_equal(got, value, err_msg=expected.name)
        return
    info = ml_dtypes.finfo(got.dtype)
    limit = float(info.max)
    x, value = got.astype(np.float64), value.astype(np.float64)
    slack = np.broadcast_to(expected.slack, value.shape) + float(info.smallest_subnormal)
    with np.errstate(all="ignore"):
        size = np.abs(value)
        sure = np.isfinite(slack) & ~(
            (size * 1.01 + slack > limit) & (size * 0.99 - slack < limit) & np.isfinite(value)
        )
        value = np.where(size > limit, np.copysign(np.inf, value), value)
        for what, is_it in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
            at = np.argwhere(sure & (is_it(x) != is_it(value)))
            where = tuple(at[0]) if len(at) else ()
            assert not len(at), (
                f"{expected.name}{list(map(int, where))} is {x[where]}, expected {value[where]} ({what})"
            )
        sure &= np.isfinite(value)
        error, value, slack = (np.where(sure, a, 0.0) for a in (x - value, value, slack))
    if expected.elementwise:
        error, value, slack = error[..., None], value[..., None], slack[..., None]
    off, allowed = (np.linalg.norm(a, axis=-1) for a in (error, slack))
    allowed = allowed + expected.bound * np.linalg.norm(value, axis=-1)
    worst = np.unravel_index(np.argmax(off - allowed), off.shape) if off.size else ()
    assert (off <= allowed).all(), (
        f"{expected.name}{list(map(int, worst))} is off by {off[worst]:.3g}, allowed {allowed[worst]:.3g}"
        f" of {np.linalg.norm(value, axis=-1)[worst]:.3g}"
    )


def finite(x: Any) -> Any:
    """|x| as float64, 0 where it is NaN or infinite."""
    x = np.abs(np.asarray(x).astype(np.float64))
    return np.where(np.isfinite(x), x, 0.0)


def _unless(condition: Any, slack: Any) -> Any:
    return np.where(condition, np.inf, slack)


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
    """A query's valid entries, and how exact their scores are."""

    entries: Any
    keys: Any
    kv: Any  # [n, d_qk], finite parts
    odd: Any  # [n]: whether a key's row has NaN or infinities
    score: Any  # [h, n]
    reach: Any  # [h, n]: how far off a score may be


def _rows(a: dict[str, Any], operator: str) -> Any:
    names = ("q", "kv", "indices", "sm_scale", "topk_length", "q_positions", "q_start", "kv_stride", "k_start", "k_end")
    given = {"kv_stride": 1} | a
    selection = select(operator, *(given.get(name) for name in names))
    scale = abs(selection.sm_scale)
    for s in range(len(selection.q)):
        entries, keys, rows, score = selection.row(s)
        kv = finite(rows)
        size = finite(selection.q[s]) @ kv.T
        reach = ROUNDING / 2 * scale * size + scale * TINY * kv.shape[1]
        odd = ~np.isfinite(rows).all(axis=1)
        yield s, _Row(entries, keys, kv, odd, score, _unless((size > LARGE) | (scale * size > LARGE), reach))


def sparse_mla_forward(a: dict[str, Any]) -> list[Expected]:
    out, peak, lse = reference.sparse_mla_forward(**a)
    dtype = str(a["q"].dtype)
    row_slack, out_slack = np.zeros(lse.shape), np.zeros(out.shape)
    for s, row in _rows(a, "sparse_mla_forward"):
        reach = row.reach.max(axis=1, initial=0.0)  # [h]
        row_slack[s] = 1e-6 + reach
        v = row.kv[:, : out.shape[2]]
        p, p_off = _weights(row.score, lse[s][:, None], 2 * reach[:, None])
        unscaled = finite(np.exp(row.score - peak[s][:, None])) @ v
        bad = (_vanishes(p) & row.odd).any(axis=1) | ~np.isfinite(p_off).all(axis=1)
        out_slack[s] = p_off @ v + p @ v * (2 * reach[:, None] + EXP)
        out_slack[s] = _unless((unscaled > LARGE) | bad[:, None], out_slack[s])
    return [
        Expected("out", out, BOUNDS[dtype], out_slack),
        Expected("max_logits", peak, 1e-6, row_slack, elementwise=True),
        Expected("lse", lse, 1e-6, row_slack, elementwise=True),
    ]


def attention_distribution(a: dict[str, Any]) -> list[Expected]:
    value = reference.attention_distribution(**a)
    plain = (
        value if a.get("normalize", "none") == "none" else reference.attention_distribution(**a | {"normalize": "none"})
    )
    slack = np.zeros(value.shape)
    for s, row in _rows(a, "attention_distribution"):
        slack[s, row.entries] = _distribution_slack(row, a["lse"][s])
    if plain is not value:
        total = finite(plain.sum(axis=1, keepdims=True))
        off = slack.sum(axis=1, keepdims=True)
        slack = slack / total + finite(value) * off / total
        slack = _unless((total > LARGE) | (plain.sum(axis=1, keepdims=True) != total) | (off > 0.1 * total), slack)
        slack = np.where((plain == 0).all(axis=1, keepdims=True) & (off < SMALL), 0.0, slack)
    return [Expected("attn", value, 2e-3, slack)]


def _distribution_slack(row: _Row, lse: Any) -> Any:
    lse = lse.astype(np.float64)[:, None]
    return _weights(row.score, lse, row.reach + ROUNDING * finite(lse))[1].sum(axis=0)


def sparse_mla_backward(a: dict[str, Any]) -> list[Expected]:
    rows = len(a["q"]), len(a["kv"]) if a["indices"] is None else a["indices"].shape[-1]
    attn = np.zeros(rows) if "attn" in a else None
    before = a["dkv"].copy() if a.get("accumulate") else None
    given = {name: value for name, value in a.items() if name not in ("dq", "dkv", "attn")}
    dq, dkv, d_sink = reference.sparse_mla_backward(**given, **{"dkv": before} if before is not None else {}, attn=attn)
    if before is not None:  # the sum in float64
        dkv = a["dkv"].astype(np.float64) + reference.sparse_mla_backward(**given | {"accumulate": False})[1]
    d_v, scale = a["d_v"], abs(float(a["sm_scale"]))
    _, h_q, d_qk = a["q"].shape
    sink = np.full(h_q, -np.inf) if "attn_sink" not in a else a["attn_sink"].astype(np.float64)
    q, d_out, out = finite(a["q"]), finite(a["d_out"]), finite(a["out"])
    dq_slack, attn_slack, sink_slack = (
        np.zeros(a["q"].shape),
        np.zeros(rows),
        np.zeros(h_q),
    )
    dkv_slack, dkv_size = np.zeros((2, len(a["kv"]), d_qk))
    for s, row in _rows(a, "sparse_mla_backward"):
        if len(row.entries) == 0:
            continue
        lse = a["lse"][s].astype(np.float64)
        below = np.logaddexp(lse, sink)
        reach = row.reach + ROUNDING * (finite(lse) + np.minimum(finite(below), 1e6))[:, None]
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
        dq_slack[s] = _unless(bad.any(axis=1)[:, None] | (ds @ row.kv > LARGE), dq_slack[s])
        part, total = (ds_off + ROUNDING * ds).T @ q[s] + TINY * h_q, ds.T @ q[s]
        part[:, :d_v] += (p_off + ROUNDING * p).T @ d_out[s]
        total[:, :d_v] += p.T @ d_out[s]
        np.add.at(dkv_slack, row.keys, _unless(bad.any(axis=0)[:, None], part))
        np.add.at(dkv_size, row.keys, total)
        delta = (d_out[s] * out[s]).sum(axis=1)
        share = finite(np.exp(-np.logaddexp(0.0, lse - sink)))
        sink_slack += _unless(delta > LARGE, share * delta * (4 * ROUNDING) + TINY)
        attn_slack[s, row.entries] = _distribution_slack(row, a["lse"][s])
    q_type = str(a["q"].dtype)
    results = []
    if a.get("need_dq", True):
        results.append(Expected("dq", dq, BOUNDS[q_type], dq_slack))
    if a.get("need_dkv", True):
        dkv_slack = _unless(dkv_size > LARGE, dkv_slack).reshape(a["kv"].shape) + (
            0 if before is None else ROUNDING * finite(before)
        )
        bound = BOUNDS["bfloat16"] if "bfloat16" in (q_type, a.get("dkv_dtype")) else BOUNDS[q_type]
        results.append(Expected("dkv", dkv, bound, dkv_slack))
    if "attn_sink" in a:
        results.append(Expected("d_sink", d_sink, BOUNDS[q_type], sink_slack))
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


# ---- the indexer


def _scores(q: Any, k: Any, w: Any, relu: bool = True, of_head: Any = None, of_key: Any = None) -> tuple[Any, Any, Any]:
    """One query's scores, how far off each may be, and the sizes of the products q·k, [h, n]."""
    with np.errstate(all="ignore"):
        dot = q.astype(np.float64) @ k.astype(np.float64).T
        w = w.astype(np.float64) if of_head is None else w.astype(np.float64) * of_head.astype(np.float64)
        score = w @ (np.maximum(dot, 0.0) if relu else dot)
        sizes = finite(q) @ finite(k).T
        size = finite(w) @ sizes
        off = 2 * ROUNDING * size + TINY * (1 + finite(w).sum() * q.shape[1])
        if of_head is not None:  # times a weight, below fp32's numbers or above them
            off = _unless((finite(w) > LARGE).any(), off + TINY * sizes.sum(axis=0))
        if of_key is not None:
            scale = of_key.astype(np.float64)
            unsure = np.isinf(off) | (np.isinf(scale) & (np.abs(score) <= off) & (size > 0))
            off = _unless(unsure | (size * finite(scale) > LARGE), off * finite(scale) + TINY)
            score = score * scale
        # A product that may round to 0, or to the other side of it, is a gate in front of an infinite weight.
        near = (sizes > 0) & (np.abs(dot) <= 2 * ROUNDING * sizes + TINY * q.shape[1])
        gate = (near & np.isinf(w)[:, None]).any(axis=0)
        off = _unless((sizes > LARGE).any(axis=0) | (size > LARGE) | gate, off)
    return np.where(np.isnan(score), -np.inf, score), off, sizes


def check_selection(a: dict[str, Any], indices: Any, scores: Any) -> None:
    """What `lightning_indexer` returns where rounding may choose another key than the reference does."""
    visible = visible_keys(
        "lightning_indexer",
        len(indices),
        len(a["k_index"]),
        a.get("q_positions"),
        a.get("q_start"),
        a.get("kv_stride", 1),
        a.get("k_start"),
        a.get("k_end"),
    )
    relu = a.get("relu", True)
    for s, (first, last) in enumerate(zip(*visible, strict=True)):
        seen = max(last - first, 0)
        count = min(a["topk"], seen)
        taken = indices[s, :count]
        assert (taken >= 0).all() and (np.diff(taken) > 0).all() and (indices[s, count:] == -1).all(), f"indices[{s}]"
        assert np.isneginf(scores[s, count:]).all(), f"scores[{s}] of no key"
        if count == 0:
            continue
        assert first <= taken[0] and taken[-1] < last, f"indices[{s}] names a key that is not visible"
        taken = taken - first
        of_head = a["q_scale"][s] if "q_scale" in a else None
        of_key = a["k_scale"][first:last] if "k_scale" in a else None
        score, off, _ = _scores(a["q_index"][s], a["k_index"][first:last], a["weights"][s], relu, of_head, of_key)
        compare(scores[s, :count], Expected(f"scores[{s}]", score[taken], 0.0, off[taken], elementwise=True))
        left = np.setdiff1d(np.arange(seen), taken)
        if len(left) and np.isfinite(off).all():
            worst, best = taken[np.argmin(score[taken] + off[taken])], left[np.argmax(score[left] - off[left])]
            assert not score[worst] + off[worst] < score[best] - off[best], (
                f"indices[{s}] has key {first + worst} of score {score[worst]}, not {first + best} of {score[best]}"
            )


def lightning_indexer_backward(a: dict[str, Any]) -> list[Expected]:
    loss, d_q, d_k, d_w = reference.lightning_indexer_backward(**a)
    d_loss, relu, d_scores = abs(float(a.get("d_loss", 1.0))), a.get("relu", True), a.get("d_scores")
    row_weights = a.get("row_weights", np.ones(len(d_q), np.float32)).astype(np.float64)
    indices = a["indices"].reshape(len(a["q_index"]), a["indices"].shape[-1]).astype(np.int64)
    loss_slack = 1e-7
    d_q_slack, d_w_slack = np.zeros(d_q.shape), np.zeros(d_w.shape)
    d_k_slack, d_k_size = np.zeros((2, *d_k.shape))
    ranges = a.get("k_start"), a.get("k_end")
    visible = visible_keys("lightning_indexer_backward", len(d_q), len(d_k), None, None, 1, *ranges)
    for s, (first, last) in enumerate(zip(*visible, strict=True)):
        entries = np.flatnonzero((indices[s] >= first) & (indices[s] < last))
        k = a["k_index"][indices[s, entries]]
        score, off, sizes = _scores(a["q_index"][s], k, a["weights"][s], relu)
        counted = ~np.isneginf(score)
        unsure = ~np.isfinite(off).all()
        entries, k, score, off, sizes = entries[counted], k[counted], score[counted], off[counted], sizes[:, counted]
        target = (a["target"] if d_scores is None else d_scores)[s, entries].astype(np.float64)
        factor = finite(row_weights[s : s + 1])[0]
        keys = indices[s, entries]
        if unsure:
            named = indices[s][(indices[s] >= first) & (indices[s] < last)]
            loss_slack = d_q_slack[s] = d_w_slack[s] = d_k_slack[named] = np.inf
            continue
        if not target.any():
            continue
        reach = off.max(initial=0.0) + ROUNDING * finite(score).max(initial=0.0)
        with np.errstate(all="ignore"):
            shifted = score - score.max(initial=-np.inf)
            p = np.exp(shifted) / np.exp(shifted).sum()
            size = factor * finite(target)
            loss_slack += (size * (2 * reach + EXP + 1e-6 * np.abs(finite(shifted) + np.log(len(p))))).sum()
            loss_slack += (size * finite(np.log(np.where(target > 0, target, 1.0)))).sum() * 1e-6
        if row_weights[s] == 0:
            continue
        factor *= d_loss
        g = factor * finite(p - target)
        g_off = factor * (finite(p) * (4 * reach + EXP) + ROUNDING * finite(target) + TINY) + TINY
        if d_scores is not None:
            g, g_off = factor * finite(target), factor * ROUNDING * finite(target) + TINY
        w, q, keys_size = finite(a["weights"][s]), finite(a["q_index"][s]), finite(k)
        dot = a["q_index"][s].astype(np.float64) @ k.astype(np.float64).T
        exact = all((np.round(x) == x).all() and x.max(initial=0) < 100 for x in (q, keys_size))
        turns = (
            (np.abs(dot) <= 2 * ROUNDING * sizes + TINY) & (sizes > 0) & (not exact) & relu
        )  # relu's derivative may be the other one
        d_dot_off = w[:, None] * np.where(turns, g + g_off, g_off + ROUNDING * g) + TINY
        odd = ~(
            np.isfinite(k.astype(np.float64)).all()
            and np.isfinite(a["q_index"][s].astype(np.float64)).all()
            and np.isfinite(a["weights"][s].astype(np.float64)).all()
        )
        lost = odd & (((p > 0) & (p < SMALL)).any() | turns.any())
        d_dot_off = _unless((w[:, None] * g > LARGE) | (g > LARGE) | lost, d_dot_off)
        sums = w[:, None] * g
        d_q_slack[s] = _unless(sums @ keys_size > LARGE, (d_dot_off + ROUNDING * sums) @ keys_size + TINY * len(g))
        np.add.at(d_k_slack, keys, (d_dot_off + ROUNDING * sums).T @ q + TINY * len(q))
        np.add.at(d_k_size, keys, sums.T @ q)
        overflows = (sizes @ g > LARGE) | (g > LARGE).any()
        d_w_slack[s] = _unless(overflows, sizes @ (g_off + 2 * ROUNDING * g) + TINY * (1 + g.sum()))
        if lost:
            d_w_slack[s] = np.inf
    names = ("loss", "d_q_index", "d_k_index", "d_weights")
    dtypes = ("float32", str(a["q_index"].dtype), "float32", str(a["weights"].dtype))
    slacks = (loss_slack, d_q_slack, _unless(d_k_size > LARGE, d_k_slack), d_w_slack)
    return [
        Expected(name, value, BOUNDS[dtype], slack, elementwise=name == "loss")
        for name, value, dtype, slack in zip(names, (loss, d_q, d_k, d_w), dtypes, slacks, strict=True)
    ]


def indexer_dense_loss(a: dict[str, Any]) -> list[Expected]:
    names, dtypes = ("loss", "d_q_index", "d_k_index", "d_weights"), ("float32", str(a["q_index"].dtype), "float32")
    values = reference.indexer_dense_loss(**a)
    # softmax and target are each of size 1 and may cancel; a query adds its errors to what each key gets
    products = 4.0 * a["q_index"].shape[2] * (1 + len(a["q_index"]))
    return [
        Expected(name, value, BOUNDS[dtype], 4e-6 * products, elementwise=name == "loss")
        for name, value, dtype in zip(names, values, (*dtypes, str(a["weights"].dtype)), strict=True)
    ]


def normalize_l1(a: dict[str, Any]) -> list[Expected]:
    return [Expected("out", reference.normalize_l1(**a), 1e-6, 1e-7)]


_JUDGES: dict[str, Callable[[dict[str, Any]], list[Expected]]] = {
    judge.__name__: judge
    for judge in (
        sparse_mla_forward,
        sparse_mla_backward,
        attention_distribution,
        paged_attention,
        nvfp4_gemv,
        nvfp4_linear,
        nvfp4_linear_backward,
        nvfp4_matmul,
        nvfp4_quantize,
        nvfp4_dequantize,
        lightning_indexer_backward,
        indexer_dense_loss,
        normalize_l1,
    )
}


def expect(call: FuzzedCall) -> Callable[[tuple[Any, ...]], None]:
    """Asks the reference, before the call is made; returns a function that judges the call's results."""
    arguments = {name: value for name, value in call.arguments.items() if name != "backend"}
    with np.errstate(all="ignore"):
        if call.operator == "lightning_indexer":
            return lambda results: check_selection(arguments, *results)
        keep = {
            name: value
            for name, value in arguments.items()
            if name not in call.outputs or call.operator == "sparse_mla_backward"
        }
        expected = _JUDGES[call.operator](keep)

    def judge(results: tuple[Any, ...]) -> None:
        assert len(results) == len(expected)
        for got, wanted in zip(results, expected, strict=True):
            if wanted.value is None:
                assert got is None
            else:
                compare(got, wanted)

    return judge
