"""NVFP4 products, quantisation and back."""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import hopwell
from hopwell._arrays import dtype_name

from ._register import (
    Named,
    NamedGradients,
    arguments_of,
    contiguous_rows,
    differentiable,
    exporting,
    no_gradient,
    operator,
    scale_shape,
)

_gemv, _linear = exporting(hopwell.nvfp4_gemv), exporting(hopwell.nvfp4_linear)
_linear_backward, _matmul = exporting(hopwell.nvfp4_linear_backward), exporting(hopwell.nvfp4_matmul)
_quantize, _dequantize = exporting(hopwell.nvfp4_quantize), exporting(hopwell.nvfp4_dequantize)


_LEAST_RECIPROCAL = 1 / torch.finfo(torch.float32).max


def _as_tensor(name: str, argument: str, number: Any, like: Tensor, is_reciprocal: bool = False) -> Tensor:
    """A global given as a number, as the ops take it. A number that the operator would refuse is refused here, because
    the operator reads the tensor on the device, where any value is data.
    """
    try:
        value = float(number) if isinstance(number, Real) else math.nan
    except OverflowError:  # a large int
        value = math.inf
    if not abs(value) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name}: {argument} must be a finite number or a 0-d float32 tensor; got {number!r}")
    if is_reciprocal and not abs(value) >= _LEAST_RECIPROCAL:
        expected = "finite with a finite reciprocal (global_is_reciprocal)"
        raise ValueError(f"{name}: {argument} must be {expected}; got {number!r}")
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _nvfp4_gemv_fake(a: Tensor, out_dtype: str, **_: Any) -> Tensor:
    dtype_name("nvfp4_gemv", "out_dtype", out_dtype, ("float16", "bfloat16", "float32"))
    return a.new_empty((a.shape[0], 1, a.shape[2]), dtype=getattr(torch, out_dtype))


@operator("nvfp4_gemv", _nvfp4_gemv_fake)
@arguments_of(hopwell.nvfp4_gemv, "out")
def _nvfp4_gemv(**given: Any) -> Tensor:
    c: Tensor = _gemv(**given)
    return c.contiguous()


def nvfp4_gemv(
    a: Tensor,
    b: Tensor,
    sfa: Tensor,
    sfb: Tensor,
    alpha: float = 1.0,
    out_dtype: str | torch.dtype = "float16",
    scale_layout: str = "plain",
    backend: str | None = None,
    global_is_reciprocal: bool = False,
) -> Tensor:
    """c[m, 0, l] = alpha · Σ_k a·b with both sides NVFP4: a [M, K/2, L], b [1 or 128, K/2, L]; c [M, 1, L] of
    out_dtype, float16, bfloat16 or float32. Codes and scales as in `hopwell.nvfp4_gemv`. Without gradients.
    """
    out_dtype = dtype_name("nvfp4_gemv", "out_dtype", out_dtype, ("float16", "bfloat16", "float32"))
    return _nvfp4_gemv(**locals())


def _nvfp4_linear_fake(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@operator("nvfp4_linear", _nvfp4_linear_fake)
@arguments_of(hopwell.nvfp4_linear, "out", weight_global=Tensor)
def _nvfp4_linear(**given: Any) -> Tensor:
    result: Tensor = _linear(**given)
    return result


def nvfp4_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_global: Tensor | float,
    *,
    bias: Tensor | None = None,
    scale_layout: str = "plain",
    global_is_reciprocal: bool = False,
    backend: str | None = None,
) -> Tensor:
    """y = x · Wᵀ + bias with W in NVFP4 and x in 16 bits (on the CPU float32 too).

    x [n, K], weight [N, K/2] (two codes a byte), weight_scale [N, K/16] or blocked, weight_global a number or a 0-d
    float32 tensor on x's device. Returns y [n, N] in x's dtype. Gradients go to x, by `nvfp4_linear_backward`, and to
    bias; the weights are frozen. `backend` names the backward's backend too, if there is such a one.
    """
    if not isinstance(weight_global, Tensor):
        weight_global = _as_tensor("nvfp4_linear", "weight_global", weight_global, x, global_is_reciprocal)
    return _nvfp4_linear(**locals())


