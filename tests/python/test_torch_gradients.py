"""hopwell.torch: gradients against float64 autograd of the definitions."""

from collections.abc import Callable
from typing import Any

import hopwell
import numpy as np
import pytest
import torch
from hopwell import reference
from hopwell import torch as hw
from support import norm_error
from torch import Tensor
from torch_inputs import (
    DTYPES,
    GRADIENT_TOLERANCE,
    assert_gradients,
    index_leaves,
    indexer_inputs,
    indexer_key_ranges,
    sparse_inputs,
)

pytestmark = pytest.mark.usefixtures("torch_seed", "numbers_only")


MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "sink": lambda: {"attn_sink": torch.randn(5)},
    "topk_length": lambda: {"topk_length": torch.randint(-1, 16, (9,), dtype=torch.int32)},
    "q_positions": lambda: {"q_positions": torch.randint(-1, 20, (9,), dtype=torch.int32)},
    "key ranges": lambda: {
        "k_start": torch.randint(-2, 6, (9,), dtype=torch.int32),
        "k_end": torch.randint(3, 20, (9,), dtype=torch.int32),
    },
    "key ranges, q_start": lambda: {
        "k_start": torch.arange(8, -1, -1, dtype=torch.int32),
        "k_end": torch.full((9,), 14, dtype=torch.int32),
        "q_start": 7,
        "kv_stride": 2,
    },
    "q_start, kv_stride": lambda: {"q_start": 3, "kv_stride": 2, "attn_sink": torch.randn(5)},
    "window": lambda: {"window_kv": torch.randn(11, 20), "window": 4},
    "window of documents": lambda: {
        "window_kv": torch.randn(9, 1, 20),
        "window": 3,
        **dict(zip(("w_start", "w_end"), hw.key_ranges(torch.tensor([0, 4, 4, 9])), strict=True)),
        "q_start": 3,
        "kv_stride": 4,
        "attn_sink": torch.randn(5),
    },
}


def window_count(inputs: dict[str, Any], s_q: int) -> Tensor:
    """1 for each window key that a query sees, [s_q, s_w]."""
    s_w = len(inputs["window_kv"])
    row = torch.arange(s_w)
    end = inputs.get("w_end", torch.arange(s_w - s_q, s_w) + 1)[:, None]
    seen = (row < end) & (row >= end - inputs["window"])
    return (seen & (row >= inputs["w_start"][:, None]) if "w_start" in inputs else seen).double()


def dense_attention(
    q: Tensor, kv: Tensor, sink: Tensor | None, inputs: dict[str, Any], window_kv: Tensor | None = None
) -> Tensor:
    """sparse_mla's out in float64 in plain PyTorch, from the definition: one weight per key, times its number of
    entries.
    """
    indices = inputs["indices"].long()
    s_q, topk = indices.shape
    valid = (indices >= 0) & (indices < len(kv))
    if (length := inputs.get("topk_length")) is not None:
        valid &= torch.arange(topk) < length[:, None]
    first = torch.zeros(s_q, 1, dtype=torch.int64)
    if "k_start" in inputs:
        first, end = inputs["k_start"][:, None].long(), inputs["k_end"][:, None]
        valid &= (indices >= first) & (indices < end)
    positions = inputs.get("q_positions")
    if (start := inputs.get("q_start")) is not None:
        positions = start + torch.arange(s_q)
    if positions is not None:
        valid &= (indices - first + 1) * inputs.get("kv_stride", 1) <= positions[:, None].long() + 1
    count = torch.zeros(s_q, len(kv), dtype=torch.float64)
    count.scatter_add_(1, torch.where(valid, indices, 0), valid.double())
    if window_kv is not None:
        kv = torch.cat([kv, window_kv.flatten(0, -2)])
        count = torch.cat([count, window_count(inputs, s_q)], dim=1)
    weight = torch.einsum("shd,td->sht", q, kv).mul(inputs["sm_scale"]).exp() * count[:, None]
    total = weight.sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink.exp()[:, None]
    p = torch.where(count.sum(-1)[:, None, None] > 0, weight / total.clamp_min(1e-300), 0.0)
    return torch.einsum("sht,tv->shv", p, kv[:, : inputs["d_v"]])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_mla_and_its_gradients(dtype: torch.dtype, mask: str) -> None:
    inputs = sparse_inputs(dtype) | MASKS[mask]()
    if "window_kv" in inputs:
        inputs["window_kv"] = inputs["window_kv"].to(dtype)
    names = [name for name in ("q", "kv", "attn_sink", "window_kv") if name in inputs]
    leaves = [inputs[name].requires_grad_() for name in names]
    out, max_logits, lse = hw.sparse_mla(**inputs)
    assert out.dtype == dtype
    assert not max_logits.requires_grad
    assert not lse.requires_grad
    d_out = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, d_out)

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    of = dict(zip(names, exact, strict=True))
    expected = dense_attention(of["q"], of["kv"], of.get("attn_sink"), inputs, of.get("window_kv"))
    assert norm_error(out.detach(), expected.detach()) <= GRADIENT_TOLERANCE[dtype]
    if dtype == torch.float32:
        expected_gradients = torch.autograd.grad(expected, exact, d_out.double())
    else:  # delta is computed from the rounded out: if gradients nearly cancel, autograd with the exact out differs
        given = [x.detach().double().numpy() for x in (d_out, inputs["q"], inputs["kv"])]
        rest = {
            name: (x.double() if x.is_floating_point() else x).detach().numpy() if isinstance(x, Tensor) else x
            for name, x in inputs.items()
            if name not in ("q", "kv", "indices", "sm_scale", "d_v")
        }
        forward = out.detach().double().numpy(), lse.detach().double().numpy()
        gradients_of = reference.sparse_mla_backward(
            *given, inputs["indices"].numpy(), *forward, inputs["sm_scale"], inputs["d_v"], **rest
        )
        expected_gradients = tuple(torch.from_numpy(np.asarray(g)) for g in gradients_of if g is not None)
    assert_gradients(gradients, expected_gradients, leaves)


