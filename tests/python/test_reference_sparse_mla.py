"""The sparse-MLA reference against dense float64 attention differentiated by torch.autograd, and finite differences."""

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hopwell import reference
from support import assert_close

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
INF = math.inf
Generator = np.random.Generator


def mla_problem(rng: Generator, s_q: int = 5, h_q: int = 3, s_kv: int = 9, topk: int = 7, d: int = 6) -> dict[str, Any]:
    """Inputs whose indices hold duplicates, everything out of range, and one row without a valid entry (the last)."""
    indices = rng.integers(0, s_kv, (s_q, topk), dtype=np.int32)
    bad = np.array([INT_MIN, -123456, -1, s_kv, s_kv + 1, INT_MAX], dtype=np.int32)
    mask = rng.random((s_q, topk)) < 0.2
    indices[mask] = rng.choice(bad, int(mask.sum()))
    indices[0, :3] = 4
    indices[1:-1, 0] = 0
    indices[-1] = rng.choice(bad, topk)
    q, kv = rng.standard_normal((s_q, h_q, d)), rng.standard_normal((s_kv, 1, d))
    return {"q": q, "kv": kv, "indices": indices[:, None], "sm_scale": 0.5}


def multiplicity(indices: np.ndarray, s_kv: int, masks: dict[str, Any]) -> torch.Tensor:
    """How often each query selects each key, [s_q, 1, s_kv], entry by entry from the words of the contract."""
    count = np.zeros((len(indices), 1, s_kv))
    lengths, positions, start, end = (masks.get(name) for name in ("topk_length", "q_positions", "k_start", "k_end"))
    if "q_start" in masks:
        positions = masks["q_start"] + np.arange(len(indices))
    for s, row in enumerate(indices.reshape(len(indices), -1).tolist()):
        first = 0 if start is None else int(start[s])
        for i, t in enumerate(row):
            in_range = end is None or first <= t < int(end[s])
            in_time = positions is None or (t - first + 1) * masks.get("kv_stride", 1) <= int(positions[s]) + 1
            if 0 <= t < s_kv and in_range and in_time and (lengths is None or i < int(lengths[s])):
                count[s, 0, t] += 1
    return torch.from_numpy(count)


def dense_mla(
    q: torch.Tensor, kv: torch.Tensor, count: torch.Tensor, sm_scale: float, d_v: int, sink: torch.Tensor | None
) -> torch.Tensor:
    """Attention over all keys in which a key selected m times has weight m, and the sink is one more logit."""
    score = sm_scale * torch.einsum("shd,td->sht", q, kv[:, 0]) + torch.log(count)
    logits = score if sink is None else torch.cat([score, sink[None, :, None].expand(len(q), -1, 1)], dim=-1)
    alive = count.sum(dim=(1, 2)) > 0
    p = torch.softmax(logits[alive], dim=-1)[..., : kv.shape[0]]
    out = torch.zeros(*q.shape[:2], d_v, dtype=q.dtype)
    return out.index_put((torch.nonzero(alive)[:, 0],), torch.einsum("sht,td->shd", p, kv[:, 0, :d_v]))


