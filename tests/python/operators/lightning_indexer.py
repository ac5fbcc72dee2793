"""The lightning indexer and its backward."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from calls import DTYPES, FLOAT8, Call, Rng, bound_of, normal
from fuzz.arguments import causality, key_ranges, scalar
from fuzz.bounds import BOUNDS, EXP, LARGE, ROUNDING, SMALL, TINY, Expected, compare, e4m3_cut, finite, is_cut, unless
from fuzz.call import WORK, FuzzedCall, fit, given
from fuzz.draw import Maker, rows_of_indices
from hopwell import reference
from hopwell.reference._visible import Visibility, visible_keys
from hypothesis import strategies as st
from torch_inputs import index_leaves, indexer_inputs, indexer_key_ranges

from ._operator import Operator


def call(rng: Rng, dtype: str) -> Call:
    s_q, s_kv, h_index, d_index = 5, 90, 3, 16

    def integers(shape: tuple[int, ...]) -> Any:  # exact scores, so that the selection has one right answer
        return rng.integers(-3, 4, shape).astype(ml_dtypes.float8_e4m3fn if dtype == FLOAT8 else DTYPES[dtype])

    arguments = {
        "q_index": integers((s_q, h_index, d_index)),
        "k_index": integers((s_kv, d_index)),
        "weights": integers((s_q, h_index)).astype(np.float32 if dtype == FLOAT8 else DTYPES[dtype]),
        "topk": 17,
        "q_start": 60,
        "kv_stride": 2,
        "k_start": rng.integers(-3, 60, s_q).astype(np.int32),
        "k_end": rng.integers(40, 99, s_q).astype(np.int32),
    }
    if dtype == FLOAT8:
        arguments["q_scale"] = np.exp2(rng.integers(-3, 4, (s_q, h_index))).astype(np.float32)
        arguments["k_scale"] = np.exp2(rng.integers(-3, 4, s_kv)).astype(np.float32)
    return Call("lightning_indexer", arguments, (0, 0))


def backward_call(rng: Rng, dtype: str) -> Call:
    arguments = call(rng, dtype).arguments
    for name in ("topk", "q_start", "kv_stride"):
        del arguments[name]
    indices = rng.integers(-2, 92, (5, 17)).astype(np.int32)
    target = rng.random(indices.shape)
    first, last = np.maximum(arguments["k_start"], 0)[:, None], np.minimum(arguments["k_end"], 90)[:, None]
    valid = (indices >= first) & (indices < last)
    total = target.sum(axis=1, keepdims=True, where=valid)  # 1 over these, or the loss were a difference of large terms
    arguments |= {
        "weights": normal(rng, (5, 3), "float32", 0.1),
        "indices": indices,
        "target": (target / np.where(total > 0, total, 1)).astype(np.float32),
        "d_loss": 0.5,
    }
    return Call("lightning_indexer_backward", arguments, (1e-4, bound_of(dtype), 1e-4, 1e-4))


def _index_inputs(maker: Maker, s_kv: int, keys: int, *more_dtypes: str) -> tuple[str, dict[str, Any]]:
    dtype = maker.choose("float32", "bfloat16", *more_dtypes)
    s_q, h_index, d_index = maker.size(0, 40), maker.size(1, 33), maker.size(1, 130)
    if maker.for_kernels:
        dtype = maker.choose("bfloat16", *(more_dtypes or ("bfloat16",)))
        h_index, d_index = maker.choose(h_index, 16, 32, 64, maker.size(1, 130)), maker.choose(128, 128, 64)
    s_q, h_index, d_index = fit([s_q, h_index, d_index], max(10 * WORK // max(keys, 1), 1))
    return dtype, {
        "q_index": maker.floats((s_q, h_index, d_index), dtype),
        "k_index": maker.floats((s_kv, d_index), dtype),
        "weights": maker.floats((s_q, h_index), maker.choose("float32", "bfloat16")),
    }


@st.composite
def right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    s_kv = maker.choose(maker.size(0, 300), maker.size(0, 300), 600, 4099, 8200)
    dtype, arguments = _index_inputs(maker, s_kv, s_kv, FLOAT8)
    arguments["topk"] = maker.choose(maker.size(0, 300), s_kv, s_kv + 3)
    s_q, h_index, _ = arguments["q_index"].shape
    if dtype == FLOAT8 and maker.chance():
        arguments["q_scale"] = maker.floats((s_q, h_index), "float32")
    if dtype == FLOAT8 and maker.chance():
        arguments["k_scale"] = maker.floats((s_kv,), "float32", rows=False)
    arguments |= causality(maker, s_q, s_kv) | key_ranges(maker, s_q, s_kv)
    if maker.chance(3):
        arguments["relu"] = maker.chance()
    return given(maker, "lightning_indexer", arguments, {})


@st.composite
def backward_right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    s_kv, topk = maker.size(0, 300), maker.choose(maker.size(0, 130), maker.size(0, 130), 2049)
    _, arguments = _index_inputs(maker, s_kv, max(s_kv, topk))
    s_q = len(arguments["q_index"])
    wanted = rows_of_indices(maker, s_q, s_kv, topk)
    arguments["indices"] = maker.values(wanted if maker.chance() else wanted[:, None])
    if maker.chance(4):
        arguments["target"] = maker.floats((s_q, topk), "float32")
    else:
        target = maker.rng.random((s_q, topk)) * (maker.rng.random((s_q, topk)) < 0.7)
        target /= np.maximum(target.sum(axis=1, keepdims=True), 1e-9)
        arguments["target"] = maker.values(target.astype(np.float32))
    if maker.chance(4):
        arguments["d_scores"], arguments["target"] = maker.floats((s_q, topk), "float32"), None
    arguments |= key_ranges(maker, s_q, s_kv)
    if maker.chance():
        arguments["d_loss"] = scalar(maker, 0.5)
    if maker.chance(3):
        arguments["row_weights"] = maker.floats((s_q,), "float32", rows=False)
    if maker.chance(3):
        arguments["relu"] = maker.chance()
    if maker.chance():
        arguments["deterministic"] = maker.chance()
    return given(maker, "lightning_indexer_backward", arguments, {})


def _scores(
    q: Any, k: Any, w: Any, relu: bool = True, of_head: Any = None, of_key: Any = None, cut: bool = False
) -> tuple[Any, Any, Any]:
    """One query's scores, how far off each may be, and the sizes of the products q·k, [h, n]. `cut`: as Hopper does."""
    with np.errstate(all="ignore"):
        dot = q.astype(np.float64) @ k.astype(np.float64).T
        w = w.astype(np.float64) if of_head is None else w.astype(np.float64) * of_head.astype(np.float64)
        score = w @ (np.maximum(dot, 0.0) if relu else dot)
        sizes = finite(q) @ finite(k).T
        size = finite(w) @ sizes
        dot_off = e4m3_cut(q, k) if cut else 0.0 * sizes
        off = 2 * ROUNDING * size + finite(w) @ dot_off + TINY * (1 + finite(w).sum() * q.shape[1])
        if of_head is not None:  # times a weight, below fp32's numbers or above them
            off = unless((finite(w) > LARGE).any(), off + TINY * sizes.sum(axis=0))
        if of_key is not None:
            scale = of_key.astype(np.float64)
            unsure = np.isinf(off) | (np.isinf(scale) & (np.abs(score) <= off) & (size > 0))
            off = unless(unsure | (size * finite(scale) > LARGE), off * finite(scale) + TINY)
            score = score * scale
        # A product that may round to 0, or to the other side of it, is a gate in front of an infinite weight.
        near = (sizes > 0) & (np.abs(dot) <= 2 * ROUNDING * sizes + dot_off + TINY * q.shape[1])
        gate = (near & np.isinf(w)[:, None]).any(axis=0)
        off = unless((sizes > LARGE).any(axis=0) | (size > LARGE) | gate, off)
    return np.where(np.isnan(score), -np.inf, score), off, sizes


