"""Rows written into a paged cache."""

from typing import Any

import numpy as np
import torch
from calls import DTYPES, Call, Rng, codes
from fuzz.bounds import Expected
from fuzz.call import WORK, FuzzedCall, fit
from fuzz.draw import E4M3, Maker
from hopwell import reference
from hypothesis import strategies as st

from ._operator import Operator


def call(rng: Rng, dtype: str) -> Call:
    def grid(shape: tuple[int, ...], step: float) -> Any:  # a rotation by these has one right result
        return rng.integers(-8, 9, shape) * step

    arguments = {
        "kv": grid((5, 512), 0.25).astype(DTYPES[dtype]),
        "cache": codes(rng, (3, 4, 656)),
        "slots": np.array([7, 2, 11, -1, 12]),
        "k_rope": grid((5, 64), 0.25).astype(DTYPES[dtype]),
        "positions": np.array([0, 3, 5, 2, 1], np.int32),
        "cos_sin": grid((6, 48), 0.125).astype(np.float32),
        "rope_offset": 200,
        "interleaved": False,
        "scale_format": "fp32",
    }
    return Call("mla_cache_append", arguments, (0,), written=("cache",))


FORMATS = {"v32": (576, 656), "v32_without_rope": (512, 656), "v4": (512, 584), "v41": (512, 528)}


def _width(maker: Maker) -> tuple[str, int, int]:
    """A format, d and the elements of a row."""
    name = maker.choose("v32", "v32_without_rope", "v4", "v41", "one scale", "index", "plain")
    if name in FORMATS:
        return name, *FORMATS[name]
    d = maker.choose(576, 512, 32, 64, 128)
    if not maker.for_kernels:
        d = maker.choose(d, 4 * maker.size(1, 40)) if name == "index" else maker.choose(d, maker.size(1, 70))
    return name, d, d + 4 if name == "index" else d


