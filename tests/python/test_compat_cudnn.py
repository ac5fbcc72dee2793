"""`hopwell.compat.cudnn` against plain PyTorch in float64, called as users of cuDNN's front end call it."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cudnn_inputs import Offsets, Pack, assert_scores, index_scores, ints, masked_scores, random, strided, visible
from hopwell.compat import _index_scores
from hopwell.compat.cudnn import DSA, TupleDict, _results
from support import norm_error
from torch import Tensor

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def few_scores_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_index_scores, "_SCORES_AT_A_TIME", 150)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("ratio", "offsets", "sm_scale"), [(1, None, 1.0), (4, None, 0.3), (1, (9, 2), -0.5), (4, (0, 33), 1.0)]
)
@DTYPES
def test_index_scores(
    dtype: torch.dtype, ratio: int, offsets: Offsets, sm_scale: float, weights_dtype: torch.dtype
) -> None:
    q, k, w = (
        random(2, 10, 5, 16, dtype=dtype),
        random(2, 13, 1, 16, dtype=dtype),
        random(2, 10, 5, dtype=weights_dtype),
    )
    expected = masked_scores(q, k[:, :, 0], w.double() * sm_scale, ratio, offsets)
    options = {"ratio": ratio, "sm_scale": sm_scale, "q_causal_offsets": ints(offsets)}
    result = DSA.indexer_forward_wrapper(q, k, w, **options)
    assert list(result.keys()) == ["scores"] and result["scores"].dtype == torch.float32
    assert_scores(result["scores"], expected)

    for out, lse_out in ((torch.empty(2, 10, 13), torch.empty(2, 10)), (strided(2, 10, 13), strided(2, 10))):
        given = DSA.indexer_forward_wrapper(q, k, w, **options, out=out, lse_out=lse_out)
        assert given["scores"] is out and given["lse"] is lse_out
        assert_scores(out, expected)
        assert_scores(lse_out, expected.logsumexp(-1))
    again = DSA.dense_indexer_score_recompute_wrapper(q, k, w, **options, out=strided(2, 10, 13))
    assert list(again.keys()) == ["out", "denom"]
    assert_scores(again["out"], expected)
    assert_scores(again["denom"], expected.logsumexp(-1))


def test_index_scores_see_a_fourth_of_the_tokens_by_default() -> None:
    q, k, w = random(1, 9, 2, 8), random(1, 4, 1, 8), random(1, 9, 2)
    assert_scores(DSA.indexer_forward_wrapper(q, k, w)["scores"], masked_scores(q, k[:, :, 0], w, 4))
    assert_scores(DSA.dense_indexer_score_recompute_wrapper(q, k, w)["out"], masked_scores(q, k[:, :, 0], w, 1))


@pytest.mark.parametrize("longest_given", [True, False])
@pytest.mark.parametrize(("ratio", "offsets"), [(1, None), (2, (4, 0, 1, 3))])
def test_index_scores_of_a_pack(ratio: int, offsets: Offsets, longest_given: bool) -> None:
    pack = Pack()
    q, k, w = random(pack.total_q, 3, 16), random(pack.total_k, 1, 16), random(pack.total_q, 3)
    longest = {"max_seqlen_q": 5, "max_seqlen_k": pack.widest} if longest_given else {}
    options = {**pack.arguments, **longest, "ratio": ratio, "q_causal_offsets": ints(offsets)}
    expected = pack.masked_scores(q, k[:, 0], w, ratio, offsets)
    result = DSA.indexer_forward_wrapper(q, k, w, **options, return_lse=True)
    assert_scores(result["scores"], expected)
    assert_scores(result["lse"], expected.logsumexp(-1))
    scores, denom = DSA.dense_indexer_score_recompute_wrapper(q, k, w, **options)
    assert torch.equal(scores, result["scores"]) and torch.equal(denom, result["lse"])


@pytest.mark.parametrize("prescaled", [False, True])
def test_index_scores_of_e4m3_with_a_scale_a_row(prescaled: bool) -> None:
    q, k = (random(2, *shape).to(torch.float8_e4m3fn) for shape in ((6, 4, 16), (7, 1, 16)))
    w, q_scale, k_scale = random(2, 6, 4), torch.rand(2, 6, 4), torch.rand(2, 7, 1)
    w = w if prescaled else w.bfloat16()
    factor = 1.0 if prescaled else 0.5 * q_scale.double()
    expected = masked_scores(q, k[:, :, 0].double() * k_scale.double(), w.double() * factor, 1)
    options = {"q_scale": q_scale, "k_scale": k_scale, "sm_scale": 0.5, "ratio": 1, "precision": "fp8"}
    assert_scores(DSA.indexer_forward_wrapper(q, k, w, **options)["scores"], expected)


def local_and_global(s_k: int, b: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Entries of a batch, some of them invalid: as key indices within their sequence, and within all keys."""
    local = torch.randint(-1, s_k, shape, dtype=torch.int32)
    local[:, 1], local[:, 2, 1:] = -1, -1  # a query without entries and a query with one entry
    local[:, 2, 0] = s_k - 1
    offsets = torch.arange(b, dtype=torch.int32)[:, None, None] * s_k
    return local, torch.where(local >= 0, local + offsets, -1)