def check_selection(a: dict[str, Any], backend: str, indices: Any, scores: Any) -> None:
    """What `lightning_indexer` returns where rounding may choose another key than the reference does."""
    given = {name: a[name] for name in Visibility.__annotations__ if name in a}
    visible = visible_keys("lightning_indexer", len(indices), len(a["k_index"]), **given)
    relu, cut = a.get("relu", True), is_cut(backend, a["q_index"].dtype.name)
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
        score, off, _ = _scores(a["q_index"][s], a["k_index"][first:last], a["weights"][s], relu, of_head, of_key, cut)
        compare(scores[s, :count], Expected(f"scores[{s}]", score[taken], 0.0, off[taken], elementwise=True))
        left = np.setdiff1d(np.arange(seen), taken)
        if len(left) and np.isfinite(off).all():
            worst, best = taken[np.argmin(score[taken] + off[taken])], left[np.argmax(score[left] - off[left])]
            assert not score[worst] + off[worst] < score[best] - off[best], (
                f"indices[{s}] has key {first + worst} of score {score[worst]}, not {first + best} of {score[best]}"
            )


def check(a: dict[str, Any], backend: str, results: tuple[Any, ...]) -> None:
    check_selection(a, backend, *results)


def backward_expected(a: dict[str, Any]) -> list[Expected]:
    loss, d_q, d_k, d_w = reference.lightning_indexer_backward(**a)
    d_loss, relu, d_scores = abs(float(a.get("d_loss", 1.0))), a.get("relu", True), a.get("d_scores")
    row_weights = a.get("row_weights", np.ones(len(d_q), np.float32)).astype(np.float64)
    indices = a["indices"].reshape(len(a["q_index"]), a["indices"].shape[-1]).astype(np.int64)
    loss_slack = 1e-7
    d_q_slack, d_w_slack = np.zeros(d_q.shape), np.zeros(d_w.shape)
    d_k_slack, d_k_size = np.zeros((2, *d_k.shape))
    largest, count = np.zeros((2, len(d_k)))  # of deterministic sums on GPUs: what bounds one number that is added
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
            of_target = finite(np.log(np.where(target > 0, target, 1.0)))
            loss_slack += (size * of_target).sum() * 1e-6
            terms = finite(target) * (of_target + np.abs(finite(shifted)) + np.log(len(p)))
            loss_slack = np.inf if terms.sum() > LARGE else loss_slack
        if row_weights[s] == 0:
            continue
        factor *= d_loss
        if factor > LARGE:
            d_q_slack[s] = d_w_slack[s] = d_k_slack[keys] = np.inf
            continue
        g = factor * finite(p - target)
        g_off = factor * (finite(p) * (4 * reach + EXP) + ROUNDING * finite(target) + TINY)
        if d_scores is not None:
            g, g_off = factor * finite(target), factor * ROUNDING * finite(target)
        g_off = g_off + TINY * (1 + finite(target) + finite(p))  # the factor may lose as much
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
        d_dot_off = unless((w[:, None] * g > LARGE) | (g > LARGE) | lost, d_dot_off)
        sums = w[:, None] * g
        lost_products = TINY * len(g) * (1 + w[:, None])
        d_q_slack[s] = (d_dot_off + ROUNDING * sums) @ keys_size + lost_products
        d_q_slack[s] = unless((sums @ keys_size > LARGE) | (g @ keys_size > LARGE), d_q_slack[s])
        of_keys = (d_dot_off + ROUNDING * sums).T @ q + TINY * len(q) * (1 + g[:, None])
        np.add.at(d_k_slack, keys, unless(w @ q > LARGE, of_keys))
        np.add.at(d_k_size, keys, sums.T @ q)
        np.maximum.at(largest, keys, g * (w @ q.max(axis=1, initial=0.0)))
        np.add.at(count, keys, 1)
        overflows = (sizes @ g > LARGE) | (g > LARGE).any()
        d_w_slack[s] = unless(overflows, sizes @ (g_off + 2 * ROUNDING * g) + TINY * (1 + g.sum()))
        if lost:
            d_w_slack[s] = np.inf
    names = ("loss", "d_q_index", "d_k_index", "d_weights")
    dtypes = ("float32", str(a["q_index"].dtype), "float32", str(a["weights"].dtype))
    d_k_slack = unless((d_k_size > LARGE) | (largest * count > LARGE)[:, None], d_k_slack)
    slacks = (loss_slack, d_q_slack, d_k_slack, d_w_slack)
    return [
        Expected(name, value, BOUNDS[dtype], slack, elementwise=name == "loss")
        for name, value, dtype, slack in zip(names, (loss, d_q, d_k, d_w), dtypes, slacks, strict=True)
    ]


