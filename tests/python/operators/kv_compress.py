"""Gated pooling of blocks of tokens, and its backward."""

from typing import Any

import hopwell
import hopwell.torch
import numpy as np
import torch
from calls import DTYPES, Call, Rng, bound_of, normal
from fuzz.bounds import BOUNDS, LARGE, ROUNDING, TINY, Expected, finite, unless
from fuzz.call import WORK, FuzzedCall, fit, given
from fuzz.draw import Maker
from hopwell import reference
from hypothesis import strategies as st

from ._operator import Operator


def _arguments(rng: Rng, dtype: str) -> dict[str, Any]:
    s, d, ratio = 29, 8, 3
    return {
        "kv": normal(rng, (s, 2 * d), dtype),
        "gate": normal(rng, (s, 2 * d), dtype),
        "ratio": ratio,
        "position_bias": normal(rng, (ratio, 2 * d), "float32"),
        "overlap": True,
        "cu_seqlens": np.array([1, 5, 5, 26], np.int32),
        "cu_compressed": np.array([0, 1, 1, 8], np.int32),
    }


def call(rng: Rng, dtype: str) -> Call:
    return Call("kv_compress", _arguments(rng, dtype), (bound_of(dtype),), ("out",))


def backward_call(rng: Rng, dtype: str) -> Call:
    arguments = {"d_out": normal(rng, (9, 8), dtype), **_arguments(rng, dtype)}
    bounds = (bound_of(dtype), bound_of(dtype), 1e-4)
    return Call("kv_compress_backward", arguments, bounds, ("d_kv", "d_gate"))


def _drawn(maker: Maker) -> tuple[str, dict[str, Any], int]:
    """Arguments of right and the number of rows of its out, which may be any."""
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
def right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype, arguments, rows = _drawn(maker)
    d = arguments["kv"].shape[1] // (2 if arguments["overlap"] else 1)
    out_dtype = maker.choose(dtype, "float32", "bfloat16")
    if out_dtype != dtype:
        arguments["out_dtype"] = out_dtype
    if rows != len(arguments["kv"]) // arguments["ratio"]:
        arguments["out"] = maker.output((rows, d), DTYPES[out_dtype], True)
        return FuzzedCall("kv_compress", arguments, ("out",), maker.memory)
    return given(maker, "kv_compress", arguments, {"out": ((rows, d), DTYPES[out_dtype], True)})


@st.composite
def backward_right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype, arguments, rows = _drawn(maker)
    d = arguments["kv"].shape[1] // (2 if arguments["overlap"] else 1)
    arguments = {"d_out": maker.floats((rows, d), maker.choose(dtype, "float32", "bfloat16")), **arguments}
    like_kv = (arguments["kv"].shape, DTYPES[dtype], True)
    return given(maker, "kv_compress_backward", arguments, {"d_kv": like_kv, "d_gate": like_kv})


def _sizes(a: dict[str, Any]) -> tuple[Any, float]:
    """|kv|, and how far off a weight may be, as a share of it.

    A value is infinite where its column is not judged: kv is not finite, or a gate is so large that exponentials differ
    in fp32.
    """
    bias = finite(a["position_bias"]).max(initial=0.0) if "position_bias" in a else 0.0
    gates = finite(a["gate"])
    unsure = (gates + bias > 1e4) | ~np.isfinite(a["kv"].astype(np.float64)) | (finite(a["kv"]) > LARGE)
    largest = min(float(gates.max(initial=0.0)), 1e4) + float(bias)
    return np.where(unsure, np.inf, finite(a["kv"])), 4 * ROUNDING + largest * 2.0**-22


def _largest(kv: Any, overlap: bool) -> Any:
    """The largest value of each column of out, [d]; infinite if one is. With overlap a window has two columns of kv."""
    largest = np.where(np.isfinite(kv).all(axis=0), finite(kv).max(axis=0, initial=0.0), np.inf)
    return largest.reshape(2, -1).max(axis=0) if overlap else largest


def expected(a: dict[str, Any]) -> list[Expected]:
    rows = len(a["out"]) if "out" in a else len(a["kv"]) // a["ratio"]
    width = a["kv"].shape[1] // (2 if a["overlap"] else 1)
    given = {name: value for name, value in a.items() if name not in ("out", "out_dtype")}
    size, share = _sizes(a)
    value, total = (reference.kv_compress(**given | {"kv": kv}, out=np.zeros((rows, width))) for kv in (a["kv"], size))
    tiny = TINY * (1 + finite(_largest(finite(a["kv"]), a["overlap"])))  # weights below fp32's normal numbers
    slack = unless(~np.isfinite(total), share * finite(total) + tiny)
    bound = BOUNDS[a.get("out_dtype", str(a["kv"].dtype))]
    return [Expected("out", value, bound, slack, elementwise=True)]


