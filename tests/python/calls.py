"""A call of each operator on random data, for tests that treat all operators alike: arguments as numpy arrays."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hopwell.torch
import ml_dtypes
import numpy as np
import torch
from hopwell import reference
from hopwell._ops import OPERATORS
from hopwell.torch.ops._indexer_dense_loss import indexer_dense_loss_and_gradients

Rng = np.random.Generator
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
FLOAT8 = "float8_e4m3fn"  # of the indexers alone


@dataclass
class Call:
    """An operator's arguments, and the bounds ‖x − ref‖/‖ref‖ of its results, in their order (0: exactly equal)."""

    operator: str
    arguments: dict[str, Any]
    bounds: tuple[float, ...]
    outputs: tuple[str, ...] = field(default=())  # arguments through which results can be written in place
    written: tuple[str, ...] = field(default=())  # arguments that a call must have, and writes

    def given(self, **changes: Any) -> dict[str, Any]:
        """The arguments with these changes, and with copies of the arrays that are written."""
        copies = {name: self.arguments[name].copy() for name in self.written}
        return {**self.arguments, **copies, **changes}


def _normal(rng: Rng, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
    return (scale * rng.standard_normal(shape)).astype(DTYPES[dtype])


def _bound(dtype: str) -> float:
    return {"float32": 1e-4, "float16": 1e-3, "bfloat16": 4e-3}[dtype]


def _sparse(rng: Rng, dtype: str) -> dict[str, Any]:
    s_q, s_kv, h_q, d_qk, topk = 5, 90, 3, 40, 33
    return {
        "q": _normal(rng, (s_q, h_q, d_qk), dtype),
        "kv": _normal(rng, (s_kv, 1, d_qk), dtype),
        "indices": rng.integers(-5, s_kv + 5, (s_q, 1, topk)).astype(np.int32),
        "sm_scale": 0.3,
        "topk_length": rng.integers(topk // 2, topk + 3, s_q).astype(np.int32),
        "q_positions": rng.integers(20, 200, s_q).astype(np.int32),
        "kv_stride": 2,
        "k_start": rng.integers(-2, 20, s_q).astype(np.int32),
        "k_end": rng.integers(60, s_kv + 5, s_q).astype(np.int32),
    }


def _window(rng: Rng, dtype: str) -> dict[str, Any]:
    return {
        "window_kv": _normal(rng, (17, 1, 40), dtype),
        "window": 6,
        "w_start": rng.integers(-2, 9, 5).astype(np.int32),
        "w_end": rng.integers(3, 20, 5).astype(np.int32),
    }


def sparse_mla_forward(rng: Rng, dtype: str) -> Call:
    arguments = _sparse(rng, dtype) | {"d_v": 24, "attn_sink": _normal(rng, (3,), "float32")} | _window(rng, dtype)
    outputs = ("out", "max_logits", "lse")
    return Call("sparse_mla_forward", arguments, (_bound(dtype), 1e-5, 1e-5), outputs)


def sparse_mla_backward(rng: Rng, dtype: str) -> Call:
    arguments = sparse_mla_forward(rng, dtype).arguments
    out, _, lse = reference.sparse_mla_forward(**arguments)
    arguments |= {
        "d_out": _normal(rng, out.shape, dtype),
        "out": out.astype(DTYPES[dtype]),
        "lse": lse.astype(np.float32),
    }
    # The given lse is rounded to fp32, which moves p by as much: not a matter of the operator.
    return Call("sparse_mla_backward", arguments, (_bound(dtype),) * 4, ("dq", "dkv"))


def attention_distribution(rng: Rng, dtype: str) -> Call:
    arguments = _sparse(rng, dtype)
    _, _, lse = reference.sparse_mla_forward(**arguments, **_window(rng, dtype), d_v=1)
    arguments |= {"lse": lse.astype(np.float32), "normalize": "l1", "attn_sink": _normal(rng, (3,), "float32")}
    return Call("attention_distribution", arguments, (2e-3,), ("out",))


def paged_attention(rng: Rng, dtype: str) -> Call:
    b, q_len, h_q, h_kv, d, block, blocks = 3, 2, 4, 2, 32, 8, 20
    arguments = {
        "q": _normal(rng, (b, q_len, h_q, d), dtype),
        "k_cache": _normal(rng, (blocks, block, h_kv, d), dtype),
        "v_cache": _normal(rng, (blocks, block, h_kv, d), dtype),
        "block_tables": rng.integers(0, blocks, (b, 6)).astype(np.int32),
        "context_lens": np.array([1, 17, 48], np.int32),
        "scale": d**-0.5,
        "pos_bias_u": _normal(rng, (h_q, d), "float32"),
        "pos_bias_v": _normal(rng, (h_q, d), "float32"),
        "r": _normal(rng, (h_q, 30, d), dtype),
        "window": 40,
    }
    bound = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 4e-3}[dtype]
    return Call("paged_attention", arguments, (bound, 1e-5), ("out", "lse"))


def _codes(rng: Rng, shape: tuple[int, ...]) -> Any:
    return rng.integers(0, 256, shape).astype(np.uint8)


def _scales(rng: Rng, shape: tuple[int, ...]) -> Any:
    return rng.uniform(0.1, 2, shape).astype(ml_dtypes.float8_e4m3fn)


def _k_fastest(array: Any) -> Any:
    """[rows, K, L] with K fastest in memory, then rows, then L."""
    return np.ascontiguousarray(array.transpose(2, 0, 1)).transpose(1, 2, 0)


def nvfp4_gemv(rng: Rng, dtype: str) -> Call:
    m, k, batch = 20, 96, 3
    arguments = {
        "a": _k_fastest(_codes(rng, (m, k // 2, batch))),
        "b": _k_fastest(_codes(rng, (1, k // 2, batch))),
        "sfa": _k_fastest(_scales(rng, (m, k // 16, batch))),
        "sfb": _k_fastest(_scales(rng, (1, k // 16, batch))),
        "alpha": 0.01,
        "out_dtype": dtype,
    }
    return Call("nvfp4_gemv", arguments, (_bound(dtype),), ("out",))


def nvfp4_linear(rng: Rng, dtype: str) -> Call:
    n, rows, k = 3, 21, 64
    arguments = {
        "x": _normal(rng, (n, k), dtype),
        "weight": _codes(rng, (rows, k // 2)),
        "weight_scale": _scales(rng, (rows, k // 16)),
        "weight_global": np.array(0.02, np.float32),
        "bias": _normal(rng, (rows,), dtype),
    }
    return Call("nvfp4_linear", arguments, (_bound(dtype),), ("out",))


def nvfp4_linear_backward(rng: Rng, dtype: str) -> Call:
    arguments = nvfp4_linear(rng, dtype).arguments
    arguments["d_out"] = _normal(rng, (3, 21), dtype)
    given = ("d_out", "weight", "weight_scale", "weight_global")
    return Call("nvfp4_linear_backward", {name: arguments[name] for name in given}, (_bound(dtype),), ("out",))


def _pooling(rng: Rng, dtype: str) -> dict[str, Any]:
    s, d, ratio = 29, 8, 3
    return {
        "kv": _normal(rng, (s, 2 * d), dtype),
        "gate": _normal(rng, (s, 2 * d), dtype),
        "ratio": ratio,
        "position_bias": _normal(rng, (ratio, 2 * d), "float32"),
        "overlap": True,
        "cu_seqlens": np.array([1, 5, 5, 26], np.int32),
        "cu_compressed": np.array([0, 1, 1, 8], np.int32),
    }


def kv_compress(rng: Rng, dtype: str) -> Call:
    return Call("kv_compress", _pooling(rng, dtype), (_bound(dtype),), ("out",))


def kv_compress_backward(rng: Rng, dtype: str) -> Call:
    arguments = {"d_out": _normal(rng, (9, 8), dtype), **_pooling(rng, dtype)}
    bounds = (_bound(dtype), _bound(dtype), 1e-4)
    return Call("kv_compress_backward", arguments, bounds, ("d_kv", "d_gate"))


def sparse_mla_decode(rng: Rng, dtype: str) -> Call:
    """Rows of V3.2 behind block tables, and a second cache; splits."""
    b, q_len, h_q, blocks, block = 3, 2, 3, 9, 5
    caches = []
    for shape in ((blocks, block, 656), (blocks - 2, block + 2, 656)):
        kv = _normal(rng, (shape[0] * shape[1], 576), dtype)
        caches.append(reference.mla_cache_append(kv, np.zeros(shape, np.uint8), np.arange(len(kv))))
    arguments = {
        "q": _normal(rng, (b, q_len, h_q, 576), dtype, 0.3),
        "cache": caches[0],
        "indices": rng.integers(-3, 40, (b, q_len, 150)).astype(np.int32),
        "sm_scale": 0.3,
        "d_v": 24,
        "block_tables": rng.integers(-1, blocks, (b, 7)).astype(np.int32),
        "context_lens": np.array([12, 35, 23], np.int32),
        "topk_length": rng.integers(70, 151, (b, q_len)).astype(np.int32),
        "extra_cache": caches[1],
        "extra_indices": rng.integers(-3, 40, (b, q_len, 70)).astype(np.int32),
        "extra_topk_length": np.array([70, 3, 64], np.int32),
        "extra_block_tables": rng.integers(0, blocks - 2, (b, 6)).astype(np.int32),
        "attn_sink": _normal(rng, (h_q,), "float32"),
        "keys_per_split": 64,
    }
    return Call("sparse_mla_decode", arguments, (_bound(dtype), 1e-5), ("out", "lse"))


def paged_lightning_indexer(rng: Rng, dtype: str) -> Call:
    """Small integers, so that the selection has one right answer; pages that do not exist."""
    b, q_len, h_index, d_index, blocks, block = 4, 2, 3, 16, 9, 5

    def integers(shape: tuple[int, ...]) -> Any:
        return rng.integers(-3, 4, shape).astype(ml_dtypes.float8_e4m3fn if dtype == FLOAT8 else DTYPES[dtype])

    arguments = {
        "q_index": integers((b, q_len, h_index, d_index)),
        "cache": integers((blocks, block, d_index)),
        "weights": integers((b, q_len, h_index)).astype(np.float32 if dtype == FLOAT8 else DTYPES[dtype]),
        "topk": 17,
        "block_tables": rng.integers(-1, blocks + 1, (b, 7)).astype(np.int32),
        "context_lens": np.array([35, 20, 1, 99], np.int32),
    }
    if dtype == FLOAT8:
        arguments["q_scale"] = np.exp2(rng.integers(-3, 4, (b, q_len, h_index))).astype(np.float32)
        scales = np.exp2(rng.integers(-3, 4, (blocks, block))).astype(np.float32)
        codes = arguments["cache"].view(np.uint8).reshape(blocks, -1)
        whole = np.concatenate([codes, scales.view(np.uint8)], axis=1)
        arguments["cache"] = whole.reshape(blocks, block, d_index + 4)
    return Call("paged_lightning_indexer", arguments, (0, 0), ("indices", "scores"))


def mla_cache_append(rng: Rng, dtype: str) -> Call:
    def grid(shape: tuple[int, ...], step: float) -> Any:  # a rotation by these has one right result
        return rng.integers(-8, 9, shape) * step

    arguments = {
        "kv": grid((5, 512), 0.25).astype(DTYPES[dtype]),
        "cache": _codes(rng, (3, 4, 656)),
        "slots": np.array([7, 2, 11, -1, 12]),
        "k_rope": grid((5, 64), 0.25).astype(DTYPES[dtype]),
        "positions": np.array([0, 3, 5, 2, 1], np.int32),
        "cos_sin": grid((6, 48), 0.125).astype(np.float32),
        "rope_offset": 200,
        "interleaved": False,
        "scale_format": "fp32",
    }
    return Call("mla_cache_append", arguments, (0,), written=("cache",))


def nvfp4_matmul(rng: Rng, dtype: str) -> Call:
    m, n, k = 19, 21, 96
    arguments = {
        "a": _codes(rng, (m, k // 2)),
        "b": _codes(rng, (n, k // 2)),
        "sfa": _scales(rng, (m, k // 16)),
        "sfb": _scales(rng, (n, k // 16)),
        "alpha": 0.01,
        "bias": _normal(rng, (n,), dtype),
        "out_dtype": dtype,
    }
    return Call("nvfp4_matmul", arguments, (_bound(dtype),), ("out",))


def nvfp4_quantize(rng: Rng, dtype: str) -> Call:
    return Call("nvfp4_quantize", {"x": _normal(rng, (7, 64), dtype)}, (0, 0, 0))


def nvfp4_dequantize(rng: Rng, dtype: str) -> Call:
    arguments = {
        "codes": _codes(rng, (7, 32)),
        "scales": _scales(rng, (7, 4)),
        "global_scale": 0.02,
        "dtype": dtype,
    }
    return Call("nvfp4_dequantize", arguments, (_bound(dtype),))


def lightning_indexer(rng: Rng, dtype: str) -> Call:
    s_q, s_kv, h_index, d_index = 5, 90, 3, 16

    def integers(shape: tuple[int, ...]) -> Any:  # exact scores, so that the selection has one right answer
        return rng.integers(-3, 4, shape).astype(ml_dtypes.float8_e4m3fn if dtype == FLOAT8 else DTYPES[dtype])

    arguments = {
        "q_index": integers((s_q, h_index, d_index)),
        "k_index": integers((s_kv, d_index)),
        "weights": integers((s_q, h_index)).astype(np.float32 if dtype == FLOAT8 else DTYPES[dtype]),
        "topk": 17,
        "q_start": 60,
        "kv_stride": 2,
        "k_start": rng.integers(-3, 60, s_q).astype(np.int32),
        "k_end": rng.integers(40, 99, s_q).astype(np.int32),
    }
    if dtype == FLOAT8:
        arguments["q_scale"] = np.exp2(rng.integers(-3, 4, (s_q, h_index))).astype(np.float32)
        arguments["k_scale"] = np.exp2(rng.integers(-3, 4, s_kv)).astype(np.float32)
    return Call("lightning_indexer", arguments, (0, 0))


def lightning_indexer_backward(rng: Rng, dtype: str) -> Call:
    arguments = lightning_indexer(rng, dtype).arguments
    for name in ("topk", "q_start", "kv_stride"):
        del arguments[name]
    indices = rng.integers(-2, 92, (5, 17)).astype(np.int32)
    target = rng.random(indices.shape)
    first, last = np.maximum(arguments["k_start"], 0)[:, None], np.minimum(arguments["k_end"], 90)[:, None]
    valid = (indices >= first) & (indices < last)
    total = target.sum(axis=1, keepdims=True, where=valid)  # 1 over these, or the loss were a difference of large terms
    arguments |= {
        "weights": _normal(rng, (5, 3), "float32", 0.1),
        "indices": indices,
        "target": (target / np.where(total > 0, total, 1)).astype(np.float32),
        "d_loss": 0.5,
    }
    return Call("lightning_indexer_backward", arguments, (1e-4, _bound(dtype), 1e-4, 1e-4))


def indexer_dense_loss(rng: Rng, dtype: str) -> Call:
    arguments = _sparse(rng, dtype) | {"indices": None}
    del arguments["topk_length"]
    _, _, lse = reference.sparse_mla_forward(**arguments, d_v=1)
    del arguments["indices"]
    arguments |= {
        "lse": lse.astype(np.float32),
        "q_index": rng.integers(-3, 4, (5, 3, 16)).astype(DTYPES[dtype]),  # whose products have a certain sign
        "k_index": rng.integers(-3, 4, (90, 16)).astype(DTYPES[dtype]),
        "weights": _normal(rng, (5, 3), "float32", 0.1),
        "row_weights": rng.uniform(0.5, 2, 5).astype(np.float32),
        "d_loss": 0.5,
        "attn_sink": _normal(rng, (3,), "float32"),
        "normalize": "l1",
    }
    return Call("indexer_dense_loss", arguments, (1e-4, _bound(dtype), 1e-4, 1e-4))


def normalize_l1(rng: Rng, dtype: str) -> Call:
    attn = rng.random((5, 33)) * (np.arange(5) != 2)[:, None]
    return Call("normalize_l1", {"attn": attn.astype(np.float32)}, (1e-6,), ("out",))


MAKERS: dict[str, Callable[[Rng, str], Call]] = {name: globals()[name] for name in OPERATORS}
WITH_FLOAT16 = {"paged_attention", *(operator for operator in MAKERS if operator.startswith("nvfp4_"))}
OPERATOR_AND_DTYPE = [
    (operator, dtype) for operator in MAKERS for dtype in DTYPES if dtype != "float16" or operator in WITH_FLOAT16
] + [(operator, FLOAT8) for operator in ("lightning_indexer", "paged_lightning_indexer")]


def as_torch(x: Any) -> Any:
    """A numpy array as a tensor of the same memory; anything else as it is."""
    if not isinstance(x, np.ndarray):
        return x
    special = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}.get(x.dtype.name)
    if special is None:
        return torch.from_numpy(x)
    return torch.from_numpy(x.view(np.int16 if x.itemsize == 2 else np.uint8)).view(special)


def in_torch(operator: str) -> Callable[..., Any]:
    """PyTorch's op of an operator. `hopwell.torch.indexer_dense_loss` returns the loss alone."""
    if operator == "indexer_dense_loss":
        return indexer_dense_loss_and_gradients
    function: Callable[..., Any] = getattr(hopwell.torch, operator)
    return function


def as_numpy(x: Any) -> Any:
    """A tensor's values as float64, or as integers for integers; numpy arrays likewise."""
    if isinstance(x, torch.Tensor):
        x = x.double().numpy() if x.is_floating_point() else x.numpy()
    return x.astype(np.float64) if np.dtype(x.dtype).kind not in "iu" else x


def results(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def assert_results(call: Call, actual: Any, expected: Any) -> None:
    """Each result within its bound, NaN and ±inf at the same places."""
    assert len(results(actual)) == len(results(expected)) == len(call.bounds)
    for got, wanted, bound in zip(results(actual), results(expected), call.bounds, strict=True):
        x, ref = as_numpy(got), as_numpy(np.asarray(wanted))
        assert x.shape == ref.shape
        if bound == 0:
            np.testing.assert_array_equal(x, ref)
            continue
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(ref))
        finite = np.isfinite(ref)
        np.testing.assert_array_equal(x[~finite], ref[~finite])
        error, size = np.linalg.norm(x[finite] - ref[finite]), np.linalg.norm(ref[finite])
        assert error <= bound * size + 1e-30, f"{call.operator}: {error / max(size, 1e-300)} > {bound}"
