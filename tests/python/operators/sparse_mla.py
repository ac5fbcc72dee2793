"""Sparse MLA, forward and backward."""

from dataclasses import dataclass
from typing import Any

import hopwell
import hopwell.torch
import numpy as np
import torch
from calls import DTYPES, Call, Rng, bound_of, normal
from fuzz.arguments import causality, key_ranges, scalar, sinks
from fuzz.bounds import BOUNDS, EXP, LARGE, ROUNDING, SMALL, TINY, Expected, finite, unless
from fuzz.call import FuzzedCall, arguments_of, fit, given
from fuzz.draw import Maker, integers_around, rows_of_indices
from hopwell import reference
from hopwell.reference._visible import Masks
from hopwell.reference.sparse_mla import see_window, select
from hypothesis import strategies as st
from torch_inputs import sparse_inputs

from ._operator import Operator


def sparse_arguments(rng: Rng, dtype: str) -> dict[str, Any]:
    s_q, s_kv, h_q, d_qk, topk = 5, 90, 3, 40, 33
    return {
        "q": normal(rng, (s_q, h_q, d_qk), dtype),
        "kv": normal(rng, (s_kv, 1, d_qk), dtype),
        "indices": rng.integers(-5, s_kv + 5, (s_q, 1, topk)).astype(np.int32),
        "sm_scale": 0.3,
        "topk_length": rng.integers(topk // 2, topk + 3, s_q).astype(np.int32),
        "q_positions": rng.integers(20, 200, s_q).astype(np.int32),
        "kv_stride": 2,
        "k_start": rng.integers(-2, 20, s_q).astype(np.int32),
        "k_end": rng.integers(60, s_kv + 5, s_q).astype(np.int32),
    }


def window_arguments(rng: Rng, dtype: str) -> dict[str, Any]:
    return {
        "window_kv": normal(rng, (17, 1, 40), dtype),
        "window": 6,
        "w_start": rng.integers(-2, 9, 5).astype(np.int32),
        "w_end": rng.integers(3, 20, 5).astype(np.int32),
    }


def forward_call(rng: Rng, dtype: str) -> Call:
    arguments = (
        sparse_arguments(rng, dtype)
        | {"d_v": 24, "attn_sink": normal(rng, (3,), "float32")}
        | window_arguments(rng, dtype)
    )
    outputs = ("out", "max_logits", "lse")
    return Call("sparse_mla_forward", arguments, (bound_of(dtype), 1e-5, 1e-5), outputs)


def backward_call(rng: Rng, dtype: str) -> Call:
    arguments = forward_call(rng, dtype).arguments
    out, _, lse = reference.sparse_mla_forward(**arguments)
    arguments |= {
        "d_out": normal(rng, out.shape, dtype),
        "out": out.astype(DTYPES[dtype]),
        "lse": lse.astype(np.float32),
    }
    # The given lse is rounded to fp32, which moves p by as much: not a matter of the operator.
    return Call("sparse_mla_backward", arguments, (bound_of(dtype),) * 4, ("dq", "dkv"))


def drawn_sparse(maker: Maker, limit: int = 600) -> tuple[str, dict[str, Any]]:
    dtype = maker.choose("float32", "bfloat16")
    s_q, s_kv, h_q = maker.size(0, 70), maker.size(0, limit), maker.size(1, 33)
    topk = maker.choose(maker.size(0, 130), maker.size(0, 130), 511, 512, 513, 1025)
    d_qk = maker.size(1, 130)
    if maker.for_kernels:
        dtype, d_qk, h_q = "bfloat16", maker.choose(576, 512), maker.choose(h_q, 8, 16, 32, 64, maker.size(1, 130))
    dense = maker.chance(4)
    if dense:
        s_kv = topk = min(s_kv, 130)
    s_q, h_q, topk, d_qk = fit([s_q, h_q, topk, d_qk])
    s_kv = topk if dense else s_kv
    flat_kv, flat_indices = maker.chance(), maker.chance()
    wanted = rows_of_indices(maker, s_q, s_kv, topk)
    arguments: dict[str, Any] = (
        {
            "q": maker.floats((s_q, h_q, d_qk), dtype),
            "kv": maker.floats((s_kv, d_qk) if flat_kv else (s_kv, 1, d_qk), dtype),
            "indices": None if dense else maker.values(wanted if flat_indices else wanted[:, None]),
            "sm_scale": scalar(maker, 0.3),
        }
        | causality(maker, s_q, s_kv)
        | key_ranges(maker, s_q, s_kv)
    )
    if dense:
        return dtype, arguments
    if maker.chance(8):
        arguments["indices"] = maker.bits(arguments["indices"].shape, np.int32)
    if maker.chance():
        arguments["topk_length"] = maker.values(integers_around(maker, s_q, [0, topk // 2, topk]), rows=False)
    return dtype, arguments


def drawn_window(maker: Maker, arguments: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Half of the calls have window keys: no rows to a few, for the last queries, documents or any two numbers."""
    if maker.chance():
        return {}
    s_q, _, d_qk = arguments["q"].shape
    s_w = maker.choose(s_q, maker.size(0, 60))
    window: dict[str, Any] = {
        "window_kv": maker.floats((s_w, d_qk) if maker.chance() else (s_w, 1, d_qk), dtype),
        "window": maker.choose(maker.integer(1, 9), maker.integer(1, 70), 2**31, 2**63 - 1),
    }
    match maker.choose("last", "any", "documents"):
        case "any":
            start, end = (integers_around(maker, s_q, [0, s_w // 2, s_w]) for _ in range(2))
        case "documents":
            starts = np.sort(maker.rng.integers(0, s_w + 1, 3))
            start = starts[np.sort(maker.rng.integers(0, 3, s_q))]
            end = start + maker.rng.integers(0, 10, s_q)
        case _:
            return window
    ranges = {"w_start": start, "w_end": end}
    return window | {name: maker.values(rows.astype(np.int32), rows=False) for name, rows in ranges.items()}


def topk_of(arguments: dict[str, Any]) -> int:
    indices = arguments["indices"]
    return len(arguments["kv"]) if indices is None else int(indices.shape[-1])


@st.composite
def forward_right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype, arguments = drawn_sparse(maker)
    s_q, h_q, d_qk = arguments["q"].shape
    d_v = arguments["d_v"] = 512 if maker.for_kernels else maker.choose(d_qk, maker.integer(1, d_qk))
    if maker.chance():
        arguments["attn_sink"] = sinks(maker, h_q)
    if maker.chance():
        arguments["share_keys"] = maker.chance()
    arguments |= drawn_window(maker, arguments, dtype)
    rows = ((s_q, h_q), np.float32, False)
    results = {"out": ((s_q, h_q, d_v), DTYPES[dtype], True), "max_logits": rows, "lse": rows}
    return given(maker, "sparse_mla_forward", arguments, results)


@st.composite
def backward_right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype, arguments = drawn_sparse(maker, limit=300)
    s_q, h_q, d_qk = arguments["q"].shape
    d_v = arguments["d_v"] = 512 if maker.for_kernels else maker.choose(d_qk, maker.integer(1, d_qk))
    if maker.chance():
        arguments["attn_sink"] = sinks(maker, h_q)
    arguments |= drawn_window(maker, arguments, dtype)
    arguments["d_out"] = maker.floats((s_q, h_q, d_v), dtype)
    if maker.chance(4):  # what no forward has returned
        arguments["out"] = maker.floats((s_q, h_q, d_v), dtype)
        arguments["lse"] = maker.floats((s_q, h_q), "float32", rows=False)
    else:
        with np.errstate(all="ignore"):
            out, _, lse = reference.sparse_mla_forward(**arguments_of(arguments, "d_out"))
            arguments["out"] = maker.values(out.astype(DTYPES[dtype]))
            arguments["lse"] = maker.values(lse.astype(np.float32), rows=False)
    for option in ("deterministic", "indices_ascending", "share_keys"):
        if maker.chance():
            arguments[option] = maker.chance()
    dkv_dtype = maker.choose("float32", "bfloat16")
    if maker.chance():
        arguments["dkv_dtype"] = dkv_dtype
    else:
        dkv_dtype = "float32"
    needed = {name: maker.choose(True, True, True, False) for name in ("dq", "dkv", "d_window_kv")}
    arguments |= {f"need_{name}": False for name, need in needed.items() if not need}
    results = {
        "dq": (arguments["q"].shape, DTYPES[dtype], True),
        "dkv": (arguments["kv"].shape, DTYPES[dkv_dtype], True),
        "attn": ((s_q, topk_of(arguments)), np.float32, True),
    }
    if "window_kv" in arguments:
        results["d_window_kv"] = arguments["window_kv"].shape, DTYPES[dkv_dtype], True
    call = given(
        maker, "sparse_mla_backward", arguments, {name: r for name, r in results.items() if needed.get(name, True)}
    )
    if "attn" in call.outputs and "attn_sink" in arguments and maker.chance():
        arguments["attn_with_sink"] = True
    of_keys = [name for name in ("dkv", "d_window_kv") if name in results and needed[name]]
    all_given = bool(of_keys) and set(of_keys) <= set(call.outputs)
    if all_given and dkv_dtype == "float32" and maker.chance():
        arguments["accumulate"] = True
        for name in of_keys:
            arguments[name][...] = maker.rng.standard_normal(arguments[name].shape)
    return call


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


@dataclass
class _Row:
    """A query's valid entries, then its window keys, and how exact their scores are."""

    entries: Any  # of the index row
    keys: Any  # [n], numbered on from kv to window_kv
    kv: Any  # [n, d_qk], finite parts
    odd: Any  # [n]: whether a key's row has NaN or infinities
    score: Any  # [h, n]
    reach: Any  # [h, n]: how far off a score may be


def rows_of(a: dict[str, Any], operator: str) -> Any:
    masks = {name: a[name] for name in Masks.__annotations__ if name in a}
    selection = select(operator, a["q"], a["kv"], a.get("indices"), a["sm_scale"], **masks)
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
        yield s, _Row(entries, keys, kv, odd, score, unless((size > LARGE) | (scale * size > LARGE), reach))


def forward_expected(a: dict[str, Any]) -> list[Expected]:
    out, peak, lse = reference.sparse_mla_forward(**a)
    dtype = str(a["q"].dtype)
    row_slack, out_slack, sums = np.zeros(lse.shape), np.zeros(out.shape), np.zeros(out.shape)
    peak_slack = np.zeros(lse.shape)
    for s, row in rows_of(a, "sparse_mla_forward"):
        reach = row.reach.max(axis=1, initial=0.0)  # [h]
        row_slack[s] = 1e-6 + reach
        both = np.isposinf(row.score).any(axis=1) & np.isnan(row.score).any(axis=1)  # NaN, or on some GPUs +inf
        peak_slack[s] = unless(both, row_slack[s])
        v = row.kv[:, : out.shape[2]]
        p, p_off = _weights(row.score, lse[s][:, None], 2 * reach[:, None])
        unscaled = finite(np.exp(row.score - peak[s][:, None])) @ v
        bad = (_vanishes(p) & row.odd).any(axis=1) | ~np.isfinite(p_off).all(axis=1)
        sums[s] = p @ v
        out_slack[s] = p_off @ v + sums[s] * (2 * reach[:, None] + EXP)
        out_slack[s] = unless((unscaled > LARGE) | bad[:, None], out_slack[s])
    return [
        Expected("out", out, BOUNDS[dtype], out_slack, sums=sums),
        Expected("max_logits", peak, 1e-6, peak_slack, elementwise=True),
        Expected("lse", lse, 1e-6, row_slack, elementwise=True),
    ]


def distribution_slack(row: _Row, lse: Any, sink: Any = None) -> Any:
    n = len(row.entries)
    below = lse = lse.astype(np.float64)[:, None]
    if sink is not None:
        below = np.where(np.isposinf(lse), np.inf, np.logaddexp(lse, sink.astype(np.float64)[:, None]))
    reach = row.reach[:, :n] + ROUNDING * (finite(lse) + np.minimum(finite(below), 1e6))
    return _weights(row.score[:, :n], below, reach)[1].sum(axis=0)


def backward_expected(a: dict[str, Any]) -> list[Expected]:
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
    for s, row in rows_of(a, "sparse_mla_backward"):
        lse = a["lse"][s].astype(np.float64)
        delta = (d_out[s] * out[s]).sum(axis=1)
        share = finite(np.exp(-np.logaddexp(0.0, lse - sink)))
        # A share below fp32's normal numbers may be 0.
        sink_slack += unless((delta > LARGE) & ~np.isposinf(lse), share * delta * (4 * ROUNDING) + TINY * (1 + delta))
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
        dq_slack[s] = unless(bad.any(axis=1)[:, None] | (dq_size[s] > LARGE), dq_slack[s])
        part, total = (ds_off + ROUNDING * ds).T @ q[s] + TINY * h_q, ds.T @ q[s]
        part[:, :d_v] += (p_off + ROUNDING * p).T @ d_out[s]
        total[:, :d_v] += p.T @ d_out[s]
        np.add.at(dkv_slack, row.keys, unless(bad.any(axis=0)[:, None], part))
        np.add.at(dkv_size, row.keys, total)
        of_attn = a["attn_sink"] if a.get("attn_with_sink") else None
        attn_slack[s, row.entries] = distribution_slack(row, a["lse"][s], of_attn)
    q_type = str(a["q"].dtype)
    results = []
    if a.get("need_dq", True):
        results.append(Expected("dq", dq, BOUNDS[q_type], dq_slack, sums=dq_size))
    dkv_slack = unless(dkv_size > LARGE, dkv_slack)
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


SPARSE_DIMENSIONS = {"q": "s_q h_q d_qk", "attn_sink": "h_q"}
SPARSE_DIMENSIONS |= dict.fromkeys(("topk_length", "q_positions", "k_start", "k_end", "w_start", "w_end"), "s_q")

_WINDOW_MESSAGES = [
    ({"window": None}, "window_kv and window must both be given, or neither; got window_kv alone"),
    ({"window_kv": None}, "window_kv and window must both be given, or neither; got window alone"),
    ({"window": 0}, "window must be at least 1; got 0"),
    (
        {"window_kv": np.zeros((17, 1, 41), np.float32)},
        "window_kv must be float32 [s_w, h_kv=1, d_qk=40]; got",
    ),
    ({"window_kv": np.zeros((17, 1, 40))}, "window_kv must be float32 [s_w, h_kv=1, d_qk=40]; got float64"),
    ({"w_start": None}, "w_start and w_end must both be given, or neither; got w_end alone"),
    ({"w_end": None}, "w_start and w_end must both be given, or neither; got w_start alone"),
    ({"w_start": np.zeros(4, np.int32)}, "w_start must be int32 [s_q=5]; got int32 [4]"),
    ({"w_end": np.zeros(5, np.int64)}, "w_end must be int32 [s_q=5]; got int64 [5]"),
    ({"window_kv": None, "window": None}, "w_start and w_end need window_kv"),
]


def _leaves(dtype: torch.dtype) -> tuple[Any, ...]:
    """q and kv, which require gradients, and the arguments after them."""
    inputs = sparse_inputs(dtype)
    q, kv = (inputs[name].requires_grad_() for name in ("q", "kv"))
    return q, kv, inputs["indices"], 0.5, 12


def _key_ranges() -> dict[str, Any]:
    return {"k_start": torch.arange(9, dtype=torch.int32), "k_end": torch.full((9,), 15, dtype=torch.int32)}


def _window_keys(dtype: torch.dtype) -> dict[str, Any]:
    ranges = {"w_start": torch.arange(9, dtype=torch.int32), "w_end": torch.full((9,), 9, dtype=torch.int32)}
    return {"window_kv": torch.randn(12, 20).to(dtype), "window": 3, **ranges}


def forward_samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    inputs, sink = _leaves(dtype), {"attn_sink": torch.randn(5).requires_grad_()}
    window = _window_keys(dtype)
    window["window_kv"].requires_grad_()
    return {
        "": (*inputs, sink),
        "no sink": (*inputs, {"q_start": 4, "kv_stride": 2}),
        "key ranges": (*inputs, sink | _key_ranges()),
        "hints": (*inputs, sink | {"indices_ascending": True, "share_keys": True}),
        "window": (*inputs, sink | window),
        "every key": (*inputs[:2], None, 0.5, 12, sink),
    }


def backward_samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    q, kv, *rest = (x.detach() if isinstance(x, torch.Tensor) else x for x in _leaves(dtype))
    name = str(dtype).removeprefix("torch.")
    out, _, lse = hopwell.sparse_mla_forward(q, kv, *rest)
    backward = (torch.randn_like(out), q, kv, rest[0], out, lse, 0.5, 12)
    options = {"deterministic": True, "dkv_dtype": name}
    return {
        "": (*backward, {"attn_sink": torch.randn(5), **_key_ranges(), **options}),
        "window": (*backward, _window_keys(dtype) | options),
    }


FORWARD = Operator(
    name="sparse_mla_forward",
    call=forward_call,
    right=forward_right,
    expected=forward_expected,
    dimensions=SPARSE_DIMENSIONS | {"out": "s_q h_q d_v!", "max_logits": "s_q h_q", "lse": "s_q h_q"},
    samples=forward_samples,
    free={("kv", 0), ("indices", 2), ("window_kv", 0)},
    messages=[
        ({"d_v": 0}, "d_v must be between 1 and d_qk = 40; got 0"),
        ({"d_v": 41}, "d_v must be between 1 and d_qk = 40; got 41"),
        ({"d_v": 10**15}, f"d_v must be between 1 and d_qk = 40; got {10**15}"),
        ({"backend": "gpu"}, "backend must be one of sm100, "),
        ({"backend": 3}, "backend must be a name from hopwell.backends"),
        ({"kv_stride": 0}, "kv_stride must be at least 1; got 0"),
        ({"q_start": 0}, "q_positions and q_start exclude each other"),
        ({"k_start": None}, "k_start and k_end must both be given, or neither; got k_end alone"),
        ({"k_end": None}, "k_start and k_end must both be given, or neither; got k_start alone"),
        ({"indices": None}, "topk_length needs indices; without them every visible key counts"),
        *_WINDOW_MESSAGES,
    ],
    fake_messages=[
        ({"d_v": 2**62}, "d_v must be between 1 and d_qk = 40"),
        ({"d_v": 0}, "d_v must be between 1 and d_qk = 40"),
        ({"d_v": 2**70}, "d_v must be an integer of 64 bits"),
    ],
)
BACKWARD = Operator(
    name="sparse_mla_backward",
    call=backward_call,
    right=backward_right,
    expected=backward_expected,
    reads_outputs=True,
    dimensions=SPARSE_DIMENSIONS
    | {"out": "s_q h_q d_v!", "d_out": "s_q h_q d_v!", "lse": "s_q h_q", "dq": "s_q h_q d_qk", "attn": "s_q topk"},
    samples=backward_samples,
    free={("kv", 0), ("indices", 2), ("window_kv", 0)},
    choices={"dkv_dtype": "float32"},
    results=("dq", "dkv", "d_sink", "d_window_kv"),
    omits=True,
    also_written=("attn",),
    messages=[
        ({"attn_with_sink": True}, "attn_with_sink needs attn and attn_sink"),
        (
            {"attn_with_sink": True, "attn": np.zeros((5, 33), np.float32), "attn_sink": None},
            "attn_with_sink needs attn and attn_sink",
        ),
        ({"accumulate": True}, "dkv must be given to accumulate into; got None"),
        ({"dkv_dtype": "float16"}, "dkv_dtype must be float32 or bfloat16; got float16"),
        ({"need_dq": False, "dq": np.zeros(1)}, "dq must be None where it is not needed"),
        (
            {"dkv": np.zeros((90, 1, 40), np.float32), "dkv_dtype": "bfloat16"},
            "dkv must be bfloat16, as dkv_dtype says; got float32",
        ),
        ({"dkv": torch.zeros(90, 1, 40, dtype=torch.bfloat16)}, "dkv must be float32, as dkv_dtype says; got bfloat16"),
        ({"k_start": None}, "k_start and k_end must both be given, or neither; got k_end alone"),
        ({"k_end": None}, "k_start and k_end must both be given, or neither; got k_start alone"),
        ({"indices": None}, "topk_length needs indices; without them every visible key counts"),
        ({"d_window_kv": np.zeros((17, 40), np.float32)}, "d_window_kv must be float32"),
        (
            {"d_window_kv": np.zeros((17, 1, 40), np.float32), "dkv_dtype": "bfloat16"},
            "d_window_kv must be bfloat16, as dkv_dtype says; got float32",
        ),
        (
            {"d_window_kv": np.zeros((17, 1, 40), np.float32), "need_d_window_kv": False},
            "d_window_kv must be None where it is not needed",
        ),
        (
            {"dkv": np.zeros((90, 1, 40), np.float32), "accumulate": True},
            "d_window_kv must be given to accumulate into; got None",
        ),
        *_WINDOW_MESSAGES,
    ],
    fake_messages=[
        ({"dkv_dtype": "half"}, "dkv_dtype must be float32 or bfloat16; got half"),
    ],
)
