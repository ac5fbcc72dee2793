"""hopwell.compat.xtuner: the formulas of xtuner's protocol, and that `install` reaches its table of backends."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hopwell.compat import xtuner
from torch import Tensor

pytestmark = pytest.mark.usefixtures("torch_seed")


def ranges(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Each query of a pack sees its document's keys up to its own."""
    start = torch.repeat_interleave(
        torch.tensor([sum(lengths[:i]) for i in range(len(lengths))]), torch.tensor(lengths)
    )
    return start, torch.arange(1, sum(lengths) + 1)


def test_attention_and_gradients() -> None:
    s, heads, groups, d, d_v = 7, 4, 2, 24, 16
    q, kv = torch.randn(s, heads, d, requires_grad=True), torch.randn(9, groups, d, requires_grad=True)
    indices = torch.stack([torch.randperm(9)[:5] for _ in range(s * groups)]).view(s, groups, 5)
    indices[:, :, 3] = -1
    result = xtuner.sparse_mla(q, kv, indices, None, d_v)
    weight = torch.randn(s, heads, d_v)
    got = torch.autograd.grad((result.raw_output * weight).sum(), (q, kv))
    scores, values = torch.full((s, heads, 9), -torch.inf).double(), torch.zeros(s, heads, 9, d_v).double()
    for i in range(s):
        for h in range(heads):
            own = indices[i, h // 2][indices[i, h // 2] >= 0]
            scores[i, h, own] = kv[own, h // 2].double() @ q[i, h].double() / d**0.5
            values[i, h] = kv[:, h // 2, :d_v].double()
    exact = torch.einsum("shk,shkv->shv", scores.softmax(-1), values)
    torch.testing.assert_close(result.raw_output.double(), exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.softmax_lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    for one, other in zip(got, torch.autograd.grad((exact * weight).sum(), (q, kv)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_selection_in_a_pack() -> None:
    lengths, h, d = [5, 1, 8], 3, 16
    q, k, weights = torch.randn(1, 14, h, d), torch.randn(1, 14, d), torch.randn(1, 14, h)
    context = SimpleNamespace(packed_causal_query_ranges=lambda s, device: ranges(lengths))
    selected = xtuner.dsa_topk_indices(q, k, weights, context, index_head_dim=d, index_topk=4)
    assert selected.shape == (14, 1, 4) and selected.dtype == torch.int32
    scores = torch.einsum("sht,sh->st", torch.einsum("shd,td->sht", q[0], k[0]).relu(), weights[0])
    for i, (start, end) in enumerate(zip(*ranges(lengths), strict=True)):
        best = scores[i, start:end].argsort(descending=True, stable=True)[:4] + start  # of equal scores the smaller key
        assert sorted(selected[i, 0][selected[i, 0] >= 0].tolist()) == sorted(best.tolist())
    few = xtuner.dsa_topk_indices(q, k, weights, context, index_head_dim=d, index_topk=99)
    assert few.shape == (14, 1, 14)


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("xtuner", "xtuner.v1", "xtuner.v1.ops", "xtuner.v1.ops.sparse_mla"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    xtuner.install()
    backends = sys.modules["xtuner.v1.ops.sparse_mla"]
    assert backends.torch_sparse_mla is xtuner.sparse_mla
    assert backends.torch_dsa_topk_indices is xtuner.dsa_topk_indices