def test_only_needed_gradients() -> None:
    inputs = sparse_inputs()
    for name in ("q", "kv"):
        leaf = inputs[name].clone().requires_grad_()
        out, _, _ = hw.sparse_mla(**inputs | {name: leaf})
        out.sum().backward()  # an expanded gradient: strides of 0
        assert leaf.grad is not None
        assert leaf.grad.abs().sum() > 0
    out, _, lse = hw.sparse_mla(**inputs)
    assert not out.requires_grad
    for need_dq, need_dkv in ((True, False), (False, True), (False, False)):
        dq, dkv, d_sink = hw.sparse_mla_backward(
            torch.ones_like(out), inputs["q"], inputs["kv"], inputs["indices"], out, lse, 0.5, 12,
            need_dq=need_dq, need_dkv=need_dkv,
        )  # fmt: skip
        assert ((dq is not None), (dkv is not None), d_sink) == (need_dq, need_dkv, None)


EMULATED = [name for name in ("cpu", "emu:sm80", "emu:sm90") if name in hopwell.backends("sparse_mla_backward")]


@pytest.mark.parametrize("backend", EMULATED)
@pytest.mark.parametrize("h_q", [16, 64])
def test_share_keys_changes_no_more_than_rounding(h_q: int, backend: str) -> None:
    """Neighbours have most keys in common. sm90 processes them together if there are up to 32 heads, except the group
    of the query without keys. Both gradients use the same out and lse, from a forward with share_keys.
    """
    s_q, s_kv, topk = 9, 200, 70
    indices = torch.stack([torch.randperm(topk + 20)[:topk] for _ in range(s_q)]).int()
    indices[5] = -1
    leaves = [torch.randn(shape).bfloat16().requires_grad_() for shape in ((s_q, h_q, 576), (s_kv, 576))]
    sink = torch.randn(h_q).requires_grad_()
    d_out = torch.randn(s_q, h_q, 512).bfloat16()

    options: dict[str, Any] = {"attn_sink": sink, "backend": backend}
    out, _, lse = hw.sparse_mla(*leaves, indices, 576**-0.5, share_keys=True, **options)
    shared = torch.autograd.grad(out, [*leaves, sink], d_out)
    with torch.no_grad():
        apart = hw.sparse_mla_backward(d_out, *leaves, indices, out, lse, 576**-0.5, dkv_dtype="bfloat16", **options)
    assert all(gradient is not None for gradient in apart)
    assert_gradients(shared, apart, [*leaves, sink])
    assert shared[0][5].abs().sum() == 0
    if backend != "emu:sm90" or h_q > 32:  # the hint has no effect there
        assert torch.equal(shared[0], apart[0])


