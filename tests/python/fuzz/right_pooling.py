"""Right calls of kv_compress and its backward."""

from typing import Any

import numpy as np
from calls import DTYPES
from hypothesis import strategies as st

from .call import WORK, FuzzedCall, fit, given
from .draw import Maker


def _pooling(maker: Maker) -> tuple[str, dict[str, Any], int]:
    """Arguments of kv_compress and the number of rows of its out, which may be any."""
    dtype = maker.choose("float32", "bfloat16")
    ratio = maker.choose(maker.size(1, 9), 1, 2, 4, 128)
    s, d, overlap = maker.choose(maker.size(0, 130), 300), maker.size(1, 70), maker.chance()
    if maker.for_kernels:
        d = maker.choose(8, 16, 64, 128)
    s, d = fit([s, d], WORK // 10)
    w = 2 * d if overlap else d
    arguments: dict[str, Any] = {
        "kv": maker.floats((s, w), dtype),
        "gate": maker.floats((s, w), dtype, palette=maker.choose(None, "normal", "normal")),
        "ratio": ratio,
        "overlap": overlap,
    }
    if maker.chance():
        arguments["position_bias"] = maker.floats((ratio, w), "float32", palette=maker.choose(None, "normal"))
    rows = maker.choose(s // ratio, s // ratio, maker.size(0, 40))
    match maker.choose("none", "documents", "documents", "any"):
        case "documents":
            count = maker.integer(0, 5)
            tokens = np.sort(maker.rng.integers(0, s + 1, count + 1))
            keys = np.append(0, np.cumsum(np.diff(tokens) // ratio))
        case "any":
            count = maker.integer(0, 5)
            tokens = _disjoint(maker, count, s)
            keys = _disjoint(maker, count, rows)
        case _:
            return dtype, arguments, rows
    arguments["cu_seqlens"] = maker.values(tokens.astype(np.int32), rows=False)
    arguments["cu_compressed"] = maker.values(keys.astype(np.int32), rows=False)
    return dtype, arguments, rows


def _disjoint(maker: Maker, count: int, size: int) -> Any:
    """Offsets of ranges that do not overlap in 0 … size − 1, also below 0 and beyond: what overlaps is undefined."""
    return np.sort(maker.rng.choice([-(2**31), -5, 0, size, size + 7, 2**31 - 1, *range(size)], count + 1))


@st.composite
def kv_compress(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype, arguments, rows = _pooling(maker)
    d = arguments["kv"].shape[1] // (2 if arguments["overlap"] else 1)
    out_dtype = maker.choose(dtype, "float32", "bfloat16")
    if out_dtype != dtype:
        arguments["out_dtype"] = out_dtype
    if rows != len(arguments["kv"]) // arguments["ratio"]:
        arguments["out"] = maker.output((rows, d), DTYPES[out_dtype], True)
        return FuzzedCall("kv_compress", arguments, ("out",), maker.memory)
    return given(maker, "kv_compress", arguments, {"out": ((rows, d), DTYPES[out_dtype], True)})


@st.composite
def kv_compress_backward(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype, arguments, rows = _pooling(maker)
    d = arguments["kv"].shape[1] // (2 if arguments["overlap"] else 1)
    arguments = {"d_out": maker.floats((rows, d), maker.choose(dtype, "float32", "bfloat16")), **arguments}
    like_kv = (arguments["kv"].shape, DTYPES[dtype], True)
    return given(maker, "kv_compress_backward", arguments, {"d_kv": like_kv, "d_gate": like_kv})
