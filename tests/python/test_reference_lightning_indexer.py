"""The indexer's reference against plain sorting and torch.autograd."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hopwell import reference
from support import assert_close

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
INF = math.inf
Generator = np.random.Generator


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("topk", [0, 1, 4, 9, 20])
@pytest.mark.parametrize("ranges", [None, ([0, 3, -2, 5, 7, INT_MIN], [9, 8, 4, 5, 3, INT_MAX])])
@pytest.mark.parametrize("masks", [{}, {"q_start": -1}, {"q_start": 3, "kv_stride": 4}, {"q_start": 7, "kv_stride": 2}])
def test_indexer_selects_what_sorting_selects(
    rng: Generator, topk: int, masks: dict[str, int], ranges: tuple[list[int], list[int]] | None, relu: bool
) -> None:
    s_q, s_kv, heads, d = 6, 9, 3, 4
    q, k = rng.integers(-2, 3, (s_q, heads, d)).astype(np.float32), rng.integers(-2, 3, (s_kv, d)).astype(np.float32)
    w = rng.integers(-2, 3, (s_q, heads)).astype(np.float32)  # small integers: exact scores, many ties
    q[0], k[5] = 0.0, np.nan
    k_start, k_end = ([0] * s_q, [s_kv] * s_q) if ranges is None else ranges
    given = {} if ranges is None else {"k_start": np.array(k_start, np.int32), "k_end": np.array(k_end, np.int32)}
    indices, scores = reference.lightning_indexer(q, k, w, topk, **masks, **given, relu=relu)
    assert indices.dtype == np.int32 and indices.shape == scores.shape == (s_q, topk)
    for s in range(s_q):
        visible = []
        for t in range(s_kv):
            past = not masks or (t - k_start[s] + 1) * masks.get("kv_stride", 1) <= masks["q_start"] + s + 1
            if past and k_start[s] <= t < k_end[s]:
                least = 0.0 if relu else -INF
                score = sum(float(w[s, j]) * max(least, float(q[s, j] @ k[t])) for j in range(heads))
                visible.append((-INF if t == 5 else score, t))
        chosen = sorted(sorted(visible, key=lambda pair: (-pair[0], pair[1]))[:topk], key=lambda pair: pair[1])
        padding = topk - len(chosen)
        assert indices[s].tolist() == [t for _, t in chosen] + [-1] * padding
        assert scores[s].tolist() == [score for score, _ in chosen] + [-INF] * padding


@pytest.mark.parametrize("relu", [True, False])
def test_indexer_scales_e4m3(rng: Generator, relu: bool) -> None:
    """The relu is of the codes' product; a scale's sign and its specials are the score's."""
    s_q, s_kv, heads, d = 4, 7, 3, 5
    q, k = (rng.integers(-3, 4, shape).astype(ml_dtypes.float8_e4m3fn) for shape in ((s_q, heads, d), (s_kv, d)))
    w, q_scale = rng.integers(1, 4, (s_q, heads)) * 1.0, np.exp2(rng.integers(-2, 3, (s_q, heads)))
    q[:, :, 0], k[:, 0] = 3.0, 3.0
    k_scale = np.array([1.0, -2.0, 0.0, np.inf, -np.inf, np.nan, 0.5])
    q_scale[1, 2] = -1.0
    k[6, 2] = np.nan
    indices, scores = reference.lightning_indexer(q, k, w, s_kv, q_scale=q_scale, k_scale=k_scale, relu=relu)
    for s in range(s_q):
        assert indices[s].tolist() == list(range(s_kv))
        for t in range(s_kv):
            dots = [sum(float(a) * float(b) for a, b in zip(q[s, j], k[t], strict=True)) for j in range(heads)]
            plain = sum(w[s, j] * q_scale[s, j] * (0.0 if relu and x < 0 else x) for j, x in enumerate(dots))
            wanted = float(k_scale[t]) * float(plain)
            assert scores[s, t] == (-INF if math.isnan(wanted) else wanted)
    with pytest.raises(ValueError, match="k_scale must be absent without float8_e4m3fn; got float64"):
        reference.lightning_indexer(q.astype(float), k.astype(float), w, 2, k_scale=k_scale)