@operator("nvfp4_linear_any_rows", _nvfp4_linear_fake)
@arguments_of(hopwell.nvfp4_linear, "out", weight_global=Tensor)
def nvfp4_linear_any_rows(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None, **given: Any) -> Tensor:
    """`nvfp4_linear`, or a product with the dequantised weight, which exists for the time of the call, where that is
    faster. The choice is made in an op because a trace would keep it, and serve no other numbers of rows.
    """
    if backend is None and _is_faster_dequantized(x, weight):
        scales, weight_global = given.pop("weight_scale"), given.pop("weight_global")
        dense = _dequantize(weight, scales, weight_global, dtype="bfloat16", **given)
        return functional.linear(x, dense, bias)
    y: Tensor = _linear(x=x, weight=weight, bias=bias, backend=backend, **given)
    return y


def _is_faster_dequantized(x: Tensor, weight: Tensor) -> bool:
    """True if the dequantised weight multiplies this many rows of x faster, as measured on an H200. Never in fp16,
    because a dequantised weight may leave its range.
    """
    if not x.is_cuda or x.dtype != torch.bfloat16 or len(x) <= 96:
        return False
    if torch.cuda.get_device_capability(x.device)[0] != 9:
        return True  # there the operator takes 16 at a time
    return len(x) > (1024 if len(weight) > 2048 else 256)