MASKS: list[dict[str, Any]] = [
    {},
    {"topk_length": np.array([7, 3, 0, 100, 5], dtype=np.int32)},
    {"topk_length": np.array([-4, 1, 6, 7, INT_MAX], dtype=np.int32), "q_start": 2},
    {"q_positions": np.array([8, INT_MAX, 0, -1, 3], dtype=np.int32)},
    {"q_positions": np.array([18, 3, 2, 35, 36], dtype=np.int32), "kv_stride": 4},
    {"q_start": -2, "kv_stride": 1},
    {"q_start": 2**40, "kv_stride": 3},
    {"k_start": np.array([4, 0, INT_MIN, 5, 0], np.int32), "k_end": np.array([5, 1, INT_MAX, 5, 9], np.int32)},
    {
        "k_start": np.array([0, -3, 2, INT_MAX, 0], np.int32),
        "k_end": np.array([9, 8, 7, INT_MIN, 9], np.int32),
        "q_start": 4,
        "topk_length": np.array([7, 6, 7, 7, 7], np.int32),
    },
    {
        "k_start": np.array([INT_MIN, -2, 1, 0, INT_MAX], np.int32),
        "k_end": np.array([INT_MAX, 3, 9, 6, INT_MAX], np.int32),
        "q_positions": np.array([INT_MAX, 13, 12, -1, INT_MAX], np.int32),
        "kv_stride": 2,
    },
]


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("masks", MASKS)
def test_mla_forward_and_backward_equal_dense_autograd(rng: Generator, masks: dict[str, Any], with_sink: bool) -> None:
    problem, d_v = mla_problem(rng), 4
    sink = rng.standard_normal(3) if with_sink else None
    count = multiplicity(problem["indices"], 9, masks)

    q, kv = (torch.from_numpy(problem[name]).requires_grad_() for name in ("q", "kv"))
    torch_sink = None if sink is None else torch.from_numpy(sink).requires_grad_()
    expected = dense_mla(q, kv, count, 0.5, d_v, torch_sink)
    d_out = rng.standard_normal(expected.shape)
    leaves = [q, kv] if torch_sink is None else [q, kv, torch_sink]
    gradients = torch.autograd.grad(expected, leaves, torch.from_numpy(d_out))

    out, max_logits, lse = reference.sparse_mla_forward(**problem, d_v=d_v, attn_sink=sink, **masks)
    assert_close(out, expected.detach())
    score = 0.5 * torch.einsum("shd,td->sht", q, kv[:, 0]).detach()
    alive = (count.sum(dim=(1, 2)) > 0).numpy()
    assert 0 < alive.sum() < len(alive)
    assert_close(max_logits, torch.where(count > 0, score, -INF).amax(-1))
    assert_close(lse[alive], torch.logsumexp(score + torch.log(count), -1)[torch.from_numpy(alive)])
    assert np.all(lse[~alive] == INF)

    attn = np.full(problem["indices"].shape[::2], np.nan)
    dq, dkv, d_sink = reference.sparse_mla_backward(
        d_out, out=out, lse=lse, **problem, d_v=d_v, attn_sink=sink, attn=attn, **masks
    )
    for actual, wanted in zip((dq, dkv, d_sink), gradients, strict=False):
        assert_close(actual, wanted)
    assert (d_sink is None) == (sink is None)
    unselected = count.sum(dim=(0, 1)).numpy() == 0
    assert dkv is not None and np.all(dkv[unselected] == 0.0)

    # attn, per entry: the softmax without the sink, of a key once for each of its entries
    share = torch.nan_to_num(torch.softmax(score + torch.log(count), -1) / count).sum(1).numpy()
    wanted_attn = np.zeros((5, 7))
    for s, i in itertools.product(range(5), range(7)):
        single = np.full((5, 7), -1, dtype=np.int32)
        single[s, i] = problem["indices"][s, 0, i]
        if multiplicity(single, 9, masks).sum():
            wanted_attn[s, i] = share[s, single[s, i]]
    assert_close(attn, wanted_attn)
    shared = {name: problem[name] for name in ("q", "kv", "indices", "sm_scale")}
    assert_close(reference.attention_distribution(**shared, lse=lse, **masks), wanted_attn)
    total = wanted_attn.sum(axis=1, keepdims=True)
    normalised = np.divide(wanted_attn, total, out=np.zeros_like(wanted_attn), where=total > 0)
    assert_close(reference.attention_distribution(**shared, lse=lse, normalize="l1", **masks), normalised)


WINDOWS: list[dict[str, Any]] = [
    {"window": 3, "s_w": 5},
    {"window": 1, "s_w": 11},
    {"window": 128, "s_w": 3},
    {"window": 2, "s_w": 0},
    {
        "window": 2,
        "s_w": 8,
        "w_start": np.array([0, INT_MIN, 4, INT_MAX, 6], np.int32),
        "w_end": np.array([8, INT_MAX, 3, INT_MIN, 7], np.int32),
    },
    {
        "window": 4,
        "s_w": 7,
        "w_start": np.array([3, 3, 0, 7, -9], np.int32),
        "w_end": np.array([4, 7, 0, 9, 2], np.int32),
    },
]


