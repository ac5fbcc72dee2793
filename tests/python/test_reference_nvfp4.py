"""The NVFP4 reference against ml_dtypes' conversions and rational arithmetic."""

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hopwell import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_close

INF = math.inf
Generator = np.random.Generator


def dequantize_by_casts(codes: np.ndarray, scales: np.ndarray, factor: float) -> np.ndarray:
    """code·scale·global through ml_dtypes, in a loop over the bytes."""
    rows, half_k = codes.shape
    values = np.zeros((rows, 2 * half_k))
    decoded = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for m, byte in np.ndindex(rows, half_k):
        for part in range(2):
            nibble = np.array(codes[m, byte] >> (4 * part) & 0xF, np.uint8).view(ml_dtypes.float4_e2m1fn)
            values[m, 2 * byte + part] = float(nibble) * decoded[m, byte // 8] * factor
    return values


def random_nvfp4(rng: Generator, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Random codes, and random scales except NaN."""
    scales = rng.integers(0, 256, (rows, k // 16)).astype(np.uint8)
    scales[(scales & 0x7F) == 0x7F] -= 1
    return rng.integers(0, 256, (rows, k // 2)).astype(np.uint8), scales


def blocked_by_formula(scales: np.ndarray, padding: int) -> np.ndarray:
    rows, columns = scales.shape
    tiles = -(-columns // 4)
    memory = np.full(-(-rows // 128) * tiles * 512, padding, dtype=np.uint8)
    for m, j in np.ndindex(rows, columns):
        memory[512 * ((m // 128) * tiles + j // 4) + 16 * (m % 32) + 4 * ((m % 128) // 32) + j % 4] = scales[m, j]
    return memory


def test_nvfp4_every_code_and_every_scale() -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 1))
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scales = np.arange(256, dtype=np.uint8)[:, None]
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * scales.view(ml_dtypes.float8_e4m3fn).astype(
        np.float64
    )
    actual = reference.nvfp4_dequantize(packed, scales.view(ml_dtypes.float8_e4m3fn), 1.0)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual[:127, 8]), True)  # -0 stays -0
    assert np.isnan(actual[[0x7F, 0xFF]]).all() and np.isfinite(np.delete(actual, [0x7F, 0xFF], 0)).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 3), (128, 4), (129, 5), (300, 9)])
def test_nvfp4_blocked_layout(rng: Generator, rows: int, columns: int) -> None:
    plain = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
    blocked = reference.pack_blocked_scales(plain)
    np.testing.assert_array_equal(blocked.reshape(-1), blocked_by_formula(plain, 0))
    np.testing.assert_array_equal(
        reference.unpack_blocked_scales(blocked_by_formula(plain, 0x7F), rows, columns), plain
    )


@pytest.mark.parametrize("layout", ["plain", "blocked"])
@pytest.mark.parametrize("rows_b", [1, 128])
def test_nvfp4_gemv(rng: Generator, layout: str, rows_b: int) -> None:
    m, k, batch = 5, 48, 2
    pairs = [[random_nvfp4(rng, rows, k) for _ in range(batch)] for rows in (m, rows_b)]
    if rows_b == 128:
        for codes, scales in pairs[1]:
            scales[1:] = 0x7F  # the scales of the padding
            codes[1:] = 0x77
    arguments = []
    for sides in pairs:
        codes = np.stack([codes for codes, _ in sides]).transpose(1, 2, 0)  # K has the smallest stride, L the largest
        scales = np.stack([scales for _, scales in sides]).transpose(1, 2, 0)
        if layout == "blocked":
            scales = np.stack([blocked_by_formula(scales[:, :, i], 0x7F) for i in range(batch)])
        arguments.append((codes, scales))
    (a, sfa), (b, sfb) = arguments
    c = reference.nvfp4_gemv(a, b, sfa, sfb, alpha=0.5, scale_layout=layout)
    for i in range(batch):
        left, right = (dequantize_by_casts(*side[i], 1.0) for side in pairs)
        assert_close(c[:, :, i], 0.5 * left @ right[:1].T)


def test_nvfp4_blocked_tensor_of_permuted_strides(rng: Generator) -> None:
    """The six-dimensional view of the blocked order, (32, 4, rows/128, 4, K/64, L), as CUTLASS users build it."""
    plain = rng.integers(0, 0x7E, (256, 8)).astype(np.uint8)
    memory = blocked_by_formula(plain, 0).reshape(1, 2, 2, 32, 4, 4)  # L, rows/128, K/64, 32, 4, 4
    view = memory.transpose(3, 4, 1, 5, 2, 0)
    np.testing.assert_array_equal(reference.unpack_blocked_scales(view, 256, 8), plain)


@pytest.mark.parametrize("layout", ["plain", "blocked"])
@pytest.mark.parametrize("reciprocal", [False, True])
def test_nvfp4_linear(rng: Generator, layout: str, reciprocal: bool) -> None:
    codes, scales = random_nvfp4(rng, 7, 64)
    x, bias = rng.standard_normal((3, 64)).astype(ml_dtypes.bfloat16), rng.standard_normal(7).astype(ml_dtypes.bfloat16)
    factor = np.float32(rng.random() + 0.1)
    given_scales = blocked_by_formula(scales, 0xFF) if layout == "blocked" else scales
    y = reference.nvfp4_linear(
        x, codes, given_scales, np.array(factor), bias=bias, scale_layout=layout, global_is_reciprocal=reciprocal
    )
    weight = dequantize_by_casts(codes, scales, 1 / float(factor) if reciprocal else float(factor))
    assert_close(y, x.astype(np.float64) @ weight.T + bias.astype(np.float64))
    scales[2, 1] = 0xFF
    poisoned = reference.nvfp4_linear(x, codes, scales, factor)
    assert np.isnan(poisoned[:, 2]).all() and np.isfinite(np.delete(poisoned, 2, axis=1)).all()


@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("layout", ["plain", "blocked"])
def test_nvfp4_linear_backward(rng: Generator, layout: str, reciprocal: bool) -> None:
    codes, scales = random_nvfp4(rng, 7, 64)
    d_out, factor = rng.standard_normal((3, 7)).astype(ml_dtypes.bfloat16), np.float32(rng.random() + 0.1)
    given_scales = blocked_by_formula(scales, 0xFF) if layout == "blocked" else scales
    d_x = reference.nvfp4_linear_backward(
        d_out, codes, given_scales, np.array(factor), scale_layout=layout, global_is_reciprocal=reciprocal
    )
    weight = dequantize_by_casts(codes, scales, 1 / float(factor) if reciprocal else float(factor))
    assert_close(d_x, d_out.astype(np.float64) @ weight)


@pytest.mark.parametrize("layout", ["plain", "blocked"])
def test_nvfp4_matmul(rng: Generator, layout: str) -> None:
    (a, sfa), (b, sfb) = random_nvfp4(rng, 5, 64), random_nvfp4(rng, 7, 64)
    bias = rng.standard_normal(7).astype(ml_dtypes.bfloat16)
    given = [blocked_by_formula(scales, 0xFF) if layout == "blocked" else scales for scales in (sfa, sfb)]
    c = reference.nvfp4_matmul(a, b, *given, alpha=0.5, bias=bias, scale_layout=layout)
    assert_close(
        c, 0.5 * dequantize_by_casts(a, sfa, 1.0) @ dequantize_by_casts(b, sfb, 1.0).T + bias.astype(np.float64)
    )
    sfa[2, 1] = 0xFF
    poisoned = reference.nvfp4_matmul(a, b, sfa, sfb)
    assert np.isnan(poisoned[2]).all() and np.isfinite(np.delete(poisoned, 2, axis=0)).all()


def test_nvfp4_gemv_of_views_reads_no_copy_of_padding(rng: Generator) -> None:
    codes, scales = random_nvfp4(rng, 4, 32)
    wide = np.full((4, 64), 0xFF, dtype=np.uint8)
    wide[:, 16:32] = codes
    one = reference.nvfp4_linear(np.ones((1, 32), np.float32), wide[:, 16:32], scales, 1.0)
    np.testing.assert_array_equal(one, reference.nvfp4_linear(np.ones((1, 32), np.float32), codes, scales, 1.0))


E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def nearest_code_in_rationals(x: float, scale: float, factor: float) -> int:
    """The nearest code in exact arithmetic, ties to even, with x/(scale·global) as a fraction."""
    value = abs(Fraction(x)) / (Fraction(scale) * Fraction(factor))
    code = min(range(8), key=lambda c: (abs(E2M1[c] - value), c % 2))
    return code | (8 if math.copysign(1.0, x) < 0 else 0)


def round_to_float32(value: Fraction) -> float:
    """Rounds a positive fraction to the nearest float32, ties to even, with subnormals."""
    ulp = max(math.frexp(float(value))[1] - 24, -149)
    return round(value / Fraction(2) ** ulp) * 2.0**ulp


def check_quantized(x: np.ndarray, global_scale: Any = None) -> tuple[np.ndarray, np.ndarray, float]:
    """Compares the bits of nvfp4_quantize with fp32 scalars, ml_dtypes' e4m3 and rational arithmetic."""
    codes, scales, factor = reference.nvfp4_quantize(x, global_scale=global_scale)
    wide = x.astype(np.float32)
    amax = np.abs(wide).max()
    if global_scale is not None:
        expected_factor = float(np.float32(global_scale))
    elif amax == 0:
        expected_factor = 1.0
    else:
        expected_factor = max(2.0**-149, round_to_float32(Fraction(float(amax)) / 2688))
    assert factor.dtype == np.float32 and factor.shape == () and float(factor) == expected_factor
    for m, j in np.ndindex(scales.shape):
        block = wide[m, 16 * j : 16 * j + 16]
        with np.errstate(over="ignore"):
            quotient = np.abs(block).max() / (np.float32(6) * factor[()])
        expected_scale = np.minimum(quotient, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        assert scales[m, j] == expected_scale.view(np.uint8)
        actual = [int(byte) >> shift & 15 for byte in codes[m, 8 * j : 8 * j + 8] for shift in (0, 4)]
        if scales[m, j] == 0:
            assert actual == [0] * 16
        else:
            decoded = float(expected_scale)
            assert actual == [nearest_code_in_rationals(float(value), decoded, float(factor)) for value in block]
    assert np.isfinite(reference.nvfp4_dequantize(codes, scales, factor)).all()
    return codes, scales, float(factor)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["f4", "f2", "bf16"]))
def test_nvfp4_quantize_random_bits(seed: int, rows: int, blocks: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if dtype == "bf16" else np.dtype(dtype)
    if rng.random() < 0.5:
        x = rng.integers(0, 256, (rows, 16 * blocks * np.dtype(kind).itemsize)).astype(np.uint8).view(kind)
        x = np.where(np.isfinite(x.astype(np.float32)), x, np.zeros_like(x))
    else:
        x = (rng.standard_normal((rows, 16 * blocks)) * 10.0 ** rng.uniform(-4, 4, (rows, 1))).astype(np.float32)
        x = np.clip(x, -60000, 60000).astype(kind)
    check_quantized(x)


@pytest.mark.parametrize("factor", [1.0, 2.0**-7, 0.1, 1e-30, 1e30, float(np.finfo(np.float32).max)])
def test_nvfp4_quantize_given_global_and_ties(rng: Generator, factor: float) -> None:
    grid = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -0.25], dtype=np.float32)
    x = np.stack([grid, -grid, np.nextafter(grid, np.float32(9)), rng.permutation(grid)])
    _, scales, returned = check_quantized(x, factor)
    assert returned == np.float32(factor)
    if factor == 1.0:
        assert np.all(scales[0] == 0x38)  # scale 1: every midpoint of the grid was a tie
    if factor == 1e-30:
        assert np.all(scales == 0x7E)  # saturated at 448
    if factor >= 1e30:
        assert not scales.any()