@pytest.mark.parametrize("backend", EMULATED)
@pytest.mark.parametrize("h_q", [16, 64])
def test_results_of_shared_keys_differ_by_no_more_than_rounding(h_q: int, backend: str) -> None:
    s_q, s_kv, topk = 9, 200, 70
    indices = torch.stack([torch.randperm(topk + 20)[:topk] for _ in range(s_q)]).int()
    indices[5] = -1
    q, kv, sink = torch.randn(s_q, h_q, 576).bfloat16(), torch.randn(s_kv, 576).bfloat16(), torch.randn(h_q)

    def results(share_keys: bool) -> tuple[Tensor, ...]:
        return hw.sparse_mla(q, kv, indices, 576**-0.5, attn_sink=sink, share_keys=share_keys, backend=backend)

    shared, apart = results(True), results(False)
    for mine, other in zip(shared, apart, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-3)
    alone = [4, 5, 6, 7, 8] if backend == "emu:sm90" and h_q <= 32 else list(range(s_q))
    assert all(torch.equal(mine[alone], other[alone]) for mine, other in zip(shared, apart, strict=True))
    assert torch.equal(shared[0], apart[0]) == (len(alone) == s_q)


@pytest.mark.parametrize("backend", EMULATED)
def test_share_keys_lets_a_nan_no_farther_than_a_group(backend: str) -> None:
    """With 16 heads on sm90 a NaN reaches the group of four queries; elsewhere only the query that selects the key."""
    indices = torch.arange(70, dtype=torch.int32).repeat(9, 1)
    indices[1, 3] = 150
    q, kv = torch.randn(9, 16, 576).bfloat16(), torch.randn(200, 576).bfloat16()
    out, _, lse = hw.sparse_mla(q, kv, indices, 576**-0.5)
    kv[150] = torch.nan

    def reached_by(values: Tensor) -> list[int]:
        return values.isnan().flatten(1).any(1).nonzero().flatten().tolist()

    def reached(share_keys: bool) -> list[int]:
        results = hw.sparse_mla(q, kv, indices, 576**-0.5, share_keys=share_keys, backend=backend)
        assert reached_by(results[1]) == reached_by(results[2]) == [1]  # NaN only for the selecting query
        dq, _, _ = hw.sparse_mla_backward(
            *(torch.randn_like(out), q, kv, indices, out, lse, 576**-0.5), share_keys=share_keys, backend=backend
        )
        assert dq is not None
        assert reached_by(dq) == reached_by(results[0])
        return reached_by(dq)

    assert reached(False) == [1]
    assert reached(True) == ([0, 1, 2, 3] if backend == "emu:sm90" else [1])


def test_deterministic_algorithms() -> None:
    """With PyTorch's switch the gradient of a frequently selected key has the same bits every time."""
    q, kv = torch.randn(700, 3, 16), torch.randn(5, 16)
    indices = torch.randint(0, 5, (700, 40), dtype=torch.int32)
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(5):
            leaf = kv.clone().requires_grad_()
            hw.sparse_mla(q, leaf, indices, 0.3, 8)[0].square().sum().backward()
            results.append(leaf.grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_indexer_loss_and_its_gradients(dtype: torch.dtype, masked: bool) -> None:
    inputs = indexer_inputs(dtype) | (indexer_key_ranges() if masked else {})
    indices = inputs["indices"].long()
    valid = (indices >= 0) & (indices < len(inputs["k_index"]))
    if masked:
        valid &= (indices >= inputs["k_start"][:, None]) & (indices < inputs["k_end"][:, None])
    inputs["target"] /= (inputs["target"] * valid).sum(-1, keepdim=True).clamp_min(1e-30)
    leaves = index_leaves(inputs)
    loss = hw.indexer_loss(**inputs)
    gradients = torch.autograd.grad(3.0 * loss, leaves)

    q, k, w = exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    target = inputs["target"].double()
    dots = torch.einsum("sjd,sid->sji", q, k[indices.clamp(0, len(k) - 1)]).relu()
    scores = torch.einsum("sji,sj->si", dots, w).masked_fill(~valid, -torch.inf)
    log_p = torch.where(valid, scores, -1e300).log_softmax(-1)
    live = valid & ((target * valid).sum(-1, keepdim=True) > 0)
    expected = torch.where(live, torch.xlogy(target, target) - target * log_p, 0.0).sum()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-6)
    assert_gradients(gradients, torch.autograd.grad(3.0 * expected, exact), leaves)


