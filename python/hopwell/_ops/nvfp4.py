"""Products of NVFP4 numbers, and the conversions."""

from typing import Any

from .. import _hopwell
from .._arrays import Array, DType, Outputs, check_dtype, dims, dtype_name


def _of_out_dtype(
    outputs: Outputs, out: Array | None, shape: tuple[int, ...], out_dtype: DType, allowed: tuple[str, ...]
) -> Array:
    """A product's result, given or new."""
    dtype = dtype_name(outputs.operator, "out_dtype", out_dtype, allowed)
    result = outputs.given_or_new("out", out, shape, dtype)
    if out is not None:
        check_dtype(outputs.operator, "out", out, dtype, "out_dtype")
    return result


def nvfp4_gemv(
    a: Array,
    b: Array,
    sfa: Array,
    sfb: Array,
    *,
    alpha: float = 1.0,
    global_is_reciprocal: bool = False,
    out_dtype: DType = "float16",
    scale_layout: str = "plain",
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Array:
    """c[m,0,l] = alpha·Σ_k a[m,k,l]·b[0,k,l], both sides NVFP4: e2m1 codes (low nibble = even k), e4m3 scales.

    Args:
        a: codes, uint8 or float4_e2m1fn_x2 [M, K/2, L]; K a multiple of 16, fastest in memory, then rows, then L.
        b: codes [1, K/2, L], or [128, K/2, L] of which only the first row counts.
        sfa, sfb: scales, uint8 or float8_e4m3fn. scale_layout "plain": [rows, K/16, L]; "blocked": the 128×4 order of
            cuBLAS and CUTLASS, in any shape of as many bytes, L slowest.
        alpha: factor of the result.
        global_is_reciprocal: alpha is 1 / the factor (compressed-tensors).
        out_dtype: "float16", "bfloat16" or "float32".
        out: [M, 1, L] of out_dtype, any strides; written in place.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        c [M, 1, L].
    """
    outputs = Outputs("nvfp4_gemv", "a", a)
    m, _, batch = dims(a, 3)
    out = _of_out_dtype(outputs, out, (m, 1, batch), out_dtype, ("float16", "bfloat16", "float32"))
    _hopwell.nvfp4_gemv(a, b, sfa, sfb, alpha, global_is_reciprocal, scale_layout, out, backend, stream)
    return outputs.native(out)[0]


def nvfp4_linear(
    x: Array,
    weight: Array,
    weight_scale: Array,
    weight_global: float | Array,
    *,
    bias: Array | None = None,
    scale_layout: str = "plain",
    global_is_reciprocal: bool = False,
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Array:
    """y[i,n] = weight_global·Σ_k x[i,k]·code[n,k]·scale[n,k/16] + bias[n]: 4-bit weights, 16-bit activations (W4A16).

    Args:
        x: bf16, fp16 or (on the CPU) fp32 [n, K].
        weight: codes, uint8 or float4_e2m1fn_x2 [N, K/2].
        weight_scale: uint8 or float8_e4m3fn; scale_layout "plain": [N, K/16], or "blocked", as in `nvfp4_gemv`.
        weight_global: a number, or a 0-d fp32 array on the device of x.
        bias: like x, [N].
        global_is_reciprocal: the global is 1 / the factor (compressed-tensors).
        out: like x, [n, N]; written in place.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        y [n, N] in the dtype of x.
    """
    outputs = Outputs("nvfp4_linear", "x", x)
    out = outputs.given_or_new("out", out, (dims(x, 2)[0], dims(weight, 2)[0]), x.dtype)
    _hopwell.nvfp4_linear(
        x, weight, weight_scale, weight_global, global_is_reciprocal, bias, scale_layout, out, backend, stream
    )
    return outputs.native(out)[0]


def nvfp4_linear_backward(
    d_out: Array,
    weight: Array,
    weight_scale: Array,
    weight_global: float | Array,
    *,
    scale_layout: str = "plain",
    global_is_reciprocal: bool = False,
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Array:
    """d_x[i,k] = weight_global·Σ_n d_out[i,n]·code[n,k]·scale[n,k/16]: the gradient of `nvfp4_linear` for its x.

    The weights are frozen: there is no gradient for them. A row of d_x has the same bits whatever other rows there are.

    Args:
        d_out: bf16, fp16 or (on the CPU) fp32 [n, N].
        weight, weight_scale, weight_global, scale_layout, global_is_reciprocal: as in `nvfp4_linear`.
        out: like d_out, [n, K]; written in place.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        d_x [n, K] in the dtype of d_out.
    """
    outputs = Outputs("nvfp4_linear_backward", "d_out", d_out)
    out = outputs.given_or_new("out", out, (dims(d_out, 2)[0], 2 * dims(weight, 2)[1]), d_out.dtype)
    _hopwell.nvfp4_linear_backward(
        d_out, weight, weight_scale, weight_global, global_is_reciprocal, scale_layout, out, backend, stream
    )
    return outputs.native(out)[0]


def nvfp4_matmul(
    a: Array,
    b: Array,
    sfa: Array,
    sfb: Array,
    *,
    alpha: float = 1.0,
    global_is_reciprocal: bool = False,
    bias: Array | None = None,
    out_dtype: DType = "bfloat16",
    scale_layout: str = "plain",
    out: Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> Array:
    """c[m,n] = alpha·Σ_k a[m,k]·b[n,k] + bias[n], both sides NVFP4 (W4A4).

    Args:
        a, b: e2m1 codes (low nibble = even k), uint8 or float4_e2m1fn_x2 [M, K/2] and [N, K/2]; K a multiple of 16.
        sfa, sfb: e4m3 scales, uint8 or float8_e4m3fn; scale_layout "plain": [rows, K/16], or "blocked", as in
            `nvfp4_gemv`.
        alpha: factor of the product, such as both sides' global scales.
        global_is_reciprocal: alpha is 1 / the factor (compressed-tensors).
        bias: [N], of out_dtype.
        out_dtype: "bfloat16", "float16" or "float32".
        out: [M, N] of out_dtype; written in place.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        c [M, N].
    """
    outputs = Outputs("nvfp4_matmul", "a", a)
    out = _of_out_dtype(outputs, out, (dims(a, 2)[0], dims(b, 2)[0]), out_dtype, ("bfloat16", "float16", "float32"))
    _hopwell.nvfp4_matmul(a, b, sfa, sfb, alpha, global_is_reciprocal, bias, scale_layout, out, backend, stream)
    return outputs.native(out)[0]


def nvfp4_quantize(
    x: Array,
    *,
    scale_layout: str = "plain",
    global_scale: float | Array | None = None,
    backend: str | None = None,
    stream: Any = None,
) -> tuple[Array, Array, Array]:
    """x to NVFP4: global = amax/2688; scale = e4m3(block amax/(6·global)); codes nearest (ties to even) to the rest.

    Args:
        x: fp32, fp16 or bf16 [rows, K]; K a multiple of 16.
        scale_layout: "plain" or "blocked", as in `nvfp4_gemv`.
        global_scale: use this one, a number or a 0-d fp32 array; scales saturate at 448 where it is too small.
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        (codes uint8 [rows, K/2], scales uint8 [rows, K/16], or blocked [rows up to 128s, K/16 up to 4s], global fp32
        0-d).
    """
    outputs = Outputs("nvfp4_quantize", "x", x)
    rows, k = dims(x, 2)
    groups = k // 16
    blocked = scale_layout == "blocked"
    codes = outputs.new((rows, k // 2), "uint8")
    scales = outputs.new((-(-rows // 128) * 128, -(-groups // 4) * 4) if blocked else (rows, groups), "uint8")
    factor = outputs.new((), "float32")
    _hopwell.nvfp4_quantize(x, global_scale, scale_layout, codes, scales, factor, backend, stream)
    return outputs.native(codes, scales, factor)


def nvfp4_dequantize(
    codes: Array,
    scales: Array,
    global_scale: float | Array,
    *,
    global_is_reciprocal: bool = False,
    scale_layout: str = "plain",
    dtype: DType = "float32",
    backend: str | None = None,
    stream: Any = None,
) -> Array:
    """x = code·scale·global.

    Args:
        codes: uint8 or float4_e2m1fn_x2 [rows, K/2].
        scales: uint8 or float8_e4m3fn; scale_layout "plain": [rows, K/16], or "blocked", as in `nvfp4_gemv`.
        global_scale: a number or a 0-d fp32 array.
        global_is_reciprocal: the global is 1 / the factor (compressed-tensors), which is rounded to fp32.
        dtype: "float32", "float16" or "bfloat16".
        backend, stream: as in `sparse_mla_forward`.

    Returns:
        x [rows, K].
    """
    name = "nvfp4_dequantize"
    outputs = Outputs(name, "codes", codes)
    rows, half_k = dims(codes, 2)
    x = outputs.new((rows, 2 * half_k), dtype_name(name, "dtype", dtype, ("float32", "float16", "bfloat16")))
    _hopwell.nvfp4_dequantize(codes, scales, global_scale, global_is_reciprocal, scale_layout, x, backend, stream)
    return outputs.native(x)[0]