def test_nvfp4_quantize_rounds_the_quotient_to_fp32_first(rng: Generator) -> None:
    """Block maxima next to a midpoint of e4m3: one rounding instead of the specified two gives another byte."""
    for _ in range(20):
        factor, x = np.float32(1 + rng.random()), np.zeros((1, 16 * 32), dtype=np.float32)
        midpoints = (1 + (2 * rng.integers(0, 8, 32) + 1) / 16) * 2.0 ** rng.integers(-5, 8, 32)
        x[0, ::16] = midpoints * 6.0 * float(factor)
        check_quantized(x, factor)


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-149, -(2.0**-140), 2.0**-126, float(np.finfo(np.float32).max)])
def test_nvfp4_quantize_extreme_values(rng: Generator, value: float) -> None:
    x = np.zeros((2, 32), dtype=np.float32)
    x[0, 3] = value
    x[1] = np.float32(value) * rng.choice(np.array([1, 0.5, -0.25, 0], np.float32), 32)
    _, scales, factor = check_quantized(x)
    assert scales[0, 1] == 0
    if value == 0.0:
        assert factor == 1.0 and not scales.any()
    elif abs(value) >= 2.0**-126:
        back = reference.nvfp4_dequantize(*reference.nvfp4_quantize(x))
        assert abs(back[0, 3] / value - 1) < 0.07


