"""hopwell.torch: the operators as custom ops, against float64 autograd and the reference; opcheck and torch.compile."""

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
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = [torch.float32, torch.bfloat16]
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-3}


@pytest.fixture(autouse=True)
def _seed(rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))


def sparse_inputs(dtype: torch.dtype = torch.float32, d_qk: int = 20, topk: int = 13) -> dict[str, Any]:
    """Random rows of 9 queries over 17 keys, with invalid and repeated entries."""
    return {
        "q": torch.randn(9, 5, d_qk).to(dtype),
        "kv": torch.randn(17, d_qk).to(dtype),
        "indices": torch.randint(-3, 20, (9, topk), dtype=torch.int32),
        "sm_scale": 0.5,
        "d_v": 12,
    }


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
}


def dense_attention(q: Tensor, kv: Tensor, sink: Tensor | None, inputs: dict[str, Any]) -> Tensor:
    """sparse_mla's out in float64 with plain PyTorch, from the definition: one weight per key, entries counted."""
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
    leaves = [inputs[name].requires_grad_() for name in ("q", "kv", "attn_sink") if name in inputs]
    out, max_logits, lse = hw.sparse_mla(**inputs)
    assert out.dtype == dtype
    assert not max_logits.requires_grad
    assert not lse.requires_grad
    d_out = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, d_out)

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = dense_attention(exact[0], exact[1], exact[2] if len(exact) > 2 else None, inputs)
    assert norm_error(out.detach(), expected.detach()) <= GRADIENT_TOLERANCE[dtype]
    if dtype == torch.float32:
        expected_gradients = torch.autograd.grad(expected, exact, d_out.double())
    else:  # delta is defined from the rounded out: where gradients nearly cancel, autograd of the exact one is no judge
        given = [x.detach().double().numpy() for x in (d_out, inputs["q"], inputs["kv"])]
        rest = {
            name: x.detach().numpy() if isinstance(x, Tensor) else x
            for name, x in inputs.items()
            if name not in ("q", "kv", "indices", "sm_scale", "d_v")
        }
        forward = out.detach().double().numpy(), lse.detach().double().numpy()
        gradients_of = reference.sparse_mla_backward(
            *given, inputs["indices"].numpy(), *forward, inputs["sm_scale"], inputs["d_v"], **rest
        )
        expected_gradients = tuple(torch.from_numpy(np.asarray(g)) for g in gradients_of if g is not None)
    for leaf, gradient, exact_gradient in zip(leaves, gradients, expected_gradients, strict=True):
        assert gradient.dtype == leaf.dtype
        assert norm_error(gradient, exact_gradient) <= GRADIENT_TOLERANCE[dtype]


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


def test_deterministic_algorithms() -> None:
    """Under PyTorch's switch a hot key's gradient has the same bits every time."""
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


