"""hopwell.torch: selection, NVFP4 and decode, against the reference and plain PyTorch."""

from typing import Any

import numpy as np
import pytest
import torch
from hopwell import reference
from hopwell import torch as hw
from support import norm_error
from torch import Tensor
from torch_inputs import paged_inputs, sparse_inputs

pytestmark = pytest.mark.usefixtures("torch_seed")


def test_target_and_selection_carry_no_gradient() -> None:
    q, kv = torch.randn(6, 3, 16, requires_grad=True), torch.randn(6, 16, requires_grad=True)
    k_index = torch.randn(6, 16, requires_grad=True)
    indices, scores = hw.lightning_indexer(q, k_index, torch.rand(6, 3, requires_grad=True), 4, q_start=0)
    _, _, lse = hw.sparse_mla(q, kv, indices, 0.5, 8)
    target = hw.attention_distribution(q, kv, indices, lse, 0.5, normalize="l1")
    assert not indices.requires_grad and scores.requires_grad
    assert not target.requires_grad
    torch.testing.assert_close(target.sum(-1), torch.ones(6))


@pytest.mark.parametrize("relu", [False, True])
def test_selection_equals_the_reference(relu: bool) -> None:
    q, k, w = torch.randn(30, 4, 32), torch.randn(30, 32), torch.rand(30, 4)
    indices, scores = hw.lightning_indexer(q, k, w, 9, q_start=0, relu=relu)
    arrays = (x.numpy() for x in (q, k, w))
    expected_indices, expected_scores = reference.lightning_indexer(*arrays, 9, q_start=0, relu=relu)
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


def test_paged_attention() -> None:
    inputs = paged_inputs()
    r, u = torch.randn(4, 24, 32), torch.randn(4, 32)
    out, lse = hw.paged_attention(*inputs, pos_bias_u=u, r=r, pos_bias_v=u)
    arrays = [x.numpy() if isinstance(x, Tensor) else x for x in inputs]
    expected = reference.paged_attention(*arrays, pos_bias_u=u.numpy(), r=r.numpy(), pos_bias_v=u.numpy())
    assert norm_error(out, torch.as_tensor(expected[0])) <= 1e-5
    np.testing.assert_allclose(lse.numpy(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_dtypes_are_pytorch_s_or_names(compiled: bool) -> None:
    """As in every function of PyTorch."""
    codes, scales, scale = hw.nvfp4_quantize(torch.randn(20, 64))
    batched = tuple(x[None].permute(1, 2, 0) for x in (codes, scales))
    inputs = sparse_inputs()
    out, _, lse = hw.sparse_mla(**inputs)
    backward = out, *(inputs[name] for name in ("q", "kv", "indices")), out, lse, 0.5, 12

    def results(dtype: torch.dtype | str) -> tuple[Any, ...]:
        return (
            hw.nvfp4_dequantize(codes, scales, scale, dtype=dtype),
            hw.nvfp4_matmul(codes, codes, scales, scales, out_dtype=dtype),
            hw.nvfp4_gemv(batched[0], batched[0][:1], batched[1], batched[1][:1], out_dtype=dtype),
            hw.sparse_mla_backward(*backward, dkv_dtype=dtype)[1],
        )

    function = torch.compile(results, fullgraph=True, backend="aot_eager") if compiled else results
    for given, named in zip(function(torch.bfloat16), results("bfloat16"), strict=True):
        assert given.dtype == torch.bfloat16
        assert torch.equal(given, named)
    with pytest.raises(ValueError, match="nvfp4_dequantize: dtype must be float32, float16 or bfloat16; got float64"):
        hw.nvfp4_dequantize(codes, scales, scale, dtype=torch.float64)


def test_the_global_scale_comes_back_without_dimensions() -> None:
    """As its fake kernel declares."""
    given = torch.full((1,), 0.01)
    assert hw.nvfp4_quantize(torch.randn(3, 32), global_scale=given)[2].shape == ()
