"""Paged caches of MLA latents and of index keys: new rows are quantised and written, and rows are read.

A cache is [blocks, block, row]. Slot s is row s mod block of block s div block. The bytes of a block lie together. The
size of a row and d, the number of its columns, name the format.
"""

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ._arrays import Array, Float64, Int64, Tensor, Uint8, as_array, as_float64, describe, require, require_shape
from .nvfp4 import E4M3, _nearest_code

NAN_CODE = 0x7F
LARGEST = 448.0


@dataclass(frozen=True)
class _Place:
    """The offsets, in a block, of the bytes of one row."""

    codes: Int64
    scales: Int64
    plain: Int64  # of bf16 columns
    unused: Int64  # are written as 0


@dataclass(frozen=True)
class _Format:
    name: str
    d: int
    tile: int = 0  # columns that share a scale; 0 if one scale is for the whole cache
    scale_type: str = ""  # "<f4" or "ue8m0"
    least: int = 0  # the smallest exponent that the quantiser chooses

    def place(self, i: int, block: int) -> _Place:
        """Where row i of a block of `block` rows is."""
        none = np.arange(0)
        if self.name == "V3.2":
            first, rope = 656 * i, 656 * i + 528 + np.arange(128)
            codes, scales = first + np.arange(512), first + 512 + np.arange(16)
            return _Place(codes, scales, rope, none) if self.d == 576 else _Place(codes, scales, none, rope)
        if self.name == "V4":
            first, scale = 576 * i, 576 * block + 8 * i
            return _Place(
                first + np.arange(448), scale + np.arange(7), first + 448 + np.arange(128), scale + np.array([7])
            )
        codes = self.d * i + np.arange(self.d)
        if self.name == "V4.1":
            return _Place(codes, 512 * block + 16 * i + np.arange(16), none, none)
        if self.name == "index":
            return _Place(codes, self.d * block + 4 * i + np.arange(4), none, none)
        return _Place(codes, none, none, none)


def _format(name: str, d: int, row: int, with_index_rows: bool) -> _Format:
    """The format of rows of `row` bytes and d columns."""
    formats = {
        (576, 656): _Format("V3.2", 576, 128, "<f4", -13),
        (512, 656): _Format("V3.2", 512, 128, "<f4", -13),
        (512, 584): _Format("V4", 512, 64, "ue8m0", -22),
        (512, 528): _Format("V4.1", 512, 32, "ue8m0", -22),
        (d, d): _Format("one scale", d),
    }
    if with_index_rows and d % 4 == 0:
        formats[d, d + 4] = _Format("index", d, d, "<f4", -22)
    found = formats.get((d, row))
    require(found is not None, name, "cache", f"rows of a size that goes with d = {d}", row)
    assert found is not None
    return found