def indexer_inputs(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    indices = torch.randint(-2, 24, (11, 7), dtype=torch.int32)
    target = torch.rand(11, 7) * ((indices >= 0) & (indices < 21))
    target[3] = 0.0
    return {
        "q_index": torch.randn(11, 4, 32).to(dtype),
        "k_index": torch.randn(21, 32).to(dtype),
        "weights": torch.randn(11, 4),
        "indices": indices,
        "target": target / target.sum(-1, keepdim=True).clamp_min(1e-30),
    }


def indexer_key_ranges() -> dict[str, Tensor]:
    """For indexer_inputs: any, one of no key, one of all."""
    k_start, k_end = torch.randint(-2, 9, (11,)), torch.randint(7, 24, (11,))
    k_start[4], k_end[4], k_start[5], k_end[5] = 8, 8, 0, 21
    return {"k_start": k_start.int(), "k_end": k_end.int()}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_indexer_loss_and_its_gradients(dtype: torch.dtype, masked: bool) -> None:
    inputs = indexer_inputs(dtype) | (indexer_key_ranges() if masked else {})
    indices = inputs["indices"].long()
    valid = (indices >= 0) & (indices < len(inputs["k_index"]))
    if masked:
        valid &= (indices >= inputs["k_start"][:, None]) & (indices < inputs["k_end"][:, None])
    inputs["target"] /= (inputs["target"] * valid).sum(-1, keepdim=True).clamp_min(1e-30)
    leaves = [inputs[name].requires_grad_() for name in ("q_index", "k_index", "weights")]
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
    for gradient, other, leaf in zip(gradients, torch.autograd.grad(3.0 * expected, exact), leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        assert norm_error(gradient, other) <= GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize("d_loss", [0.0, 1e-30, 0.5, 1.0])
def test_the_gradient_of_the_loss_does_not_depend_on_d_loss(d_loss: float) -> None:
    """It scales the gradients that the op returns, not the loss."""
    inputs, ranges = indexer_inputs(), indexer_key_ranges()
    leaves = [inputs[name].requires_grad_() for name in ("q_index", "k_index", "weights")]
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
    leaves = [inputs[name].requires_grad_() for name in ("q_index", "k_index", "weights")]
    row_weights = torch.randn(11).mul(torch.arange(11) % 3)
    loss = hw.indexer_loss(**inputs, row_weights=row_weights, relu=False)
    row_loss = hw.lightning_indexer_backward(
        inputs["target"], *leaves, inputs["indices"], row_weights=row_weights, relu=False
    )[-1]
    torch.testing.assert_close(loss, (row_loss * row_weights).sum(), rtol=1e-4, atol=1e-5)
    each = [hw.indexer_loss(**inputs, row_weights=row_weights * (torch.arange(11) == i), relu=False) for i in range(11)]
    torch.testing.assert_close(loss, torch.stack(each).sum(), rtol=1e-4, atol=1e-5)
    expected = torch.autograd.grad(torch.stack(each).sum(), leaves)
    for gradient, wanted in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        assert norm_error(gradient, wanted) <= GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scores_of_the_indexer_are_differentiable(dtype: torch.dtype) -> None:
    inputs = indexer_inputs(dtype)
    leaves = [inputs[name].requires_grad_() for name in ("q_index", "k_index", "weights")]
    indices, scores = hw.lightning_indexer(*leaves, 9, q_start=0, kv_stride=1)
    assert not indices.requires_grad
    factors = torch.randn(11, 9)
    gradients = torch.autograd.grad((scores.masked_fill(indices < 0, 0) * factors).sum(), leaves)
    q, k, w = exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    dots = torch.einsum("sjd,sid->sji", q, k[indices.clamp(min=0).long()]).relu()
    expected = torch.einsum("sji,sj->si", dots, w).masked_fill(indices < 0, 0)
    torch.testing.assert_close(scores.masked_fill(indices < 0, 0).double(), expected, rtol=1e-3, atol=1e-3)
    wanted_gradients = torch.autograd.grad((expected * factors).sum(), exact)
    for gradient, wanted, leaf in zip(gradients, wanted_gradients, leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        assert norm_error(gradient, wanted) <= GRADIENT_TOLERANCE[dtype]


def test_compiled_gradients_of_the_scores() -> None:
    inputs = indexer_inputs()
    leaves = [inputs[name].requires_grad_() for name in ("q_index", "k_index", "weights")]

    def loss(*leaves: Tensor) -> Tensor:
        indices, scores = hw.lightning_indexer(*leaves, 9, q_start=0)
        return scores.masked_fill(indices < 0, 0).square().sum()

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


def dense_loss_inputs(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Of `indexer_dense_loss`, by position."""
    q, kv, lse = torch.randn(6, 3, 24), torch.randn(15, 24), torch.full((6, 3), 3.0)
    index = torch.randn(6, 2, 8), torch.randn(15, 8)
    return (q.to(dtype), kv.to(dtype), lse, *(x.to(dtype) for x in index), torch.randn(6, 2), 0.3)


def differentiable_calls() -> dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """An input of each differentiable operator and a scalar of it."""
    sparse, index, dense = sparse_inputs(), indexer_inputs(), dense_loss_inputs()
    return {
        "sparse_mla_forward": (sparse.pop("q"), lambda q: hw.sparse_mla(q, **sparse)[0].sum()),
        "lightning_indexer_backward": (index.pop("q_index"), lambda q: hw.indexer_loss(q, **index)),
        "indexer_dense_loss": (dense[3], lambda q: hw.indexer_dense_loss(*dense[:3], q, *dense[4:])),
    }


@pytest.mark.parametrize("name", list(differentiable_calls()))
def test_second_derivatives_are_an_error(name: str) -> None:
    """Left out in silence, the second derivative of a sum in which they are one term would be too small."""
    x, function = differentiable_calls()[name]
    leaf = x.requires_grad_()
    with pytest.raises(RuntimeError, match=f"hopwell::{name} has no second derivative"):
        (function(leaf) + leaf.square().sum()).backward(create_graph=True)
    (gradient,) = torch.autograd.grad(function(leaf), leaf)
    assert not gradient.requires_grad


def test_the_backward_as_an_op_has_no_gradient() -> None:
    inputs = sparse_inputs()
    out, _, lse = hw.sparse_mla(**inputs)
    rest = inputs["kv"], inputs["indices"], out, lse, inputs["sm_scale"], inputs["d_v"]
    dq, _, _ = hw.sparse_mla_backward(torch.ones_like(out), inputs["q"].requires_grad_(), *rest)
    with pytest.raises(RuntimeError, match="hopwell::sparse_mla_backward has no gradient"):
        dq.sum().backward()


@pytest.mark.parametrize("name", list(differentiable_calls()))
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_is_an_error(name: str, grad: bool) -> None:
    x, function = differentiable_calls()[name]
    message = f"hopwell::{name} has no forward-mode derivative"
    with torch.set_grad_enabled(grad):
        with pytest.raises(RuntimeError, match=message):
            torch.func.jvp(function, (x,), (x,))
        with forward_ad.dual_level():
            function(x)  # no tangent: nothing is lost
            with pytest.raises(RuntimeError, match=message):
                function(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("name", list(differentiable_calls()))
def test_torch_func_is_an_error(name: str) -> None:
    x, function = differentiable_calls()[name]
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(RuntimeError, match=f"hopwell::{name} has no gradient in torch.func.grad"):
            transform(function)(x)


def test_constants_are_constants_in_forward_mode_too() -> None:
    q, kv, indices = torch.randn(6, 3, 16), torch.randn(6, 16), torch.arange(6, dtype=torch.int32).expand(6, 6)

    def target(q: Tensor) -> Tensor:
        return hw.attention_distribution(q, kv, indices.contiguous(), torch.zeros(6, 3), 0.1)

    _, tangent = torch.func.jvp(target, (q,), (q,))
    assert not tangent.any()
    assert not torch.func.grad(lambda q: target(q).sum())(q).any()


def plain(q: Tensor, **outputs: Tensor) -> Any:
    """`hopwell`'s own function, which takes tensors to write into."""
    torch.manual_seed(1)
    kv, indices = torch.randn(17, 20), torch.randint(0, 17, (9, 13), dtype=torch.int32)
    return hopwell.sparse_mla_forward(q, kv, indices, 0.5, 12, **outputs)


def test_plain_functions_refuse_tangents() -> None:
    q = torch.randn(9, 5, 20)
    with forward_ad.dual_level():
        plain(q)
        with pytest.raises(ValueError, match="sparse_mla_forward: q carries a tangent"):
            plain(forward_ad.make_dual(q, q))
        with pytest.raises(ValueError, match="sparse_mla_forward: out carries a tangent"):
            plain(q, out=forward_ad.make_dual(torch.zeros(9, 5, 12), torch.zeros(9, 5, 12)))


def test_tensors_that_stand_for_their_negatives() -> None:
    """Resolved by PyTorch's dispatcher, refused where it is not asked."""
    q = torch._neg_view(torch.randn(9, 5, 20))
    assert q.is_neg()
    inputs = sparse_inputs() | {"q": q}
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            actual, expected = hw.sparse_mla(**inputs)[0], hw.sparse_mla(**inputs | {"q": q.resolve_neg()})[0]
        assert torch.equal(actual, expected)
    with pytest.raises(ValueError, match="sparse_mla_forward: q has the negative bit"):
        plain(q)
    given = torch.zeros(9, 5, 12)
    with pytest.raises(ValueError, match="sparse_mla_forward: out has the negative bit"):
        plain(q.resolve_neg(), out=torch._neg_view(given))
    assert not given.any()


def test_a_tensor_written_in_place_has_a_new_version() -> None:
    """A backward that needs what it was is an error, not a wrong number."""
    q, given = torch.randn(9, 5, 20), torch.randn(9, 5, 12)
    weight = torch.ones(9, 5, 12, requires_grad=True)
    loss = (weight * given).sum()
    lse = torch.zeros(9, 5)
    before = given._version, lse._version
    with pytest.raises(ValueError, match="sparse_mla_forward: lse must be"):
        plain(q, out=given, lse=torch.zeros(9, 4))
    assert (given._version, lse._version) == before  # nothing was written
    plain(q, out=given, lse=lse)
    assert given._version > before[0]
    assert lse._version > before[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_that_requires_grad_is_not_written() -> None:
    q, given = torch.randn(9, 5, 20), torch.zeros(9, 5, 12, requires_grad=True)
    with pytest.raises(ValueError, match="sparse_mla_forward: out requires grad"):
        plain(q, out=given)
    assert not given.any()
    with torch.no_grad():  # as PyTorch's own out=
        plain(q, out=given)
    assert given.any()


def test_target_and_selection_carry_no_gradient() -> None:
    q, kv = torch.randn(6, 3, 16, requires_grad=True), torch.randn(6, 16, requires_grad=True)
    k_index = torch.randn(6, 16, requires_grad=True)
    indices, scores = hw.lightning_indexer(q, k_index, torch.rand(6, 3, requires_grad=True), 4, q_start=0)
    _, _, lse = hw.sparse_mla(q, kv, indices, 0.5, 8)
    target = hw.attention_distribution(q, kv, indices, lse, 0.5, normalize="l1")
    assert not indices.requires_grad and scores.requires_grad
    assert not target.requires_grad
    torch.testing.assert_close(target.sum(-1), torch.ones(6))


def test_selection_equals_the_reference() -> None:
    q, k, w = torch.randn(30, 4, 32), torch.randn(30, 32), torch.rand(30, 4)
    indices, scores = hw.lightning_indexer(q, k, w, 9, q_start=0)
    expected_indices, expected_scores = reference.lightning_indexer(q.numpy(), k.numpy(), w.numpy(), 9, q_start=0)
    np.testing.assert_array_equal(indices.numpy(), expected_indices)
    np.testing.assert_allclose(scores.numpy(), expected_scores, rtol=1e-4, atol=1e-4)


def test_selection_from_float8() -> None:
    q, k = (torch.randn(shape).to(torch.float8_e4m3fn) for shape in ((30, 4, 32), (50, 32)))
    w, q_scale, k_scale = torch.rand(30, 4, requires_grad=True), torch.rand(30, 4), torch.rand(50)
    indices, scores = hw.lightning_indexer(q, k, w, 9, q_scale=q_scale, k_scale=k_scale)
    folded = hw.lightning_indexer(q, k, w * q_scale, 9, k_scale=k_scale)
    assert torch.equal(indices, folded[0]) and torch.equal(scores, folded[1])
    plain = hw.lightning_indexer(q.float(), k.float(), w * q_scale, 50)[1] * k_scale
    torch.testing.assert_close(scores, plain.gather(1, indices.long()))
    torch.testing.assert_close(scores.sort(-1).values, plain.topk(9).values.sort(-1).values)
    message = "lightning_indexer_backward: q_index must be bfloat16 or float32 .*; got float8_e4m3fn"
    with pytest.raises(ValueError, match=message):
        scores.sum().backward()
    fakes = [x.to("meta") for x in (q, k, w, q_scale, k_scale)]
    fake_indices, fake_scores = hw.lightning_indexer(*fakes[:3], 9, q_scale=fakes[3], k_scale=fakes[4])
    assert (fake_indices.dtype, fake_scores.dtype, fake_indices.shape) == (torch.int32, torch.float32, (30, 9))
    # opcheck cannot compare float8 with itself.
    compiled = torch.compile(hw.lightning_indexer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, w, 9, q_scale=q_scale, k_scale=k_scale)[0], indices)


# ---- NVFP4 and paged attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain", "blocked"])
def test_nvfp4_round_trip_and_linear(layout: str) -> None:
    weight, x, bias = torch.randn(33, 96), torch.randn(3, 96), torch.randn(33)
    codes, scales, scale = hw.nvfp4_quantize(weight, scale_layout=layout)
    rounded = hw.nvfp4_dequantize(codes, scales, scale, scale_layout=layout)
    assert 0 < norm_error(rounded, weight) < 0.15
    y = hw.nvfp4_linear(x, codes, scales, scale, bias=bias, scale_layout=layout)
    assert norm_error(y, x.double() @ rounded.double().T + bias) <= 1e-4
    floats = codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e4m3fn)
    torch.testing.assert_close(hw.nvfp4_linear(x, *floats, float(scale), bias=bias, scale_layout=layout), y)
    again, same_scales, given = hw.nvfp4_quantize(rounded, scale_layout=layout, global_scale=scale)
    assert torch.equal(hw.nvfp4_dequantize(again, same_scales, given, scale_layout=layout), rounded)


def test_nvfp4_gemv() -> None:
    m, k, batch = 20, 64, 3
    a, b = (torch.randint(0, 256, (batch, rows, k // 2), dtype=torch.uint8).permute(1, 2, 0) for rows in (m, 1))
    sfa, sfb = (torch.randint(40, 70, (batch, rows, k // 16), dtype=torch.uint8).permute(1, 2, 0) for rows in (m, 1))
    c = hw.nvfp4_gemv(a, b, sfa, sfb, alpha=0.5, out_dtype="float32")
    expected = reference.nvfp4_gemv(*(x.numpy() for x in (a, b, sfa, sfb)), alpha=0.5)
    assert c.shape == (m, 1, batch)
    assert norm_error(c, torch.as_tensor(np.asarray(expected, np.float64))) <= 1e-3


@pytest.mark.parametrize("layout", ["plain", "blocked"])
def test_nvfp4_matmul(layout: str) -> None:
    x, weight = torch.randn(20, 64), torch.randn(30, 64)
    a, sfa, scale_a = hw.nvfp4_quantize(x, scale_layout=layout)
    b, sfb, scale_b = hw.nvfp4_quantize(weight, scale_layout=layout)
    alpha, bias = float(scale_a * scale_b), torch.randn(30)
    c = hw.nvfp4_matmul(a, b, sfa, sfb, alpha=alpha, bias=bias, out_dtype="float32", scale_layout=layout)
    rounded_x = hw.nvfp4_dequantize(a, sfa, scale_a, scale_layout=layout)
    rounded_weight = hw.nvfp4_dequantize(b, sfb, scale_b, scale_layout=layout)
    torch.testing.assert_close(c, rounded_x @ rounded_weight.T + bias)
    assert hw.nvfp4_matmul(*(t.to("meta") for t in (a, b, sfa, sfb))).dtype == torch.bfloat16


def paged_inputs(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    q = torch.randn(2, 3, 4, 32).to(dtype)
    k_cache, v_cache = (torch.randn(6, 8, 2, 32).to(dtype) for _ in range(2))
    tables = torch.tensor([[4, 1, 3], [0, 5, 2]], dtype=torch.int32)
    return q, k_cache, v_cache, tables, torch.tensor([19, 7], dtype=torch.int32), 0.2


def test_paged_attention() -> None:
    inputs = paged_inputs()
    r, u = torch.randn(4, 24, 32), torch.randn(4, 32)
    out, lse = hw.paged_attention(*inputs, pos_bias_u=u, r=r, pos_bias_v=u)
    arrays = [x.numpy() if isinstance(x, Tensor) else x for x in inputs]
    expected = reference.paged_attention(*arrays, pos_bias_u=u.numpy(), r=r.numpy(), pos_bias_v=u.numpy())
    assert norm_error(out, torch.as_tensor(expected[0])) <= 1e-5
    np.testing.assert_allclose(lse.numpy(), expected[1], rtol=1e-5, atol=1e-5)


# ---- the ops as PyTorch sees them ----------------------------------------------------------------------------------


def op_samples() -> dict[str, tuple[Any, ...]]:
    """Arguments for every op, by position."""
    samples: dict[str, tuple[Any, ...]] = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        inputs = sparse_inputs(dtype)
        q, kv, sink = (x.requires_grad_() for x in (inputs["q"], inputs["kv"], torch.randn(5)))
        rest = inputs["indices"], 0.5, 12
        out, _, lse = hopwell.sparse_mla_forward(q.detach(), kv.detach(), *rest)
        samples[f"sparse_mla_forward {name}"] = (q, kv, *rest, sink)
        samples[f"sparse_mla_forward {name}, no sink"] = (q, kv, *rest, None, None, None, 4, 2)
        ranges = torch.arange(9, dtype=torch.int32), torch.full((9,), 15, dtype=torch.int32)
        samples[f"sparse_mla_forward {name}, key ranges"] = (q, kv, *rest, sink, None, None, None, 1, *ranges)
        backward = (torch.randn_like(out), q.detach(), kv.detach(), inputs["indices"], out, lse, 0.5, 12)
        samples[f"sparse_mla_backward {name}"] = (*backward, sink.detach(), None, None, None, 1, *ranges, True, name)
        samples[f"attention_distribution {name}"] = (q, kv, inputs["indices"], lse, 0.5, None, None, None, 1, *ranges)
        index = indexer_inputs(dtype)
        q_index, k_index, weights = (index[n].requires_grad_() for n in ("q_index", "k_index", "weights"))
        # Without gradients: opcheck cannot add the scores to integers. test_compiled_gradients_of_the_scores has them.
        plain_index = (x.detach() for x in (q_index, k_index, weights))
        samples[f"lightning_indexer {name}"] = (*plain_index, 5, None, 0)
        loss = index["target"], q_index, k_index, weights, index["indices"]
        samples[f"lightning_indexer_backward {name}"] = loss
        ranges, row_weights = indexer_key_ranges().values(), torch.rand(11)
        samples[f"lightning_indexer_backward {name}, key ranges"] = (*loss, *ranges, None, row_weights, False, 0.5)
        given = None, q_index, k_index, weights, index["indices"], None, None, torch.randn(index["target"].shape)
        samples[f"lightning_indexer_backward {name}, d_scores"] = given
        dense = dense_loss_inputs(dtype)
        samples[f"indexer_dense_loss {name}"] = (*dense[:3], *(x.requires_grad_() for x in dense[3:6]), dense[6])
        samples[f"sparse_mla_forward {name}, every key"] = (q, kv, None, 0.5, 12, sink)
        samples[f"paged_attention {name}"] = paged_inputs(dtype)
        x = torch.randn(3, 64).to(dtype)
        quantized = hw.nvfp4_quantize(torch.randn(10, 64))
        samples[f"nvfp4_linear {name}"] = (x, *quantized)
        for layout in ("plain", "blocked"):
            samples[f"nvfp4_quantize {name}, {layout}"] = (x, layout)
        samples[f"nvfp4_dequantize {name}"] = (*quantized, "plain", name)
    codes = torch.randint(0, 256, (1, 4, 16), dtype=torch.uint8).permute(1, 2, 0)
    scales = torch.randint(40, 70, (1, 4, 2), dtype=torch.uint8).permute(1, 2, 0)
    samples["nvfp4_gemv"] = (codes, codes[:1], scales, scales[:1])
    flat = codes[:, :, 0], codes[:3, :, 0], scales[:, :, 0], scales[:3, :, 0]
    samples["normalize_l1"] = (torch.rand(3, 5),)
    samples["nvfp4_matmul"] = (*flat, 0.5, torch.randn(3), "float32")
    return samples


@pytest.mark.parametrize("sample", list(op_samples()))
def test_opcheck(sample: str) -> None:
    arguments = op_samples()[sample]
    torch.library.opcheck(getattr(torch.ops.hopwell, sample.split()[0]).default, arguments)


def test_a_backward_without_a_formula_is_an_error() -> None:
    """With gradients off such an op runs on tensors that require them, and its result has none."""
    weight, x = hw.nvfp4_quantize(torch.randn(10, 64)), torch.randn(3, 64, requires_grad=True)
    y = hw.nvfp4_linear(x, *weight)
    with pytest.raises(RuntimeError, match="hopwell::nvfp4_linear has no gradient"):
        y.sum().backward()
    with torch.no_grad():
        same = hw.nvfp4_linear(x, *weight)
    assert not same.requires_grad
    assert torch.equal(same, y)


class Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_calls_without_gradients_that_others_have_to_see() -> None:
    """They go through PyTorch's dispatcher: modes, fake and meta tensors, transforms and traces."""
    weight, x = hw.nvfp4_quantize(torch.randn(10, 64)), torch.randn(3, 64)

    def linear(x: Tensor) -> Tensor:
        return hw.nvfp4_linear(x, *weight)

    with Listener() as listener:
        linear(x)
    assert "hopwell.nvfp4_linear.default" in listener.heard
    with torch.profiler.profile() as profile:
        linear(x)
    assert "hopwell::nvfp4_linear" in [event.key for event in profile.key_averages()]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        assert linear(fake).shape == (3, 10)
    assert type(linear(fake)) is type(fake)
    assert hw.nvfp4_linear(*(t.to("meta") for t in (x, *weight))).is_meta
    assert torch.equal(torch.jit.trace(linear, x)(x + 1), linear(x + 1))
    assert torch.equal(make_fx(linear)(x)(x + 1), linear(x + 1))
    batch = torch.stack([x, -x])
    assert torch.equal(torch.vmap(linear)(batch), torch.stack([linear(x), linear(-x)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dtype: torch.dtype, dynamic: bool) -> None:
    """Selection, attention of packed documents, target and loss in one graph: the numbers do not change."""
    cuts = torch.tensor([0, 4, 4, 11], dtype=torch.int32)

    def step(q: Tensor, kv: Tensor, q_index: Tensor, k_index: Tensor, weights: Tensor) -> Tensor:
        indices, _ = hw.lightning_indexer(q_index, k_index, weights, 6, q_start=0)
        k_start, k_end = hw.key_ranges(cuts, s_q=len(q))
        out, _, lse = hw.sparse_mla(q * 2, kv, indices, 0.3, 12, k_start=k_start, k_end=k_end)
        target = hw.attention_distribution(q * 2, kv, indices, lse, 0.3, k_start=k_start, k_end=k_end, normalize="l1")
        return out.float().square().sum() + hw.indexer_loss(q_index, k_index, weights, indices, target)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for s in (15, 18):
        shapes = (s, 5, 20), (s, 20), (s, 4, 32), (s, 32), (s, 4)
        leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
        expected, actual = step(*leaves), compiled(*leaves)
        torch.testing.assert_close(actual, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)
        for a, b in zip(torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True):
            assert norm_error(a, b) <= GRADIENT_TOLERANCE[dtype]


def test_compiled_decode() -> None:
    weights = hw.nvfp4_quantize(torch.randn(10, 32))

    def decode(x: Tensor) -> Tensor:
        out, _ = hw.paged_attention(*paged)
        return out.sum() + hw.nvfp4_linear(x + 1, *weights).sum() + hw.nvfp4_dequantize(*weights).sum()

    paged, x = paged_inputs(), torch.randn(4, 32)
    torch.testing.assert_close(torch.compile(decode, fullgraph=True)(x), decode(x))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(decode, fullgraph=True)(x), decode(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": torch.zeros(9, 13, dtype=torch.int64)}, "sparse_mla_forward: indices"),
        ({"kv": torch.randn(17, 21)}, "sparse_mla_forward: "),
        ({"d_v": 21}, "sparse_mla_forward: d_v"),
        ({"sm_scale": float("nan")}, "sparse_mla_forward: sm_scale"),
        ({"attn_sink": torch.randn(4)}, "sparse_mla_forward: attn_sink"),
        ({"k_start": torch.zeros(9, dtype=torch.int32)}, "sparse_mla_forward: k_start and k_end"),
        ({"backend": "abacus"}, "sparse_mla_forward: backend"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hw.sparse_mla(**sparse_inputs() | change)