def _nvfp4_linear_backward_fake(d_out: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return d_out.new_empty((d_out.shape[0], weight.shape[1] * 2))


@operator("nvfp4_linear_backward", _nvfp4_linear_backward_fake)
@arguments_of(hopwell.nvfp4_linear_backward, "out", weight_global=Tensor)
def _nvfp4_linear_backward(**given: Any) -> Tensor:
    d_x: Tensor = _linear_backward(**given)
    return d_x


def nvfp4_linear_backward(
    d_out: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_global: Tensor | float,
    *,
    scale_layout: str = "plain",
    global_is_reciprocal: bool = False,
    backend: str | None = None,
) -> Tensor:
    """d_x = d_out · W: the gradient of `nvfp4_linear` for its x. d_out [n, N], the weights as there; d_x [n, K] in the
    dtype of d_out. Without gradients.
    """
    given = locals()
    if not isinstance(weight_global, Tensor):
        name = "nvfp4_linear_backward"
        given["weight_global"] = _as_tensor(name, "weight_global", weight_global, d_out, global_is_reciprocal)
    return _nvfp4_linear_backward(**given)


def _save_linear(given: Named, _: Tensor) -> Named:
    has_backward = given["backend"] in hopwell.backends("nvfp4_linear_backward")
    del given["x"], given["bias"]
    return given | {"backend": given["backend"] if has_backward else None}


def _linear_gradients(given: Named, needed: set[str], d_out: Tensor) -> NamedGradients:
    for name in ("weight", "weight_scale", "weight_global"):
        if name in needed:
            raise RuntimeError(f"hopwell::nvfp4_linear has no gradient for {name}: its weights are frozen")
    d_x = _nvfp4_linear_backward(contiguous_rows(d_out), **given) if "x" in needed else None
    return {"x": d_x, "bias": d_out.sum(0) if "bias" in needed else None}


for _name in ("nvfp4_linear", "nvfp4_linear_any_rows"):
    differentiable(_name, _linear_gradients, _save_linear)


def _nvfp4_matmul_fake(a: Tensor, b: Tensor, out_dtype: str, **_: Any) -> Tensor:
    dtype_name("nvfp4_matmul", "out_dtype", out_dtype, ("bfloat16", "float16", "float32"))
    return a.new_empty((a.shape[0], b.shape[0]), dtype=getattr(torch, out_dtype))


@operator("nvfp4_matmul", _nvfp4_matmul_fake)
@arguments_of(hopwell.nvfp4_matmul, "out")
def _nvfp4_matmul(**given: Any) -> Tensor:
    c: Tensor = _matmul(**given)
    return c


def nvfp4_matmul(
    a: Tensor,
    b: Tensor,
    sfa: Tensor,
    sfb: Tensor,
    alpha: float = 1.0,
    bias: Tensor | None = None,
    out_dtype: str | torch.dtype = "bfloat16",
    scale_layout: str = "plain",
    backend: str | None = None,
    global_is_reciprocal: bool = False,
) -> Tensor:
    """c = alpha · a · bᵀ + bias with both sides NVFP4 (W4A4): a [M, K/2], b [N, K/2]; bias [N] and c [M, N] of
    out_dtype, bfloat16, float16 or float32. Codes and scales as in `hopwell.nvfp4_matmul`. Without gradients.
    """
    out_dtype = dtype_name("nvfp4_matmul", "out_dtype", out_dtype, ("bfloat16", "float16", "float32"))
    return _nvfp4_matmul(**locals())


def _nvfp4_quantize_fake(x: Tensor, scale_layout: str, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, k = x.shape
    codes = x.new_empty((rows, k // 2), dtype=torch.uint8)
    scales = x.new_empty(scale_shape(rows, k, scale_layout), dtype=torch.uint8)
    return codes, scales, x.new_empty((), dtype=torch.float32)


@operator("nvfp4_quantize", _nvfp4_quantize_fake)
@arguments_of(hopwell.nvfp4_quantize, global_scale=Tensor | None)
def _nvfp4_quantize(global_scale: Tensor | None, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, used = _quantize(global_scale=global_scale, **given)
    if global_scale is not None:
        used = global_scale.clone().reshape(())  # an op's output must not be its input
    return codes, scales, used


def nvfp4_quantize(
    x: Tensor,
    *,
    scale_layout: str = "plain",
    global_scale: Tensor | float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds x float32, float16 or bfloat16 [rows, K], K a multiple of 16, to NVFP4. Returns codes uint8 [rows, K/2],
    scales uint8 [rows, K/16] (padded to whole blocks where blocked) and the global scale, a 0-d float32 tensor: the one
    given, a number or such a tensor, or one made for x.
    """
    if global_scale is not None and not isinstance(global_scale, Tensor):
        global_scale = _as_tensor("nvfp4_quantize", "global_scale", global_scale, x)
    return _nvfp4_quantize(**locals())


def _nvfp4_dequantize_fake(codes: Tensor, dtype: str, **_: Any) -> Tensor:
    dtype_name("nvfp4_dequantize", "dtype", dtype, ("float32", "float16", "bfloat16"))
    return codes.new_empty((codes.shape[0], codes.shape[1] * 2), dtype=getattr(torch, dtype))


@operator("nvfp4_dequantize", _nvfp4_dequantize_fake)
@arguments_of(hopwell.nvfp4_dequantize, global_scale=Tensor)
def _nvfp4_dequantize(**given: Any) -> Tensor:
    result: Tensor = _dequantize(**given)
    return result


def nvfp4_dequantize(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | float,
    *,
    scale_layout: str = "plain",
    dtype: str | torch.dtype = "float32",
    backend: str | None = None,
    global_is_reciprocal: bool = False,
) -> Tensor:
    """code · scale · global as a [rows, K] tensor of dtype, float32, float16 or bfloat16. codes [rows, K/2], scales
    [rows, K/16] or blocked, global_scale a number or a 0-d float32 tensor, as `nvfp4_quantize` returns them.
    """
    dtype = dtype_name("nvfp4_dequantize", "dtype", dtype, ("float32", "float16", "bfloat16"))
    if not isinstance(global_scale, Tensor):
        global_scale = _as_tensor("nvfp4_dequantize", "global_scale", global_scale, codes, global_is_reciprocal)
    return _nvfp4_dequantize(**locals())


no_gradient("nvfp4_gemv")
no_gradient("nvfp4_linear_backward")
no_gradient("nvfp4_matmul")
no_gradient("nvfp4_quantize")
no_gradient("nvfp4_dequantize")
