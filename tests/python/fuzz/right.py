"""A right call of each operator: every option, sizes from nothing to a little past a tile, any strides and aliasing."""

from collections.abc import Callable
from typing import Any

import numpy as np
from calls import DTYPES, FLOAT8
from hopwell import reference
from hopwell._ops import OPERATORS
from hypothesis import strategies as st

from . import right_cache, right_decode, right_paged_indexer, right_pooling
from .call import WORK, FuzzedCall, fit, given
from .draw import E4M3, Maker, integers_around, rows_of_indices


def _causality(maker: Maker, s_q: int, s_kv: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    stride = maker.choose(1, 2, 5, 1, 2**31, 2**62)
    if maker.chance():
        arguments["kv_stride"] = stride
    match maker.choose("none", "start", "positions"):
        case "start":
            near = maker.integer(-3, 2 * s_kv + 3)
            arguments["q_start"] = maker.choose(near, near, near, 2**62 - 1, 1 - 2**62, 2**31, -(2**31))
        case "positions":
            arguments["q_positions"] = maker.values(integers_around(maker, s_q, [0, s_kv, 2 * s_kv]), rows=False)
    return arguments


def _key_ranges(maker: Maker, s_q: int, s_kv: int) -> dict[str, Any]:
    """Half of the calls have them: any two numbers, or documents of whose keys a query sees the first ones."""
    match maker.choose("none", "none", "any", "documents"):
        case "any":
            start, end = (integers_around(maker, s_q, [0, s_kv // 2, s_kv]) for _ in range(2))
        case "documents":
            starts = np.sort(maker.rng.integers(0, s_kv + 1, 3))
            document = np.sort(maker.rng.integers(0, 3, s_q))
            start, past = starts[document], np.append(starts[1:], s_kv)[document]
            end = start + (maker.rng.random(s_q) * (past - start + 1)).astype(np.int64)
        case _:
            return {}
    ranges = {"k_start": start, "k_end": end}
    return {name: maker.values(values.astype(np.int32), rows=False) for name, values in ranges.items()}


def _sparse(maker: Maker, limit: int = 600) -> tuple[str, dict[str, Any]]:
    dtype = maker.choose("float32", "bfloat16")
    s_q, s_kv, h_q = maker.size(0, 70), maker.size(0, limit), maker.size(1, 33)
    topk = maker.choose(maker.size(0, 130), maker.size(0, 130), 511, 512, 513, 1025)
    d_qk = maker.size(1, 130)
    if maker.for_kernels:
        dtype, d_qk, h_q = "bfloat16", maker.choose(576, 512), maker.choose(h_q, 8, 16, 32, 64, maker.size(1, 130))
    dense = maker.chance(4)
    if dense:
        s_kv = topk = min(s_kv, 130)
    s_q, h_q, topk, d_qk = fit([s_q, h_q, topk, d_qk])
    s_kv = topk if dense else s_kv
    flat_kv, flat_indices = maker.chance(), maker.chance()
    wanted = rows_of_indices(maker, s_q, s_kv, topk)
    arguments: dict[str, Any] = (
        {
            "q": maker.floats((s_q, h_q, d_qk), dtype),
            "kv": maker.floats((s_kv, d_qk) if flat_kv else (s_kv, 1, d_qk), dtype),
            "indices": None if dense else maker.values(wanted if flat_indices else wanted[:, None]),
            "sm_scale": _scalar(maker, 0.3),
        }
        | _causality(maker, s_q, s_kv)
        | _key_ranges(maker, s_q, s_kv)
    )
    if dense:
        return dtype, arguments
    if maker.chance(8):
        arguments["indices"] = maker.bits(arguments["indices"].shape, np.int32)
    if maker.chance():
        arguments["topk_length"] = maker.values(integers_around(maker, s_q, [0, topk // 2, topk]), rows=False)
    return dtype, arguments


def _window(maker: Maker, arguments: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Half of the calls have window keys: no rows to a few, for the last queries, documents or any two numbers."""
    if maker.chance():
        return {}
    s_q, _, d_qk = arguments["q"].shape
    s_w = maker.choose(s_q, maker.size(0, 60))
    window: dict[str, Any] = {
        "window_kv": maker.floats((s_w, d_qk) if maker.chance() else (s_w, 1, d_qk), dtype),
        "window": maker.choose(maker.integer(1, 9), maker.integer(1, 70), 2**31, 2**63 - 1),
    }
    match maker.choose("last", "any", "documents"):
        case "any":
            start, end = (integers_around(maker, s_q, [0, s_w // 2, s_w]) for _ in range(2))
        case "documents":
            starts = np.sort(maker.rng.integers(0, s_w + 1, 3))
            start = starts[np.sort(maker.rng.integers(0, 3, s_q))]
            end = start + maker.rng.integers(0, 10, s_q)
        case _:
            return window
    ranges = {"w_start": start, "w_end": end}
    return window | {name: maker.values(rows.astype(np.int32), rows=False) for name, rows in ranges.items()}


def _topk(arguments: dict[str, Any]) -> int:
    indices = arguments["indices"]
    return len(arguments["kv"]) if indices is None else int(indices.shape[-1])


def _scalar(maker: Maker, usual: float) -> float:
    """A finite float of 32 bits, as the operators take it: mostly a usual one."""
    extreme = maker.choose(0.0, -0.0, 3.4e38, -3.4e38, 1e-45, 1e-30, 1e6)
    return float(np.float32(maker.choose(usual, -usual, 1.0, usual, extreme)))


@st.composite
def sparse_mla_forward(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype, arguments = _sparse(maker)
    s_q, h_q, d_qk = arguments["q"].shape
    d_v = arguments["d_v"] = 512 if maker.for_kernels else maker.choose(d_qk, maker.integer(1, d_qk))
    if maker.chance():
        arguments["attn_sink"] = _sink(maker, h_q)
    if maker.chance():
        arguments["share_keys"] = maker.chance()
    arguments |= _window(maker, arguments, dtype)
    rows = ((s_q, h_q), np.float32, False)
    results = {"out": ((s_q, h_q, d_v), DTYPES[dtype], True), "max_logits": rows, "lse": rows}
    return given(maker, "sparse_mla_forward", arguments, results)


def _sink(maker: Maker, h_q: int) -> Any:
    sinks = maker.rng.choice(np.array([0.0, 1.5, -3.0, np.inf, -np.inf, 1e38, -1e38], np.float32), h_q)
    return maker.values(sinks, rows=False)


@st.composite
def sparse_mla_backward(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype, arguments = _sparse(maker, limit=300)
    s_q, h_q, d_qk = arguments["q"].shape
    d_v = arguments["d_v"] = 512 if maker.for_kernels else maker.choose(d_qk, maker.integer(1, d_qk))
    if maker.chance():
        arguments["attn_sink"] = _sink(maker, h_q)
    arguments |= _window(maker, arguments, dtype)
    arguments["d_out"] = maker.floats((s_q, h_q, d_v), dtype)
    if maker.chance(4):  # what no forward has returned
        arguments["out"] = maker.floats((s_q, h_q, d_v), dtype)
        arguments["lse"] = maker.floats((s_q, h_q), "float32", rows=False)
    else:
        with np.errstate(all="ignore"):
            out, _, lse = reference.sparse_mla_forward(**arguments_of(arguments, "d_out"))
            arguments["out"] = maker.values(out.astype(DTYPES[dtype]))
            arguments["lse"] = maker.values(lse.astype(np.float32), rows=False)
    for option in ("deterministic", "indices_ascending", "share_keys"):
        if maker.chance():
            arguments[option] = maker.chance()
    dkv_dtype = maker.choose("float32", "bfloat16")
    if maker.chance():
        arguments["dkv_dtype"] = dkv_dtype
    else:
        dkv_dtype = "float32"
    needed = {name: maker.choose(True, True, True, False) for name in ("dq", "dkv", "d_window_kv")}
    arguments |= {f"need_{name}": False for name, need in needed.items() if not need}
    results = {
        "dq": (arguments["q"].shape, DTYPES[dtype], True),
        "dkv": (arguments["kv"].shape, DTYPES[dkv_dtype], True),
        "attn": ((s_q, _topk(arguments)), np.float32, True),
    }
    if "window_kv" in arguments:
        results["d_window_kv"] = arguments["window_kv"].shape, DTYPES[dkv_dtype], True
    call = given(
        maker, "sparse_mla_backward", arguments, {name: r for name, r in results.items() if needed.get(name, True)}
    )
    if "attn" in call.outputs and "attn_sink" in arguments and maker.chance():
        arguments["attn_with_sink"] = True
    of_keys = [name for name in ("dkv", "d_window_kv") if name in results and needed[name]]
    all_given = bool(of_keys) and set(of_keys) <= set(call.outputs)
    if all_given and dkv_dtype == "float32" and maker.chance():
        arguments["accumulate"] = True
        for name in of_keys:
            arguments[name][...] = maker.rng.standard_normal(arguments[name].shape)
    return call


def arguments_of(arguments: dict[str, Any], *left_out: str) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in left_out}


@st.composite
def attention_distribution(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype, arguments = _sparse(maker)
    s_q, h_q, _ = arguments["q"].shape
    if maker.chance(4):
        arguments["lse"] = maker.floats((s_q, h_q), "float32", rows=False)
    else:
        with np.errstate(all="ignore"):
            window = _window(maker, arguments, dtype)  # the target of a joint softmax
            _, _, lse = reference.sparse_mla_forward(**arguments, **window, d_v=1)
            arguments["lse"] = maker.values(lse.astype(np.float32), rows=False)
    if maker.chance():
        arguments["attn_sink"] = _sink(maker, h_q)
    if maker.chance():
        arguments["normalize"] = maker.choose("none", "l1")
    if maker.chance():
        arguments["indices_ascending"] = maker.chance()
    results = {"out": ((s_q, _topk(arguments)), np.float32, True)}
    return given(maker, "attention_distribution", arguments, results)


@st.composite
def paged_attention(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype = maker.choose("float32", "float16", "bfloat16")
    b, h_kv, group, d = maker.size(0, 5), maker.size(1, 5), maker.size(1, 4), maker.choose(32, 40, 64, 128, 256)
    flat = maker.chance(4)
    q_len = 1 if flat else maker.choose(1, 2, 3, 16)
    block = maker.choose(1, 2, 3, 4, 7, 8, 16, 17, 32, 256)
    blocks, pages = maker.size(0, 12), maker.choose(0, 1, 2, 5, 9)
    b, h_kv, group, q_len = fit([b, h_kv, group, q_len], max(WORK // max(pages * block * d, 1), 1))
    (blocks,) = fit([blocks], max(WORK // (block * h_kv * d), 1))
    h_q = h_kv * group
    x = 16 // np.dtype(DTYPES[dtype]).itemsize
    layout = maker.choose("nhd", "hnd", "vllm")
    shapes: dict[str, tuple[Any, Any]] = {
        "nhd": ((blocks, block, h_kv, d),) * 2,
        "hnd": ((blocks, h_kv, block, d),) * 2,
        "vllm": ((blocks, h_kv, d // x, block, x), (blocks, h_kv, d, block)),
    }
    tables = rows_of_indices(maker, b, blocks, pages)
    arguments: dict[str, Any] = {
        "q": maker.floats((b, h_q, d) if flat else (b, q_len, h_q, d), dtype),
        "k_cache": maker.floats(shapes[layout][0], dtype),
        "v_cache": maker.floats(shapes[layout][1], dtype),
        "block_tables": maker.values(tables),
        "context_lens": maker.values(integers_around(maker, b, [0, pages * block // 2, pages * block]), rows=False),
        "scale": _scalar(maker, 0.2),
    }
    if layout != "nhd" or maker.chance():
        arguments["layout"] = layout
    if maker.chance():
        arguments["window"] = maker.choose(0, maker.integer(1, 20), 2**31, 2**63 - 1)
    if maker.chance(3):
        arguments["pos_bias_u"] = maker.floats((h_q, d), maker.choose("float32", dtype))
    extent = maker.choose(0, 1, 7, 40, pages * block)
    rule = maker.choose("zero", "clamp", "-inf")
    if rule == "clamp":
        extent = max(extent, 1)
    bias = maker.choose("none", "key", "distance", "r", "r and v")
    first = maker.choose(1, b)
    if bias == "key":
        shape = (first, h_q, q_len, extent)
        arguments["bias"] = maker.floats(shape, maker.choose("float32", "float16", "bfloat16"))
    elif bias == "distance":
        shape = (first, h_q, extent)
        arguments["bias"] = maker.floats(shape, maker.choose("float32", "float16", "bfloat16"))
        arguments["bias_kind"] = "distance"
    elif bias != "none":
        arguments["r"] = maker.floats((maker.choose(1, h_q), extent, d), maker.choose("float32", dtype))
        if bias == "r and v":
            arguments["pos_bias_v"] = maker.floats((h_q, d), maker.choose("float32", dtype))
    if bias != "none" or maker.chance(4):
        arguments |= {"out_of_range": rule, "pre_scale": maker.chance()}
    if bias == "none" and rule == "clamp":
        arguments.pop("out_of_range", None)
    if maker.chance(4):
        arguments["alibi_slopes"] = maker.floats((h_q,), "float32", rows=False)
    shape = arguments["q"].shape
    results = {"out": (shape, DTYPES[dtype], True), "lse": (shape[:-1], np.float32, False)}
    return given(maker, "paged_attention", arguments, results)


def _k(maker: Maker) -> int:
    if maker.for_kernels:
        return 64 * maker.choose(1, 2, 3, 4, 8, 17)
    return 16 * maker.choose(1, 2, 3, 4, 5, 8, 9, 16, 17, 40, 65, 0)


def _blocked(maker: Maker, rows: int, groups: int, batch: int, dtype: Any) -> Any:
    """Blocked scales in some of the shapes that they may have; the padding holds whatever it holds."""
    flat = maker.scales((batch * (-(-rows // 128) * 128) * (-(-groups // 4) * 4),), dtype, dense=True)
    return maker.choose(flat, flat.reshape(-1, 4), flat.reshape(-1, 4).T, flat.reshape(1, 2, -1))


@st.composite
def nvfp4_gemv(draw: st.DrawFn) -> FuzzedCall:
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
        arguments["alpha"] = _scalar(maker, 0.01)
    out_dtype = "float16"
    if maker.chance():
        out_dtype = arguments["out_dtype"] = maker.choose("float16", "bfloat16", "float32")
    if blocked or maker.chance():
        arguments["scale_layout"] = "blocked" if blocked else "plain"
    _some_reciprocal(maker, arguments, "alpha")
    return given(maker, "nvfp4_gemv", arguments, {"out": ((m, 1, batch), DTYPES[out_dtype], False)})


def _global(maker: Maker, positive: bool = False) -> Any:
    """A global scale: a number, or an array of one float32."""
    value = maker.choose(0.015625, 4.0, 1.0, 2.0**-100, 2.0**100, 2.0**-149) if positive else _scalar(maker, 0.02)
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
def nvfp4_linear(draw: st.DrawFn) -> FuzzedCall:
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
def nvfp4_linear_backward(draw: st.DrawFn) -> FuzzedCall:
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
def nvfp4_matmul(draw: st.DrawFn) -> FuzzedCall:
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
        arguments["alpha"] = _scalar(maker, 0.01)
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
def nvfp4_quantize(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype = maker.choose("float32", "float16", "bfloat16")
    arguments: dict[str, Any] = {"x": maker.floats((maker.size(0, 130), _k(maker)), dtype)}
    if maker.chance():
        arguments["scale_layout"] = maker.choose("plain", "blocked")
    if maker.chance():
        arguments["global_scale"] = _global(maker, positive=True)
    return given(maker, "nvfp4_quantize", arguments, {})


@st.composite
def nvfp4_dequantize(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    rows, k = maker.size(0, 130), _k(maker)
    arguments: dict[str, Any] = {"codes": maker.codes((rows, k // 2))}
    _scale_argument(maker, arguments, "scales", rows, k)
    arguments["global_scale"] = _global(maker)
    if maker.chance():
        arguments["dtype"] = maker.choose("float32", "float16", "bfloat16")
    _some_reciprocal(maker, arguments, "global_scale")
    return given(maker, "nvfp4_dequantize", arguments, {})


def _index_inputs(maker: Maker, s_kv: int, keys: int, *more_dtypes: str) -> tuple[str, dict[str, Any]]:
    dtype = maker.choose("float32", "bfloat16", *more_dtypes)
    s_q, h_index, d_index = maker.size(0, 40), maker.size(1, 33), maker.size(1, 130)
    if maker.for_kernels:
        dtype = maker.choose("bfloat16", *(more_dtypes or ("bfloat16",)))
        h_index, d_index = maker.choose(h_index, 16, 32, 64, maker.size(1, 130)), maker.choose(128, 128, 64)
    s_q, h_index, d_index = fit([s_q, h_index, d_index], max(10 * WORK // max(keys, 1), 1))
    return dtype, {
        "q_index": maker.floats((s_q, h_index, d_index), dtype),
        "k_index": maker.floats((s_kv, d_index), dtype),
        "weights": maker.floats((s_q, h_index), maker.choose("float32", "bfloat16")),
    }


@st.composite
def lightning_indexer(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    s_kv = maker.choose(maker.size(0, 300), maker.size(0, 300), 600, 4099, 8200)
    dtype, arguments = _index_inputs(maker, s_kv, s_kv, FLOAT8)
    arguments["topk"] = maker.choose(maker.size(0, 300), s_kv, s_kv + 3)
    s_q, h_index, _ = arguments["q_index"].shape
    if dtype == FLOAT8 and maker.chance():
        arguments["q_scale"] = maker.floats((s_q, h_index), "float32")
    if dtype == FLOAT8 and maker.chance():
        arguments["k_scale"] = maker.floats((s_kv,), "float32", rows=False)
    arguments |= _causality(maker, s_q, s_kv) | _key_ranges(maker, s_q, s_kv)
    if maker.chance(3):
        arguments["relu"] = maker.chance()
    return given(maker, "lightning_indexer", arguments, {})


@st.composite
def lightning_indexer_backward(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    s_kv, topk = maker.size(0, 300), maker.choose(maker.size(0, 130), maker.size(0, 130), 2049)
    _, arguments = _index_inputs(maker, s_kv, max(s_kv, topk))
    s_q = len(arguments["q_index"])
    wanted = rows_of_indices(maker, s_q, s_kv, topk)
    arguments["indices"] = maker.values(wanted if maker.chance() else wanted[:, None])
    if maker.chance(4):
        arguments["target"] = maker.floats((s_q, topk), "float32")
    else:
        target = maker.rng.random((s_q, topk)) * (maker.rng.random((s_q, topk)) < 0.7)
        target /= np.maximum(target.sum(axis=1, keepdims=True), 1e-9)
        arguments["target"] = maker.values(target.astype(np.float32))
    if maker.chance(4):
        arguments["d_scores"], arguments["target"] = maker.floats((s_q, topk), "float32"), None
    arguments |= _key_ranges(maker, s_q, s_kv)
    if maker.chance():
        arguments["d_loss"] = _scalar(maker, 0.5)
    if maker.chance(3):
        arguments["row_weights"] = maker.floats((s_q,), "float32", rows=False)
    if maker.chance(3):
        arguments["relu"] = maker.chance()
    if maker.chance():
        arguments["deterministic"] = maker.chance()
    return given(maker, "lightning_indexer_backward", arguments, {})


@st.composite
def indexer_dense_loss(draw: st.DrawFn) -> FuzzedCall:
    """Of usual numbers, and of index vectors whose products have a certain sign: shapes, masks and memory matter."""
    maker = Maker(draw)
    dtype = maker.choose("float32", "bfloat16")
    s_q, s_kv, h_q, h_index = maker.size(0, 40), maker.size(0, 130), maker.size(1, 9), maker.size(1, 9)
    d_qk, d_index = maker.size(1, 70), maker.size(1, 40)
    if maker.for_kernels:
        dtype, d_qk, d_index = "bfloat16", maker.choose(512, 576), maker.choose(64, 128)
    s_q, s_kv, h_q, d_qk = fit([s_q, s_kv, h_q, d_qk])

    def normal(*shape: int) -> Any:
        return maker.values(maker.rng.standard_normal(shape).astype(DTYPES[dtype]))

    def whole(*shape: int) -> Any:
        return maker.values(maker.rng.integers(-2, 3, shape).astype(DTYPES[dtype]))

    masks = _causality(maker, s_q, s_kv) | _key_ranges(maker, s_q, s_kv)
    arguments: dict[str, Any] = {
        "q": normal(s_q, h_q, d_qk),
        "kv": normal(s_kv, d_qk) if maker.chance() else normal(s_kv, 1, d_qk),
        "sm_scale": 0.25,
    } | masks
    _, _, lse = reference.sparse_mla_forward(**arguments, indices=None, d_v=1)
    weights = 0.1 * maker.rng.standard_normal((s_q, h_index))
    arguments |= {
        "lse": maker.values(lse.astype(np.float32), rows=False),
        "q_index": whole(s_q, h_index, d_index),
        "k_index": whole(s_kv, d_index),
        "weights": maker.values(weights.astype(DTYPES[maker.choose("float32", "bfloat16")])),
    }
    if maker.chance():
        arguments["attn_sink"] = _sink(maker, h_q)
    if maker.chance():
        arguments["normalize"] = maker.choose("heads", "l1")
    if maker.chance():
        arguments["d_loss"] = maker.choose(0.5, -1.0, 0.0)
    if maker.chance(3):
        arguments["row_weights"] = maker.values(maker.rng.integers(0, 3, s_q).astype(np.float32), rows=False)
    for name in ("relu", "deterministic"):
        if maker.chance(3):
            arguments[name] = maker.chance()
    return given(maker, "indexer_dense_loss", arguments, {})


@st.composite
def normalize_l1(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    shape = maker.size(0, 70), maker.size(0, 300)
    rows = maker.rng.random(shape) * (maker.rng.random((shape[0], 1)) < 0.7)
    arguments = {"attn": maker.values(rows.astype(np.float32))}
    return given(maker, "normalize_l1", arguments, {"out": (shape, np.float32, True)})


CALLS: dict[str, Callable[[], st.SearchStrategy[FuzzedCall]]] = {
    name: {
        **vars(right_pooling),
        **vars(right_cache),
        **vars(right_decode),
        **vars(right_paged_indexer),
        **globals(),
    }[name]
    for name in OPERATORS
}