def make_cache(maker: Maker, blocks: int, block: int, row: int, dtype: Any) -> Any:
    """Blocks of any bytes, one behind or before the other, perhaps with gaps."""
    itemsize = np.dtype(dtype).itemsize
    unit = 16 // itemsize if maker.for_kernels else 1
    stride = block * row
    if maker.chance() or maker.for_kernels:
        stride = (-(-stride // unit) + maker.integer(0, 3)) * unit
    size = max(blocks - 1, 0) * stride + block * row
    memory = maker.memory.block(size * itemsize, at_end=not maker.chance(4) and not maker.for_kernels)
    memory.bytes[:] = maker.rng.integers(0, 256, size * itemsize)
    backwards = blocks > 1 and maker.chance(4)
    first = (blocks - 1) * stride if backwards else 0
    steps = (-stride if backwards else stride, row, 1)
    cache = np.ndarray((blocks, block, row), dtype, memory.bytes, first * itemsize, [itemsize * s for s in steps])
    return cache[:, :, None] if maker.chance(4) else cache


def _slots(maker: Maker, n: int, slots: int) -> Any:
    """Some are out of range. Two are equal in calls on the CPU only, where the later row stays."""
    dtype = maker.choose(np.int64, np.int32)
    info = np.iinfo(dtype)
    order = maker.rng.permutation(max(n, slots))[:n]
    if not maker.kernels and maker.chance(4):
        order = maker.rng.integers(-1, 3, n)
    outside = maker.rng.choice([info.min, -1, slots, slots + 1, info.max], n)
    return maker.values(np.where(maker.rng.random(n) < 0.2, outside, order).astype(dtype), rows=False)


def _rotation(maker: Maker, n: int, d: int) -> dict[str, Any]:
    """Of numbers whose products are exact, as those of kv are then."""
    r = 2 * maker.integer(1, min(d // 2, 40))
    count = maker.integer(1, 9)
    table = (maker.rng.integers(-8, 9, (count, r)) / 8).astype(DTYPES[maker.choose("float32", "bfloat16")])
    positions = maker.rng.integers(-1, count + 1, n).astype(maker.choose(np.int64, np.int32))
    rotation = {"positions": maker.values(positions, rows=False), "cos_sin": maker.values(table)}
    if maker.chance():
        rotation["rope_offset"] = maker.integer(0, d - r)
    if maker.chance():
        rotation["interleaved"] = maker.chance()
    return rotation


@st.composite
def right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    name, d, row = _width(maker)
    dtype = "bfloat16" if maker.for_kernels else maker.choose("float32", "bfloat16")
    n, blocks, block = maker.size(0, 40), maker.size(0, 9), maker.choose(1, 2, maker.size(1, 20), 64)
    n, d = fit([n, d], WORK // 20)[0], d
    is_rotated = d > 1 and maker.chance(3)
    rope = maker.choose(0, maker.integer(0, d - 1)) if not maker.for_kernels else maker.choose(0, 0, min(64, d - 4))
    # The bits of an fp32 NaN in bf16 are nobody's matter.
    palette = maker.choose("normal", "wide", "small", "integers", "mixed") if dtype == "float32" else None

    def rows(columns: int) -> Any:
        if is_rotated:
            return maker.values((maker.rng.integers(-40, 41, (n, columns)) / 4).astype(DTYPES[dtype]))
        return maker.floats((n, columns), dtype, palette=palette)

    arguments: dict[str, Any] = {"kv": rows(d - rope)}
    if rope:
        arguments["k_rope"] = rows(rope)
    cache_dtype = maker.choose(np.uint8, np.uint8, np.int8, E4M3)
    if name == "plain":
        cache_dtype = DTYPES[maker.choose(dtype, "bfloat16")]
    arguments["cache"] = make_cache(maker, blocks, block, row, cache_dtype)
    arguments["slots"] = _slots(maker, n, blocks * block)
    if is_rotated:
        arguments |= _rotation(maker, n, d)
    if name in ("v32", "v32_without_rope", "index") and maker.chance():
        arguments["scale_format"] = maker.choose("pow2", "fp32")
    if name == "one scale" and maker.chance():
        scale = maker.choose(1.0, 0.037, 2.0**-10, 300.0)
        arguments["kv_scale"] = maker.choose(scale, maker.values(np.float32(scale)))
    if maker.chance(4):
        arguments["backend"] = "cpu"
    return FuzzedCall("mla_cache_append", arguments, ("cache",), maker.memory)


def expected(a: dict[str, Any]) -> list[Expected]:
    return [Expected("cache", reference.mla_cache_append(**a | {"cache": np.array(a["cache"])}))]


def dimensions(a: dict[str, Any]) -> dict[str, str]:
    return {
        "kv": "n columns!",
        "cache": "blocks block row!" if a["cache"].ndim == 3 else "blocks block 1! row!",
        "k_rope": "n d_rope!",
        "slots": "n",
        "positions": "n",
        "cos_sin": "max_positions r!",
    }


def samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    kv, slots = torch.randn(3, 512).to(dtype), torch.tensor([5, -1, 2])
    rotation = {"positions": torch.arange(3), "cos_sin": torch.randn(4, 64), "rope_offset": 448, "interleaved": False}
    options = {"k_rope": torch.randn(3, 64).to(dtype), **rotation, "scale_format": "fp32"}
    coded, one_scale = (torch.zeros(2, 4, row, dtype=torch.uint8) for row in (656, 512))
    return {
        "": (kv, coded, slots, options),
        "one scale": (kv.clone().requires_grad_(), one_scale, slots, {"kv_scale": torch.tensor(0.5)}),
    }


OPERATOR = Operator(
    name="mla_cache_append",
    call=call,
    right=right,
    expected=expected,
    reads_outputs=True,
    must_be_given=("cache",),
    dimensions=dimensions,
    samples=samples,
    free={("cache", 0), ("cache", 1), ("cos_sin", 0)},
    choices={"scale_format": "pow2"},
    messages=[
        (
            {"cache": np.zeros((3, 4, 584), np.uint8)},
            "cache must be rows of 656 (V3.2), 576 (one scale) or 580 (index keys) bytes for d = 576; got 584",
        ),
        (
            {"cache": np.zeros((3, 4, 2, 656), np.uint8)},
            "cache must be [blocks, block, row] or [blocks, block, 1, row]; got ",
        ),
        ({"cache": np.zeros((3, 4, 512), np.float32)}, "cache must be rows of d = 576 elements; "),
        ({"cache": np.zeros((3, 0, 656), np.uint8)}, "cache must be in blocks of 1 to 65536 rows"),
        ({"cache": np.zeros((3, 8, 656), np.uint8)[:, ::2]}, "cache must be contiguous inside a block; got "),
        ({"cache": np.broadcast_to(np.zeros((1, 65537, 656), np.uint8), (2, 65537, 656))}, "cache must be "),
        ({"slots": np.zeros(5, np.int16)}, "slots must be int64 or int32"),
        ({"slots": np.zeros(4, np.int64)}, "slots must be int64 or int32 [n=5]; got "),
        ({"kv_scale": 0.5}, "kv_scale needs a cache of bytes with one scale"),
        ({"kv_scale": np.ones((), np.float32)}, "kv_scale needs a cache of bytes with one scale"),
        ({"positions": None}, "positions and cos_sin must both be given, or neither; got cos_sin alone"),
        ({"cos_sin": None}, "positions and cos_sin must both be given, or neither; got positions alone"),
        ({"cos_sin": None, "positions": None}, "rope_offset needs positions and cos_sin"),
        (
            {"cos_sin": np.zeros((6, 47), np.float32)},
            "cos_sin must be [max_positions, r] with an even r between 2 and d = 576; got ",
        ),
        (
            {"cos_sin": np.zeros((6, 0), np.float32)},
            "cos_sin must be [max_positions, r] with an even r between 2 and d = 576; got ",
        ),
        ({"rope_offset": 529}, "rope_offset must be between 0 and d - r = 528; got 529"),
        ({"rope_offset": -1}, "rope_offset must be between 0 and d - r = 528; got -1"),
        ({"scale_format": "linear"}, "scale_format must be "),
    ],
)
