"""The reference of the indexer's dense loss, and of attention to all visible keys, against torch.autograd."""

from typing import Any

import numpy as np
import pytest
import torch
from hopwell import reference
from support import assert_close

Generator = np.random.Generator

MASKS: list[dict[str, Any]] = [
    {},
    {"q_start": 2},
    {"q_positions": np.array([18, -1, 2, 35, 11], np.int32), "kv_stride": 4},
    {"k_start": np.array([4, 0, -7, 5, 3], np.int32), "k_end": np.array([9, 1, 99, 5, 8], np.int32)},
    {"k_start": np.array([0, 2, 2, 9, 1], np.int32), "k_end": np.array([9, 8, 7, 3, 9], np.int32), "q_start": 1},
]


def visible_to(masks: dict[str, Any], s_q: int, s_kv: int) -> torch.Tensor:
    """Returns the mask of keys that each query sees, written from the specification's text."""
    seen = torch.zeros(s_q, s_kv, dtype=torch.bool)
    for s in range(s_q):
        start = int(masks["k_start"][s]) if "k_start" in masks else 0
        end = int(masks["k_end"][s]) if "k_end" in masks else s_kv
        position = (
            masks["q_positions"][s] if "q_positions" in masks else masks["q_start"] + s if "q_start" in masks else None
        )
        for t in range(s_kv):
            past = position is None or (t - start + 1) * masks.get("kv_stride", 1) <= position + 1
            seen[s, t] = start <= t < end and bool(past)
    return seen


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("masks", MASKS)
def test_loss_and_gradients_equal_autograd(rng: Generator, masks: dict[str, Any], relu: bool, joint: bool) -> None:
    """`joint`: the target is the keys' share of a softmax over window keys and a sink too, divided by its sum."""
    s_q, s_kv, h_q, d_qk, heads, d = 5, 9, 3, 6, 2, 4
    q, kv, scale = rng.standard_normal((s_q, h_q, d_qk)), rng.standard_normal((s_kv, d_qk)), 0.4
    index = [rng.standard_normal(shape) for shape in ((s_q, heads, d), (s_kv, d), (s_q, heads))]
    row_weights = np.array([0.5, 2.0, 1.0, -1.0, 3.0])
    seen = visible_to(masks, s_q, s_kv)
    kv[~seen.any(0).numpy()] = index[1][~seen.any(0).numpy()] = np.nan

    score = scale * torch.einsum("shd,td->sht", torch.from_numpy(q), torch.from_numpy(np.nan_to_num(kv)))
    score = score.masked_fill(~seen[:, None], -torch.inf)
    lse = torch.where(seen.any(1)[:, None], score.logsumexp(-1), torch.inf)
    target = torch.exp(score - lse[:, :, None]).mean(1)
    joint_options: dict[str, Any] = {}
    lse_given = lse.numpy()
    if joint:
        sink, of_window = rng.standard_normal(h_q), rng.standard_normal((s_q, h_q))
        lse_given = np.logaddexp(np.where(np.isposinf(lse_given), -np.inf, lse_given), of_window)
        total = np.logaddexp(lse_given, sink)
        target = torch.exp(score - torch.from_numpy(total)[:, :, None]).sum(1)
        sums = target.sum(1, keepdim=True)
        target = target / torch.where(sums == 0, 1.0, sums)
        joint_options = {"attn_sink": sink, "normalize": "l1"}
    leaves = [torch.from_numpy(np.nan_to_num(x)).requires_grad_() for x in index]
    dots = torch.einsum("sjd,td->sjt", leaves[0], leaves[1])
    scores = (leaves[2][:, :, None] * (dots.relu() if relu else dots)).sum(1)
    rows = [
        torch.nn.functional.kl_div(scores[s, seen[s]].log_softmax(-1), target[s, seen[s]], reduction="sum")
        for s in range(s_q)
    ]
    expected = sum(float(w) * row for w, row in zip(row_weights, rows, strict=True))
    gradients = torch.autograd.grad(expected, leaves)

    out, _, reference_lse = reference.sparse_mla_forward(q, kv, None, scale, 4, **masks)
    values = torch.where(
        seen.any(1)[:, None, None], torch.exp(score - lse[:, :, None]) @ torch.from_numpy(np.nan_to_num(kv[:, :4])), 0.0
    )
    assert_close(out, values)
    attn = reference.attention_distribution(q, kv, None, reference_lse, scale, **masks)
    if not joint:
        assert_close(attn, target * h_q)
    row_loss = np.full(s_q, np.nan)
    options = {"row_weights": row_weights, "relu": relu, "row_loss": row_loss}
    options |= joint_options | {"d_loss": -2.5}
    given_lse = lse_given if joint else reference_lse
    loss, *actual = reference.indexer_dense_loss(q, kv, given_lse, *index, scale, **options, **masks)
    assert_close(loss, expected.detach())
    assert_close(row_loss, [float(row.detach()) for row in rows])
    for got, wanted in zip(actual, gradients, strict=True):
        assert_close(got, -2.5 * wanted)


def test_a_row_of_weight_0_adds_nothing_whatever_is_in_it(rng: Generator) -> None:
    q, kv = rng.standard_normal((3, 2, 4)), rng.standard_normal((5, 4))
    index = [rng.standard_normal(shape) for shape in ((3, 2, 4), (5, 4), (3, 2))]
    _, _, lse = reference.sparse_mla_forward(q, kv, None, 0.5, 4)
    lse[1] = np.nan
    row_weights = np.array([1.0, 0.0, 2.0])
    results = reference.indexer_dense_loss(q, kv, lse, *index, 0.5, row_weights=row_weights)
    assert all(np.isfinite(x).all() for x in results)
    assert not results[1][1].any() and not results[3][1].any()


def test_rows_divided_by_their_sums(rng: Generator) -> None:
    rows = rng.random((4, 6))
    rows[2] = 0.0
    assert_close(reference.normalize_l1(rows).sum(axis=1), [1.0, 1.0, 0.0, 1.0])
    expected = reference.normalize_l1(rows)
    assert reference.normalize_l1(rows, out=rows) is rows
    assert_close(rows, expected)


# Bugs that these tests must notice, by module of the reference: a piece of it, its replacement, and the meaning.
# mutations.py plants them.
BUGS = {
    "indexer_dense_loss": [
        ("np.logaddexp(row_lse, _sink(name, attn_sink, h_q))", "row_lse", "no sink in the target of the loss"),
        ('h_q if normalize == "heads" else', "h_q if True else", "l1 ignored by the loss"),
        ("target / (h_q if", "target / (1 if", "sum over heads for the mean"),
        ("d_k[visible] += ", "d_k[visible] = ", "only the last query's d_k"),
        ("- target)\n", ")\n", "target dropped from g"),
        ("if of_row[s] == 0.0:", "if False:", "NaN of a row of weight 0"),
        ("keys[first[s] :", "keys[0 :", "index scores of keys that are not seen"),
    ],
}