@pytest.mark.parametrize("dense", [False, True])
def test_a_factor_of_the_loss_is_not_rounded_to_bfloat16(dense: bool) -> None:
    """Such as 1 / the number of tokens: a rounded factor would change all of d_q_index by the same part, up to 0.4
    %.
    """
    q_index, k_index, weights = torch.randn(40, 4, 32).bfloat16(), torch.randn(60, 32).bfloat16(), torch.randn(40, 4)
    leaves = [x.requires_grad_() for x in (q_index, k_index, weights)]
    attention = torch.randn(40, 3, 24), torch.randn(60, 24), torch.full((40, 3), 3.0)
    indices, target = torch.randint(0, 60, (40, 30), dtype=torch.int32), torch.rand(40, 30)

    def loss(*leaves: Tensor) -> Tensor:
        return hw.indexer_dense_loss(*attention, *leaves, 0.3) if dense else hw.indexer_loss(*leaves, indices, target)

    plain = torch.autograd.grad(loss(*leaves), leaves)
    factor = 1 / 3
    for gradient, expected in zip(torch.autograd.grad(factor * loss(*leaves), leaves), plain, strict=True):
        assert gradient.dtype == expected.dtype
        ratios = (gradient.double() / expected.double())[expected != 0]
        assert abs(ratios.median() / factor - 1) <= 2**-10  # the elements are rounded up or down


