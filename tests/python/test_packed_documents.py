"""Packed documents in PyTorch: key ranges, and calls with them, compared with a loop over the documents."""

import itertools
from typing import Any

import pytest
import torch
from hopwell import torch as hw
from support import norm_error
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.usefixtures("torch_seed")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_training_step_of_packed_documents_equals_a_loop_over_them(dtype: torch.dtype) -> None:
    """Index rows contain keys of any document. The ranges mask keys of other documents and keys after the query's own
    key.

    Results of one query have the same bits. The gradients of kv and the sink are sums, whose order may differ.
    """
    lengths = [5, 0, 1, 40, 0, 23]
    s, cuts = sum(lengths), [0, *itertools.accumulate(lengths)]
    q, kv, sink = torch.randn(s, 5, 20).to(dtype), torch.randn(s, 20).to(dtype), torch.randn(5)
    indices, d_out = torch.randint(-3, s + 3, (s, 50), dtype=torch.int32), torch.randn(s, 5, 12).to(dtype)

    def step(here: slice, indices: Tensor, **masks: Any) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q[here], kv[here], sink)]
        forward = hw.sparse_mla(leaves[0], leaves[1], indices, 0.5, 12, attn_sink=leaves[2], **masks)
        attn = hw.attention_distribution(leaves[0], leaves[1], indices, forward[2], 0.5, **masks)
        return *(x.detach() for x in forward), attn, *torch.autograd.grad(forward[0], leaves, d_out[here])

    k_start, k_end = hw.key_ranges(torch.tensor(cuts, dtype=torch.int32))
    packed = step(slice(0, s), indices, k_start=k_start, k_end=k_end)
    alone = [
        step(slice(first, past), indices[first:past] - first, q_start=0) for first, past in itertools.pairwise(cuts)
    ]
    *of_queries, dkv, d_sink = (torch.cat(parts) for parts in zip(*alone, strict=True))
    names = ("out", "max_logits", "lse", "attn", "dq")
    for name, got, wanted in zip(names, packed, of_queries, strict=False):
        assert torch.equal(got, wanted), name
    assert packed[3].any(dim=1).sum() > s / 2
    rounding = 2**-20 if dtype == torch.float32 else 2**-8
    assert norm_error(packed[5], dkv) <= rounding
    assert norm_error(packed[6], d_sink.view(len(lengths), 5).sum(0)) <= 2**-20
    without = step(slice(0, s), indices)
    assert not torch.equal(packed[0], without[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("of_queries", "of_keys"),
    [
        ([3, 1, 4], None),
        ([0, 0, 3, 0, 2, 0], None),
        ([0], None),
        ([], None),
        ([2, 0, 3, 1], [2, 5, 7, 1]),
        ([3, 2, 0], [1, 0, 4]),
    ],
)
def test_key_ranges(of_queries: list[int], of_keys: list[int] | None, causal: bool, dtype: torch.dtype) -> None:
    """The second list has documents with fewer keys than queries; their first queries see no key."""
    expected: list[tuple[int, int]] = []
    first = 0
    for queries, keys in zip(of_queries, of_keys or of_queries, strict=True):
        expected += [(first, first + (keys - queries + i + 1 if causal else keys)) for i in range(queries)]
        first += keys
    offsets = [
        None if lengths is None else torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)
        for lengths in (of_queries, of_keys)
    ]
    for s_q in (None, len(expected), len(expected) + 3, max(len(expected) - 2, 0)):
        wanted = (expected + 3 * [(0, 0)])[: len(expected) if s_q is None else s_q]
        for given, column in zip(hw.key_ranges(*offsets, causal=causal, s_q=s_q), (0, 1), strict=True):
            assert given.dtype == torch.int32
            assert given.tolist() == [bounds[column] for bounds in wanted]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([torch.zeros(3)], "cu_seqlens_q must be int32 or int64"),
        ([torch.zeros(2, 3, dtype=torch.int32)], "cu_seqlens_q must be int32 or int64"),
        ([torch.zeros(0, dtype=torch.int32)], "cu_seqlens_q must be int32 or int64"),
        ([torch.zeros(3, dtype=torch.int32), torch.zeros(3)], "cu_seqlens_k must be int32 or int64"),
        ([torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)], r"cu_seqlens_k must be \[3\]"),
        ([[0, 3]], r"cu_seqlens_q must be int32 or int64 \[documents \+ 1\]; got \[0, 3\]"),
        ([torch.tensor([0, 3]), (0, 3)], r"cu_seqlens_k must be int32 or int64 \[documents \+ 1\]; got \(0, 3\)"),
        ([torch.tensor([0, 3]), torch.tensor([0, 3], device="meta")], r"cu_seqlens_k must be \[2\] on cpu .* on meta"),
    ],
)
def test_key_ranges_of_bad_arguments(offsets: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=f"key_ranges: {message}"):
        hw.key_ranges(*offsets)