def entries(local: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return local >= 0
    return (local >= 0) & (torch.arange(local.shape[2]) < lengths[:, :, None])


@pytest.mark.parametrize("are_global", [False, True])
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("b", [1, 3])
@DTYPES
def test_recomputed_scores_of_entries(dtype: torch.dtype, b: int, with_lengths: bool, are_global: bool) -> None:
    s_q, s_k, h, d, topk = 6, 11, 4, 16, 7
    q, k = random(b, s_q, h, d, dtype=dtype), random(b, s_k, d, dtype=dtype)
    local, flat = local_and_global(s_k, b, (b, s_q, topk))
    lengths = torch.randint(1, topk + 1, (b, s_q), dtype=torch.int32) if with_lengths else None
    valid = entries(local, lengths)
    gathered = torch.stack([rows[t.clamp(min=0).long()] for rows, t in zip(k.double(), local, strict=True)])
    dots = torch.einsum("bshd,bsid->bshi", q.double(), gathered)
    scores = (0.3 * dots).masked_fill(~valid[:, :, None], -math.inf)
    lse = scores.logsumexp(-1)
    expected = (scores - lse[..., None]).exp().nan_to_num(0.0).sum(2)
    expected = expected / expected.sum(-1, keepdim=True).clamp(min=1e-30)
    options = {"topk_indices_global": are_global, "topk_length": lengths, "qhead_per_kv_head": h}
    table = flat if are_global else local
    result = DSA.sparse_attn_score_recompute_wrapper(q, k, lse.float(), table, 0.3, **options)
    assert list(result.keys()) == ["target"]
    assert norm_error(result["target"], expected) <= TOLERANCES[dtype]
    assert result["target"][~valid].eq(0).all()
    out = strided(b, s_q, topk)
    assert DSA.sparse_attn_score_recompute_wrapper(q, k, lse.float(), table, 0.3, **options, out=out)[0] is out
    assert torch.equal(out, result["target"])

    w = random(b, s_q, h, dtype=dtype)
    index = torch.einsum("bshi,bsh->bsi", dots.relu(), w.double()).masked_fill(~valid, -math.inf)
    (predict,) = DSA.sparse_indexer_score_recompute_wrapper(q, k, w, table, **options)
    torch.testing.assert_close(predict.double(), index.softmax(-1).nan_to_num(0.0), rtol=1e-4, atol=1e-6)
    assert DSA.sparse_indexer_score_recompute_wrapper(q, k, w, table, **options, out=out)[0] is out
    assert torch.equal(out, predict)


def test_attention_on_the_entries_of_sparse_attention() -> None:
    q, kv, lengths = random(3, 4, 576), random(9, 576), torch.tensor([4, -1, 90], dtype=torch.int32)
    indices = torch.tensor([[1, -9, 22, 1, 5], [1, 2, 3, 4, 5], [8, 0, 9, 3, 3]], dtype=torch.int32)
    lse = DSA.sparse_attention(q, kv, indices, topk_length=lengths)["lse"]
    target, kept = DSA.sparse_attention_score_recompute(q, kv, lse, indices, topk_length=lengths)
    assert kept.tolist() == [[1, -1, -1, 1, -1], [-1] * 5, [8, 0, -1, 3, 3]]
    scores = torch.einsum("shd,sid->shi", q.double(), kv.double()[indices.clamp(0, 8).long()]) / 24
    scores = scores.masked_fill(kept[:, None] < 0, -math.inf)
    expected = scores.softmax(-1).nan_to_num(0.0).mean(1)
    torch.testing.assert_close(target.double(), expected, rtol=1e-4, atol=1e-7)


def attention_sums(q: Tensor, k: Tensor, lse: Tensor, scale: float, mask: Tensor) -> Tensor:
    """The attention distribution of one sequence, summed over heads: q [s_q, h, d], k [s_k, h_kv, d]."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = scale * torch.einsum("shd,thd->sht", q.double(), keys)
    return (scores - lse.double()[..., None]).exp().sum(1).masked_fill(~mask, 0.0)


@pytest.mark.parametrize("h_kv", [1, 2])
@pytest.mark.parametrize(("ratio", "offsets"), [(1, None), (3, (4, 21))])
@DTYPES
def test_dense_attention_sums(dtype: torch.dtype, ratio: int, offsets: Offsets, h_kv: int) -> None:
    q, k, lse = random(2, 8, 4, 16, dtype=dtype), random(2, 12, h_kv, 16, dtype=dtype), torch.randn(2, 8, 4) + 2
    masks = [visible(8, 12, ratio, o) for o in offsets or (0, 0)]
    expected = torch.stack([attention_sums(*x, 0.2, m) for *x, m in zip(q, k, lse, masks, strict=True)])
    options = {"qhead_per_kv_head": 4 // h_kv, "ratio": ratio, "q_causal_offsets": ints(offsets)}
    result = DSA.dense_attn_score_recompute_wrapper(q, k, lse, 0.2, **options)
    assert list(result.keys()) == ["out", "denom"]
    assert_scores(result["out"], expected.masked_fill(~torch.stack(masks), -math.inf), TOLERANCES[dtype])
    assert norm_error(result["denom"], expected.sum(-1)) <= TOLERANCES[dtype]
    out, denom = strided(2, 8, 12), strided(2, 8)
    given = DSA.dense_attn_score_recompute_wrapper(q, k, lse, 0.2, **options, out=out, denom_out=denom)
    assert given["out"] is out and given["denom"] is denom
    assert torch.equal(out, result["out"]) and torch.equal(denom, result["denom"])


def test_dense_attention_sums_of_a_pack() -> None:
    pack = Pack()
    q, k, lse = random(pack.total_q, 4, 16), random(pack.total_k, 1, 16), torch.randn(pack.total_q, 4) + 2
    expected = torch.full((pack.total_q, pack.widest), -math.inf, dtype=torch.float64)
    for (q_i, lse_i), (k_i,), of_q, _ in pack.parts((q, lse), (k,)):
        mask = visible(len(q_i), len(k_i), 1)
        expected[of_q, : len(k_i)] = attention_sums(q_i, k_i, lse_i, 0.2, mask).masked_fill(~mask, -math.inf)
    out, denom = DSA.dense_attn_score_recompute_wrapper(q, k, lse, 0.2, **pack.arguments)
    assert_scores(out, expected, 1e-4)
    assert norm_error(denom, expected.masked_fill(expected.isinf(), 0.0).sum(-1)) <= 1e-4


def index_leaves(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [random(*shape, dtype=dtype) for shape in shapes]
    return leaves, [x.double().requires_grad_() for x in leaves]


def assert_gradients(result: TupleDict, wanted: Sequence[Tensor], dtypes: Sequence[torch.dtype], bound: float) -> None:
    """Checks the gradients of q, weights and k."""
    assert list(result.keys()) == ["d_index_q", "d_weights", "d_index_k"]
    for gradient, other, dtype in zip(result, wanted, dtypes, strict=True):
        assert gradient.dtype == dtype and gradient.shape == other.shape
        assert norm_error(gradient, other) <= bound


@pytest.mark.parametrize("are_global", [False, True])
@pytest.mark.parametrize("backend", ["default", "sm100_v2"])
@pytest.mark.parametrize("b", [1, 2])
@DTYPES
def test_gradients_of_the_sparse_loss(dtype: torch.dtype, b: int, backend: str, are_global: bool) -> None:
    s_q, s_k, h, d, topk = 6, 11, 3, 16, 7
    (q, w, k), exact = index_leaves([(b, s_q, h, d), (b, s_q, h), (b, s_k, d)], dtype)
    local, flat = local_and_global(s_k, b, (b, s_q, topk))
    valid = entries(local, None)
    target = torch.rand(b, s_q, topk).masked_fill(~valid, 0.0)
    target /= target.sum(-1, keepdim=True).clamp(min=1e-30)
    keys = torch.stack([rows[t.clamp(min=0).long()] for rows, t in zip(exact[2], local, strict=True)])
    dots = torch.einsum("bshd,bsid->bshi", exact[0], keys).relu()
    scores = (0.25 * torch.einsum("bshi,bsh->bsi", dots, exact[1])).masked_fill(~valid, -1e30)
    loss = -(target.double() * scores.log_softmax(-1)).sum() / (b * s_q)
    wanted = torch.autograd.grad(3.0 * 0.5 * loss, (*exact, scores))
    predict = scores.detach().softmax(-1).masked_fill(~valid, 0.0).float()

    signal, table = target.clone(), flat if are_global else local
    options = {"sm_scale": 0.25, "loss_coeff": 3.0, "topk_indices_global": are_global, "backend": backend}
    result = DSA.indexer_backward_wrapper(
        q, w, k, signal, predict, table, grad_loss=torch.tensor([0.5]), deterministic=True, **options
    )
    assert_gradients(result, wanted[:3], [dtype] * 3, 2 * TOLERANCES[dtype])
    assert norm_error(signal, wanted[3]) <= 1e-5 and signal[~valid].eq(0).all()

    of_weights = torch.float32 if backend == "sm100_v2" else dtype
    buffers = {"d_index_q": torch.empty_like(q), "d_weights": torch.empty_like(w, dtype=of_weights)}
    buffers["d_index_k"] = strided(*k.shape)
    signal = target.clone()
    given = DSA.indexer_backward_wrapper(q, w, k, signal, predict, table, grad_loss=0.5, **options, **buffers)
    assert all(given[name] is buffer for name, buffer in buffers.items())
    assert_gradients(given, wanted[:3], [dtype, of_weights, torch.float32], 2 * TOLERANCES[dtype])
    if of_weights == torch.float32:
        assert norm_error(given["d_weights"], wanted[1]) <= 1e-4  # not rounded to 16 bits


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ratio", [1, 2])
@DTYPES
def test_gradients_of_the_dense_loss(dtype: torch.dtype, ratio: int, packed: bool) -> None:
    """From the results of the two dense recomputations, as Megatron calls them, with a target of one attention head."""
    pack = Pack()
    first, second = ((pack.total_q,), (pack.total_k,)) if packed else ((2, 7), (2, 9))
    (q, w, k), exact = index_leaves([(*first, 3, 16), (*first, 3), (*second, 16)], dtype)
    if packed:
        pieces = list(pack.parts((exact[0], exact[1]), (exact[2],)))
        scores = [(index_scores(a, c, e), visible(len(a), len(c), ratio)) for (a, e), (c,), *_ in pieces]
    else:
        scores = [(index_scores(*x), visible(7, 9, ratio)) for x in zip(exact[0], exact[2], exact[1], strict=True)]
    rows = [s.masked_fill(~m, -1e30).log_softmax(-1).masked_fill(~m, 0.0) for s, m in scores]
    attention = [torch.rand(m.shape).masked_fill(~m, 0.0) for _, m in scores]
    loss = sum(
        -(a.double() / a.double().sum(-1, keepdim=True).clamp(min=1e-9) * r).sum()
        for a, r in zip(attention, rows, strict=True)
    )
    wanted = torch.autograd.grad(3.0 * 0.5 * loss / math.prod(first), exact)

    options = {**(pack.arguments if packed else {}), "ratio": ratio}
    dense = torch.zeros(pack.total_q, pack.widest) if packed else torch.stack(attention)
    if packed:
        for a, (_, _, of_q, _) in zip(attention, pieces, strict=True):
            dense[of_q, : a.shape[1]] = a
    index, lse = DSA.dense_indexer_score_recompute_wrapper(q, k.unsqueeze(-2), w, **options)
    sums, given = dense.sum(-1), {"d_index_k": torch.empty(k.shape)}
    result = DSA.dense_indexer_backward_wrapper(
        q, w, k, dense, sums, index, lse, torch.tensor(0.5), loss_coeff=3.0, **options, **given
    )
    assert result["d_index_k"] is given["d_index_k"]
    assert_gradients(result, wanted, [dtype, dtype, torch.float32], 2 * TOLERANCES[dtype])


def test_the_scale_of_dense_scores_is_their_gradient_s_too() -> None:
    q, w, k = random(1, 5, 2, 16), random(1, 5, 2), random(1, 5, 16)
    dense = torch.rand(1, 5, 5).tril()
    results = []
    for sm_scale, weights in ((1.0, 0.5 * w), (0.5, w)):
        index, lse = DSA.dense_indexer_score_recompute_wrapper(q, k.unsqueeze(2), weights, sm_scale=sm_scale)
        results.append(
            DSA.dense_indexer_backward_wrapper(
                q, weights, k, dense.clone(), dense.sum(-1), index, lse, 1.0, sm_scale=sm_scale
            )
        )
    assert torch.equal(results[0]["d_index_q"], results[1]["d_index_q"])
    torch.testing.assert_close(0.5 * results[0]["d_weights"], results[1]["d_weights"])


def attention(q: Tensor, kv: Tensor, valid: Tensor, indices: Tensor, sink: Tensor, scale: float, d_v: int) -> Any:
    keys = kv[indices.clamp(0, len(kv) - 1).long()]
    scores = (scale * torch.einsum("shd,sid->shi", q, keys)).masked_fill(~valid[:, None], -math.inf)
    with_sink = torch.cat([scores, sink[None, :, None].expand(len(q), -1, 1)], -1)
    probabilities = with_sink.softmax(-1)[..., :-1].nan_to_num(0.0)  # NaN if there is no key and no sink
    return torch.einsum("shi,sid->shd", probabilities, keys[..., :d_v]), scores.logsumexp(-1)


def attention_gradients(
    q: Tensor, kv: Tensor, valid: Tensor, indices: Tensor, sink: Tensor, scale: float, out: Tensor, d_out: Tensor
) -> list[Tensor]:
    """Gradients of q, kv and the sink, from the rounded forward result, which the backward reads."""
    table = indices.clamp(0, len(kv) - 1).long()
    keys, d_v = kv[table], out.shape[2]
    scores = (scale * torch.einsum("shd,sid->shi", q, keys)).masked_fill(~valid[:, None], -math.inf)
    total = torch.logaddexp(scores.logsumexp(-1), sink)
    p, delta = (scores - total[..., None]).exp(), (out * d_out).sum(-1)
    d_scores = p * (torch.einsum("shd,sid->shi", d_out, keys[..., :d_v]) - delta[..., None]) * scale
    d_keys = torch.einsum("shi,shd->sid", d_scores, q)
    d_keys[..., :d_v] += torch.einsum("shi,shd->sid", p, d_out)
    d_kv = torch.zeros_like(kv).index_add_(0, table.flatten(), d_keys.flatten(0, 1))
    return [torch.einsum("shi,sid->shd", d_scores, keys), d_kv, -((sink - total).exp() * delta).sum(0)]


@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("scale", [None, 0.4])
@DTYPES
def test_gradients_of_sparse_attention(dtype: torch.dtype, scale: float | None, with_lengths: bool) -> None:
    s_q, s_kv, h, d, d_v, topk = 7, 11, 4, 16, 12, 6
    q, kv = random(s_q, h, d, dtype=dtype), random(s_kv, d, dtype=dtype)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    indices = torch.randint(-1, s_kv, (s_q, topk), dtype=torch.int32)
    indices[3] = -1
    lengths = torch.randint(0, topk + 1, (s_q,), dtype=torch.int32) if with_lengths else None
    valid = entries(indices[None], None if lengths is None else lengths[None])[0]
    exact = [x.double() for x in (q, kv)]
    out, lse = attention(*exact, valid, indices, sink.double(), scale or 0.25, d_v)
    out, d_out = out.to(dtype), torch.randn(s_q, h, d_v).to(dtype)
    wanted = attention_gradients(*exact, valid, indices, sink.double(), scale or 0.25, out.double(), d_out.double())
    call = (q, kv, out, d_out, lse.float(), sink, indices)
    result = DSA.sparse_attention_backward_wrapper(*call, softmax_scale=scale, topk_length=lengths, deterministic=True)
    assert list(result.keys()) == ["dq", "dkv", "d_sink"]
    for gradient, other, kind in zip(result, wanted, (dtype, dtype, torch.float32), strict=True):
        assert gradient.dtype == kind
        assert norm_error(gradient, other) <= TOLERANCES[dtype]
    dq, dkv = strided(s_q, h, d).to(dtype), torch.empty(s_kv, d)
    given = DSA.sparse_attention_backward_wrapper(*call, scale, lengths, dq, dkv, q_cluster_mode="adaptive_pair")
    assert given["dq"] is dq and given["dkv"] is dkv
    assert norm_error(dkv, wanted[1]) <= TOLERANCES[dtype] and norm_error(dq, wanted[0]) <= TOLERANCES[dtype]


@pytest.mark.parametrize("with_sink", [False, True])
def test_sparse_attention_forward_and_differentiable(with_sink: bool) -> None:
    q, kv = random(5, 4, 576, dtype=torch.bfloat16), random(9, 576, dtype=torch.bfloat16)
    indices = torch.randint(-1, 9, (5, 6), dtype=torch.int32)
    indices[:, 0] = 2
    sink = torch.randn(4) if with_sink else None
    logit = torch.full((4,), -math.inf) if sink is None else sink
    leaves = [q.requires_grad_(), kv.requires_grad_(), *([] if sink is None else [sink.requires_grad_()])]
    exact = [x.detach().double().requires_grad_() for x in (q, kv, logit)]
    expected, lse = attention(exact[0], exact[1], indices >= 0, indices, exact[2], 1 / 24, 512)
    result = DSA.sparse_attention(q, kv, indices, sink)
    assert list(result.keys()) == ["out", "max_logits", "lse"]
    assert not result["max_logits"].requires_grad and not result["lse"].requires_grad
    assert norm_error(result["out"].detach(), expected.detach()) <= 4e-3
    assert norm_error(result["lse"], lse.detach()) <= 1e-5
    d_out = torch.randn(5, 4, 512).bfloat16()
    wanted = torch.autograd.grad(expected, exact[: len(leaves)], d_out.double())
    mine = torch.autograd.grad(result["out"], leaves, d_out)
    for gradient, other in zip(mine[:2], wanted[:2], strict=True):
        assert norm_error(gradient, other) <= 8e-3
    if sink is not None:  # −Σ_s p_sink Σ_i d_out · out may cancel: out is rounded to bf16, by 2^-9 at most
        p_sink = 1 / (1 + (exact[2] - lse).neg().exp())
        rounding = (p_sink * (d_out * expected).abs().sum(-1)).sum(0).detach() * 2**-9
        assert ((mine[2] - wanted[2]).abs() <= 1e-4 * wanted[2].abs() + rounding).all()
    forward = DSA.sparse_attention_forward_wrapper(q, kv, indices, attn_sink=sink, softmax_scale=1 / 24)
    out, max_logits, logs, lse_indexer = forward
    assert lse_indexer is None and not out.requires_grad and torch.equal(out, result["out"])
    assert torch.equal(logs, result["lse"]) and torch.equal(max_logits, result["max_logits"])


def test_nothing_to_do() -> None:
    q, k, w = torch.zeros(2, 0, 3, 16), torch.zeros(2, 5, 1, 16), torch.zeros(2, 0, 3)
    assert DSA.indexer_forward_wrapper(q, k, w)["scores"].shape == (2, 0, 5)
    assert DSA.indexer_forward_wrapper(q[:0], k[:0], w[:0])["scores"].shape == (0, 0, 5)
    cu = torch.zeros(3, dtype=torch.int32)
    empty = DSA.indexer_forward_wrapper(q[0], k[0, :0], w[0], cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert empty["scores"].shape == (0, 0)
    assert DSA.dense_attn_score_recompute_wrapper(q, k, w, 1.0)["out"].shape == (2, 0, 5)
    scores = torch.zeros(2, 0, 4)
    gradients = DSA.indexer_backward_wrapper(q, w, k[:, :, 0], scores, scores.clone(), scores.int(), 1.0)
    assert gradients["d_index_k"].eq(0).all()


class Handle:
    """An object with a number, as `cuda.bindings.driver.CUstream`."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __int__(self) -> int:
        return self.number


@pytest.mark.parametrize("number", [0, 1])
def test_the_default_stream_is_no_external_one(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """PyTorch before 2.13 makes a new stream of ExternalStream(0), and this stream does not wait for the default
    one.
    """
    default, refused = object(), lambda *_, **__: pytest.fail("the default stream was taken for another")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "ExternalStream", refused)
    assert _results._torch_stream(Handle(number), torch.device("cuda")) is default


def test_a_stream_of_its_own_and_each_thread_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    device = torch.device("cuda", 1)
    assert _results._torch_stream(Handle(77), device) == (77, device)
    with pytest.raises(ValueError, match="stream must be the handle of one stream; got 2"):
        _results._torch_stream(2, device)


def test_host_tensors_have_no_stream() -> None:
    q, k, w = random(1, 4, 3, 16), random(1, 5, 1, 16), random(1, 4, 3)
    with_stream = DSA.indexer_forward_wrapper(q, k, w, stream=Handle(77))["scores"]
    assert torch.equal(with_stream, DSA.indexer_forward_wrapper(q, k, w)["scores"])


def test_results_are_found_by_name_and_by_number_and_unpack() -> None:
    result = TupleDict(a=1, b=2)
    first, second = result
    assert (first, second) == (1, 2) and result["b"] == result[1] == 2 and result == {"a": 1, "b": 2}
