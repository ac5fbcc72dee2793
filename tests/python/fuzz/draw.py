"""Shapes, strides, aliasing and values of arrays. What hypothesis chooses is structure; values come from a seed."""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
from calls import DTYPES as WIDE_DTYPES
from calls import FLOAT8
from hypothesis import strategies as st

from .memory import PATTERN, Block, Memory

T = TypeVar("T")
EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)  # of tiles and vectors
DTYPES = WIDE_DTYPES | {FLOAT8: ml_dtypes.float8_e4m3fn}
FAR = 2**40  # a stride of a dimension of one element may be anything
SPECIAL_FLOATS = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1e38, -1e38, 3.4e38, 1e-38, -1e-40, 1e-45, 65504.0, 6e-8)


class Place(NamedTuple):
    """Where the elements of an array lie in a block."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    lowest: int  # elements before the first
    extent: int  # elements from the lowest to the highest


# A strategy takes longer to make than to draw from.
_integers = functools.cache(st.integers)
_permutations = functools.cache(lambda count: st.permutations(range(count)))


@functools.cache
def _sizes(smallest: int, limit: int) -> st.SearchStrategy[int]:
    few = st.integers(smallest, max(smallest, min(limit, 9)))
    edges = [edge for edge in EDGES if smallest <= edge <= limit]
    return st.one_of(few, few, st.sampled_from(edges)) if edges else few


class Maker:
    """Makes the arrays of one call."""

    work: ClassVar[float] = 1.0  # the size of calls, as a multiple of the size on the CPU
    kernels: ClassVar[bool] = False  # most calls have the shapes and strides that GPUs' kernels take

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.memory = Memory()
        # How the floats of this call are; most calls have numbers that sums of products bear.
        self.palette = self.choose("normal", "integers", "mixed", "normal", "small", "wide", "specials", "bits")
        self._inputs: list[Block] = []
        self.for_kernels = self.kernels and not self.chance(8)
        self._aligned = self.for_kernels and not self.chance(4)  # rows to 16 bytes

    def choose(self, *options: T) -> T:
        return options[self.integer(0, len(options) - 1)]

    def chance(self, one_in: int = 2) -> bool:
        return self.integer(0, one_in - 1) == one_in - 1

    def integer(self, low: int, high: int) -> int:
        return self.draw(_integers(low, high))

    def size(self, smallest: int = 0, limit: int = 300) -> int:
        return self.draw(_sizes(smallest, limit))

    # ---- where elements lie

    def place(self, shape: tuple[int, ...], dtype: Any, rows: bool, written: bool, plain: bool = False) -> Place:
        """Strides: any order of dimensions, gaps, steps backwards; of what is only read also 0 and overlapping ones.

        With `rows` the last dimension is contiguous.
        """
        unit = self._unit(dtype, rows)
        order = list(range(len(shape)))  # slowest first
        plain = plain or not self.chance()
        if not plain:
            slow = order[:-1] if rows else order
            order = list(self.draw(_permutations(len(slow)))) + order[len(slow) :]
        strides, lowest, extent = [0] * len(shape), 0, 1
        for i in reversed(order):
            contiguous = plain or (rows and i == len(shape) - 1)
            strides[i] = extent if contiguous else self._stride(shape[i], extent, written, unit)
            if shape[i] > 1:
                span = abs(strides[i]) * (shape[i] - 1)
                extent += span
                lowest += span if strides[i] < 0 else 0
        return Place(shape, tuple(strides), *((0, 0) if 0 in shape else (lowest, extent)))

    def _unit(self, dtype: Any, rows: bool) -> int:
        """What strides are multiples of, in elements."""
        return max(16 // np.dtype(dtype).itemsize, 1) if rows and self._aligned else 1

    def _stride(self, size: int, extent: int, written: bool, unit: int) -> int:
        if size <= 1:
            return self.choose(extent, 0, -1, FAR)
        extent = -(-extent // unit) * unit
        steps = [extent, extent + self.integer(1, 3) * unit, -extent]
        if not written:
            steps += [0, (1 + extent // (2 * unit)) * unit]
        return self.choose(*steps)

    def _array(self, block: Block, place: Place, dtype: Any, skipped: int = 0) -> Any:
        itemsize = np.dtype(dtype).itemsize
        strides = [stride * itemsize for stride in place.strides]
        return np.ndarray(place.shape, dtype, block.bytes, skipped + place.lowest * itemsize, strides)

    # ---- what is read

    def floats(self, shape: tuple[int, ...], dtype: str, rows: bool = True, palette: str | None = None) -> Any:
        palette = palette or (self.palette if not self.chance(4) else "normal")
        return self._input(shape, DTYPES[dtype], rows, lambda count: floats(self.rng, palette, DTYPES[dtype], count))

    def scales(self, shape: tuple[int, ...], dtype: Any, dense: bool = False) -> Any:
        """e4m3 scales: any byte in calls of any bits, else positive ones of about 1."""
        low, high = (0, 256) if self.palette in ("bits", "specials") else (0x20, 0x50)
        return self._input(
            shape, dtype, True, lambda count: self.rng.integers(low, high, count).astype(np.uint8), dense
        )

    def codes(self, shape: tuple[int, ...]) -> Any:
        return self._input(shape, np.uint8, True, lambda count: self.rng.integers(0, 256, count).astype(np.uint8))

    def bits(self, shape: tuple[int, ...], dtype: Any, rows: bool = True) -> Any:
        return self._input(shape, dtype, rows, lambda count: floats(self.rng, "bits", dtype, count))

    def values(self, values: Any, rows: bool = True) -> Any:
        """An array of these values."""
        values = np.asarray(values)
        array = self._input(values.shape, values.dtype, rows, None)
        array[...] = values
        return array

    def _input(self, shape: tuple[int, ...], dtype: Any, rows: bool, fill: Any, dense: bool = False) -> Any:
        itemsize = np.dtype(dtype).itemsize
        # Given values are put in one by one: no two elements may be one.
        place = self.place(shape, dtype, rows and len(shape) > 0, written=fill is None, plain=dense)
        size = place.extent * itemsize
        shared = [block for block in self._inputs if len(block.bytes) >= size] if fill is not None else []
        if shared and self.chance(4):  # aliased: another argument's memory, whatever that holds
            block = self.choose(*shared)
            step = itemsize * self._unit(dtype, rows)
            offset = self.integer(0, (len(block.bytes) - size) // step) * step
            if (block.bytes.ctypes.data + offset) % itemsize == 0:
                return self._array(block, place, dtype, offset)
        block = self.memory.block(size, at_end=not self.chance(4))
        if fill is not None:
            block.bytes[:] = np.ascontiguousarray(fill(place.extent)).view(np.uint8).reshape(-1)
            self._inputs.append(block)
        else:
            block.bytes[:] = PATTERN
        return self._array(block, place, dtype)

    # ---- what is written

    def output(self, shape: tuple[int, ...], dtype: Any, rows: bool = True) -> Any:
        place = self.place(shape, dtype, rows and len(shape) > 0, written=True)
        block = self.memory.block(place.extent * np.dtype(dtype).itemsize, at_end=not self.chance(4))
        block.bytes[:] = PATTERN
        return self._array(block, place, dtype)


def floats(rng: np.random.Generator, palette: str, dtype: Any, count: int) -> Any:
    """`count` floats of a palette. Palettes: see the branches."""
    if palette == "mixed":
        palette = str(rng.choice(["normal", "small", "constant", "zeros"]))
    if palette == "bits":
        return rng.integers(0, 256, count * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype)
    normal = rng.standard_normal(count)
    with np.errstate(over="ignore"):
        match palette:
            case "integers":  # exact products and sums, and many ties
                return np.round(normal * 2).astype(dtype)
            case "small":
                return (normal * 0.05).astype(dtype)
            case "constant":
                return np.full(count, rng.choice([1.0, -8.0, 0.3]), dtype)
            case "zeros":
                return np.copysign(np.zeros(count), normal).astype(dtype)
            case "wide":
                return (normal * 2.0 ** rng.integers(-20, 12, count)).astype(dtype)
            case "specials":
                share = rng.choice([0.01, 0.1, 0.5])
                chosen = np.where(rng.random(count) < share, rng.choice(SPECIAL_FLOATS, count), normal)
                return chosen.astype(dtype)
            case _:
                return normal.astype(dtype)


def rows_of_indices(maker: Maker, s_q: int, s_kv: int, topk: int) -> Any:
    """Index rows, int32 [s_q, topk]: keys and extremes, few keys over and over, ascending with −1 at the end, nothing
    valid.
    """
    rng = maker.rng
    extremes = np.array([-(2**31), -123456, -1, s_kv, s_kv + 1, 2**31 - 1])
    kind = maker.choose("any", "few", "ascending", "valid", "none")
    wild = rng.choice(extremes, (s_q, topk))
    if kind == "none" or s_kv == 0:
        return wild.astype(np.int32)
    keys = rng.integers(0, s_kv, (s_q, topk))
    if kind == "valid":
        return keys.astype(np.int32)
    if kind == "few":
        few = rng.integers(0, s_kv, (s_q, 2))
        return np.take_along_axis(few, rng.integers(0, 2, (s_q, topk)), 1).astype(np.int32)
    if kind == "ascending":
        rows = np.full((s_q, topk), -1, np.int32)
        for row in rows:
            chosen = np.sort(rng.permutation(s_kv)[: rng.integers(0, topk + 1)])
            row[: len(chosen)] = chosen
        return rows
    return np.where(rng.random((s_q, topk)) < 0.3, wild, keys).astype(np.int32)


def integers_around(maker: Maker, count: int, around: Sequence[int]) -> Any:
    """int32 [count]: near the given numbers, or extremes."""
    near = maker.rng.choice(np.array(around), count) + maker.rng.integers(-2, 3, count)
    extremes = maker.rng.choice([-(2**31), -1, 0, 2**31 - 1], count)
    return np.where(maker.rng.random(count) < 0.1, extremes, near).astype(np.int32)


E4M3 = ml_dtypes.float8_e4m3fn
