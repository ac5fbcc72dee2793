"""`hopwell.compat.tilelang` against plain PyTorch in float64, called as slime's and Miles' plug-ins call it."""

import math
from typing import Any

import pytest
import torch
from hopwell.compat.tilelang import (
    SparseMLA,
    batched_indexer_fwd,
    generate_varlen_mask_params,
    lighting_indexer,
    sparse_attn_tilelang,
    sparse_mqa_fwd_interface,
    sparse_mqa_target_fwd_interface,
    v4_lighting_indexer,
)
from torch import Tensor
from torch_inputs import RESTRIDES, Restride, restrided

CU_SEQLENS = torch.tensor([0, 1, 9, 9, 24], dtype=torch.int32)


def norm_error(x: Tensor, expected: Tensor) -> float:
    return float(((x.double() - expected).norm() / expected.norm()).detach())


def index_inputs(dtype: torch.dtype) -> list[Tensor]:
    s = int(CU_SEQLENS[-1])
    q = (torch.randn(s, 3, 16) * 4).round() / 4  # q·k is exact, so that its sign is certain
    k = (torch.randn(s, 16) * 4).round() / 4
    return [q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), torch.randn(s, 3).requires_grad_()]


def all_scores(q: Tensor, k: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> Tensor:
    scores = torch.einsum("sjt,sj->st", torch.einsum("sjd,td->sjt", q, k).relu(), weights)
    keys = torch.arange(len(k))
    return scores.masked_fill((keys < start[:, None]) | (keys >= end[:, None]), -torch.inf)


def test_the_key_ranges_of_a_pack() -> None:
    start, end = generate_varlen_mask_params(CU_SEQLENS)
    assert start.tolist() == [0] + [1] * 8 + [9] * 15
    assert end.tolist() == list(range(1, 25))


@pytest.mark.parametrize("topk", [4, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [False, True])
def test_indexer_and_its_gradients(dtype: torch.dtype, topk: int, given: bool) -> None:
    leaves, (start, end) = index_inputs(dtype), generate_varlen_mask_params(CU_SEQLENS)
    chosen = torch.randint(-1, 24, (24, topk), dtype=torch.int32) if given else None
    q, k, weights = leaves
    scores, indices = lighting_indexer(q, k, weights.unsqueeze(-1), start, end, topk, chosen)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = all_scores(*exact, start, end)
    if given:
        assert indices is chosen
    else:
        best = expected.detach().topk(min(topk, 24)).values  # either of two keys with equal scores may be chosen
        for row in range(24):
            taken = indices[row][indices[row] >= 0].long()
            assert len(taken) == len(taken.unique()) == int((best[row] > -torch.inf).sum())
            torch.testing.assert_close(
                expected[row, taken].sort(descending=True).values.detach(), best[row, : len(taken)]
            )
    expected = expected.gather(1, indices.clamp(min=0).long()).masked_fill(indices < 0, -torch.inf)
    assert torch.equal(scores.isinf(), expected.isinf())
    finite = ~expected.isinf()
    torch.testing.assert_close(scores[finite].double(), expected[finite], rtol=1e-4, atol=1e-4)

    factors = torch.randn(24, topk)
    gradients = torch.autograd.grad((scores[finite] * factors[finite]).sum(), leaves)
    wanted = torch.autograd.grad((expected[finite] * factors[finite]).sum(), exact)
    for gradient, other, leaf in zip(gradients, wanted, leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        assert norm_error(gradient, other) <= (4e-3 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("given", [False, True])
def test_indexer_without_the_relu(given: bool) -> None:
    leaves, (start, end) = index_inputs(torch.bfloat16), generate_varlen_mask_params(CU_SEQLENS)
    chosen = torch.randint(-1, 24, (24, 5), dtype=torch.int32) if given else None
    q, k, weights = leaves
    scores, indices = lighting_indexer(q, k, weights, start, end, 5, chosen, use_relu=False)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    every = torch.einsum("sjt,sj->st", torch.einsum("sjd,td->sjt", *exact[:2]), exact[2])
    keys = torch.arange(24)
    every = every.masked_fill((keys < start[:, None]) | (keys >= end[:, None]), -torch.inf)
    if not given:
        best = every.detach().topk(5).values.sort(-1).values
        torch.testing.assert_close(scores.detach().sort(-1).values.double(), best, rtol=1e-4, atol=1e-4)
    expected = every.gather(1, indices.clamp(min=0).long()).masked_fill(indices < 0, -torch.inf)
    finite = ~expected.isinf()
    assert torch.equal(finite, ~scores.isinf())
    factors = torch.randn(24, 5)
    gradients = torch.autograd.grad((scores[finite] * factors[finite]).sum(), leaves)
    wanted = torch.autograd.grad((expected[finite] * factors[finite]).sum(), exact)
    for gradient, other in zip(gradients, wanted, strict=True):
        assert norm_error(gradient, other) <= 4e-3


@pytest.mark.parametrize("use_relu", [False, True])
def test_indexer_arguments_that_do_not_fit(use_relu: bool) -> None:
    """The call raises at once, not later in its backward."""
    leaves, (start, end) = index_inputs(torch.float32), generate_varlen_mask_params(CU_SEQLENS)
    q, k, weights = leaves
    chosen = torch.zeros(24, 5, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"lighting_indexer: index_q must be \[s_q, h_index, d_index\]; got \[24, 16\]"
    ):
        lighting_indexer(q[:, 0], k, weights, start, end, 5, use_relu=use_relu)
    with pytest.raises(ValueError, match=r"lighting_indexer: weights must be \[s_q=24, h_index=3\]; got \[24, 2\]"):
        lighting_indexer(q, k, weights[:, :2], start, end, 5, use_relu=use_relu)
    for wrong in (chosen.long(), chosen[:7], chosen[None]):
        with pytest.raises(ValueError, match="indexer_scores: indices must be "):
            lighting_indexer(q, k, weights, start, end, 5, wrong, use_relu)
    for bounds in ((start[:1], end), (start, torch.zeros(30, dtype=torch.int32))):
        with pytest.raises(ValueError, match=r"indexer_scores: k_\w+ must be \[s_q=24\]"):
            lighting_indexer(q, k, weights, *bounds, 5, chosen, use_relu)


def test_miles_names_how_it_selects() -> None:
    leaves, (start, end) = index_inputs(torch.float32), generate_varlen_mask_params(CU_SEQLENS)
    plain = lighting_indexer(*leaves, start, end, 4)
    for backend in ("torch", "flashinfer"):  # Miles' bounds are int64
        named = lighting_indexer(*leaves, start.long(), end.long(), 4, topk_backend=backend)
        assert all(torch.equal(x, y) for x, y in zip(named, plain, strict=True))
    q, k, weights = leaves
    beyond = torch.full((24,), 2**32), torch.full((24,), 24)
    for more, all_keys in zip(*(lighting_indexer(*leaves, 0 * end, e, 4) for e in beyond), strict=True):
        assert torch.equal(more, all_keys)
    batch = q[:, None], k[:, None], weights[:, None], 0 * end
    assert torch.equal(*(batched_indexer_fwd(*batch, e) for e in beyond))
    with pytest.raises(ValueError, match="lighting_indexer: topk_backend must be torch or flashinfer; got sgl"):
        lighting_indexer(*leaves, start, end, 4, topk_backend="sgl")


@pytest.mark.parametrize(("ratio", "topk"), [(1, 4), (4, 3), (4, 100)])
def test_indexer_of_compressed_keys(ratio: int, topk: int) -> None:
    s, batch, s_kv = 13, 2, 13 // ratio
    q = ((torch.randn(s, batch, 3, 16) * 4).round() / 4).requires_grad_()
    k = ((torch.randn(s_kv, batch, 16) * 4).round() / 4).requires_grad_()
    weights = torch.randn(s, batch, 3).requires_grad_()
    end = torch.arange(1, s + 1) // ratio
    scores, indices = v4_lighting_indexer(q, k, weights, ratio, topk)
    assert scores.shape == indices.shape == (batch, s, min(topk, s_kv)) and indices.dtype == torch.int32
    every = batched_indexer_fwd(q, k, weights, torch.zeros(s), end)
    exact = [x.detach().double() for x in (q, k, weights)]
    parts = [all_scores(*(x[:, i] for x in exact), torch.zeros(s), end) for i in range(batch)]
    expected = torch.stack(parts)
    assert torch.equal(every.isinf(), expected.isinf())
    torch.testing.assert_close(
        every.double().nan_to_num(neginf=0.0), expected.nan_to_num(neginf=0.0), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(scores.detach(), every.topk(min(topk, s_kv)).values)
    tied = (scores.diff() == 0) & (indices[..., 1:] >= 0)
    assert (indices.diff() > 0)[tied].all()
    again = v4_lighting_indexer(q, k, weights, ratio, topk, indices)
    assert torch.equal(again[1], indices)
    torch.testing.assert_close(again[0].detach(), scores.detach())
    finite = ~scores.isinf()
    mine = torch.autograd.grad(scores[finite].sum(), (q, k, weights))
    other = torch.autograd.grad(again[0][finite].sum(), (q, k, weights))
    for x, y in zip(mine, other, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("given", [False, True])
def test_indexer_of_packed_compressed_keys(given: bool) -> None:
    """VeOmni's bounds: compared with a loop over the documents, each with its own compressed keys."""
    queries, keys, ratio, topk = [9, 1, 8], [2, 0, 2], 4, 2
    q, k, weights = torch.randn(18, 1, 3, 16), torch.randn(4, 1, 16), torch.randn(18, 1, 3)
    starts = torch.tensor([0, 2, 2]).repeat_interleave(torch.tensor(queries)).int()
    ends = starts + torch.cat([torch.arange(1, n + 1) // ratio for n in queries]).int()
    bounds = {"cu_seqlen_ks": starts, "cu_seqlen_ke": ends}
    chosen = v4_lighting_indexer(q, k, weights, ratio, topk, **bounds)[1] if given else None
    scores, indices = v4_lighting_indexer(q, k, weights, ratio, topk, chosen, **bounds)
    of_queries, of_keys = (x.split(lengths) for x, lengths in ((torch.arange(18), queries), (torch.arange(4), keys)))
    for rows, mine in zip(of_queries, of_keys, strict=True):
        alone, local = v4_lighting_indexer(q[rows], k[mine], weights[rows], ratio, topk)
        first = int(mine[0]) if len(mine) else 0
        width = local.shape[2]
        assert torch.equal(indices[:, rows, :width], torch.where(local < 0, -1, local + first))
        torch.testing.assert_close(scores[:, rows, :width], alone)
        assert indices[:, rows, width:].eq(-1).all()
    with pytest.raises(ValueError, match="v4_lighting_indexer: cu_seqlen_ks and cu_seqlen_ke must be given together"):
        v4_lighting_indexer(q, k, weights, ratio, topk, cu_seqlen_ks=starts)
    with pytest.raises(ValueError, match=r"k_start must be int32 \[s_q=18\]"):
        v4_lighting_indexer(q, k, weights, ratio, topk, cu_seqlen_ks=starts[:1], cu_seqlen_ke=ends)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_the_target_of_some_entries(scale: float | None) -> None:
    """The target is a softmax over all entries and the sink, which VeOmni's indexer learns from."""
    q, kv, sink = (torch.randn(shape).requires_grad_() for shape in ((2, 5, 3, 16), (2, 7, 16), (3,)))
    indices = torch.randint(-1, 7, (2, 5, 6), dtype=torch.int32)
    indices[1, 2] = -1
    out, lse = sparse_attn_tilelang(q, kv, sink, indices, scale, return_lse=True)
    assert torch.equal(out, sparse_attn_tilelang(q, kv, sink, indices, scale))
    assert out.requires_grad and not lse.requires_grad
    assert torch.equal(lse, sparse_mqa_fwd_interface(q, kv, sink, indices, scale)[1])
    some = indices[:, :, 2:]
    target = sparse_mqa_target_fwd_interface(q, kv, some, lse, scale)
    keys = torch.stack([x[entries.clamp(min=0).long()] for x, entries in zip(kv.double(), some, strict=True)])
    scores = (0.25 if scale is None else scale) * torch.einsum("bshd,bsid->bshi", q.double(), keys)
    expected = (scores - lse[..., None] * math.log(2)).exp().masked_fill((some < 0)[:, :, None], 0.0).sum(2)
    assert not target.requires_grad
    torch.testing.assert_close(target.double(), expected.detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"sparse_mqa_target_fwd_interface: lse must be \[b=2, s=5, heads=3\]; got"):
        sparse_mqa_target_fwd_interface(q, kv, some, lse[:, :, 0], scale)


def test_attention_of_a_batch() -> None:
    q, kv = torch.randn(2, 5, 4, 20), torch.randn(2, 7, 1, 20)
    indices = torch.randint(-1, 7, (2, 5, 1, 3), dtype=torch.int32)
    out, lse = SparseMLA.apply(q, kv, indices, 0.3, 12)
    for i in range(2):
        one = SparseMLA.apply(q[i], kv[i], indices[i], 0.3, 12)
        assert torch.equal(out[i], one[0]) and torch.equal(lse[i], one[1])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_its_gradients(dtype: torch.dtype, groups: int) -> None:
    q = torch.randn(9, 4, 20).to(dtype).requires_grad_()
    kv = torch.randn(11, groups, 20).to(dtype).requires_grad_()
    indices = torch.randint(-1, 11, (9, groups, 6), dtype=torch.int32)
    indices[:, :, 0] = 3
    out, lse = SparseMLA.apply(q, kv, indices, 0.3, d_v=12)
    exact_q, exact_kv = (x.detach().double().requires_grad_() for x in (q, kv))
    keys = torch.stack([exact_kv[indices[:, g].clamp(min=0).long(), g] for g in range(groups)], 1)
    scores = 0.3 * torch.einsum("sghd,sgid->sghi", exact_q.unflatten(1, (groups, -1)), keys)
    scores = scores.masked_fill((indices < 0)[:, :, None], -torch.inf)
    expected = torch.einsum("sghi,sgid->sghd", scores.softmax(-1), keys[..., :12]).flatten(1, 2)
    tolerance = 4e-3 if dtype == torch.bfloat16 else 1e-4
    assert out.dtype == dtype and not lse.requires_grad
    assert norm_error(out, expected) <= tolerance
    torch.testing.assert_close(
        lse.double(), (scores.logsumexp(-1) / math.log(2)).flatten(1, 2), rtol=1e-5, atol=1e-5, check_dtype=False
    )
    d_out = torch.randn(out.shape).to(dtype)
    wanted = torch.autograd.grad(expected, (exact_q, exact_kv), d_out.double())
    for gradient, other in zip(torch.autograd.grad(out, (q, kv), d_out), wanted, strict=True):
        assert gradient.dtype == dtype
        assert norm_error(gradient, other) <= 2 * tolerance


def attention_with_sinks(q: Tensor, kv: Tensor, sink: Tensor, indices: Tensor, scale: float) -> Tensor:
    """The reference in Miles' tests: the sink is a term of the denominator, −1 is an invalid entry."""
    keys = torch.stack([rows[entries.clamp(min=0).long()] for rows, entries in zip(kv, indices, strict=True)])
    scores = scale * torch.einsum("bshd,bsid->bshi", q, keys)
    scores = scores.masked_fill((indices < 0)[:, :, None], -math.inf)
    with_sink = torch.cat([scores, sink.view(1, 1, -1, 1).expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bshi,bsid->bshd", with_sink.softmax(-1)[..., :-1], keys)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_sinks_and_its_gradients(dtype: torch.dtype, scale: float | None, batch: int) -> None:
    q = torch.randn(batch, 7, 4, 16).to(dtype).requires_grad_()
    kv = torch.randn(batch, 11, 16).to(dtype).requires_grad_()
    sink = torch.tensor([0.0, 2.0, -3.0, 0.5]).requires_grad_()
    indices = torch.randint(-1, 11, (batch, 7, 6), dtype=torch.int32)
    indices[:, 2] = -1  # a query without keys: the sink gets all attention
    out = sparse_attn_tilelang(q, kv, sink, indices, scale)
    exact = [x.detach().double().requires_grad_() for x in (q, kv, sink)]
    expected = attention_with_sinks(*exact, indices, 0.25 if scale is None else scale)
    tolerance = 4e-3 if dtype == torch.bfloat16 else 1e-4
    assert out.dtype == dtype and out.shape == q.shape and out[:, 2].eq(0).all()
    assert norm_error(out, expected) <= tolerance
    again, lse = sparse_mqa_fwd_interface(q, kv, sink, indices, scale)
    assert torch.equal(again, out) and not again.requires_grad
    assert lse.shape == (batch, 7, 4)
    torch.testing.assert_close(lse[:, 2], (sink.detach() / math.log(2)).expand(batch, -1))
    keys = torch.stack([x[entries.clamp(min=0).long()] for x, entries in zip(exact[1], indices, strict=True)])
    scores = (0.25 if scale is None else scale) * torch.einsum("bshd,bsid->bshi", exact[0], keys)
    scores = scores.masked_fill((indices < 0)[:, :, None], -math.inf).logsumexp(-1).logaddexp(exact[2])
    torch.testing.assert_close(lse.double(), scores.detach() / math.log(2), rtol=1e-4, atol=1e-4)
    d_out = torch.randn(out.shape).to(dtype)
    wanted = torch.autograd.grad(expected, exact, d_out.double())
    gradients = torch.autograd.grad(out, (q, kv, sink), d_out)
    assert [x.dtype for x in gradients] == [dtype, dtype, torch.float32]
    for gradient, other in zip(gradients[:2], wanted[:2], strict=True):
        assert norm_error(gradient, other) <= 2 * tolerance
    # −Σ_s p_sink Σ_i d_out · out may cancel: out is rounded to bf16, by 2^-9 at most
    p_sink = (sink.detach() - lse * math.log(2)).exp()
    rounding = (p_sink * (d_out * expected.detach()).abs().sum(-1)).sum((0, 1)) * 2**-9
    assert (
        (gradients[2] - wanted[2]).abs() <= 1e-4 * wanted[2].abs() + 1e-5 + rounding * (dtype == torch.bfloat16)
    ).all()


def test_attention_with_sinks_of_nothing() -> None:
    q, kv, sink = torch.randn(2, 0, 4, 16), torch.randn(2, 5, 16), torch.zeros(4)
    assert sparse_attn_tilelang(q, kv, sink, torch.zeros(2, 0, 3, dtype=torch.int32)).shape == q.shape
    assert sparse_attn_tilelang(q[:0], kv[:0], sink, torch.zeros(0, 0, 3, dtype=torch.int32)).shape == (0, 0, 4, 16)


@pytest.mark.parametrize("n", [0, 2])
def test_tensors_without_influence_get_gradients_of_zeros(n: int) -> None:
    """No sequences, or rows without a valid entry."""
    attention = [torch.randn(*shape).requires_grad_() for shape in ((n, 3, 4, 16), (n, 5, 16), (4,))]
    sparse_attn_tilelang(*attention, torch.full((n, 3, 6), -1, dtype=torch.int32)).sum().backward()
    heads = [torch.randn(*shape).requires_grad_() for shape in ((n, 3, 4, 16), (n, 5, 1, 16))]
    SparseMLA.apply(*heads, torch.full((n, 3, 1, 6), -1, dtype=torch.int32), 0.3, 16)[0].sum().backward()
    index = [torch.randn(*shape).requires_grad_() for shape in ((3, n, 4, 8), (5, n, 8), (3, n, 4))]
    bounds = torch.zeros(3, dtype=torch.int32)
    scores, _ = v4_lighting_indexer(*index, 4, 2, cu_seqlen_ks=bounds, cu_seqlen_ke=bounds)
    scores.masked_fill(scores == -math.inf, 0.0).sum().backward()
    for x in (*attention, *heads, *index):
        assert x.grad is not None and x.grad.shape == x.shape and x.grad.eq(0).all()


@pytest.mark.parametrize("restride", RESTRIDES)
def test_tensors_of_any_strides(restride: Restride) -> None:
    """Results and gradients have the bits of contiguous tensors."""
    entries = torch.randint(-1, 11, (2, 7, 6), dtype=torch.int32)
    q, kv, sink = (torch.randn(*shape).requires_grad_() for shape in ((2, 7, 4, 16), (2, 11, 16), (4,)))
    index = [torch.randn(*shape).requires_grad_() for shape in ((7, 2, 3, 8), (11, 2, 8), (7, 2, 3))]
    bounds = [torch.randint(*ends, (7,), dtype=torch.int32) for ends in ((0, 3), (6, 12))]
    of_one = [x.detach()[:, 0].requires_grad_() for x in index]
    groups, keys = entries.transpose(0, 1).contiguous(), torch.randn(11, 2, 16).requires_grad_()
    calls: list[tuple[Any, list[Tensor]]] = [
        (sparse_attn_tilelang, [q, kv, sink, entries]),
        (lambda *x: sparse_attn_tilelang(*x, None, True)[1].detach(), [q, kv, sink, entries]),
        (sparse_mqa_target_fwd_interface, [q, kv, entries, torch.rand(2, 7, 4)]),
        (lambda *x: SparseMLA.apply(*x, 0.3, 12)[0], [torch.randn(7, 4, 16).requires_grad_(), keys, groups]),
        (lambda *x: lighting_indexer(*x, 4)[0].exp(), [*of_one, *bounds]),
        (lambda *x: lighting_indexer(*x[:5], 6, x[5])[0].exp(), [*of_one, *bounds, entries[0]]),
        (lambda *x: v4_lighting_indexer(*x, 2, 3)[0].exp(), index),
        (lambda *x: batched_indexer_fwd(*x).exp(), [*index, *bounds]),
    ]
    for function, given in calls:
        results = []
        for tensors in (given, restrided(restride, *given)):
            out, learned = function(*tensors), [x for x in tensors if x.requires_grad]
            gradients = torch.autograd.grad(out.square().sum(), learned) if out.requires_grad else ()
            results.append([out, *gradients])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(7, 4, 16)}, r"q must be \[b, s, heads, d\]; got \[7, 4, 16\]"),
        ({"kv": torch.zeros(1, 11, 8)}, r"kv must be \[b=1, s_kv, d=16\]; got \[1, 11, 8\]"),
        ({"attn_sink": torch.zeros(3)}, r"attn_sink must be \[heads=4\]; got \[3\]"),
        (
            {"topk_idxs": torch.zeros(1, 6, 2, dtype=torch.int32)},
            r"topk_idxs must be \[b=1, s=7, topk\]; got \[1, 6, 2\]",
        ),
        ({"topk_idxs": torch.zeros(1, 7, 2)}, "indices must be int32"),
    ],
)
def test_wrong_arguments_of_attention_with_sinks(change: dict[str, Tensor], message: str) -> None:
    call = {
        "q": torch.zeros(1, 7, 4, 16),
        "kv": torch.zeros(1, 11, 16),
        "attn_sink": torch.zeros(4),
        "topk_idxs": torch.zeros(1, 7, 2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        sparse_attn_tilelang(**{**call, **change})


def test_shapes_of_compressed_keys_that_do_not_fit() -> None:
    q, k, weights, bounds = torch.zeros(5, 2, 3, 16), torch.zeros(4, 2, 16), torch.zeros(5, 2, 3), torch.zeros(5)
    with pytest.raises(ValueError, match=r"batched_indexer_fwd: k must be \[s_kv, b=2, d_index=16\]; got \[4, 1, 16\]"):
        batched_indexer_fwd(q, k[:, :1], weights, bounds, bounds)
    with pytest.raises(ValueError, match=r"batched_indexer_fwd: weights must be \[s=5, b=2, h_index=3\]"):
        batched_indexer_fwd(q, k, weights[1:], bounds, bounds)
    with pytest.raises(ValueError, match=r"v4_lighting_indexer: index_k must be \[s_kv, b=2, d_index=16\]"):
        v4_lighting_indexer(q, k[..., :8], weights, 4, 2)
    with pytest.raises(ValueError, match="v4_lighting_indexer: compress_ratio must be at least 1; got 0"):
        v4_lighting_indexer(q, k, weights, 0, 2)
    with pytest.raises(ValueError, match=r"v4_lighting_indexer: weights must be \[s=5, b=2, h_index=3\]; got \[5, 3\]"):
        v4_lighting_indexer(q, k, weights[:, 0], 4, 2)
    for b in (1, 3):
        with pytest.raises(ValueError, match=r"v4_lighting_indexer: topk_indices must be \[b=2, s=5, topk\]"):
            v4_lighting_indexer(q, k, weights, 4, 2, torch.zeros(b, 5, 2, dtype=torch.int32))


def test_no_sequences_give_empty_results() -> None:
    scores, indices = v4_lighting_indexer(torch.zeros(5, 0, 3, 16), torch.zeros(4, 0, 16), torch.zeros(5, 0, 3), 4, 9)
    assert scores.shape == indices.shape == (0, 5, 4)
    assert scores.dtype == torch.float32 and indices.dtype == torch.int32
    none = torch.zeros(0, 5, 2, 4, dtype=torch.int32)
    out, lse = SparseMLA.apply(torch.zeros(0, 5, 4, 16), torch.zeros(0, 7, 2, 16), none, 1.0, 8)
    assert out.shape == (0, 5, 4, 8) and lse.shape == (0, 5, 4)


def test_shapes_that_do_not_fit() -> None:
    q, kv, indices = torch.randn(5, 3, 16), torch.randn(7, 2, 16), torch.zeros(5, 2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"SparseMLA.apply: kv_group must divide the heads of q"):
        SparseMLA.apply(q, kv, indices, 1.0, 8)
    with pytest.raises(ValueError, match=r"SparseMLA.apply: q must be \[s_q, heads, d_qk\]"):
        SparseMLA.apply(q[None], kv, indices, 1.0, 8)