def window_rows(window: dict[str, Any], s_q: int) -> np.ndarray:
    """Which rows of window_kv each query sees, [s_q, s_w], row by row from the words of the contract."""
    s_w = window["s_w"]
    seen = np.zeros((s_q, s_w), bool)
    for s in range(s_q):
        low, high = (int(window[name][s]) if name in window else None for name in ("w_start", "w_end"))
        low = 0 if low is None else min(max(low, 0), s_w)
        high = min(max(s_w - s_q + s + 1 if high is None else high, 0), s_w)
        for t in range(s_w):
            seen[s, t] = max(low, high - window["window"]) <= t < high
    return seen


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("masks", MASKS[::3])
@pytest.mark.parametrize("window", WINDOWS)
def test_mla_with_window_keys_equals_dense_autograd(
    rng: Generator, window: dict[str, Any], masks: dict[str, Any], with_sink: bool
) -> None:
    """One softmax over the window keys, the selected keys and the sink. Rows that no query sees hold NaN."""
    problem, d_v, s_w = mla_problem(rng), 4, window["s_w"]
    sink = rng.standard_normal(3) if with_sink else None
    seen = window_rows(window, 5)
    window_kv = rng.standard_normal((s_w, 1, 6))
    count = torch.cat([multiplicity(problem["indices"], 9, masks), torch.from_numpy(seen[:, None] * 1.0)], dim=2)

    q, kv, wkv = (torch.from_numpy(x).requires_grad_() for x in (problem["q"], problem["kv"], window_kv))
    torch_sink = None if sink is None else torch.from_numpy(sink).requires_grad_()
    expected = dense_mla(q, torch.cat([kv, wkv]), count, 0.5, d_v, torch_sink)
    d_out = rng.standard_normal(expected.shape)
    leaves = [q, kv, wkv] + ([] if torch_sink is None else [torch_sink])
    d_q, d_kv, d_window_kv, *d_sinks = torch.autograd.grad(expected, leaves, torch.from_numpy(d_out))

    given = {name: value for name, value in window.items() if name != "s_w"}
    given |= {"window_kv": np.where(seen.any(0)[:, None, None], window_kv, np.nan), **masks}
    out, max_logits, lse = reference.sparse_mla_forward(**problem, d_v=d_v, attn_sink=sink, **given)
    assert_close(out, expected.detach())
    score = 0.5 * torch.einsum("shd,td->sht", q, torch.cat([kv, wkv])[:, 0]).detach()
    alive = (count.sum(dim=(1, 2)) > 0).numpy()
    assert_close(max_logits, torch.where(count > 0, score, -INF).amax(-1))
    assert_close(lse[alive], torch.logsumexp(score + torch.log(count), -1)[torch.from_numpy(alive)])
    assert np.all(lse[~alive] == INF)

    attn = np.full((5, 7), np.nan)
    options = {"d_v": d_v, "attn_sink": sink, "attn": attn, "attn_with_sink": with_sink, **given}
    gradients = reference.sparse_mla_backward(d_out, out=out, lse=lse, **problem, **options)
    wanted = d_q, d_kv, d_sinks[0] if with_sink else None, d_window_kv
    for actual, gradient in zip(gradients, wanted, strict=True):
        assert (actual is None) == (gradient is None)
        if gradient is not None:
            assert_close(actual, gradient)

    # attn has the keys of kv alone, with a share of the softmax over everything.
    of_all = lse if sink is None else np.where(np.isposinf(lse), INF, np.logaddexp(lse, sink))
    wanted_attn = np.zeros((5, 7))
    for s, i in itertools.product(range(5), range(7)):
        single = np.full((5, 7), -1, dtype=np.int32)
        single[s, i] = problem["indices"][s, 0, i]
        if multiplicity(single, 9, masks).sum():
            wanted_attn[s, i] = np.exp(score[s, :, single[s, i]].numpy() - of_all[s]).sum()
    assert_close(attn, wanted_attn)
    shared = {name: problem[name] for name in ("q", "kv", "indices", "sm_scale")} | {"lse": lse, **masks}
    assert_close(reference.attention_distribution(**shared, attn_sink=sink), wanted_attn)