def test_indexer_backward_equals_autograd(rng: Generator) -> None:
    s_q, s_kv, heads, d, topk = 6, 8, 3, 5, 6
    q, k, w = rng.standard_normal((s_q, heads, d)), rng.standard_normal((s_kv, d)), rng.standard_normal((s_q, heads))
    indices = rng.integers(0, s_kv - 1, (s_q, topk)).astype(np.int32)  # duplicates; no query selects the last key
    mask = rng.random(indices.shape) < 0.2
    indices[mask] = rng.choice(np.array([INT_MIN, -2, -1, s_kv, INT_MAX], np.int32), int(mask.sum()))
    indices[0, 0], indices[4] = 2, -2
    valid = (indices >= 0) & (indices < s_kv)
    target = rng.random((s_q, topk)) * valid
    target[0, 1:], target[3] = 0.0, 0.0
    total = target.sum(axis=1, keepdims=True)
    target = np.divide(target, total, out=np.zeros_like(target), where=total > 0)
    k[-1] = np.nan

    tq, tk, tw = (torch.from_numpy(x.copy()).requires_grad_() for x in (q, k, w))
    rows = []
    for s in range(s_q):
        keep = torch.from_numpy(np.flatnonzero(valid[s]))
        wanted = torch.from_numpy(target[s])[keep]
        if wanted.sum() > 0:
            chosen = tk[torch.from_numpy(indices[s].astype(np.int64))[keep]]
            score = (tw[s][:, None] * torch.relu(tq[s] @ chosen.T)).sum(0)
            rows.append(torch.nn.functional.kl_div(torch.log_softmax(score, -1), wanted, reduction="sum"))
    expected = torch.stack(rows).sum()
    gradients = torch.autograd.grad(expected, [tq, tk, tw])

    target[~valid] = 5.0  # of no meaning there
    loss, *actual = reference.lightning_indexer_backward(target, q, k, w, indices, d_loss=-2.5)
    assert_close(loss, expected.detach())
    for gradient, wanted in zip(actual, gradients, strict=True):
        assert gradient.any()
        assert_close(gradient, -2.5 * wanted.numpy())


@pytest.mark.parametrize("relu", [True, False])
def test_indexer_backward_of_given_gradients_and_of_weighted_rows(rng: Generator, relu: bool) -> None:
    q, k, w = rng.standard_normal((5, 3, 4)), rng.standard_normal((6, 4)), rng.standard_normal((5, 3))
    indices = np.array([rng.permutation(6)[:4] for _ in range(5)], np.int32)
    target, weights = rng.dirichlet(np.ones(4), 5), np.array([0.5, -2.0, 0.0, 1.0, 3.0])
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, w)]
    dots = torch.einsum("sjd,sid->sji", leaves[0], leaves[1][torch.from_numpy(indices).long()])
    scores = torch.einsum("sji,sj->si", dots.relu() if relu else dots, leaves[2])
    row_losses = torch.nn.functional.kl_div(scores.log_softmax(-1), torch.tensor(target), reduction="none").sum(-1)
    expected = (torch.from_numpy(weights) * row_losses).sum()
    row_loss = np.empty(5)
    target[2, 1] = np.nan  # of weight 0
    options = {"row_weights": weights, "relu": relu}
    loss, *actual = reference.lightning_indexer_backward(
        target, q, k, w, indices, row_loss=row_loss, d_loss=np.float32(0.5), **options
    )
    assert_close(loss, expected.detach())
    assert np.isnan(row_loss[2])
    assert_close(np.delete(row_loss, 2), np.delete(row_losses.detach().numpy(), 2))
    for gradient, wanted in zip(actual, torch.autograd.grad(expected, leaves, retain_graph=True), strict=True):
        assert_close(gradient, 0.5 * wanted.numpy())

    d_scores = rng.standard_normal((5, 4))
    d_scores[2, 0] = np.inf  # of weight 0
    loss, *actual = reference.lightning_indexer_backward(None, q, k, w, indices, d_scores=d_scores, **options)
    assert loss is None
    d_scores[2] = 0
    wanted_gradients = torch.autograd.grad(scores, leaves, torch.from_numpy(d_scores * weights[:, None]))
    for gradient, wanted in zip(actual, wanted_gradients, strict=True):
        assert gradient.any()
        assert_close(gradient, wanted.numpy())


