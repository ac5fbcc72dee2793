"""NVFP4 matrix products, quantisation and scale layouts.

A weight is code·scale·global: e2m1 codes, two a byte (low nibble = even k); one e4m3 scale for 16 of them along K;
one fp32 global for the tensor. Formats: OCP Microscaling Formats (MX) v1.0, section 5.3, and OCP 8-bit Floating
Point v1.0. Everything but the fp32 steps of `nvfp4_quantize` is exact in float64 up to the sum over K.
"""

import numpy as np
import numpy.typing as npt

from ._arrays import Array, Float64, Tensor, Uint8, as_array, as_float64, deliver, describe, require, require_shape

BLOCK = 16  # codes along K that share a scale
CODE_MAX, SCALE_MAX = 6.0, 448.0


def _decode_minifloat(codes: Array, exponent_bits: int, mantissa_bits: int) -> Float64:
    """IEEE-like bit patterns without infinities to numbers. The exponent's bias is 2^(exponent_bits − 1) − 1."""
    bits = np.asarray(codes, dtype=np.int64)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = np.where(bits >> (exponent_bits + mantissa_bits), -1.0, 1.0)
    significand = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)  # no hidden bit in subnormals
    bias = (1 << (exponent_bits - 1)) - 1
    power = np.maximum(exponent, 1) - bias - mantissa_bits
    return np.asarray(sign * np.ldexp(significand.astype(np.float64), power))


E2M1 = _decode_minifloat(np.arange(16), 2, 1)  # 0 0.5 1 1.5 2 3 4 6 and their negatives
E4M3 = _decode_minifloat(np.arange(256), 4, 3)
E4M3[[0x7F, 0xFF]] = np.nan


def _nearest_code(magnitude: Float64, unit: Float64 | float, grid: Float64) -> Uint8:
    """The code c whose grid[c]·unit is nearest to magnitude ≥ 0; ties to the even code; past the end, the last.

    magnitude is compared with the midpoints themselves rather than divided by unit, so nothing is rounded: a midpoint
    times a unit of scale·global has at most 3 + 4 + 24 significant bits.
    """
    code = np.zeros(np.shape(magnitude), dtype=np.uint8)
    for lower, midpoint in enumerate((grid[:-1] + grid[1:]) / 2.0):
        tie_goes_up = lower % 2 == 1
        code += (magnitude >= midpoint * unit) if tie_goes_up else (magnitude > midpoint * unit)
    return code