def test_nvfp4_quantize_blocked_and_round_trip(rng: Generator) -> None:
    x = rng.standard_normal((130, 80)).astype(np.float32)
    codes, scales, factor = reference.nvfp4_quantize(x)
    blocked_codes, blocked, _ = reference.nvfp4_quantize(x, scale_layout="blocked")
    np.testing.assert_array_equal(blocked_codes, codes)
    np.testing.assert_array_equal(blocked.reshape(-1), blocked_by_formula(scales, 0))
    back = reference.nvfp4_dequantize(codes, blocked, factor, scale_layout="blocked")
    assert_close(back, dequantize_by_casts(codes, scales, float(factor)))
    assert np.linalg.norm(back - x) / np.linalg.norm(x) < 0.12
    again, scales_again, _ = reference.nvfp4_quantize(back.astype(np.float32), global_scale=factor)
    repeated = reference.nvfp4_dequantize(again, scales_again, factor)
    np.testing.assert_array_equal(repeated.astype(np.float32), back.astype(np.float32))


@pytest.mark.parametrize("bad", [INF, -INF, math.nan])
def test_nvfp4_quantize_non_finite_spoils_its_block_only(rng: Generator, bad: float) -> None:
    x = rng.standard_normal((3, 48)).astype(np.float32)
    clean_codes, clean_scales, clean_factor = check_quantized(np.where(np.arange(48) // 16 == 1, np.float32(0), x))
    x[:, 16:32] = 0.0
    x[1, 20] = bad
    codes, scales, factor = reference.nvfp4_quantize(x)
    clean_scales[1, 1] = 0x7F
    np.testing.assert_array_equal(codes, clean_codes)
    np.testing.assert_array_equal(scales, clean_scales)
    assert factor == clean_factor
    assert np.isnan(reference.nvfp4_dequantize(codes, scales, factor)[1, 16:32]).all()


@pytest.mark.parametrize("layout", ["plain", "blocked"])
@pytest.mark.parametrize(("rows", "k"), [(0, 0), (0, 32), (3, 0)])
def test_nvfp4_empty_work(rows: int, k: int, layout: str) -> None:
    codes, scales, factor = reference.nvfp4_quantize(np.zeros((rows, k), np.float32), scale_layout=layout)
    padded = (0, -(-(k // 16) // 4) * 4) if rows == 0 else (128, 0)
    assert codes.shape == (rows, k // 2) and factor == 1.0
    assert scales.shape == ((rows, k // 16) if layout == "plain" else padded)
    assert reference.nvfp4_dequantize(codes, scales, factor, scale_layout=layout).shape == (rows, k)
    for n in (0, 2):
        y = reference.nvfp4_linear(np.ones((n, k)), codes, scales, 1.0, bias=np.arange(rows), scale_layout=layout)
        np.testing.assert_array_equal(y, np.broadcast_to(np.arange(rows), (n, rows)))
    if layout == "plain":
        for batch in (0, 2):
            a, sfa, b, sfb = (np.zeros((m, width, batch), np.uint8) for m in (rows, 1) for width in (k // 2, k // 16))
            c = reference.nvfp4_gemv(a, b, sfa, sfb)
            assert c.shape == (rows, 1, batch) and not c.any()


@pytest.mark.parametrize("factor", [0.0, -1.0, INF, math.nan, 1e-60])
def test_nvfp4_quantize_bad_global(factor: float) -> None:
    with pytest.raises(ValueError, match="nvfp4_quantize: global_scale must be positive and finite"):
        reference.nvfp4_quantize(np.ones((1, 16), np.float32), global_scale=factor)


def test_nvfp4_bad_arguments() -> None:
    codes, scales = np.zeros((4, 16), np.uint8), np.zeros((4, 2), np.uint8)
    with pytest.raises(ValueError, match=r"nvfp4_linear: weight_scale must be \[rows, K/16\] = \[4, 2\]; got uint8"):
        reference.nvfp4_linear(np.zeros((1, 32)), codes, scales[:, :1], 1.0)
    with pytest.raises(ValueError, match="nvfp4_linear: weight_scale must be 512 bytes of blocked scales; got 8"):
        reference.nvfp4_linear(np.zeros((1, 32)), codes, scales, 1.0, scale_layout="blocked")
    with pytest.raises(ValueError, match="nvfp4_linear: weight must be"):
        reference.nvfp4_linear(np.zeros((1, 24)), codes[:, :12], scales, 1.0)
    with pytest.raises(ValueError, match="nvfp4_gemv: b must be of 1 row, or 1 padded to 128; got uint8"):
        reference.nvfp4_gemv(codes[..., None], codes[..., None], scales[..., None], scales[..., None])
    with pytest.raises(ValueError, match="nvfp4_quantize: x must be"):
        reference.nvfp4_quantize(np.zeros((4, 24), np.float32))


# Bugs that these tests must notice, by module of the reference: a piece of it, its replacement, and the meaning.
# mutations.py plants them.
BUGS = {
    "nvfp4": [
        ("E2M1[codes & 0xF], E2M1[codes >> 4]", "E2M1[codes >> 4], E2M1[codes & 0xF]", "wrong nibble first"),
        ("lower % 2 == 1", "lower % 2 == 0", "ties to odd"),
        (
            "16 * (m % 32) + 4 * ((m % 128) // 32)",
            "4 * (m % 32) + 128 * ((m % 128) // 32)",
            "blocked scales in another order",
        ),
        ("np.maximum(exponent, 1)", "exponent", "subnormals halved"),
        ("np.asarray(1.0 / factor)", "np.asarray(factor)", "reciprocal global ignored"),
        ("amax / np.float32(CODE_MAX * SCALE_MAX)", "amax / np.float32(CODE_MAX * 256)", "another global scale"),
        ("factor * (_decode(codes_a", "1.0 * (_decode(codes_a", "alpha ignored by nvfp4_matmul"),
        ("factor * (gradients @", "1.0 * (gradients @", "global ignored by nvfp4_linear_backward"),
        ("(signs << 3)", "(signs << 2)", "sign in the wrong bit"),
    ],
}