def test_indexer_backward_ignores_scores_that_are_not_numbers(rng: Generator) -> None:
    q, k, w = rng.standard_normal((2, 3, 4)), rng.standard_normal((6, 4)), rng.standard_normal((2, 3))
    indices, target = np.array([[0, 2, 5], [5, 5, -1]], dtype=np.int32), np.full((2, 3), 1 / 3)
    k[5, 1] = np.nan
    loss, *gradients = reference.lightning_indexer_backward(target, q, k, w, indices)
    without = np.where(indices == 5, -1, indices).astype(np.int32)
    expected_loss, *expected = reference.lightning_indexer_backward(target, q, k, w, without)
    assert loss == expected_loss and all(np.isfinite(g).all() for g in gradients)
    for gradient, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_array_equal(gradient, wanted)


def test_indexer_backward_ignores_entries_outside_the_key_range(rng: Generator) -> None:
    q, k, w = rng.random((3, 2, 4)), rng.random((6, 4)), rng.standard_normal((3, 2))  # gates are open
    indices, target = np.array([[0, 2, 5, 2], [-1, 3, 4, 1], [5, 0, 3, 6]], dtype=np.int32), rng.random((3, 4))
    ranges = {"k_start": np.array([1, INT_MIN, 3], np.int32), "k_end": np.array([5, 4, 3], np.int32)}
    within = np.array([[-1, 2, -1, 2], [-1, 3, -1, 1], [-1, -1, -1, -1]], dtype=np.int32)
    actual = reference.lightning_indexer_backward(target, q, k, w, indices, **ranges)
    for got, wanted in zip(actual, reference.lightning_indexer_backward(target, q, k, w, within), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert actual[1][:2].any(axis=(1, 2)).all() and not actual[1][2].any()


def test_indexer_backward_gates_are_factors(rng: Generator) -> None:
    """Term by term from the formulae, with a NaN target, infinite keys and queries, and gates that are closed."""
    s_q, s_kv, heads, d = 5, 6, 3, 4
    q, k, w = rng.standard_normal((s_q, heads, d)), rng.standard_normal((s_kv, d)), rng.random((s_q, heads))
    q[:, :, 0], k[:, 0] = 1.0, 1.0
    q[1, 1, 0], k[4, 0] = -INF, -INF
    q[3], k[5] = np.abs(q[3]), INF  # the scores of query 3 with key 5 are +inf
    q[4, 0] = -np.abs(q[4, 0])  # a head that no key but the last two opens
    indices = np.array([[0, 1, 2], [0, 1, 2], [0, 1, 4], [0, 1, 5], [0, 2, 3]], dtype=np.int32)
    k[:4, 1:] = np.abs(k[:4, 1:])
    q[4, 0, 0] = -1.0
    target = np.full((s_q, 3), 1 / 3)
    target[4, 1] = np.nan
    loss, d_q, d_k, d_w = reference.lightning_indexer_backward(target, q, k, w, indices)
    assert np.isnan(loss)
    wanted_q, wanted_k, wanted_w = np.zeros_like(q), np.zeros_like(k), np.zeros_like(w)
    with np.errstate(invalid="ignore"):
        for s in range(s_q):
            dot = np.array(
                [[sum(a * b for a, b in zip(q[s, j], k[t], strict=True)) for t in indices[s]] for j in range(heads)]
            )
            score = [sum(w[s, j] * max(dot[j, i], 0.0) for j in range(heads)) for i in range(3)]
            p = np.exp(score - np.max(score)) / np.exp(score - np.max(score)).sum()
            for i, t in enumerate(indices[s]):
                for j in range(heads):
                    g, gate = p[i] - target[s, i], float(dot[j, i] > 0)
                    wanted_w[s, j] += g * max(dot[j, i], 0.0)
                    wanted_q[s, j] += g * w[s, j] * gate * k[t]
                    wanted_k[t] += g * w[s, j] * gate * q[s, j]
    assert np.isnan(wanted_q[4]).all() and np.isnan(wanted_w[3:]).all() and np.isnan(wanted_k[2]).all()
    assert np.isnan(wanted_q[2, :, 0]).all() and np.isfinite(wanted_q[2, :, 1:]).all()
    assert np.isnan(wanted_k[:3, 0]).all() and np.isfinite(wanted_w[:3]).all()
    for actual, wanted in zip((d_q, d_k, d_w), (wanted_q, wanted_k, wanted_w), strict=True):
        assert_close(actual, wanted)


def test_indexer_backward_loss_of_a_nan_target_is_nan(rng: Generator) -> None:
    q, k, w = rng.standard_normal((1, 2, 4)), rng.standard_normal((3, 4)), rng.random((1, 2))
    indices, target = np.array([[0, 1, 2]], dtype=np.int32), np.array([[0.5, np.nan, 0.5]])
    assert np.isnan(reference.lightning_indexer_backward(target, q, k, w, indices)[0])


def test_indexer_backward_of_equal_scores_of_any_size() -> None:
    """log 2 is lost in an lse of 1e17, and must not be in the loss: probabilities of a half are the target's."""
    q, k, w = np.full((1, 1, 1), 1e17), np.ones((2, 1)), np.ones((1, 1))
    indices, target = np.array([[0, 1]], np.int32), np.array([[0.5, 0.5]])
    loss, *gradients = reference.lightning_indexer_backward(target, q, k, w, indices)
    assert_close(loss, 0.0)
    assert all((gradient == 0).all() for gradient in gradients)


# Bugs that these tests must notice, by module of the reference: a piece of it, its replacement, and the meaning.
# mutations.py plants them.
BUGS = {
    "lightning_indexer": [
        ("np.maximum(dot, 0.0) if relu else dot)\n    return", "dot)\n    return", "relu dropped"),
        ("w[s], relu, of_key[seen])", "w[s], True, of_key[seen])", "relu kept in the selection"),
        ("(of_key * score), -np.inf, of_key * score", "(score), -np.inf, score", "k_scale dropped"),
        ("w = w * of_head", "pass", "q_scale dropped"),
        ("np.sort(best_first[:topk])", "best_first[:topk]", "keys in order of score"),
        ('np.argsort(-score, kind="stable")', 'np.argsort(score, kind="stable")', "smallest scores chosen"),
        ("g = np.exp(log_prob) - p", "g = np.exp(log_prob)", "target dropped from the gradient"),
        ("((dot > 0.0) if relu else 1.0)", "1.0", "relu's derivative dropped"),
        ("((dot > 0.0) if relu else 1.0)", "(dot > 0.0)", "relu's derivative without a relu"),
        ("_gradient(factor * of_row[s], g)", "_gradient(factor, g)", "row_weights dropped from the gradient"),
        ("(of_row[counts] * losses[counts])", "losses[counts]", "row_weights dropped from the loss"),
        ("if of_row[s] == 0.0:", "if False:", "rows of weight 0 make NaN"),
        ("np.add.at(d_k, keys, d_dot.T @ q[s])", "d_k[keys] += d_dot.T @ q[s]", "duplicates merged in dk"),
        ("keys_of[s] >= first[s]", "keys_of[s] >= 0", "keys before the range"),
        ("keys_of[s] < last[s]", "keys_of[s] < len(k)", "keys after the range"),
        ("some = p != 0.0", "some = p > 0.0", "NaN targets without a loss"),
        ("if not p.any():", "if False:", "rows without a target counted"),
    ],
}
