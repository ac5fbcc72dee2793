"""The reference of paged latent caches, against bytes written out here and a decoder of its own."""

import math
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hopwell import reference

Generator = np.random.Generator
BF16 = ml_dtypes.bfloat16

# d, bytes of a row, elements of a tile (0: one scale), elements in tiles, the least exponent
FORMATS = {
    "v32": (576, 656, 128, 512, -13),
    "v32_without_rope": (512, 656, 128, 512, -13),
    "v4": (512, 584, 64, 448, -22),
    "v41": (512, 528, 32, 512, -22),
    "index": (128, 132, 128, 128, -22),
    "one_scale": (512, 512, 0, 512, 0),
}
WITH_TILES = [name for name, (_, _, tile, _, _) in FORMATS.items() if tile]


def append(kv: Any, cache: Any, slots: list[int], **options: Any) -> Any:
    return reference.mla_cache_append(np.asarray(kv), cache, np.array(slots), **options)


def poisoned(blocks: int, block: int, row: int) -> Any:
    return np.full((blocks, block, row), 0xA5, np.uint8)


def one_row(name: str, x: Any, **options: Any) -> Any:
    """The bytes of a block of one row."""
    cache = poisoned(1, 1, FORMATS[name][1])
    append(np.asarray(x)[None], cache, [0], **options)
    return cache[0, 0]


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
    return -magnitude if code >> 7 else magnitude


def scale_of(name: str, row: Any, tile: int) -> float:
    """The scale of a tile of a block of one row."""
    if name in ("v32", "v32_without_rope", "index"):
        first = (128 if name == "index" else 512) + 4 * tile
        value: float = struct.unpack("<f", row[first : first + 4].tobytes())[0]
        return value
    return math.ldexp(1.0, int(row[(576 if name == "v4" else 512) + tile]) - 127)