def test_mla_without_keys_of_kv_is_the_window_alone(rng: Generator) -> None:
    q, keys = rng.standard_normal((4, 3, 6)), rng.standard_normal((6, 6))
    nothing, own = np.zeros((0, 6)), np.arange(2, 6, dtype=np.int32)  # the queries are the last rows
    window: dict[str, Any] = {"window_kv": keys, "window": 2}
    expected = reference.sparse_mla_forward(q, keys, None, 0.5, 4, k_start=own - 1, k_end=own + 1)
    for kv, indices in ((nothing, None), (keys, np.zeros((4, 0), np.int32))):
        for got, wanted in zip(reference.sparse_mla_forward(q, kv, indices, 0.5, 4, **window), expected, strict=True):
            assert_close(got, wanted)


def test_mla_accumulates_into_both_gradients_of_keys(rng: Generator) -> None:
    problem, d_v = mla_problem(rng), 4
    problem |= {"window_kv": rng.standard_normal((7, 6)), "window": 3, "d_v": d_v}
    out, _, lse = reference.sparse_mla_forward(**problem)
    given = problem | {"d_out": rng.standard_normal(out.shape), "out": out, "lse": lse}
    _, dkv, _, d_window_kv = reference.sparse_mla_backward(**given)
    assert dkv is not None and d_window_kv is not None
    starts = [rng.standard_normal(x.shape).astype(np.float32) for x in (dkv, d_window_kv)]
    sums = [start.copy() for start in starts]
    reference.sparse_mla_backward(**given, dkv=sums[0], d_window_kv=sums[1], accumulate=True)
    for total, start, gradient in zip(sums, starts, (dkv, d_window_kv), strict=True):
        np.testing.assert_array_equal(total, (start + gradient).astype(np.float32))
    *_, none = reference.sparse_mla_backward(**given, need_d_window_kv=False)
    assert none is None
    with pytest.raises(ValueError, match="sparse_mla_backward: d_window_kv must be a float32 array"):
        reference.sparse_mla_backward(**given, dkv=sums[0], accumulate=True)


@pytest.mark.parametrize("positions", [False, True])
def test_mla_of_packed_documents_equals_a_loop_over_them(rng: Generator, positions: bool) -> None:
    """Whose keys their queries see up to their own, as a range or by a position that counts from the document's start;
    the documents in the middle are empty, and one of a single token.
    """
    cuts, d_v = [0, 4, 4, 4, 5, 11], 4
    problem = mla_problem(rng, s_q=11, s_kv=11, topk=9)
    own = np.arange(11, dtype=np.int32)
    starts = np.repeat(cuts[:-1], np.diff(cuts)).astype(np.int32)
    ends = np.repeat(cuts[1:], np.diff(cuts)).astype(np.int32)
    ranges: dict[str, Any] = {"k_start": starts, "k_end": own + 1}
    if positions:
        ranges |= {"k_end": ends, "q_positions": own - starts}
    sink, d_out = rng.standard_normal(3), rng.standard_normal((11, 3, d_v))
    options: dict[str, Any] = {"sm_scale": problem.pop("sm_scale"), "d_v": d_v, "attn_sink": sink}

    out, max_logits, lse = reference.sparse_mla_forward(**problem, **options, **ranges)
    gradients = reference.sparse_mla_backward(d_out, **problem, out=out, lse=lse, **options, **ranges)
    attn = reference.attention_distribution(**problem, lse=lse, sm_scale=options["sm_scale"], **ranges)
    assert np.count_nonzero(attn) > 0 and np.isposinf(lse[-1]).all()
    dq, dkv, d_sink = (np.full(g.shape, np.nan) for g in (problem["q"], problem["kv"], sink))
    d_sink[:] = 0.0
    for first, past in itertools.pairwise(cuts):
        here = slice(first, past)
        one = {"q": problem["q"][here], "kv": problem["kv"][here]}
        indices = problem["indices"][here].astype(np.int64) - first
        one["indices"] = np.where((indices < 0) | (indices >= past - first), -1, indices).astype(np.int32)
        forward = reference.sparse_mla_forward(**one, **options, q_start=0)
        for packed, alone in zip((out, max_logits, lse), forward, strict=True):
            assert_close(packed[here], alone)
        shares = reference.attention_distribution(**one, lse=lse[here], sm_scale=options["sm_scale"], q_start=0)
        assert_close(attn[here], shares)
        one_of = reference.sparse_mla_backward(d_out[here], **one, out=out[here], lse=lse[here], **options, q_start=0)
        assert all(g is not None for g in one_of)
        dq[here], dkv[here], share = one_of
        d_sink += share
    for packed, alone in zip(gradients, (dq, dkv, d_sink), strict=True):
        assert_close(packed, alone)