@pytest.mark.parametrize("d_loss", [0.0, 1e-30, 0.5, 1.0])
def test_the_gradient_of_the_loss_does_not_depend_on_d_loss(d_loss: float) -> None:
    """d_loss scales the gradients that the op returns, not the loss."""
    inputs, ranges = indexer_inputs(), indexer_key_ranges()
    leaves = index_leaves(inputs)
    expected = torch.autograd.grad(hw.indexer_loss(**inputs, **ranges), leaves)
    loss, *returned, row_loss = hw.lightning_indexer_backward(
        inputs["target"], *leaves, inputs["indices"], **ranges, d_loss=d_loss
    )
    torch.testing.assert_close(row_loss.sum(), loss.detach())
    for gradient, given, wanted in zip(torch.autograd.grad(loss, leaves), returned, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(given, wanted * d_loss, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_indexer_loss_of_weighted_rows_without_relu(dtype: torch.dtype) -> None:
    inputs = indexer_inputs(dtype)
    leaves = index_leaves(inputs)
    row_weights = torch.randn(11).mul(torch.arange(11) % 3)
    loss = hw.indexer_loss(**inputs, row_weights=row_weights, relu=False)
    row_loss = hw.lightning_indexer_backward(
        inputs["target"], *leaves, inputs["indices"], row_weights=row_weights, relu=False
    )[-1]
    torch.testing.assert_close(loss, (row_loss * row_weights).sum(), rtol=1e-4, atol=1e-5)
    each = [hw.indexer_loss(**inputs, row_weights=row_weights * (torch.arange(11) == i), relu=False) for i in range(11)]
    torch.testing.assert_close(loss, torch.stack(each).sum(), rtol=1e-4, atol=1e-5)
    of_each = zip(*(torch.autograd.grad(of_one, leaves) for of_one in each), strict=True)
    expected = [torch.stack(gradients).float().sum(0) for gradients in of_each]  # autograd rounds sums to bf16
    assert_gradients(torch.autograd.grad(loss, leaves), expected, leaves)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scores_of_the_indexer_are_differentiable(dtype: torch.dtype, relu: bool) -> None:
    inputs = indexer_inputs(dtype)
    leaves = index_leaves(inputs)
    indices, scores = hw.lightning_indexer(*leaves, 9, q_start=0, kv_stride=1, relu=relu)
    assert not indices.requires_grad
    factors = torch.randn(11, 9)
    gradients = torch.autograd.grad((scores.masked_fill(indices < 0, 0) * factors).sum(), leaves)
    q, k, w = exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    dots = torch.einsum("sjd,sid->sji", q, k[indices.clamp(min=0).long()])
    expected = torch.einsum("sji,sj->si", dots.relu() if relu else dots, w).masked_fill(indices < 0, 0)
    torch.testing.assert_close(scores.masked_fill(indices < 0, 0).double(), expected, rtol=1e-3, atol=1e-3)
    assert_gradients(gradients, torch.autograd.grad((expected * factors).sum(), exact), leaves)


def test_gradients_of_any_strides_reach_the_indexer() -> None:
    """The gradient of a sum is one expanded number; the gradient of a transpose has strided rows."""
    leaves = index_leaves(indexer_inputs())
    scores = hw.lightning_indexer(*leaves, 9)[1]  # of 21 keys, all visible
    for given in (torch.ones(()).expand(11, 9), torch.randn(9, 11).t()):
        actual = torch.autograd.grad(scores, leaves, given, retain_graph=True)
        expected = torch.autograd.grad(scores, leaves, given.contiguous(), retain_graph=True)
        assert_gradients(actual, expected, leaves)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_given_entries(dtype: torch.dtype, masked: bool, relu: bool) -> None:
    """Includes invalid and repeated entries."""
    inputs, ranges = indexer_inputs(dtype), indexer_key_ranges() if masked else {}
    leaves, indices = index_leaves(inputs), inputs["indices"].long()
    scores = hw.indexer_scores(*leaves, inputs["indices"], **ranges, relu=relu)
    counts = (indices >= 0) & (indices < 21)
    if masked:
        counts &= (indices >= ranges["k_start"][:, None]) & (indices < ranges["k_end"][:, None])
    q, k, w = exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    dots = torch.einsum("sjd,sid->sji", q, k[indices.clamp(0, 20)])
    expected = torch.einsum("sji,sj->si", dots.relu() if relu else dots, w)
    assert scores.dtype == torch.float32
    assert torch.equal(scores == -torch.inf, ~counts)
    torch.testing.assert_close(scores[counts].double(), expected[counts], rtol=1e-4, atol=1e-4)
    actual = torch.autograd.grad(scores.masked_fill(~counts, 0).t().square().sum(), leaves)
    assert_gradients(actual, torch.autograd.grad(expected.masked_fill(~counts, 0).square().sum(), exact), leaves)
    with torch.no_grad():
        assert torch.equal(hw.indexer_scores(*leaves, inputs["indices"], **ranges, relu=relu), scores)


def test_scores_of_nothing() -> None:
    q, k, w, indices = torch.randn(11, 4, 32), torch.randn(21, 32), torch.randn(11, 4), indexer_inputs()["indices"]
    assert hw.indexer_scores(q[:0], k, w[:0], indices[:0]).shape == (0, 7)
    assert hw.indexer_scores(q, k, w, indices[:, :0]).shape == (11, 0)
    assert (hw.indexer_scores(q, k[:0], w, indices) == -torch.inf).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_index": torch.zeros(11, 4, 32).double()}, "q_index must be bfloat16 or float32; got torch.float64"),
        ({"q_index": torch.zeros(11, 32)}, r"q_index must be \[s_q, h_index, d_index\]; got \[11, 32\]"),
        ({"k_index": torch.zeros(21, 31)}, r"k_index must be \[s_kv, d_index=32\]; got \[21, 31\]"),
        ({"k_index": torch.zeros(21, 32).bfloat16()}, "k_index must be torch.float32 as q_index is; got torch.bf"),
        ({"weights": torch.zeros(11, 4).half()}, "weights must be bfloat16 or float32; got torch.float16"),
        ({"weights": torch.zeros(11, 4, 1)}, r"weights must be \[s_q=11, h_index=4\]; got \[11, 4, 1\]"),
        ({"indices": torch.zeros(11, 7).long()}, "indices must be int32; got torch.int64"),
        ({"indices": torch.zeros(10, 7).int()}, r"indices must be \[s_q=11, topk\]; got \[10, 7\]"),
        ({"k_start": torch.zeros(11).int()}, "k_start and k_end must be given together"),
        ({"k_start": torch.zeros(11).int(), "k_end": torch.zeros(1).int()}, r"k_end must be \[s_q=11\]; got \[1\]"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_scores_of_what_does_not_fit(change: dict[str, Tensor], message: str, grad: bool) -> None:
    call = {name: x for name, x in indexer_inputs().items() if name != "target"}
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="^indexer_scores: " + message):
        hw.indexer_scores(**call | change)


@pytest.mark.parametrize("given", [False, True])
def test_compiled_gradients_of_the_scores(given: bool) -> None:
    inputs = indexer_inputs()
    leaves = index_leaves(inputs)

    def loss(*leaves: Tensor) -> Tensor:
        indices, scores = hw.lightning_indexer(*leaves, 9, q_start=0)
        if given:
            indices = inputs["indices"]
            scores = hw.indexer_scores(*leaves, indices)
        return scores.masked_fill(scores == -torch.inf, 0).square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves)
    for gradient, wanted in zip(torch.autograd.grad(compiled, leaves), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_d_loss_on_the_device_of_the_others() -> None:
    inputs = indexer_inputs()
    target, indices = inputs.pop("target"), inputs.pop("indices")
    by_number = hopwell.lightning_indexer_backward(target, **inputs, indices=indices, d_loss=-0.5)
    by_tensor = hopwell.lightning_indexer_backward(target, **inputs, indices=indices, d_loss=torch.tensor(-0.5))
    for number, tensor in zip(by_number, by_tensor, strict=True):
        assert torch.equal(number, tensor)