INDEXER_DIMENSIONS = {
    "q_index": "s_q h d",
    "k_index": "s_kv d",
    "weights": "s_q h",
    "q_scale": "s_q h",
    "k_scale": "s_kv",
    **dict.fromkeys(("target", "d_scores"), "s_q topk"),
    **dict.fromkeys(("q_positions", "k_start", "k_end", "row_weights"), "s_q"),
}


def samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Without gradients: opcheck cannot add the scores to integers. test_compiled_gradients_of_the_scores has them."""
    inputs = indexer_inputs(dtype)
    return {"": (*(inputs[n] for n in ("q_index", "k_index", "weights")), 5, {"q_start": 0, "relu": False})}


def backward_samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    inputs = indexer_inputs(dtype)
    loss = inputs["target"], *index_leaves(inputs), inputs["indices"]
    options = {**indexer_key_ranges(), "row_weights": torch.rand(11), "relu": False, "d_loss": 0.5}
    return {
        "": loss,
        "key ranges": (*loss, options),
        "d_scores": (None, *loss[1:], {"d_scores": torch.randn(inputs["target"].shape)}),
    }


OPERATOR = Operator(
    name="lightning_indexer",
    dtypes=("float32", "bfloat16", FLOAT8),
    call=call,
    right=right,
    check=check,
    dimensions=INDEXER_DIMENSIONS,
    samples=samples,
    free={("k_index", 0)},
    messages=[
        (
            {"k_scale": np.ones(90, np.float32)},
            "q_scale and k_scale need float8_e4m3fn q_index and k_index; scales of bfloat16 and float32 belong",
        ),
        ({"topk": -1}, "topk must be an integer of at least 0; got -1"),
        ({"topk": 2**31}, f"topk must be an integer of at most {2**31 - 1}; got {2**31}"),
        ({"topk": 2**62}, f"topk must be an integer of at most {2**31 - 1}; got {2**62}"),
        ({"topk": 2**70}, f"topk must be an integer of at most {2**31 - 1}; got {2**70}"),
        ({"topk": 2.0}, "topk must be an integer of at least 0; got 2.0"),
        ({"k_start": None}, "k_start and k_end must both be given, or neither; got k_end alone"),
        ({"kv_stride": -4}, "kv_stride must be at least 1; got -4"),
    ],
    fake_messages=[
        ({"topk": 2**62}, f"topk must be an integer of at most {2**31 - 1}"),
        ({"topk": -1}, "topk must be an integer of at least 0"),
        ({"topk": -(2**64)}, "topk must be an integer of 64 bits"),
    ],
)
BACKWARD = Operator(
    name="lightning_indexer_backward",
    call=backward_call,
    right=backward_right,
    expected=backward_expected,
    dimensions=INDEXER_DIMENSIONS,
    samples=backward_samples,
    free={("k_index", 0)},
    results=("loss", "d_q_index", "d_k_index", "d_weights"),
    messages=[
        (
            {"q_index": np.zeros((5, 3, 16), ml_dtypes.float8_e4m3fn)},
            "q_index must be bfloat16 or float32 [s_q, h_index, d_index]; got float8_e4m3fn [5, 3, 16]",
        ),
        ({"k_end": None}, "k_start and k_end must both be given, or neither; got k_start alone"),
    ],
)