def _bytes(operator: str, argument: str, x: Tensor) -> Uint8:
    """Codes or scales as uint8, viewed and not converted."""
    array = as_array(x)
    is_bytes = array.dtype == np.uint8 or array.dtype.name == "float8_e4m3fn"
    require(is_bytes, operator, argument, "uint8 or float8_e4m3fn", describe(array))
    return array.view(np.uint8)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _blocked_offsets(rows: int, columns: int) -> npt.NDArray[np.int64]:
    """Byte offset of scale (m, j) in the 128×4 blocked order, int64 [rows, columns]."""
    m, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    tile = (m // 128) * (_round_up(columns, 4) // 4) + j // 4
    return np.asarray(512 * tile + 16 * (m % 32) + 4 * ((m % 128) // 32) + j % 4, dtype=np.int64)


def pack_blocked_scales(scales: Tensor) -> Uint8:
    """Plain scales [rows, K/16] to the 128×4 blocked order of cuBLAS and CUTLASS.

    Returns uint8 [rows rounded up to 128, K/16 rounded up to 4]; the shape says only how many bytes there are. Padding
    bytes are 0.
    """
    plain = _bytes("pack_blocked_scales", "scales", scales)
    require(plain.ndim == 2, "pack_blocked_scales", "scales", "[rows, K/16]", describe(plain))
    rows, columns = plain.shape
    blocked = np.zeros((_round_up(rows, 128), _round_up(columns, 4)), dtype=np.uint8)
    blocked.reshape(-1)[_blocked_offsets(rows, columns)] = plain
    return blocked


def unpack_blocked_scales(blocked: Tensor, rows: int, columns: int) -> Uint8:
    """The plain scales uint8 [rows, columns] out of a blocked tensor of any shape. Padding is not read."""
    return _unpack("unpack_blocked_scales", "blocked", blocked, rows, columns, 1)[:, :, 0]


def _unpack(operator: str, argument: str, blocked: Tensor, rows: int, columns: int, batch: int) -> Uint8:
    """Plain scales uint8 [rows, columns, batch] out of `batch` blocked matrices, one after the other in memory."""
    memory = _bytes(operator, argument, blocked).ravel(order="K")  # as the bytes lie, whatever the shape says
    size = _round_up(rows, 128) * _round_up(columns, 4)
    require(memory.size == batch * size, operator, argument, f"{batch * size} bytes of blocked scales", memory.size)
    return np.moveaxis(memory.reshape(batch, size)[:, _blocked_offsets(rows, columns)], 0, 2)


def _scales(
    operator: str, argument: str, x: Tensor, layout: str, shape: tuple[int, int] | tuple[int, int, int]
) -> Float64:
    """Decoded scales in plain order, of the given plain shape [rows, K/16] or [rows, K/16, L]."""
    require(layout in ("plain", "blocked"), operator, "scale_layout", "plain or blocked", layout)
    if layout == "blocked":
        batch = shape[2] if len(shape) == 3 else 1
        return E4M3[_unpack(operator, argument, x, shape[0], shape[1], batch)].reshape(shape)
    plain = _bytes(operator, argument, x)
    require_shape(operator, argument, plain, "[rows, K/16]" if len(shape) == 2 else "[rows, K/16, L]", shape)
    return E4M3[plain]


def _decode(codes: Uint8, scales: Float64) -> Float64:
    """code·scale, [rows, K], from codes [rows, K/2] and decoded scales [rows, K/16]."""
    values = np.stack([E2M1[codes & 0xF], E2M1[codes >> 4]], axis=-1).reshape(len(codes), 2 * codes.shape[1])
    return values * np.repeat(scales, BLOCK, axis=1)


def _factor(operator: str, argument: str, given: float | Tensor, is_reciprocal: bool) -> Float64:
    """The factor that a global scale, a number or a 0-d array, stands for."""
    factor = as_float64(given)
    require(factor.ndim == 0, operator, argument, "a number or a 0-d array", describe(factor))
    if not is_reciprocal:
        return factor
    with np.errstate(divide="ignore", over="ignore"):
        usable = bool(np.isfinite(factor)) and bool(np.isfinite(np.float32(1.0) / np.float32(factor)))
    require(usable, operator, argument, "finite with a finite reciprocal (global_is_reciprocal)", factor)
    return np.asarray(1.0 / factor)


def _require_whole_blocks(operator: str, argument: str, codes: Uint8, rank: int, expected: str) -> None:
    whole = codes.ndim == rank and codes.shape[1] % (BLOCK // 2) == 0
    require(whole, operator, argument, f"{expected} with K a multiple of {BLOCK}", describe(codes))


def nvfp4_gemv(
    a: Tensor,
    b: Tensor,
    sfa: Tensor,
    sfb: Tensor,
    *,
    alpha: float = 1.0,
    global_is_reciprocal: bool = False,
    out_dtype: str = "float16",
    scale_layout: str = "plain",
    out: Array | None = None,
) -> Array:
    """c[m,0,l] = alpha·Σ_k a[m,k,l]·b[0,k,l], both sides NVFP4; 1 / alpha is the factor with global_is_reciprocal.

    a uint8 [M, K/2, L] with sfa [M, K/16, L]; b uint8 [N, K/2, L] with sfb [N, K/16, L]; scales uint8 or float8_e4m3fn,
    plain or blocked (then L matrices one after the other). Returns c [M, 1, L].

    N is 1, or 128 where the one row was padded to a tile; the padding is not read. `out_dtype` does not matter here:
    nothing is rounded.
    """
    name = "nvfp4_gemv"
    codes_a, codes_b = _bytes(name, "a", a), _bytes(name, "b", b)
    _require_whole_blocks(name, "a", codes_a, 3, "uint8 [M, K/2, L]")
    _require_whole_blocks(name, "b", codes_b, 3, "uint8 [N, K/2, L]")
    (m, half_k, batch), rows_b = codes_a.shape, len(codes_b)
    require_shape(name, "b", codes_b, "[N, K/2, L]", (rows_b, half_k, batch))
    require(rows_b in (1, 128), name, "b", "of 1 row, or 1 padded to 128", describe(codes_b))
    known = ("float16", "bfloat16", "float32")
    require(out_dtype in known, name, "out_dtype", "float16, bfloat16 or float32", out_dtype)
    require(bool(np.isfinite(alpha)), name, "alpha", "finite", alpha)
    factor = _factor(name, "alpha", alpha, global_is_reciprocal)
    scales_a = _scales(name, "sfa", sfa, scale_layout, (m, half_k // 8, batch))
    scales_b = _scales(name, "sfb", sfb, scale_layout, (rows_b, half_k // 8, batch))

    c = np.zeros((m, 1, batch))
    for i in range(batch):
        matrix = _decode(codes_a[:, :, i], scales_a[:, :, i])
        c[:, :, i] = factor * (matrix @ _decode(codes_b[:1, :, i], scales_b[:1, :, i]).T)
    return deliver(name, "out", c, out)


def nvfp4_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_global: float | Tensor,
    *,
    bias: Tensor | None = None,
    scale_layout: str = "plain",
    global_is_reciprocal: bool = False,
    out: Array | None = None,
) -> Array:
    """y[i,n] = weight_global·Σ_k x[i,k]·code[n,k]·scale[n,k/16] + bias[n].

    x [n, K]; weight uint8 [N, K/2]; weight_scale [N, K/16], plain or blocked; weight_global a number or a 0-d array
    (its reciprocal with global_is_reciprocal); bias [N]. Returns y [n, N].
    """
    name = "nvfp4_linear"
    codes, activations = _bytes(name, "weight", weight), as_float64(x)
    _require_whole_blocks(name, "weight", codes, 2, "uint8 [N, K/2]")
    rows, k = len(codes), 2 * codes.shape[1]
    require(activations.ndim == 2 and activations.shape[1] == k, name, "x", f"[n, {k}]", describe(activations))
    scales = _scales(name, "weight_scale", weight_scale, scale_layout, (rows, k // BLOCK))
    factor = _factor(name, "weight_global", weight_global, global_is_reciprocal)
    offset = np.zeros(rows) if bias is None else as_float64(bias)
    require_shape(name, "bias", offset, "[N]", (rows,))

    return deliver(name, "out", factor * (activations @ _decode(codes, scales).T) + offset, out)


def nvfp4_linear_backward(
    d_out: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_global: float | Tensor,
    *,
    scale_layout: str = "plain",
    global_is_reciprocal: bool = False,
    out: Array | None = None,
) -> Array:
    """d_x[i,k] = weight_global·Σ_n d_out[i,n]·code[n,k]·scale[n,k/16]: the gradient of `nvfp4_linear` for its x.

    d_out [n, N]; the weights as in `nvfp4_linear`. Returns d_x [n, K].
    """
    name = "nvfp4_linear_backward"
    codes, gradients = _bytes(name, "weight", weight), as_float64(d_out)
    _require_whole_blocks(name, "weight", codes, 2, "uint8 [N, K/2]")
    rows, k = len(codes), 2 * codes.shape[1]
    require(gradients.ndim == 2 and gradients.shape[1] == rows, name, "d_out", f"[n, {rows}]", describe(gradients))
    scales = _scales(name, "weight_scale", weight_scale, scale_layout, (rows, k // BLOCK))
    factor = _factor(name, "weight_global", weight_global, global_is_reciprocal)
    return deliver(name, "out", factor * (gradients @ _decode(codes, scales)), out)


def nvfp4_matmul(
    a: Tensor,
    b: Tensor,
    sfa: Tensor,
    sfb: Tensor,
    *,
    alpha: float = 1.0,
    global_is_reciprocal: bool = False,
    bias: Tensor | None = None,
    out_dtype: str = "bfloat16",
    scale_layout: str = "plain",
    out: Array | None = None,
) -> Array:
    """c[m,n] = alpha·Σ_k a[m,k]·b[n,k] + bias[n], both sides NVFP4; 1 / alpha is the factor with global_is_reciprocal.

    a uint8 [M, K/2] with sfa [M, K/16]; b uint8 [N, K/2] with sfb [N, K/16]; scales uint8 or float8_e4m3fn, plain or
    blocked; bias [N]. Returns c [M, N]. `out_dtype` does not matter here: nothing is rounded.
    """
    name = "nvfp4_matmul"
    codes_a, codes_b = _bytes(name, "a", a), _bytes(name, "b", b)
    _require_whole_blocks(name, "a", codes_a, 2, "uint8 [M, K/2]")
    (m, half_k), n = codes_a.shape, len(codes_b)
    require_shape(name, "b", codes_b, "[N, K/2]", (n, half_k))
    known = ("bfloat16", "float16", "float32")
    require(out_dtype in known, name, "out_dtype", "bfloat16, float16 or float32", out_dtype)
    require(bool(np.isfinite(alpha)), name, "alpha", "finite", alpha)
    factor = _factor(name, "alpha", alpha, global_is_reciprocal)
    scales_a = _scales(name, "sfa", sfa, scale_layout, (m, half_k // 8))
    scales_b = _scales(name, "sfb", sfb, scale_layout, (n, half_k // 8))
    offset = np.zeros(n) if bias is None else as_float64(bias)
    require_shape(name, "bias", offset, "[N]", (n,))
    return deliver(name, "out", factor * (_decode(codes_a, scales_a) @ _decode(codes_b, scales_b).T) + offset, out)


def _global_of(amax: np.float32) -> np.float32:
    """amax/2688 in fp32, so that the largest block's scale is 448 and its largest code 6."""
    if amax == 0:
        return np.float32(1.0)
    smallest = np.finfo(np.float32).smallest_subnormal  # the quotient of a subnormal amax may round to 0
    return np.float32(max(amax / np.float32(CODE_MAX * SCALE_MAX), smallest))


def nvfp4_quantize(
    x: Tensor, *, scale_layout: str = "plain", global_scale: float | Tensor | None = None
) -> tuple[Uint8, Uint8, npt.NDArray[np.float32]]:
    """x [rows, K] (fp32, fp16 or bf16, K a multiple of 16) to NVFP4.

    Bit by bit, in fp32 with round-to-nearest-even and subnormals kept:

        global = amax / 2688                  amax over the tensor; 1 if it is 0; at least 2^-149
        scale  = e4m3(block_amax / (6·global))   product, quotient and conversion each round once; saturates at 448
        code   = nearest e2m1 to x / (scale·global), ties to even, saturating at 6: exact, as if by real numbers

    A code keeps x's sign also where it rounds to zero (0x8). A block whose scale is 0, because it is zero or too small
    for its global, gets codes 0x0. A block with a NaN or an infinity gets a NaN scale (0x7F) and codes 0x0; such
    values do not count in amax. A given `global_scale` (positive, finite) is rounded to fp32 and used as it is.
    Returns codes uint8 [rows, K/2], scales uint8 [rows, K/16] or blocked, and the global, a 0-d fp32 array.
    """
    name = "nvfp4_quantize"
    given = as_array(x)
    accepted = given.dtype.name in ("float32", "float16", "bfloat16") and given.ndim == 2
    expected = "float32, float16 or bfloat16 [rows, K] with K a multiple of 16"
    require(accepted and given.shape[1] % BLOCK == 0, name, "x", expected, describe(given))
    require(scale_layout in ("plain", "blocked"), name, "scale_layout", "plain or blocked", scale_layout)
    magnitude = np.abs(given.astype(np.float32))
    finite = np.isfinite(magnitude)
    factor = _global_of(magnitude.max(initial=np.float32(0.0), where=finite))
    if global_scale is not None:
        wanted = as_array(global_scale)
        require(wanted.ndim == 0, name, "global_scale", "a number or a 0-d array", describe(wanted))
        factor = np.float32(wanted[()])
        require(bool(0.0 < factor < np.inf), name, "global_scale", "positive and finite in fp32", factor)

    blocks = np.where(finite, magnitude, np.float32(0.0))  # fp32, as [rows, K/16, 16]
    blocks = blocks.reshape(len(given), given.shape[1] // BLOCK, BLOCK)
    spoilt = np.asarray(~finite.reshape(blocks.shape).all(axis=2))
    with np.errstate(over="ignore", under="ignore"):
        quotient = blocks.max(axis=2) / (np.float32(CODE_MAX) * factor)
    scales = _nearest_code(quotient.astype(np.float64), 1.0, E4M3[:0x7F])

    unit = E4M3[scales][:, :, None] * np.float64(factor)
    signs = np.signbit(given.astype(np.float32)).astype(np.uint8).reshape(blocks.shape)
    codes = _nearest_code(blocks.astype(np.float64), unit, E2M1[:8]) | (signs << 3)
    codes = np.where((scales == 0)[:, :, None] | spoilt[:, :, None], np.uint8(0), codes).reshape(given.shape)
    scales = np.where(spoilt, np.uint8(0x7F), scales)
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
    return packed, pack_blocked_scales(scales) if scale_layout == "blocked" else scales, np.array(factor)


def nvfp4_dequantize(
    codes: Tensor,
    scales: Tensor,
    global_scale: float | Tensor,
    *,
    global_is_reciprocal: bool = False,
    scale_layout: str = "plain",
    dtype: str = "float32",
) -> Float64:
    """code·scale·global, [rows, K], from codes uint8 [rows, K/2] and scales [rows, K/16] or blocked; the factor is
    1 / global with global_is_reciprocal.

    `dtype` does not matter here: nothing is rounded.
    """
    name = "nvfp4_dequantize"
    packed = _bytes(name, "codes", codes)
    _require_whole_blocks(name, "codes", packed, 2, "uint8 [rows, K/2]")
    require(dtype in ("float32", "float16", "bfloat16"), name, "dtype", "float32, float16 or bfloat16", dtype)
    factor = _factor(name, "global_scale", global_scale, global_is_reciprocal)
    shape = (len(packed), packed.shape[1] // (BLOCK // 2))
    return _decode(packed, _scales(name, "scales", scales, scale_layout, shape)) * factor