def test_key_ranges_of_fewer_than_no_queries() -> None:
    with pytest.raises(ValueError, match="key_ranges: s_q must be at least 0; got -1"):
        hw.key_ranges(torch.tensor([0, 3]), s_q=-1)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_selection_from_packed_documents_equals_a_loop_over_them(dtype: torch.dtype, exact: bool) -> None:
    """The results have the same bits; exact scores also have ties."""
    lengths = [5, 0, 1, 400, 0, 23]
    s, cuts = sum(lengths), [0, *itertools.accumulate(lengths)]
    shapes = ((s, 4, 32), (s, 32), (s, 4))
    q, k, w = ((torch.randint(-2, 3, shape) if exact else torch.randn(shape)).to(dtype) for shape in shapes)
    k_start, k_end = hw.key_ranges(torch.tensor(cuts))
    indices, scores = hw.lightning_indexer(q, k, w, 9, k_start=k_start, k_end=k_end)
    for first, past in itertools.pairwise(cuts):
        here = slice(first, past)
        alone, alone_scores = hw.lightning_indexer(q[here], k[here], w[here], 9, q_start=0)
        assert torch.equal(indices[here], torch.where(alone < 0, alone, alone + first))
        assert torch.equal(scores[here], alone_scores)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_of_packed_documents_equals_a_loop_over_them(dtype: torch.dtype) -> None:
    """Index rows contain keys of any document. The gradients that belong to one query have the same bits.

    The gradients of keys do too, because deterministic sums over one document's queries keep their order.
    """
    lengths = [5, 0, 1, 40, 0, 23]
    s, cuts = sum(lengths), [0, *itertools.accumulate(lengths)]
    tensors = [torch.randn(shape).to(dtype) for shape in ((s, 3, 16), (s, 16))] + [torch.randn(s, 3)]
    indices, target = torch.randint(-3, s + 3, (s, 50), dtype=torch.int32), torch.rand(s, 50)

    def step(here: slice, indices: Tensor, **ranges: Tensor) -> tuple[Tensor, ...]:
        leaves = [x[here].clone().requires_grad_() for x in tensors]
        loss = hw.indexer_loss(*leaves, indices, target[here], deterministic=True, **ranges)
        return loss.detach()[None], *torch.autograd.grad(loss, leaves)

    k_start, k_end = hw.key_ranges(torch.tensor(cuts, dtype=torch.int32), causal=False)
    losses, *gradients = step(slice(0, s), indices, k_start=k_start, k_end=k_end)
    alone = [step(slice(first, past), indices[first:past] - first) for first, past in itertools.pairwise(cuts)]
    alone_losses, *alone_gradients = (torch.cat(parts) for parts in zip(*alone, strict=True))
    torch.testing.assert_close(losses[0], alone_losses.sum(), rtol=1e-6, atol=0)
    for got, wanted in zip(gradients, alone_gradients, strict=True):
        assert torch.equal(got, wanted)
    assert gradients[0].any(dim=-1).any(dim=-1).sum() > s / 2
