"""merge_partials against float64 over all keys at once, and its special values."""

import math
from typing import Any

import pytest
import torch
from hopwell.torch import merge_partials, sparse_mla_decode
from torch import Tensor

pytestmark = pytest.mark.usefixtures("torch_seed")


def random_parts(n: int, *shape: int, d_v: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, *shape, d_v), 10 * torch.randn(n, *shape)


def expected(outs: Tensor, lses: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Element by element, in float64, with Python's numbers."""
    out, lse = torch.zeros(outs.shape[1:], dtype=torch.float64), torch.full(lses.shape[1:], math.inf).double()
    for flat in range(lse.numel()):
        place = torch.unravel_index(torch.tensor(flat), lse.shape)
        terms = [(lses[r][place].item(), outs[r][place].double()) for r in range(len(outs))]
        terms = [(value, part) for value, part in terms if value != math.inf]
        if not terms:
            continue
        most = max(value for value, _ in terms)
        total = most + math.log(math.fsum(math.exp(value - most) for value, _ in terms))
        factor = 1.0 if sink is None else 1 / (1 + math.exp(min(sink[place[-1]].item() - total, 700)))
        lse[place] = total
        out[place] = factor * sum((math.exp(value - total) * part for value, part in terms), torch.zeros(()))
    return out, lse


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("sink", [False, True])
def test_agrees_with_float64(n: int, sink: bool) -> None:
    outs, lses = random_parts(n, 3, 2, 5, d_v=7)
    lses[torch.rand(lses.shape) < 0.3] = math.inf
    lses[:, 1, 0] = math.inf  # a query without a key in any part
    outs[lses == math.inf] = math.nan  # unread
    attn_sink = torch.tensor([0.5, -math.inf, math.inf, -3.0, 40.0]) if sink else None
    out, lse = merge_partials(outs, lses, attn_sink)
    right = expected(outs, lses, attn_sink)
    torch.testing.assert_close(out.double(), right[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), right[1], atol=1e-5, rtol=1e-6)
    assert out[1, 0].eq(0).all() and lse[1, 0].eq(math.inf).all()
    listed = merge_partials(list(outs), tuple(lses), attn_sink)
    assert torch.equal(listed[0], out) and torch.equal(listed[1], lse)


def test_ranks_with_parts_of_the_keys_give_the_whole() -> None:
    """Decode context parallelism: rank r holds every third page."""
    h_q, d_qk, block, sink = 4, 96, 8, torch.randn(4)
    cache, q = torch.randn(12, block, d_qk), torch.randn(5, 2, h_q, d_qk)
    indices = torch.randint(-3, 96, (5, 2, 40), dtype=torch.int32)
    indices[0] = 5  # all keys of one rank
    whole = sparse_mla_decode(q, cache, indices, 0.1, 64, attn_sink=sink)
    owner = indices // block % 3
    parts = [sparse_mla_decode(q, cache, torch.where(owner == r, indices, -1), 0.1, 64) for r in range(3)]
    out, lse = merge_partials([p[0] for p in parts], [p[1] for p in parts], sink)
    torch.testing.assert_close(out, whole[0], atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(lse, whole[1], atol=2e-6, rtol=2e-6)


def test_large_logarithms_and_nan() -> None:
    outs, lses = torch.ones(2, 4, 3), torch.tensor([[1e4, -1e4, math.nan, -math.inf], [1e4, -1e4 - 50, 0, 2]])
    out, lse = merge_partials(outs, lses)
    torch.testing.assert_close(lse[:2], torch.tensor([1e4 + math.log(2), -1e4]))
    torch.testing.assert_close(out[:2], torch.ones(2, 3))
    assert lse[2].isnan() and out[2].isnan().all()
    assert lse[3] == 2 and out[3].eq(1).all()


def test_dtype_of_out() -> None:
    outs, lses = random_parts(3, 2, 2, d_v=4)
    out, _ = merge_partials(outs.bfloat16(), lses)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outs": torch.zeros(0, 2, 4)}, "outs must be at least one part; got 0"),
        ({"lses": torch.zeros(2, 2)}, "lses must be 3 parts as outs has; got 2"),
        ({"lses": torch.zeros(3, 4)}, r"lses\[0\] must be \[2\]; got \[4\]"),
        ({"lses": torch.zeros(3, 2).double()}, r"lses\[0\] must be float32; got torch.float64 \[2\]"),
        ({"outs": torch.zeros(3, 2, 4).int()}, r"outs\[0\] must be of floating-point numbers; got torch.int32"),
        ({"attn_sink": torch.zeros(3)}, r"attn_sink must be float32 \[2\]; got torch.float32 \[3\]"),
        ({"outs": torch.zeros(3, 2)}, r"outs must be \[n, …, h, d_v\]; got torch.float32 \[2\]"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"outs": torch.zeros(3, 2, 4), "lses": torch.zeros(3, 2), **change}
    with pytest.raises(ValueError, match="^merge_partials: " + message):
        merge_partials(**arguments)
