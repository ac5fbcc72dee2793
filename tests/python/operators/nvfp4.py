"""The operators of NVFP4."""

from typing import Any

import hopwell
import hopwell.torch
import ml_dtypes
import numpy as np
import torch
from calls import DTYPES, Call, Rng, bound_of, codes, normal
from fuzz.arguments import scalar
from fuzz.bounds import BOUNDS, LARGE, ROUNDING, TINY, Expected, finite, unless
from fuzz.call import WORK, FuzzedCall, fit, given
from fuzz.draw import E4M3, Maker
from hopwell import reference
from hypothesis import strategies as st

from ._operator import Operator


def _scales(rng: Rng, shape: tuple[int, ...]) -> Any:
    return rng.uniform(0.1, 2, shape).astype(ml_dtypes.float8_e4m3fn)


def _k_fastest(array: Any) -> Any:
    """[rows, K, L] with K fastest in memory, then rows, then L."""
    return np.ascontiguousarray(array.transpose(2, 0, 1)).transpose(1, 2, 0)


def gemv_call(rng: Rng, dtype: str) -> Call:
    m, k, batch = 20, 96, 3
    arguments = {
        "a": _k_fastest(codes(rng, (m, k // 2, batch))),
        "b": _k_fastest(codes(rng, (1, k // 2, batch))),
        "sfa": _k_fastest(_scales(rng, (m, k // 16, batch))),
        "sfb": _k_fastest(_scales(rng, (1, k // 16, batch))),
        "alpha": 0.01,
        "out_dtype": dtype,
    }
    return Call("nvfp4_gemv", arguments, (bound_of(dtype),), ("out",))


def linear_call(rng: Rng, dtype: str) -> Call:
    n, rows, k = 3, 21, 64
    arguments = {
        "x": normal(rng, (n, k), dtype),
        "weight": codes(rng, (rows, k // 2)),
        "weight_scale": _scales(rng, (rows, k // 16)),
        "weight_global": np.array(0.02, np.float32),
        "bias": normal(rng, (rows,), dtype),
    }
    return Call("nvfp4_linear", arguments, (bound_of(dtype),), ("out",))


def linear_backward_call(rng: Rng, dtype: str) -> Call:
    arguments = linear_call(rng, dtype).arguments
    arguments["d_out"] = normal(rng, (3, 21), dtype)
    given = ("d_out", "weight", "weight_scale", "weight_global")
    return Call("nvfp4_linear_backward", {name: arguments[name] for name in given}, (bound_of(dtype),), ("out",))


def matmul_call(rng: Rng, dtype: str) -> Call:
    m, n, k = 19, 21, 96
    arguments = {
        "a": codes(rng, (m, k // 2)),
        "b": codes(rng, (n, k // 2)),
        "sfa": _scales(rng, (m, k // 16)),
        "sfb": _scales(rng, (n, k // 16)),
        "alpha": 0.01,
        "bias": normal(rng, (n,), dtype),
        "out_dtype": dtype,
    }
    return Call("nvfp4_matmul", arguments, (bound_of(dtype),), ("out",))


def quantize_call(rng: Rng, dtype: str) -> Call:
    return Call("nvfp4_quantize", {"x": normal(rng, (7, 64), dtype)}, (0, 0, 0))


def dequantize_call(rng: Rng, dtype: str) -> Call:
    arguments = {
        "codes": codes(rng, (7, 32)),
        "scales": _scales(rng, (7, 4)),
        "global_scale": 0.02,
        "dtype": dtype,
    }
    return Call("nvfp4_dequantize", arguments, (bound_of(dtype),))


def _k(maker: Maker) -> int:
    if maker.for_kernels:
        return 64 * maker.choose(1, 2, 3, 4, 8, 17)
    return 16 * maker.choose(1, 2, 3, 4, 5, 8, 9, 16, 17, 40, 65, 0)


def _blocked(maker: Maker, rows: int, groups: int, batch: int, dtype: Any) -> Any:
    """Blocked scales in some of the shapes that they may have; the padding holds whatever it holds."""
    flat = maker.scales((batch * (-(-rows // 128) * 128) * (-(-groups // 4) * 4),), dtype, dense=True)
    return maker.choose(flat, flat.reshape(-1, 4), flat.reshape(-1, 4).T, flat.reshape(1, 2, -1))


@st.composite
def gemv_right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    m, k, batch, rows_b = maker.size(0, 130), _k(maker), maker.size(0, 4), maker.choose(1, 1, 128)
    scale_type = maker.choose(np.uint8, E4M3)
    blocked = maker.chance(3)

    def k_fastest(rows: int, columns: int, make: Any) -> Any:
        return make((batch, rows, columns)).transpose(1, 2, 0)

    def scales(rows: int) -> Any:
        if blocked:
            return _blocked(maker, rows, k // 16, batch, scale_type)
        return k_fastest(rows, k // 16, lambda shape: maker.scales(shape, scale_type))

    arguments: dict[str, Any] = {
        "a": k_fastest(m, k // 2, maker.codes),
        "b": k_fastest(rows_b, k // 2, maker.codes),
        "sfa": scales(m),
        "sfb": scales(rows_b),
    }
    if maker.chance():
        arguments["alpha"] = scalar(maker, 0.01)
    out_dtype = "float16"
    if maker.chance():
        out_dtype = arguments["out_dtype"] = maker.choose("float16", "bfloat16", "float32")
    if blocked or maker.chance():
        arguments["scale_layout"] = "blocked" if blocked else "plain"
    _some_reciprocal(maker, arguments, "alpha")
    return given(maker, "nvfp4_gemv", arguments, {"out": ((m, 1, batch), DTYPES[out_dtype], False)})


def _global(maker: Maker, positive: bool = False) -> Any:
    """A global scale: a number, or an array of one float32."""
    value = maker.choose(0.015625, 4.0, 1.0, 2.0**-100, 2.0**100, 2.0**-149) if positive else scalar(maker, 0.02)
    if maker.chance():
        return value
    given = maker.values(np.array(value, np.float32))
    if not positive and maker.chance(4):
        given = maker.bits((), np.float32)
    return given


def _reciprocal(maker: Maker, as_array: bool) -> Any:
    """A number whose reciprocal is a factor, or an array of it."""
    value = maker.choose(3.0, -0.37, 64.0, 2.0**100, -(2.0**-100), 2.0**-126)
    return maker.values(np.array(value, np.float32)) if as_array else value


def _some_reciprocal(maker: Maker, arguments: dict[str, Any], name: str) -> None:
    """Sometimes says whether the global, or alpha, is a reciprocal."""
    if not maker.chance(3):
        return
    arguments["global_is_reciprocal"] = maker.chance()
    if arguments["global_is_reciprocal"]:
        arguments[name] = _reciprocal(maker, as_array=name != "alpha" and maker.chance())


def _scale_argument(maker: Maker, arguments: dict[str, Any], name: str, rows: int, k: int) -> None:
    dtype, blocked = maker.choose(np.uint8, E4M3), maker.chance(3)
    arguments[name] = _blocked(maker, rows, k // 16, 1, dtype) if blocked else maker.scales((rows, k // 16), dtype)
    if blocked or maker.chance():
        arguments["scale_layout"] = "blocked" if blocked else "plain"


@st.composite
def linear_right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype = maker.choose("float32", "float16", "bfloat16")
    n, rows, k = maker.choose(1, maker.size(0, 130)), maker.size(0, 130), _k(maker)
    n, rows = fit([n, rows], max(10 * WORK // max(k, 1), 1))
    arguments: dict[str, Any] = {"x": maker.floats((n, k), dtype), "weight": maker.codes((rows, k // 2))}
    _scale_argument(maker, arguments, "weight_scale", rows, k)
    arguments["weight_global"] = _global(maker)
    if maker.chance():
        arguments["bias"] = maker.floats((rows,), dtype)
    _some_reciprocal(maker, arguments, "weight_global")
    return given(maker, "nvfp4_linear", arguments, {"out": ((n, rows), DTYPES[dtype], True)})


@st.composite
def linear_backward_right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype = maker.choose("float32", "float16", "bfloat16")
    n, rows, k = maker.choose(1, maker.size(0, 130)), maker.choose(maker.size(0, 130), 300, 700), _k(maker)
    n, rows = fit([n, rows], max(10 * WORK // max(k, 1), 1))
    arguments: dict[str, Any] = {"d_out": maker.floats((n, rows), dtype), "weight": maker.codes((rows, k // 2))}
    _scale_argument(maker, arguments, "weight_scale", rows, k)
    arguments["weight_global"] = _global(maker)
    _some_reciprocal(maker, arguments, "weight_global")
    return given(maker, "nvfp4_linear_backward", arguments, {"out": ((n, k), DTYPES[dtype], True)})


@st.composite
def matmul_right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    m, n, k = maker.choose(1, maker.size(0, 130)), maker.choose(1, maker.size(0, 130)), _k(maker)
    m, n = fit([m, n], max(10 * WORK // max(k, 1), 1))
    scale_type, blocked = maker.choose(np.uint8, E4M3), maker.chance(3)

    def scales(rows: int) -> Any:
        if blocked:
            return _blocked(maker, rows, k // 16, 1, scale_type)
        return maker.scales((rows, k // 16), scale_type)

    arguments: dict[str, Any] = {
        "a": maker.codes((m, k // 2)),
        "b": maker.codes((n, k // 2)),
        "sfa": scales(m),
        "sfb": scales(n),
    }
    if maker.chance():
        arguments["alpha"] = scalar(maker, 0.01)
    out_dtype = "bfloat16"
    if maker.chance():
        out_dtype = arguments["out_dtype"] = maker.choose("bfloat16", "float16", "float32")
    if maker.chance():
        arguments["bias"] = maker.floats((n,), out_dtype)
    if blocked or maker.chance():
        arguments["scale_layout"] = "blocked" if blocked else "plain"
    _some_reciprocal(maker, arguments, "alpha")
    return given(maker, "nvfp4_matmul", arguments, {"out": ((m, n), DTYPES[out_dtype], True)})


@st.composite
def quantize_right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype = maker.choose("float32", "float16", "bfloat16")
    arguments: dict[str, Any] = {"x": maker.floats((maker.size(0, 130), _k(maker)), dtype)}
    if maker.chance():
        arguments["scale_layout"] = maker.choose("plain", "blocked")
    if maker.chance():
        arguments["global_scale"] = _global(maker, positive=True)
    return given(maker, "nvfp4_quantize", arguments, {})


@st.composite
def dequantize_right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    rows, k = maker.size(0, 130), _k(maker)
    arguments: dict[str, Any] = {"codes": maker.codes((rows, k // 2))}
    _scale_argument(maker, arguments, "scales", rows, k)
    arguments["global_scale"] = _global(maker)
    if maker.chance():
        arguments["dtype"] = maker.choose("float32", "float16", "bfloat16")
    _some_reciprocal(maker, arguments, "global_scale")
    return given(maker, "nvfp4_dequantize", arguments, {})


def _sizes(codes: Any) -> Any:
    """Codes, two a byte, without their signs."""
    return codes & 0x77


def _scale_sizes(scales: Any) -> Any:
    """Scales without their signs; NaN becomes 0."""
    magnitude = scales.view(np.uint8) & 0x7F
    return np.where(magnitude == 0x7F, np.uint8(0), magnitude).astype(np.uint8).copy(order="K")


def _factor(a: dict[str, Any], name: str) -> float:
    """The factor of a global scale, or of alpha."""
    given = float(a.get(name, 1.0))
    return 1.0 / given if a.get("global_is_reciprocal") else given


def gemv_expected(a: dict[str, Any]) -> list[Expected]:
    sizes = {"a": _sizes(a["a"]), "b": _sizes(a["b"]), "sfa": _scale_sizes(a["sfa"]), "sfb": _scale_sizes(a["sfb"])}
    size = reference.nvfp4_gemv(**sizes, scale_layout=a.get("scale_layout", "plain"))
    slack = (ROUNDING * size + TINY) * abs(_factor(a, "alpha")) + TINY
    bound = BOUNDS[a.get("out_dtype", "float16")]
    return [Expected("c", reference.nvfp4_gemv(**a), bound, slack, elementwise=True)]


def linear_expected(a: dict[str, Any]) -> list[Expected]:
    factor = _factor(a, "weight_global")
    size = reference.nvfp4_linear(
        finite(a["x"]), _sizes(a["weight"]), _scale_sizes(a["weight_scale"]), 1.0,
        scale_layout=a.get("scale_layout", "plain"),
    )  # fmt: skip
    slack = (ROUNDING * size + TINY * 2 * a["weight"].shape[1]) * abs(factor)
    if "bias" in a:
        slack = slack + ROUNDING * finite(a["bias"])
    unscaled = 6.0 * finite(a["x"]).sum(axis=1, keepdims=True)  # codes times x, before the scales
    slack = unless((size > LARGE) | (unscaled > LARGE), np.where(np.isfinite(slack), slack, 0.0))
    return [Expected("y", reference.nvfp4_linear(**a), BOUNDS[str(a["x"].dtype)], slack)]


def linear_backward_expected(a: dict[str, Any]) -> list[Expected]:
    size = reference.nvfp4_linear_backward(
        finite(a["d_out"]), _sizes(a["weight"]), _scale_sizes(a["weight_scale"]), 1.0,
        scale_layout=a.get("scale_layout", "plain"),
    )  # fmt: skip
    slack = (ROUNDING * size + TINY * len(a["weight"])) * abs(_factor(a, "weight_global"))
    slack = unless(size > LARGE, np.where(np.isfinite(slack), slack, 0.0))
    return [Expected("d_x", reference.nvfp4_linear_backward(**a), BOUNDS[str(a["d_out"].dtype)], slack)]


def matmul_expected(a: dict[str, Any]) -> list[Expected]:
    sizes = {"a": _sizes(a["a"]), "b": _sizes(a["b"]), "sfa": _scale_sizes(a["sfa"]), "sfb": _scale_sizes(a["sfb"])}
    size = reference.nvfp4_matmul(**sizes, scale_layout=a.get("scale_layout", "plain"))
    slack = (ROUNDING * size + TINY) * abs(_factor(a, "alpha")) + TINY
    if "bias" in a:
        slack = slack + ROUNDING * finite(a["bias"])
    bound = BOUNDS[a.get("out_dtype", "bfloat16")]
    return [Expected("c", reference.nvfp4_matmul(**a), bound, slack, elementwise=True)]


def quantize_expected(a: dict[str, Any]) -> list[Expected]:
    names = ("codes", "scales", "global_scale")
    return [Expected(name, value) for name, value in zip(names, reference.nvfp4_quantize(**a), strict=True)]


def dequantize_expected(a: dict[str, Any]) -> list[Expected]:
    value = reference.nvfp4_dequantize(**a)
    rounding = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[a.get("dtype", "float32")]
    if a.get("global_is_reciprocal"):
        rounding += 2.0**-24  # of the factor
    return [Expected("x", value, 1.01 * rounding, np.zeros(value.shape), elementwise=True)]


def _quantized() -> tuple[Any, ...]:
    return tuple(hopwell.torch.nvfp4_quantize(torch.randn(10, 64)))


def linear_samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    bias = torch.randn(10, dtype=dtype, requires_grad=True)
    return {"": (torch.randn(3, 64).to(dtype).requires_grad_(), *_quantized(), {"bias": bias})}


def linear_backward_samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    return {"": (torch.randn(3, 10).to(dtype), *_quantized())}


def gemv_samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    if dtype != torch.float32:  # no argument has it
        return {}
    codes = torch.randint(0, 256, (1, 4, 16), dtype=torch.uint8).permute(1, 2, 0)
    scales = torch.randint(40, 70, (1, 4, 2), dtype=torch.uint8).permute(1, 2, 0)
    return {"": (codes, codes[:1], scales, scales[:1])}


def matmul_samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    samples = gemv_samples(dtype)
    for a, _, sfa, _ in samples.values():
        flat = a[:, :, 0], a[:3, :, 0], sfa[:, :, 0], sfa[:3, :, 0]
        samples[""] = (*flat, {"alpha": 0.5, "bias": torch.randn(3), "out_dtype": "float32"})
    return samples


def quantize_samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    x = torch.randn(3, 64).to(dtype)
    return {layout: (x, {"scale_layout": layout}) for layout in ("plain", "blocked")}


def dequantize_samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    return {"": (*_quantized(), {"dtype": str(dtype).removeprefix("torch.")})}


GEMV = Operator(
    name="nvfp4_gemv",
    dtypes=("float32", "float16", "bfloat16"),
    call=gemv_call,
    right=gemv_right,
    expected=gemv_expected,
    dimensions={"a": "M K! L", "b": "N! K! L", "sfa": "M K! L", "sfb": "N! K! L", "out": "M 1! L"},
    samples=gemv_samples,
    choices={"out_dtype": "float32", "scale_layout": "plain"},
    messages=[
        ({"out_dtype": "float8"}, "out_dtype must be float16, bfloat16 or float32; got float8"),
        ({"scale_layout": "tiled"}, "scale_layout must be 'plain' or 'blocked'; got 'tiled'"),
        (
            {"out": np.zeros((20, 1, 3), np.float32), "out_dtype": "float16"},
            "out must be float16, as out_dtype says; got float32",
        ),
    ],
    fake_messages=[
        ({"out_dtype": "float64"}, "out_dtype must be float16, bfloat16 or float32; got float64"),
    ],
)
LINEAR = Operator(
    name="nvfp4_linear",
    dtypes=("float32", "float16", "bfloat16"),
    call=linear_call,
    right=linear_right,
    expected=linear_expected,
    dimensions={"x": "n K!", "weight": "N K!", "weight_scale": "N K!", "bias": "N", "out": "n N"},
    samples=linear_samples,
    free={("x", 0)},
    choices={"scale_layout": "plain"},
    messages=[
        ({"weight_global": None}, "weight_global must be a number or a 0-d float32 array; got None"),
    ],
)
LINEAR_BACKWARD = Operator(
    name="nvfp4_linear_backward",
    dtypes=("float32", "float16", "bfloat16"),
    call=linear_backward_call,
    right=linear_backward_right,
    expected=linear_backward_expected,
    dimensions={"d_out": "n N", "weight": "N K!", "weight_scale": "N K!", "out": "n K!"},
    samples=linear_backward_samples,
    free={("d_out", 0)},
    choices={"scale_layout": "plain"},
    messages=[
        ({"weight_global": None}, "weight_global must be a number or a 0-d float32 array; got None"),
    ],
)
MATMUL = Operator(
    name="nvfp4_matmul",
    dtypes=("float32", "float16", "bfloat16"),
    call=matmul_call,
    right=matmul_right,
    expected=matmul_expected,
    dimensions={"a": "M K!", "b": "N K!", "sfa": "M K!", "sfb": "N K!", "bias": "N", "out": "M N"},
    samples=matmul_samples,
    choices={"out_dtype": "float32", "scale_layout": "plain"},
    messages=[
        ({"out_dtype": "float8"}, "out_dtype must be bfloat16, float16 or float32; got float8"),
        ({"scale_layout": "tiled"}, "scale_layout must be 'plain' or 'blocked'; got 'tiled'"),
        (
            {"out": np.zeros((19, 21), np.float32), "out_dtype": "float16"},
            "out must be float16, as out_dtype says; got float32",
        ),
    ],
    fake_messages=[
        ({"out_dtype": "float64"}, "out_dtype must be bfloat16, float16 or float32; got float64"),
    ],
)
QUANTIZE = Operator(
    name="nvfp4_quantize",
    dtypes=("float32", "float16", "bfloat16"),
    call=quantize_call,
    right=quantize_right,
    expected=quantize_expected,
    dimensions={"x": "rows K!"},
    samples=quantize_samples,
    free={("x", 0)},
    choices={"scale_layout": "plain"},
    messages=[
        ({"global_scale": 0.0}, "global_scale must be "),
        ({"global_scale": float("nan")}, "global_scale must be "),
        ({"scale_layout": None}, "scale_layout must be 'plain' or 'blocked'; got None"),
    ],
)
DEQUANTIZE = Operator(
    name="nvfp4_dequantize",
    dtypes=("float32", "float16", "bfloat16"),
    call=dequantize_call,
    right=dequantize_right,
    expected=dequantize_expected,
    dimensions={"codes": "rows K!", "scales": "rows K!"},
    samples=dequantize_samples,
    choices={"dtype": "float32", "scale_layout": "plain"},
    messages=[
        ({"dtype": "float64"}, "dtype must be float32, float16 or bfloat16; got float64"),
    ],
    fake_messages=[
        ({"dtype": "int32"}, "dtype must be float32, float16 or bfloat16; got int32"),
    ],
)