@pytest.mark.parametrize("name", WITH_TILES)
def test_a_tile_has_the_smallest_power_of_two_that_keeps_it_within_448(name: str, rng: Generator) -> None:
    d, _, tile, coded, least = FORMATS[name]
    for amax in (448.0, 448.5, 447.0, 449.0, 896.0, 1.0, 1.75, 1.76, 1e30, 3e38, 2.0**-13 * 448, 2.0**-22 * 448):
        x = np.zeros(d, np.float32)
        x[:coded] = rng.uniform(-1, 1, coded) * amax * 0.99
        x[:coded:tile] = -amax
        row = one_row(name, x)
        for i in range(coded // tile):
            scale = scale_of(name, row, i)
            assert math.frexp(scale)[0] == 0.5
            assert 448 * scale >= float(np.float32(amax))
            assert scale == 2.0**least or 448 * scale / 2 < float(np.float32(amax))
            assert scale >= 2.0**least
            for j in range(i * tile, (i + 1) * tile):
                quotient, code = float(x[j]) / scale, int(row[j])
                assert (code >> 7 == 1) == (x[j] < 0)
                nearest = min(abs(abs(quotient) - e4m3(other)) for other in range(0x7F))
                assert abs(quotient - e4m3(code)) == nearest


@pytest.mark.parametrize("name", WITH_TILES)
def test_tiny_and_zero_tiles_have_the_least_scale(name: str) -> None:
    d, _, tile, coded, least = FORMATS[name]
    x = np.zeros(d, np.float32)
    x[1], x[2] = -0.0, 2.0**-60
    row = one_row(name, x)
    assert [scale_of(name, row, i) for i in range(coded // tile)] == [2.0**least] * (coded // tile)
    assert row[:4].tolist() == [0, 0x80, 0, 0]


def test_a_tie_goes_to_the_even_code() -> None:
    x = np.zeros(576, np.float32)
    x[:6] = 448, 17, 19, -17, 2.0**-10, 3 * 2.0**-10  # codes of 16, 18 and 20 are 0x58, 0x59 and 0x5A
    assert one_row("v32", x)[:6].tolist() == [0x7E, 0x58, 0x5A, 0xD8, 0x00, 0x02]


@pytest.mark.parametrize("name", ["v32", "index"])
def test_fp32_scales(name: str) -> None:
    d = FORMATS[name][0]
    x = np.zeros(d, np.float32)
    x[:3] = 3, -1, 0.4
    row = one_row(name, x, scale_format="fp32")
    scale = np.float32(3) / np.float32(448)
    assert scale_of(name, row, 0) == scale
    expected = [np.float32(v) / scale for v in (3, -1, 0.4)]
    assert row[0] == 0x7E
    assert [e4m3(int(code)) for code in row[1:3]] == pytest.approx([float(v) for v in expected[1:]], rel=1 / 16)
    if name == "v32":
        assert scale_of(name, row, 1) == np.float32(1e-4) / np.float32(448)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_gets_one_code_and_no_scale(name: str, value: float) -> None:
    d, _, tile, _, least = FORMATS[name]
    x = np.zeros(d, np.float32)
    x[:2] = value, 448
    row = one_row(name, x)
    assert row[:3].tolist() == [0x7F, 0x7E, 0]
    if tile:
        assert scale_of(name, row, 0) == 1
        assert one_row(name, np.full(d, value, np.float32))[:tile].tolist() == [0x7F] * tile
        assert scale_of(name, one_row(name, np.full(d, value, np.float32)), 0) == 2.0**least


def test_one_scale_divides_and_saturates() -> None:
    x = np.zeros(512, np.float32)
    x[:4] = 1, -2, 1e30, -1e30
    for scale in (0.5, np.array(0.5, np.float32)):
        assert one_row("one_scale", x, kv_scale=scale)[:5].tolist() == [0x40, 0xC8, 0x7E, 0xFE, 0]
    assert one_row("one_scale", x)[:2].tolist() == [0x38, 0xC0]


def bf16_bytes(x: Any) -> list[int]:
    values: list[int] = np.asarray(x, BF16).view(np.uint8).tolist()
    return values


def test_every_byte_of_each_format() -> None:
    """Two rows of a block of three. The numbers of tile g are 2^g: codes 0x78, of 256, and the scale 2^(g − 8)."""

    def expected_of(name: str) -> tuple[list[int], list[int]]:
        """The codes and the scales of the row, a list of bytes each."""
        _, _, tile, coded, least = FORMATS[name]
        exponents = [max(g - 8, least) for g in range(coded // tile)]
        codes = [0x78] * coded
        if name in ("v4", "v41"):
            return codes, [127 + e for e in exponents]
        return codes, list(b"".join(struct.pack("<f", 2.0**e) for e in exponents))

    for name in WITH_TILES:
        d, row, tile, coded, _ = FORMATS[name]
        x = np.ones(d)
        x[:coded] = np.repeat(2.0 ** np.arange(coded // tile), tile)
        x[coded:] = np.arange(d - coded) + 0.5
        codes, scales = expected_of(name)
        rope = bf16_bytes(x[coded:])
        cache = poisoned(2, 3, row)
        append(np.stack([x, x]).astype(BF16), cache, [3 + 0, 3 + 2])
        block = np.full(3 * row, 0xA5)
        for i in (0, 2):
            if name.startswith("v32"):
                block[656 * i : 656 * (i + 1)] = codes + scales + (rope if d == 576 else [0] * 128)
            elif name == "v4":
                block[576 * i : 576 * (i + 1)] = codes + rope
                block[1728 + 8 * i : 1728 + 8 * (i + 1)] = [*scales, 0]
            elif name == "v41":
                block[512 * i : 512 * (i + 1)] = codes
                block[1536 + 16 * i : 1536 + 16 * (i + 1)] = scales
            else:
                block[128 * i : 128 * (i + 1)] = codes
                block[384 + 4 * i : 384 + 4 * (i + 1)] = scales
        assert cache[1].reshape(-1).tolist() == block.tolist()
        assert (cache[0] == 0xA5).all()


def test_rows_of_one_scale_and_of_bf16() -> None:
    x = np.array([[1, -2, 0.5, np.nan]], np.float32)
    cache = poisoned(2, 2, 4)
    append(x, cache, [2])
    assert cache.reshape(-1, 4).tolist() == [[0xA5] * 4] * 2 + [[0x38, 0xC0, 0x30, 0x7F]] + [[0xA5] * 4]
    plain = np.zeros((2, 2, 1, 4), BF16)
    append(np.array([[1 + 2**-9, -2, 3, 4]], np.float32), plain, [1])
    assert plain.reshape(-1, 4).astype(float).tolist() == [[0] * 4, [1, -2, 3, 4], [0] * 4, [0] * 4]


@pytest.mark.parametrize("name", FORMATS)
def test_skipped_rows_and_bytes_between_blocks(name: str, rng: Generator) -> None:
    d, row, *_ = FORMATS[name]
    memory = np.full((3, 2 * row + 7), 0xA5, np.uint8)
    cache = np.lib.stride_tricks.as_strided(memory, (3, 2, row), (2 * row + 7, row, 1))
    x = rng.standard_normal((7, d)).astype(BF16)
    slots = [-1, 6, 4, 2**31 - 1, -(2**31), 1, 2**40]
    append(x, cache, slots)
    assert (memory[:, 2 * row :] == 0xA5).all()
    both = poisoned(3, 2, row)
    append(x[5:6], both, [1])
    append(x[2:3], both, [4])
    assert (both == cache).all()
    assert (cache[1] == 0xA5).all()
    read = d if name != "index" else 0
    if read:
        rows = reference.read_mla_cache(cache, np.array([1, -1, 4, 6], np.int32), d)
        assert not rows[[1, 3]].any()
        # Half a step of a code is at most 1/16 of its value, or 2^-10 of the scale.
        close = {"rtol": 1 / 15, "atol": 2.0**-9}
        np.testing.assert_allclose(rows[[0, 2]], x[[5, 2]].astype(float), **close)
        np.testing.assert_array_equal(rows[[0, 2]] < 0, (x[[5, 2]] < 0) & (rows[[0, 2]] != 0))


def test_the_later_of_two_equal_slots_stays() -> None:
    cache = np.zeros((1, 2, 4), np.float32)
    append(np.array([[1.0] * 4, [2.0] * 4, [3.0] * 4], np.float32), cache, [1, 0, 1])
    assert cache[0, :, 0].tolist() == [2, 3]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("offset", [None, 0, 3])
def test_rotation(interleaved: bool, offset: int | None, rng: Generator) -> None:
    d, r = 12, 6
    x = rng.standard_normal((4, d))
    angles = rng.uniform(0, 6, (5, r // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    cache = np.zeros((1, 4, d))
    positions = np.array([2, 4, 5, -1])
    append(x[:, :9], cache.view(), [3, 1, 0, 2], k_rope=x[:, 9:], positions=positions, cos_sin=table,
           rope_offset=offset, interleaved=interleaved)  # fmt: skip
    first = d - r if offset is None else offset
    for i, slot in ((0, 3), (1, 1)):
        expected = x[i].copy()
        for pair in range(r // 2):
            at = [first + 2 * pair, first + 2 * pair + 1] if interleaved else [first + pair, first + pair + r // 2]
            turned = complex(*x[i, at]) * np.exp(1j * angles[positions[i], pair])
            expected[at] = turned.real, turned.imag
        np.testing.assert_allclose(cache[0, slot], expected, rtol=1e-13, atol=1e-13)
    assert not cache[0, [0, 2]].any()  # positions outside of the table


def test_rotated_columns_are_rounded_before_they_are_quantised() -> None:
    x = np.zeros((1, 512), np.float32)
    x[0, 510:] = 1, 1
    table = np.array([[1 + 2**-9, 0.0]])
    cache = poisoned(1, 1, 512)
    append(x.astype(BF16), cache, [0], positions=np.array([0]), cos_sin=table, kv_scale=17 * 2.0**-4 / 17)
    assert cache[0, 0, 510] == e4m3_code(1 / (17 * 2.0**-4 / 17))
    # 17 is a tie of 16 and 18, and goes to 16; 17·(1 + 2^-9) is none, but its bf16 is.
    x[0, 510:] = 17, 17
    append(x.astype(BF16), cache, [0], positions=np.array([0]), cos_sin=table)
    assert cache[0, 0, 510] == 0x58
    append(x, cache, [0], positions=np.array([0]), cos_sin=table)
    assert cache[0, 0, 510] == 0x59


def e4m3_code(x: float) -> int:
    return min(range(0x7F), key=lambda code: (abs(e4m3(code) - x), code % 2))


# ---- reading -------------------------------------------------------------------------------------------------------


def test_values_are_rounded_to_bf16() -> None:
    row = np.zeros(656, np.uint8)
    row[:128] = np.arange(128)
    row[128:256] = np.arange(128, 256)
    row[512:528] = list(struct.pack("<4f", 1 + 2**-9, 3e38, math.nan, -0.5))
    row[384] = 0x38
    row[528:530] = bf16_bytes([1.5])
    values = reference.read_mla_cache(row.reshape(1, 1, 656), np.array([0]), 576)[0]
    assert values[0x38] == 1  # 1 + 2^-9 is not a number of bf16
    assert values[0x7E] == 448
    assert values[0x3C] == 1.5  # 1.5·(1 + 2^-9) is between two, nearer to this
    assert math.isnan(values[0x7F])
    assert values[128 + 0x7E] == -math.inf
    assert np.isnan(values[256:384]).all()
    assert values[384] == -0.5
    assert values[512] == 1.5
    assert math.isnan(values[255])


def test_exponent_bytes() -> None:
    for name, (d, size, scales_at, tile) in {"v4": (512, 584, 576, 64), "v41": (512, 528, 512, 32)}.items():
        row = np.zeros(size, np.uint8)
        row[:448] = 0x38
        row[scales_at : scales_at + 7] = [0, 1, 127, 128, 254, 255, 120]
        values = reference.read_mla_cache(row.reshape(1, 1, 1, size), np.array([0]), d)[0]
        got = [values[tile * g] for g in range(7)]
        assert got[:5] == [2.0**-127, 2.0**-126, 1, 2, 2.0**127], name
        assert math.isnan(got[5])
        assert got[6] == 2.0**-7


def test_one_scale_multiplies_without_rounding() -> None:
    row = np.array([0x38, 0x41, 0xFF, 0x80], np.uint8).reshape(1, 1, 4)
    values = reference.read_mla_cache(row.view(ml_dtypes.float8_e4m3fn), np.array([0]), 4, kv_scale=1.1)[0]
    assert values[:2].tolist() == [float(np.float32(1.1)), 2.25 * float(np.float32(1.1))]
    assert math.isnan(values[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache": np.zeros((1, 1, 655), np.uint8)}, "cache must be rows of a size that goes with d = 576; got 655"),
        ({"cache": np.zeros((1, 656), np.uint8)}, r"cache must be \[blocks, block, row\]"),
        ({"cache": np.zeros((1, 1, 512), BF16)}, "cache must be rows of d = 576; got 512"),
        ({"cache": np.zeros((2, 4, 656), np.uint8)[:, ::2]}, "cache must be contiguous inside a block"),
        ({"slots": np.zeros(2, np.int16)}, "slots must be int64 or int32"),
        ({"slots": np.zeros(3, np.int64)}, r"slots must be \[n\] = \[2\]"),
        ({"kv_scale": 1.0}, "kv_scale must be left out"),
        ({"scale_format": "linear"}, "scale_format must be 'pow2' or 'fp32'; got linear"),
        ({"positions": np.zeros(2, np.int64)}, "cos_sin must be given with positions"),
        ({"rope_offset": 3}, "rope_offset must be given with cos_sin"),
        ({"positions": np.zeros(2, np.int64), "cos_sin": np.zeros((2, 3))}, "cos_sin must be .* even r"),
        (
            {"positions": np.zeros(2, np.int64), "cos_sin": np.zeros((2, 4)), "rope_offset": 573},
            "rope_offset must be between 0 and 572; got 573",
        ),
    ],
)
def test_refused(arguments: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {
        "kv": np.zeros((2, 576), np.float32),
        "cache": np.zeros((1, 1, 656), np.uint8),
        "slots": np.zeros(2, np.int64),
    }
    with pytest.raises(ValueError, match=f"^mla_cache_append: {message}"):
        reference.mla_cache_append(**right | arguments)


# Bugs that these tests must notice, by module of the reference: a piece of it, its replacement, and the meaning.
# mutations.py plants them.
BUGS = {
    "mla_cache": [
        ("2.0**exponent < amax", "2.0**exponent <= amax", "a scale too large where amax is 448 times it"),
        ("np.where(np.isfinite(x), codes", "np.where(~np.isnan(x), codes", "infinities saturated"),
        ("np.signbit(quotient)", "quotient < 0", "the sign of zero dropped"),
        ('"ue8m0", -22', '"ue8m0", -13', "the least exponent of V3.2 for V4"),
        ("max(amax, float(np.float32(1e-4)))", "amax", "a scale of 0 for zeros"),
        ("block[place.unused] = 0", "pass", "unused bytes kept"),
        ("576 * block + 8 * i", "576 * block + 7 * i", "scales of V4 without their padding"),
        ("512 * block + 16 * i", "528 * i + 512", "scales of V4.1 beside their codes"),
        ("self.d * block + 4 * i", "self.d * (i + 1) + 4 * i", "scales of index rows beside their codes"),
        ("0 <= slot < self", "slot < self", "negative slots count from the end"),
        ("not 0 <= position < len", "not position < len", "negative positions count from the end"),
        ("reshape(-1, 2).T if interleaved", "reshape(-1, 2).T if not interleaved", "the other kind of pairs"),
        ("x1 * cosine + x0", "x1 * cosine - x0", "a rotation that is none"),
        ("first = d - r if", "first = 0 if", "RoPE of the first columns"),
        ("_bf16_nearest(product.astype(np.float32))", "product.astype(np.float32)", "values not rounded to bf16"),
        ("exponent == 255", "exponent == 256", "the exponent byte 255 taken for a number"),
    ],
}