def test_mla_without_indices_attends_every_visible_key_in_order(rng: Generator) -> None:
    problem, masks = mla_problem(rng), {"q_start": 2}
    problem["indices"] = np.broadcast_to(np.arange(9, dtype=np.int32), (5, 9))
    absent = problem | {"indices": None}
    results = reference.sparse_mla_forward(**problem, d_v=4, **masks)
    for got, wanted in zip(reference.sparse_mla_forward(**absent, d_v=4, **masks), results, strict=True):
        assert_close(got, wanted)
    shared = {"lse": results[2], **masks}
    attn = reference.attention_distribution(**absent, **shared)
    assert_close(attn, reference.attention_distribution(**problem, **shared))
    assert np.count_nonzero(attn[0]) == 3


def test_mla_backward_equals_finite_differences(rng: Generator) -> None:
    problem, d_v, sink = mla_problem(rng, s_q=3, h_q=2, s_kv=5, topk=4, d=4), 3, rng.standard_normal(2)
    d_out = rng.standard_normal((3, 2, d_v))

    def objective(**changed: Any) -> float:
        out, _, _ = reference.sparse_mla_forward(**{**problem, "attn_sink": sink, **changed}, d_v=d_v)
        return float((out * d_out).sum())

    out, _, lse = reference.sparse_mla_forward(**problem, d_v=d_v, attn_sink=sink)
    results = reference.sparse_mla_backward(d_out, out=out, lse=lse, **problem, d_v=d_v, attn_sink=sink)
    for name, gradient in zip(("q", "kv", "attn_sink"), results, strict=True):
        point = sink if name == "attn_sink" else problem[name]
        numeric = np.zeros(point.shape)
        for where in np.ndindex(point.shape):
            step = np.zeros(point.shape)
            step[where] = 1e-5
            numeric[where] = (objective(**{name: point + step}) - objective(**{name: point - step})) / 2e-5
        assert_close(gradient, numeric, 1e-8)


@pytest.mark.parametrize("sink", [0.0, INF, -INF, 1e38, -1e38])
def test_mla_extreme_sinks(rng: Generator, sink: float) -> None:
    problem, d_v = mla_problem(rng), 4
    sinks, d_out = np.full(3, sink), rng.standard_normal((5, 3, 4))
    plain, max_logits, lse = reference.sparse_mla_forward(**problem, d_v=d_v)
    out, sink_max, sink_lse = reference.sparse_mla_forward(**problem, d_v=d_v, attn_sink=sinks)
    np.testing.assert_array_equal(sink_max, max_logits)
    np.testing.assert_array_equal(sink_lse, lse)
    assert np.all(out[-1] == 0.0) and np.all(lse[-1] == INF) and np.all(max_logits[-1] == -INF)
    dq, dkv, d_sink = reference.sparse_mla_backward(
        d_out, out=out, lse=lse, **problem, d_v=d_v, attn_sink=sinks, need_dq=True
    )
    assert dq is not None and dkv is not None and d_sink is not None
    if sink >= 1e38:
        assert not out.any() and not dq.any() and not dkv.any() and not d_sink.any()
    elif sink <= -1e38:
        np.testing.assert_array_equal(out, plain)
        assert dq.any() and dkv.any() and not d_sink.any()
    else:
        assert_close(out[:-1], plain[:-1] * (np.exp(lse[:-1]) / (np.exp(lse[:-1]) + 1.0))[:, :, None])
        assert d_sink.all()


