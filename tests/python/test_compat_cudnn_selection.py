"""The selection of keys by `hopwell.compat.cudnn`: from scores, or with them in one; and entries by other numbers."""

import math

import pytest
import torch
from cudnn_inputs import Offsets, Pack, assert_scores, ints, masked_scores, random, strided
from hopwell.compat import _index_scores
from hopwell.compat.cudnn import DSA


@pytest.fixture(autouse=True)
def few_scores_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_index_scores, "_SCORES_AT_A_TIME", 150)


@pytest.mark.parametrize("top_k", [1, 6, 40])
@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tie_break", "deterministic"), [(0, False), (0, True), (1, True), (2, False)])
def test_top_k(dtype: torch.dtype, next_n: int, top_k: int, tie_break: int, deterministic: bool) -> None:
    x = (torch.randn(12, 31) * 2).round().to(dtype)  # many ties, zeros of both signs among them
    x[1, 5], x[2, :9], x[3, 4] = -math.inf, -math.inf, math.inf
    lengths = torch.randint(0, 32, (12 // next_n,), dtype=torch.int32)
    lengths[0] = 31
    options = {"tie_break": tie_break, "deterministic": deterministic, "next_n": next_n}
    indices, values = DSA.indexer_top_k_wrapper(x, lengths, top_k, **options)
    assert indices.dtype == torch.int32 and values.dtype == dtype and indices.shape == values.shape == (12, top_k)
    for row in range(12):
        n = max(0, int(lengths[row // next_n]) - next_n + row % next_n + 1)
        sign = -1 if tie_break == 2 else 1
        numbers = x[row].tolist()
        best = sorted(range(n), key=lambda t: (-numbers[t], sign * t))[:top_k]
        assert indices[row].tolist() == sorted(best) + [-1] * (top_k - len(best))
        assert torch.equal(values[row, : len(best)], x[row, sorted(best)])
        assert values[row, len(best) :].eq(-math.inf).all()
    without = DSA.indexer_top_k_wrapper(x, lengths, top_k=top_k, return_val=False, **options)
    assert without["values"] is None and torch.equal(without["indices"], indices)


def test_top_k_of_strided_rows_and_of_no_columns() -> None:
    x, lengths = torch.randn(5, 9), torch.full((5,), 9, dtype=torch.int32)
    views = x.t().contiguous().t(), torch.stack([lengths, lengths], 1)[:, 0]
    assert torch.equal(DSA.indexer_top_k_wrapper(*views, 4)[0], DSA.indexer_top_k_wrapper(x, lengths, 4)[0])
    indices, values = DSA.indexer_top_k_wrapper(x[:, :0], lengths * 0, 2)
    assert indices.eq(-1).all() and values.eq(-math.inf).all()


@pytest.mark.parametrize("top_k", [3, 20])
@pytest.mark.parametrize("are_global", [False, True])
@pytest.mark.parametrize(("ratio", "offsets", "sm_scale"), [(1, None, 1.0), (4, (3, 33), 0.5)])
def test_selection_with_the_scores(ratio: int, offsets: Offsets, sm_scale: float, are_global: bool, top_k: int) -> None:
    q, k, w = random(2, 10, 5, 16), random(2, 13, 1, 16), random(2, 10, 5)
    scores = masked_scores(q, k[:, :, 0], w.double() * sm_scale, ratio, offsets)
    options = {"ratio": ratio, "sm_scale": sm_scale, "q_causal_offsets": ints(offsets)}
    options["topk_indices_global"] = are_global
    result = DSA.indexer_forward_top_k_wrapper(q, k, w, top_k, **options)
    assert list(result.keys()) == ["indices", "logits", "softmax"]
    own = result["indices"] - 13 * are_global * torch.arange(2)[:, None, None]
    own = own.masked_fill(result["indices"] < 0, -1)
    assert result["indices"].dtype == torch.int32 and own.max() < 13
    assert_scores(result["logits"], scores.gather(2, own.clamp(min=0).long()).masked_fill(own < 0, -math.inf))
    best = scores.topk(min(top_k, 13)).values
    assert_scores(result["logits"].sort(-1, descending=True).values[:, :, :13], best)
    softmax = result["logits"].softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(result["softmax"], softmax, rtol=1e-6, atol=0)

    outputs = strided(2, 10, top_k).int(), strided(2, 10, top_k), strided(2, 10, top_k), strided(2, 10)
    given = dict(zip(("out_indices", "out_logits", "softmax_out", "lse_out"), outputs, strict=True))
    again = DSA.indexer_forward_top_k_wrapper(q, k, w, top_k, **options, **given, return_softmax=False)
    assert all(x is out for x, out in zip(again, outputs, strict=True))
    assert all(torch.equal(again[name], result[name]) for name in ("indices", "logits", "softmax"))
    assert_scores(again["lse"], scores.logsumexp(-1))
    only = DSA.indexer_forward_top_k_wrapper(q, k, w, top_k, **options, return_softmax=False)
    assert list(only.keys()) == ["indices", "logits"]


def test_selection_with_the_scores_of_a_pack() -> None:
    pack = Pack()
    q, k, w = random(pack.total_q, 3, 16), random(pack.total_k, 1, 16), random(pack.total_q, 3)
    scores = pack.masked_scores(q, k[:, 0], w, 1)
    result = DSA.indexer_forward_top_k_wrapper(q, k, w, 4, ratio=1, topk_indices_global=False, **pack.arguments)
    assert_scores(result["logits"].sort(-1, descending=True).values, scores.topk(4).values)
    of_pack = DSA.indexer_forward_top_k_wrapper(q, k, w, 4, ratio=1, **pack.arguments)["indices"]
    moved = DSA.local_to_global_wrapper(result["indices"], pack.widest, *pack.arguments.values())["indices"]
    assert moved.dtype == torch.int32 and torch.equal(moved, of_pack)


def test_numbers_of_keys_of_their_own_sequence_and_of_all() -> None:
    own = torch.tensor([[[3, -1, 0]], [[-7, 4, 1]]])
    assert DSA.local_to_global_wrapper(own, 5)["indices"].tolist() == [[[3, -1, 0]], [[-1, 9, 6]]]


def test_entries_are_moved_to_the_front() -> None:
    table = torch.tensor([[[-1, 4, -9, 2]], [[-1, -1, -1, -1]], [[7, 7, 0, 1]]], dtype=torch.int32)
    indices, lengths = DSA.compactify_wrapper(table)
    assert indices.tolist() == [[4, 2, -1, -1], [-1] * 4, [7, 7, 0, 1]]
    assert lengths.tolist() == [2, 0, 4] and indices.dtype == lengths.dtype == torch.int32
    assert torch.equal(DSA.compactify_wrapper(table[:, 0])["indices"], indices)
