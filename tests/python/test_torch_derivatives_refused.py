"""hopwell.torch: a derivative that there is none of is an error, and never left out in silence."""

from collections.abc import Callable
from functools import partial
from typing import Any

import hopwell
import pytest
import torch
from hopwell import torch as hw
from hopwell.torch.parallel import ContextShard, ParallelDSA
from torch import Tensor
from torch.autograd import forward_ad
from torch_inputs import dense_loss_inputs, indexer_inputs, sparse_inputs

pytestmark = pytest.mark.usefixtures("torch_seed")


def differentiable_calls() -> dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """An input of each differentiable operator and a scalar of it."""
    sparse, index, dense, given = sparse_inputs(), indexer_inputs(), dense_loss_inputs(), indexer_inputs()
    given["indices"].abs_().clamp_(max=20)
    del given["target"]
    quantized = hw.nvfp4_quantize(torch.randn(10, 64))
    return {
        "sparse_mla_forward": (sparse.pop("q"), lambda q: hw.sparse_mla(q, **sparse)[0].sum()),
        "lightning_indexer_backward": (index.pop("q_index"), lambda q: hw.indexer_loss(q, **index)),
        "indexer_scores": (given.pop("q_index"), lambda q: hw.indexer_scores(q, **given).sum()),
        "nvfp4_linear": (torch.randn(3, 64), lambda x: hw.nvfp4_linear(x, *quantized).sum()),
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


@pytest.mark.parametrize("of_loss", [False, True])
def test_second_derivatives_over_ranks_are_an_error(of_loss: bool) -> None:
    mla = hw.nn.SparseMLA(24, 2, d_v=8, d_rope=4, d_nope=4, d_head=4)
    dsa = ParallelDSA(mla, hw.nn.LightningIndexer(24, topk=3, h_index=2, d_index=8, d_rope=4))
    y, loss = dsa(torch.randn(1, 5, 24), ContextShard.zigzag(5))
    weight = dsa.indexer.wk.weight if of_loss else mla.kv_b_proj.weight
    with pytest.raises(RuntimeError, match=r"hopwell.torch.parallel has no second derivative"):
        torch.autograd.grad(loss if of_loss else y.sum(), weight, create_graph=True)


def test_the_backward_as_an_op_has_no_gradient() -> None:
    inputs = sparse_inputs()
    out, _, lse = hw.sparse_mla(**inputs)
    rest = inputs["kv"], inputs["indices"], out, lse, inputs["sm_scale"], inputs["d_v"]
    dq, _, _ = hw.sparse_mla_backward(torch.ones_like(out), inputs["q"].requires_grad_(), *rest)
    with pytest.raises(RuntimeError, match="hopwell::sparse_mla_backward has no gradient"):
        dq.sum().backward()


def test_a_backward_without_a_formula_is_an_error() -> None:
    """With gradients off such an op runs on tensors that require them, and its result has none."""
    weight, x = hw.nvfp4_quantize(torch.randn(10, 64)), torch.randn(3, 10, requires_grad=True)
    y = hw.nvfp4_linear_backward(x, *weight)
    with pytest.raises(RuntimeError, match="hopwell::nvfp4_linear_backward has no gradient"):
        y.sum().backward()
    with torch.no_grad():
        same = hw.nvfp4_linear_backward(x, *weight)
    assert not same.requires_grad
    assert torch.equal(same, y)


def test_weights_of_four_bits_are_frozen() -> None:
    codes, scales, factor = hw.nvfp4_quantize(torch.randn(10, 64))
    scales, factor = scales.view(torch.float8_e4m3fn).requires_grad_(), factor.requires_grad_()
    for frozen, name in ((scales, "weight_scale"), (factor, "weight_global")):
        given = [x if x is frozen else x.detach() for x in (codes, scales, factor)]
        y = hw.nvfp4_linear(torch.randn(3, 64), *given)
        with pytest.raises(RuntimeError, match=f"hopwell::nvfp4_linear has no gradient for {name}: its weights are"):
            y.sum().backward()


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


def test_an_explanation_writes_nothing() -> None:
    """Nor does PyTorch think so: a backward that needs what was in the output still runs."""
    x, given, weight = torch.rand(3, 5), torch.rand(3, 5), torch.ones(3, 5, requires_grad=True)
    loss, before = (weight * given).sum(), (given.clone(), given._version)
    hopwell.explain("normalize_l1", attn=x, out=given)
    assert torch.equal(given, before[0]) and given._version == before[1]
    loss.backward()
    with pytest.raises(ValueError, match="normalize_l1: attn must be"):
        hopwell.explain("normalize_l1", attn=x[0], out=given)
    hopwell.normalize_l1(x, out=given)
    assert given._version > before[1]


def test_a_tensor_that_requires_grad_is_not_written() -> None:
    q, given = torch.randn(9, 5, 20), torch.zeros(9, 5, 12, requires_grad=True)
    with pytest.raises(ValueError, match="sparse_mla_forward: out requires grad"):
        plain(q, out=given)
    assert not given.any()
    with torch.no_grad():  # as PyTorch's own out=
        plain(q, out=given)
    assert given.any()


def test_a_row_loss_that_requires_grad_is_not_written() -> None:
    index, dense = indexer_inputs(), dense_loss_inputs()
    target, indices = index.pop("target"), index.pop("indices")
    for name, rows, call in (
        (
            "lightning_indexer_backward",
            11,
            partial(hopwell.lightning_indexer_backward, target, **index, indices=indices),
        ),
        ("indexer_dense_loss", 6, partial(hopwell.indexer_dense_loss, *dense)),
    ):
        given = torch.zeros(rows, requires_grad=True)
        with pytest.raises(ValueError, match=f"{name}: row_loss requires grad"):
            call(row_loss=given)
        assert not given.any()
        before = (free := torch.zeros(rows))._version
        call(row_loss=free)
        assert free.any() and free._version > before