def test_mla_never_reads_what_no_valid_index_names(rng: Generator) -> None:
    problem = mla_problem(rng)
    lengths = np.array([7, 7, 2, 7, 7], dtype=np.int32)
    problem["indices"][problem["indices"] == 8] = 7
    used = multiplicity(problem["indices"], 9, {"topk_length": lengths}).sum(dim=(0, 1)).numpy() > 0
    problem["indices"][2, 0, 2:] = 8  # past topk_length; no valid entry names it
    problem["kv"][~used] = rng.choice([np.nan, INF, -INF], problem["kv"][~used].shape)
    clean = {**problem, "kv": np.nan_to_num(problem["kv"], nan=7.0, posinf=7.0, neginf=7.0)}
    poisoned = reference.sparse_mla_forward(**problem, d_v=4, topk_length=lengths)
    for actual, expected in zip(
        poisoned, reference.sparse_mla_forward(**clean, d_v=4, topk_length=lengths), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    d_out, out, lse = rng.standard_normal((5, 3, 4)), poisoned[0].copy(), poisoned[2].copy()
    options: dict[str, Any] = {"d_v": 4, "topk_length": lengths, "attn_sink": rng.standard_normal(3)}
    expected_gradients = reference.sparse_mla_backward(d_out, out=out, lse=lse, **clean, **options)
    d_out[-1], out[-1] = np.nan, np.nan  # a row without a valid entry, whose lse is +inf
    gradients = reference.sparse_mla_backward(d_out, out=out, lse=lse, **problem, **options)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_array_equal(gradient, wanted)


@pytest.mark.parametrize("magnitude", [1e4, -1e4])
def test_mla_large_logits(rng: Generator, magnitude: float) -> None:
    problem = mla_problem(rng)
    problem["sm_scale"] = magnitude
    out, max_logits, lse = reference.sparse_mla_forward(**problem, d_v=6)
    assert np.all(np.isfinite(out)) and np.all(np.abs(lse[:-1] - max_logits[:-1]) <= math.log(7) + 1e-9)


@pytest.mark.parametrize("score", [1e17, -1e17, 1e300])
def test_mla_keys_that_occur_twice_share_any_score(score: float) -> None:
    """log 2 is lost in an lse of 1e17, and must not be in the weights: a sink as large gets a third."""
    kv, indices = np.array([[1.0, 3.0]]), np.zeros((1, 2), np.int32)
    out, _, lse = reference.sparse_mla_forward(np.array([[[score, 0.0]]]), kv, indices, 1.0, 2)
    assert_close(out, [[[1.0, 3.0]]])
    assert_close(lse, [[score]])
    sink = np.array([score])
    with_sink, *_ = reference.sparse_mla_forward(np.array([[[score, 0.0]]]), kv, indices, 1.0, 2, attn_sink=sink)
    assert_close(with_sink, [[[2 / 3, 2.0]]])


def test_mla_scores_that_are_all_minus_infinity() -> None:
    """No kernel can tell such a row from an empty one; its values may be infinite, too."""
    q, kv, indices = np.array([[[1.0, 0.5]]]), np.array([[-np.inf, 1.0]]), np.zeros((1, 2), np.int32)
    out, max_logits, lse = reference.sparse_mla_forward(q, kv, indices, 1.0, 2)
    assert (out == 0).all() and max_logits == -np.inf and lse == np.inf


def test_mla_outputs_ranks_and_accumulation(rng: Generator) -> None:
    problem, d_v = mla_problem(rng), 4
    flat = {**problem, "kv": problem["kv"][:, 0], "indices": problem["indices"][:, 0]}
    buffer = np.full((5, 3, 4), np.nan, dtype=ml_dtypes.bfloat16)
    out, _, lse = reference.sparse_mla_forward(**problem, d_v=d_v)
    returned, _, _ = reference.sparse_mla_forward(**flat, d_v=d_v, out=buffer)
    assert returned is buffer
    np.testing.assert_array_equal(buffer, out.astype(ml_dtypes.bfloat16))

    d_out = rng.standard_normal(out.shape)
    _, dkv, _ = reference.sparse_mla_backward(d_out, out=out, lse=lse, **problem, d_v=d_v)
    assert dkv is not None
    start = rng.standard_normal((9, 6)).astype(np.float32)
    total = start.copy()
    dq, same, _ = reference.sparse_mla_backward(
        d_out, out=out, lse=lse, **flat, d_v=d_v, dkv=total, accumulate=True, need_dq=False
    )
    assert same is total and dq is None
    np.testing.assert_array_equal(total, (start + dkv[:, 0]).astype(np.float32))
    with pytest.raises(ValueError, match="sparse_mla_backward: dkv must be a float32 array"):
        reference.sparse_mla_backward(d_out, out=out, lse=lse, **flat, d_v=d_v, accumulate=True)


@pytest.mark.parametrize(("s_q", "topk", "s_kv"), [(0, 7, 9), (5, 0, 9), (5, 7, 0)])
def test_mla_empty_work(rng: Generator, s_q: int, topk: int, s_kv: int) -> None:
    q, kv = rng.standard_normal((s_q, 3, 6)), rng.standard_normal((s_kv, 1, 6))
    indices = np.zeros((s_q, 1, topk), dtype=np.int32)
    out, max_logits, lse = reference.sparse_mla_forward(q, kv, indices, 0.5, 4, attn_sink=np.full(3, INF))
    assert out.shape == (s_q, 3, 4) and not out.any() and np.all(lse == INF) and np.all(max_logits == -INF)
    dq, dkv, _ = reference.sparse_mla_backward(out, q, kv, indices, out, lse, 0.5, 4)
    assert dq is not None and dkv is not None and not dq.any() and not dkv.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": np.zeros((4, 1, 7), np.int32)}, r"indices must be \[5, 1, topk\]; got int64 \[4, 7\]"),
        ({"indices": np.zeros((5, 1, 7))}, r"indices must be int32; got float64 \[5, 1, 7\]"),
        ({"kv": np.zeros((9, 1, 5))}, "kv must be"),
        ({"kv": np.zeros((9, 2, 6))}, "kv must be"),
        ({"sm_scale": np.nan}, "sm_scale must be finite; got nan"),
        ({"d_v": 7}, r"d_v must be in 1\.\.6"),
        ({"attn_sink": np.zeros(4)}, r"attn_sink must be \[h_q\] = \[3\]; got float64 \[4\]"),
        ({"kv_stride": 0}, "kv_stride must be at least 1; got 0"),
        ({"q_start": 0, "q_positions": np.zeros(5, np.int32)}, "q_start must be absent"),
        ({"k_start": np.zeros(5, np.int32)}, "k_start must be given together with k_end"),
        ({"k_end": np.zeros(5, np.int32)}, "k_start must be given together with k_end"),
        ({"k_start": np.zeros(4, np.int32), "k_end": np.zeros(5, np.int32)}, r"k_start must be \[s_q\] = \[5\]"),
        ({"k_start": np.zeros(5, np.int32), "k_end": np.zeros(5)}, "k_end must be int32; got float64"),
        ({"out": np.zeros((5, 3, 5))}, "out must be"),
        ({"window": 3}, "window must be given together with window_kv"),
        ({"window_kv": np.zeros((4, 6))}, "window must be given together with window_kv"),
        ({"window_kv": np.zeros((4, 6)), "window": 0}, "window must be at least 1; got 0"),
        ({"window_kv": np.zeros((4, 5)), "window": 2}, "window_kv must be"),
        ({"w_start": np.zeros(5, np.int32), "w_end": np.zeros(5, np.int32)}, "w_start must be absent"),
        ({"window_kv": np.zeros((4, 6)), "window": 2, "w_end": np.zeros(5, np.int32)}, "w_start must be given"),
    ],
)
def test_mla_bad_arguments(rng: Generator, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="sparse_mla_forward: " + message):
        reference.sparse_mla_forward(**{**mla_problem(rng), "d_v": 4, **change})