class _Cache:
    """A checked cache."""

    def __init__(self, name: str, cache: Tensor, d: int, with_index_rows: bool) -> None:
        self.array = as_array(cache)
        shape = self.array.shape
        is_cache = self.array.ndim == 3 or (self.array.ndim == 4 and shape[2] == 1)
        expected = "[blocks, block, row] or [blocks, block, 1, row]"
        require(is_cache, name, "cache", expected, describe(self.array))
        self.blocks, self.block, row = shape[0], shape[1], shape[-1]
        require(1 <= self.block <= 65536, name, "cache", "in blocks of 1 to 65536 rows", self.block)
        in_order = self.blocks == 0 or self.array[0].flags.c_contiguous
        require(in_order, name, "cache", "contiguous inside a block", self.array.strides)
        self.format: _Format | None = None
        if self.array.itemsize == 1:
            self.format = _format(name, d, row, with_index_rows)
        else:
            require(row == d, name, "cache", f"rows of d = {d}", row)

    def has(self, slot: int) -> bool:
        return bool(0 <= slot < self.blocks * self.block)

    def plain_row(self, slot: int) -> Array:
        """The elements of a row that is not quantised."""
        row: Array = self.array[slot // self.block, slot % self.block].reshape(-1)
        return row

    def bytes_of(self, slot: int) -> tuple[Uint8, _Place]:
        """The bytes of a slot's block, which may be written, and where the row lies in them."""
        assert self.format is not None
        block: Uint8 = self.array[slot // self.block].view(np.uint8).reshape(-1)
        return block, self.format.place(slot % self.block, self.block)


def _integers(name: str, argument: str, x: Tensor, n: int) -> Int64:
    array = as_array(x)
    require(array.dtype in (np.int32, np.int64), name, argument, "int64 or int32", describe(array))
    require_shape(name, argument, array, "[n]", (n,))
    return array.astype(np.int64)


def _one_scale(name: str, cache: _Cache, kv_scale: float | Tensor | None) -> np.float32:
    has_one = cache.format is not None and cache.format.tile == 0
    require(has_one or kv_scale is None, name, "kv_scale", "left out: this cache has scales or codes nothing", kv_scale)
    return np.float32(1.0 if kv_scale is None else as_float64(kv_scale).reshape(()))


# ---- append --------------------------------------------------------------------------------------------------------


def _codes(x: Array, scale: np.float32 | Array) -> Uint8:
    """The e4m3 codes of x / scale: nearest, ties to even, saturated. NaN and infinities get the code of NaN."""
    with np.errstate(all="ignore"):
        quotient = (x.astype(np.float32) / scale).astype(np.float64)
    codes = _nearest_code(np.abs(quotient), 1.0, E4M3[:NAN_CODE])
    codes |= np.where(np.signbit(quotient), 0x80, 0).astype(np.uint8)
    return np.where(np.isfinite(x), codes, NAN_CODE).astype(np.uint8)


def _scale(x: Array, scale_format: str, least: int) -> np.float32:
    """The scale of a tile."""
    amax = float(np.abs(x.astype(np.float32)).max(initial=0.0, where=np.isfinite(x)))
    if scale_format == "fp32":
        return np.float32(max(amax, float(np.float32(1e-4)))) / np.float32(LARGEST)
    exponent = least
    while LARGEST * 2.0**exponent < amax:
        exponent += 1
    return np.float32(2.0**exponent)


def _rotate(x: Array, cos_sin: Float64, first: int, interleaved: bool) -> None:
    """Rotates the columns first … first + r − 1 of a row, rounded once to its dtype."""
    r = len(cos_sin)
    cosine, sine = cos_sin[: r // 2], cos_sin[r // 2 :]
    pairs = np.arange(r).reshape(-1, 2).T if interleaved else np.arange(r).reshape(2, -1)
    x0, x1 = x[first + pairs].astype(np.float64)
    with np.errstate(all="ignore"):
        x[first + pairs[0]] = (x0 * cosine - x1 * sine).astype(x.dtype)
        x[first + pairs[1]] = (x1 * cosine + x0 * sine).astype(x.dtype)


def _write(cache: _Cache, slot: int, x: Array, scale_format: str, kv_scale: np.float32) -> None:
    form = cache.format
    if form is None:
        with np.errstate(over="ignore"):
            cache.plain_row(slot)[:] = x.astype(cache.array.dtype)
        return
    block, place = cache.bytes_of(slot)
    count = len(place.codes)
    if form.tile == 0:
        block[place.codes] = _codes(x, kv_scale)
        return
    tiles = x[:count].reshape(-1, form.tile)
    scales = np.array([_scale(tile, scale_format, form.least) for tile in tiles], "<f4")
    block[place.codes] = _codes(tiles, scales[:, None]).reshape(-1)
    as_bytes = scales.view(np.uint8) if form.scale_type == "<f4" else 127 + np.log2(scales)
    block[place.scales] = as_bytes.astype(np.uint8)
    with np.errstate(over="ignore"):
        block[place.plain] = x[count:].astype(ml_dtypes.bfloat16).view(np.uint8)
    block[place.unused] = 0


def mla_cache_append(
    kv: Tensor,
    cache: Array,
    slots: Tensor,
    *,
    k_rope: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    rope_offset: int | None = None,
    interleaved: bool = True,
    scale_format: str = "pow2",
    kv_scale: float | Tensor | None = None,
) -> Array:
    """Writes row i of [kv, k_rope] into slot slots[i] of the cache, rotated first if there are positions, and quantised
    as the cache's format says. Rows whose slot or position is out of range are skipped. Returns the cache.

    A tile has the scale 2^e with the smallest e that keeps its finite elements within 448, but not below the format's
    least; or, with "fp32", max(amax, 1e-4) / 448. Unlike other functions here this one writes bytes: those of the
    operator, but for rotated columns, which are rounded once from float64. Of equal slots the later row stays.
    """
    name = "mla_cache_append"
    rows = as_array(kv)
    require(rows.ndim == 2, name, "kv", "[n, d]", describe(rows))
    if k_rope is not None:
        rope = as_array(k_rope)
        require(rope.ndim == 2 and len(rope) == len(rows), name, "k_rope", "[n, d_rope]", describe(rope))
        rows = np.concatenate([rows, rope], axis=1)
    n, d = rows.shape
    target = _Cache(name, cache, d, with_index_rows=True)
    at = _integers(name, "slots", slots, n)
    require(scale_format in ("pow2", "fp32"), name, "scale_format", "'pow2' or 'fp32'", scale_format)
    has_fp32 = target.format is not None and target.format.scale_type == "<f4"
    require(scale_format == "pow2" or has_fp32, name, "scale_format", "'pow2' for these rows", scale_format)
    one_scale = _one_scale(name, target, kv_scale)
    require((positions is None) == (cos_sin is None), name, "cos_sin", "given with positions", None)
    require(rope_offset is None or cos_sin is not None, name, "rope_offset", "given with cos_sin", rope_offset)
    table, where, first = np.zeros((0, 0)), np.zeros(n, np.int64), 0
    if positions is not None and cos_sin is not None:
        table, where = as_float64(cos_sin), _integers(name, "positions", positions, n)
        require(table.ndim == 2, name, "cos_sin", "[max_positions, r]", describe(table))
        r = table.shape[1]
        require(2 <= r <= d and r % 2 == 0, name, "cos_sin", f"[max_positions, r] with an even r of 2 … {d}", r)
        first = d - r if rope_offset is None else rope_offset
        require(0 <= first <= d - r, name, "rope_offset", f"between 0 and {d - r}", first)
    for i in range(n):
        slot, position = int(at[i]), int(where[i])
        if not target.has(slot) or (cos_sin is not None and not 0 <= position < len(table)):
            continue
        x = rows[i].copy()
        if cos_sin is not None:
            _rotate(x, table[position], first, interleaved)
        _write(target, slot, x, scale_format, one_scale)
    return target.array


# ---- read ----------------------------------------------------------------------------------------------------------


def _e4m3_of(code: int) -> float:
    """The value of an e4m3 code: a sign, 4 bits of exponent with bias 7, and 3 bits of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == NAN_CODE:
        return math.nan
    magnitude = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return -magnitude if code & 0x80 else magnitude


# The values of all codes.
_E4M3 = np.array([_e4m3_of(code) for code in range(256)])


def _bf16_nearest(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """x rounded to bf16: nearest, ties to even."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return np.where(np.isnan(x), np.float32(np.nan), rounded.astype(np.uint32).view(np.float32))


def _row_of_bytes(data: bytes, name: str, d: int, block: int, i: int) -> Float64:
    """The columns of row i of a block of `block` rows."""
    if name == "V3.2":
        codes, scales, tile = 656 * i, 656 * i + 512, 128
        quantised, rope = 512, codes + 528  # offset of the bf16 columns
    elif name == "V4":
        codes, scales, tile = 576 * i, 576 * block + 8 * i, 64
        quantised, rope = 448, codes + 448
    else:
        codes, scales, tile = 512 * i, 512 * block + 16 * i, 32
        quantised, rope = 512, 0
    each = np.frombuffer(data, np.uint8)
    if name == "V3.2":
        scale = each[scales : scales + 16].view("<f4").astype(np.float64)
    else:
        exponent = each[scales : scales + quantised // tile].astype(np.int64)
        scale = np.where(exponent == 255, np.nan, np.ldexp(1.0, exponent - 127))
    row = np.zeros(d)
    bf16 = each[rope : rope + 2 * (d - quantised)].view("<u2").astype(np.uint32)
    with np.errstate(all="ignore"):
        row[quantised:] = (bf16 << 16).view(np.float32)
        product = _E4M3[each[codes : codes + quantised]] * scale.repeat(tile)  # exact in float64, so rounded once
        row[:quantised] = _bf16_nearest(product.astype(np.float32))
    return row


def read_mla_cache(cache: Tensor, slots: Tensor, d_qk: int, kv_scale: float | Tensor | None = None) -> Float64:
    """The rows of some slots of a cache of latents, float64 [n, d_qk]; of a slot out of range 0.

    An element of a tile is bf16(fp32(code·scale)); with one scale for the whole cache it is code·kv_scale, not rounded.
    """
    name = "read_mla_cache"
    source = _Cache(name, cache, d_qk, with_index_rows=False)
    at = as_array(slots)
    require(at.ndim == 1, name, "slots", "[n]", describe(at))
    at = _integers(name, "slots", at, len(at))
    one_scale = _one_scale(name, source, kv_scale)
    values = np.zeros((len(at), d_qk))
    for i, slot in enumerate(at.tolist()):
        if not source.has(slot):
            continue
        if source.format is None:
            values[i] = source.plain_row(slot).astype(np.float64)
            continue
        data, row = source.array[slot // source.block].tobytes(), slot % source.block
        if source.format.tile == 0:
            values[i] = [_e4m3_of(code) * float(one_scale) for code in data[d_qk * row : d_qk * (row + 1)]]
        else:
            values[i] = _row_of_bytes(data, source.format.name, d_qk, source.block, row)
    return values