def backward_expected(a: dict[str, Any]) -> list[Expected]:
    d_kv, d_gate, d_bias = reference.kv_compress_backward(**a)
    kv, share = _sizes(a)
    d_out = np.where(np.isfinite(a["d_out"].astype(np.float64)), finite(a["d_out"]), np.inf)
    size = reference.kv_compress_backward(**a | {"d_out": d_out})[0]  # weights · |d_out|
    # Unjudged if a value of the column is, also of another window.
    largest = np.tile(_largest(kv, a["overlap"]), 2 if a["overlap"] else 1)
    tiny = TINY * (1 + finite(d_out).max(initial=0.0))  # weights below fp32's normal numbers
    of_kv = unless(~np.isfinite(size) | ~np.isfinite(largest), share * finite(size) + tiny)
    factor = 2 * finite(largest) + 1
    of_gate = unless(~np.isfinite(of_kv) | (size * factor > LARGE), (2 * share * finite(size) + tiny) * factor)
    total = finite(d_gate).sum(axis=0)
    of_bias = unless(total > LARGE, of_gate.sum(axis=0) + ROUNDING * total)
    of_bias = np.broadcast_to(of_bias, (a["ratio"], kv.shape[1]))
    bound = BOUNDS[str(a["kv"].dtype)]
    return [
        Expected("d_kv", d_kv, bound, of_kv, elementwise=True),
        Expected("d_gate", d_gate, bound, of_gate, elementwise=True),
        Expected("d_position_bias", d_bias, 1e-4, of_bias),
    ]


_DIMENSIONS = {"kv": "s w", "gate": "s w", "position_bias": "ratio w", "cu_seqlens": "n!", "cu_compressed": "n!"}


def _packed(dtype: torch.dtype) -> tuple[Any, ...]:
    bias, offsets = torch.randn(3, 8), torch.tensor([0, 8, 14], dtype=torch.int32)
    pool = (torch.randn(14, 8).to(dtype) for _ in range(2))
    return *pool, 3, bias, True, offsets, hopwell.torch.compressed_lengths(offsets, 3)


def samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    kv, gate, ratio, bias, *packed = _packed(dtype)
    pool = kv.requires_grad_(), gate.requires_grad_()
    return {
        "": (*pool, ratio, bias.requires_grad_(), *packed),
        "plain": (*pool, 3, {"out_dtype": "float32"}),
    }


def backward_samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    return {"": (torch.randn(4, 4).to(dtype), *_packed(dtype))}


OPERATOR = Operator(
    name="kv_compress",
    call=call,
    right=right,
    expected=expected,
    reads_outputs=True,
    dimensions=_DIMENSIONS,
    samples=samples,
    choices={"out_dtype": "float32"},
    messages=[
        ({"ratio": 0}, "ratio must be at least 1; got 0"),
        ({"gate": np.zeros((29, 14), np.float32)}, "gate must be float32 [s=29, w=16]; got "),
        ({"position_bias": np.zeros((4, 16), np.float32)}, "position_bias must be float32 [ratio=3, w=16"),
        ({"position_bias": np.zeros((3, 16))}, "position_bias must be float32"),
        ({"cu_compressed": None}, "cu_seqlens and cu_compressed must both be given, or neither; got cu_seqlens alone"),
        ({"cu_seqlens": None}, "cu_seqlens and cu_compressed must both be given, or neither; got cu_compressed alone"),
        ({"cu_seqlens": np.zeros(4, np.int64)}, "cu_seqlens must be int32"),
        ({"cu_compressed": np.zeros(3, np.int32)}, "cu_compressed must be int32"),
    ],
)
BACKWARD = Operator(
    name="kv_compress_backward",
    call=backward_call,
    right=backward_right,
    expected=backward_expected,
    dimensions=_DIMENSIONS | {"d_kv": "s w", "d_gate": "s w"},
    samples=backward_samples,
    free={("d_out", 0)},
    messages=[
        ({"d_out": np.zeros((9, 16), np.float32)}, "d_out must be "),
    ],
)