def test_mla_takes_dlpack_strides_and_low_precision(rng: Generator) -> None:
    problem = mla_problem(rng)
    for name in ("q", "kv"):
        problem[name] = problem[name].astype(ml_dtypes.bfloat16)
    exact = {**problem, "q": problem["q"].astype(np.float64), "kv": problem["kv"].astype(np.float64)}
    expected = reference.sparse_mla_forward(**exact, d_v=4)
    padded = np.full((5, 3, 8), np.nan)
    padded[..., :6] = exact["q"]
    tensors = {name: torch.from_numpy(exact[name]).float() for name in ("q", "kv")}
    as_dlpack = {**exact, **tensors, "indices": torch.from_numpy(exact["indices"])}
    for variant in (problem, as_dlpack, {**exact, "q": padded[..., :6]}):
        for actual, wanted in zip(reference.sparse_mla_forward(**variant, d_v=4), expected, strict=True):
            assert actual.dtype == np.float64
            np.testing.assert_array_equal(actual, wanted)


# Bugs that these tests must notice, by module of the reference: a piece of it, its replacement, and the meaning.
# mutations.py plants them.
BUGS = {
    "_visible": [
        ("(positions + 1) // int(kv_stride)", "positions // int(kv_stride)", "causal limit off by one"),
        ("(positions + 1) //", "(positions + int(kv_stride)) //", "keys visible before their last token"),
        ("0, s_kv)", "0, s_kv - 1)", "the last key never visible"),
        ("first + (positions", "(positions", "keys of a range counted from key 0"),
        ("last = np.minimum(last, ", "last = (", "a range's end ignored beside positions"),
        ("np.maximum(first, 0)", "np.zeros_like(first)", "a range's start ignored"),
    ],
    "sparse_mla": [
        ("keys >= first", "keys > first", "the first visible key masked"),
        ("keys.shape[1]) < lengths", "keys.shape[1]) <= lengths", "topk_length off by one"),
        ("np.where(empty, np.inf, row_max[s] + log_sum)", "row_max[s] + log_sum", "lse of an empty row −inf"),
        (" * factor[:, None])", ")", "sink dropped from the output"),
        ("np.where(empty[:, None], 0.0, ", "(", "infinite values in a row whose scores are all −inf"),
        ("np.logaddexp(forward_lse[s], sink)", "forward_lse[s]", "sink dropped from the probabilities"),
        (".sum(axis=1)\n", ".sum(axis=1) / (1 - sink_share)\n", "sink dropped from delta"),
        ("(dp - delta[:, None])", "dp", "delta dropped"),
        ("* selection.sm_scale\n", "\n", "sm_scale dropped from ds"),
        ("np.add.at(sums, rows, ds.T @ selection.q[s])", "sums[rows] += ds.T @ selection.q[s]", "duplicates merged"),
        ("np.add.at(sums[:, :d_v], rows, p.T @ gradient[s])", "pass", "dV dropped"),
        ("d_sink -= ", "d_sink += ", "sign of d_sink"),
        ("attn_with_sink else forward_lse[s]", "True else forward_lse[s]", "sink in the distribution"),
        ("if attn_with_sink else", "if False else", "attn_with_sink ignored"),
        ("d_kv = d_kv + dkv", "pass", "accumulate ignored"),
        ("d_window = d_window + d_window_kv", "pass", "accumulate ignored for window keys"),
        ("last - min(window, s_w)", "last - min(window + 1, s_w)", "the window one key too wide"),
        ("(np.clip(start, 0, s_w), ", "(0, ", "the previous document in the window"),
        ("s_w - s_q + np.arange", "np.arange", "the queries are the first rows of window_kv"),
        ("np.arange(s_q, dtype=np.int64) + 1", "np.arange(s_q, dtype=np.int64)", "a query not in its own window"),
        ("d_q[s] += ds @ values", "d_q[s] = ds @ values", "only the window in dq"),
        ("np.arange(len(latent)), (", "np.arange(len(latent))[::-1], (", "absent indices backwards"),
    ],
    "normalize_l1": [
        ("rows.sum(axis=1, keepdims=True)", "rows.max(axis=1, keepdims=True)", "l1 over the largest"),
    ],
    "attention_distribution": [
        ("np.logaddexp(row_lse, _sink(name, attn_sink, h_q))", "row_lse", "no sink in the target"),
        (".sum(axis=0)\n", ".mean(axis=0)\n", "mean over heads for the sum"),
    ],
}
