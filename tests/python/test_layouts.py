"""Arrays whose rows lie backwards, or apart: what an operator gives of plain arrays it gives of these, on the CPU.

`test_views.py` has the emulated backends, on the same calls.
"""

from collections.abc import Callable, Iterator
from typing import Any

import hopwell
import ml_dtypes
import numpy as np
import pytest

BF16 = ml_dtypes.bfloat16
Arguments = dict[str, Any]


def _normal(rng: np.random.Generator, *shape: int, dtype: Any = BF16) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def _bytes(rng: np.random.Generator, *shape: int, scales: bool = False) -> Any:
    low, high = (0x20, 0x50) if scales else (0, 256)
    return rng.integers(low, high, shape).astype(np.uint8)


def _full(count: int, value: int) -> Any:
    return np.full(count, value, np.int32)


def _selection(rng: np.random.Generator) -> Arguments:
    s_q, s_kv, topk = 3, 70, 33
    return {
        "q": _normal(rng, s_q, 4, 576),
        "kv": _normal(rng, s_kv, 1, 576),
        "indices": rng.integers(-2, s_kv + 2, (s_q, 1, topk)).astype(np.int32),
        "sm_scale": 0.04,
        "topk_length": rng.integers(topk // 2, topk + 1, s_q).astype(np.int32),
        "q_positions": rng.integers(40, 90, s_q).astype(np.int32),
        "k_start": rng.integers(0, 9, s_q).astype(np.int32),
        "k_end": rng.integers(50, s_kv, s_q).astype(np.int32),
    }


def _forward(rng: np.random.Generator) -> Arguments:
    return _selection(rng) | {
        "attn_sink": _normal(rng, 4, dtype=np.float32),
        "out": np.empty((3, 4, 512), BF16),
        "max_logits": np.empty((3, 4), np.float32),
        "lse": np.empty((3, 4), np.float32),
    }


def _backward(rng: np.random.Generator) -> Arguments:
    arguments = _selection(rng) | {"attn_sink": _normal(rng, 4, dtype=np.float32)}
    out, _, lse = hopwell.sparse_mla_forward(**arguments, backend="cpu")
    outputs = {
        "dq": np.empty((3, 4, 576), BF16),
        "dkv": np.empty((70, 1, 576), np.float32),
        "attn": np.empty((3, 33), np.float32),
    }
    return arguments | {"d_out": _normal(rng, 3, 4, 512), "out": out, "lse": lse} | outputs


def _deterministic_backward(rng: np.random.Generator) -> Arguments:
    return _backward(rng) | {"deterministic": True}


def _distribution(rng: np.random.Generator) -> Arguments:
    lse = np.full((3, 4), 3, np.float32)
    return _selection(rng) | {"lse": lse, "out": np.empty((3, 33), np.float32)}


def _indexer_operands(rng: np.random.Generator) -> Arguments:
    return {
        "q_index": _normal(rng, 3, 4, 128),
        "k_index": _normal(rng, 70, 128),
        "weights": _normal(rng, 3, 4, dtype=np.float32),
        "k_start": _full(3, 2),
        "k_end": _full(3, 66),
    }


def _indexer(rng: np.random.Generator) -> Arguments:
    return _indexer_operands(rng) | {"topk": 16, "q_positions": _full(3, 60)}


def _indexer_backward(rng: np.random.Generator) -> Arguments:
    target = np.abs(_normal(rng, 3, 16, dtype=np.float32))
    return _indexer_operands(rng) | {
        "target": target / target.sum(axis=1, keepdims=True),
        "indices": np.sort(rng.permuted(np.tile(np.arange(70, dtype=np.int32), (3, 1)), axis=1)[:, :16]),
        "row_weights": np.abs(_normal(rng, 3, dtype=np.float32)),
        "row_loss": np.empty(3, np.float32),
    }


def _dense_loss(rng: np.random.Generator) -> Arguments:
    attention = {name: value for name, value in _selection(rng).items() if name in ("q", "kv", "sm_scale")}
    return _indexer_operands(rng) | attention | {"lse": np.full((3, 4), 3, np.float32)}


def _paged(rng: np.random.Generator) -> Arguments:
    return {
        "q": _normal(rng, 2, 2, 4, 64),
        "k_cache": _normal(rng, 7, 16, 2, 64),
        "v_cache": _normal(rng, 7, 16, 2, 64),
        "block_tables": rng.integers(0, 7, (2, 3)).astype(np.int32),
        "context_lens": np.array([37, 20], np.int32),
        "scale": 0.1,
        "pos_bias_u": _normal(rng, 4, 64),
        "pos_bias_v": _normal(rng, 4, 64),
        "r": _normal(rng, 4, 48, 64),
        "alibi_slopes": np.abs(_normal(rng, 4, dtype=np.float32)),
        "out": np.empty((2, 2, 4, 64), BF16),
        "lse": np.empty((2, 2, 4), np.float32),
    }


def _gemv(rng: np.random.Generator) -> Arguments:
    def batched(array: Any) -> Any:  # K fastest, then rows, then L
        return array.transpose(1, 2, 0)

    return {
        "a": batched(_bytes(rng, 2, 40, 64)),
        "b": batched(_bytes(rng, 2, 1, 64)),
        "sfa": batched(_bytes(rng, 2, 40, 8, scales=True)),
        "sfb": batched(_bytes(rng, 2, 1, 8, scales=True)),
        "out": batched(np.empty((2, 40, 1), np.float16)),
    }


def _linear(columns: int) -> Callable[[np.random.Generator], Arguments]:
    def arguments(rng: np.random.Generator) -> Arguments:
        return {
            "x": _normal(rng, columns, 128),
            "weight": _bytes(rng, 70, 64),
            "weight_scale": _bytes(rng, 70, 8, scales=True),
            "weight_global": 0.5,
            "bias": _normal(rng, 70),
            "out": np.empty((columns, 70), BF16),
        }

    return arguments


def _linear_backward(rng: np.random.Generator) -> Arguments:
    return {
        "d_out": _normal(rng, 5, 328),
        "weight": _bytes(rng, 328, 64),
        "weight_scale": _bytes(rng, 328, 8, scales=True),
        "weight_global": 0.5,
        "out": np.empty((5, 128), BF16),
    }


def _matmul(rng: np.random.Generator) -> Arguments:
    return {
        "a": _bytes(rng, 40, 64),
        "b": _bytes(rng, 70, 64),
        "sfa": _bytes(rng, 40, 8, scales=True),
        "sfb": _bytes(rng, 70, 8, scales=True),
        "bias": _normal(rng, 70),
        "out": np.empty((40, 70), BF16),
    }


def _quantize(rng: np.random.Generator) -> Arguments:
    return {"x": _normal(rng, 5, 128)}


def _dequantize(rng: np.random.Generator) -> Arguments:
    return {"codes": _bytes(rng, 5, 64), "scales": _bytes(rng, 5, 8, scales=True), "global_scale": 0.5}


def _normalize(rng: np.random.Generator) -> Arguments:
    return {"attn": np.abs(_normal(rng, 5, 70, dtype=np.float32)), "out": np.empty((5, 70), np.float32)}


def _pooling(rng: np.random.Generator) -> Arguments:
    return {
        "kv": _normal(rng, 41, 64),
        "gate": _normal(rng, 41, 64),
        "ratio": 4,
        "position_bias": _normal(rng, 4, 64, dtype=np.float32),
        "overlap": True,
        "cu_seqlens": np.array([0, 17, 41], np.int32),
        "cu_compressed": np.array([0, 4, 10], np.int32),
    }


def _compress(rng: np.random.Generator) -> Arguments:
    return {**_pooling(rng), "out": np.empty((10, 32), BF16)}


def _compress_backward(rng: np.random.Generator) -> Arguments:
    return {"d_out": _normal(rng, 10, 32), **_pooling(rng)}


CALLS: dict[str, tuple[str, Callable[[np.random.Generator], Arguments]]] = {
    "sparse_mla_forward": ("sparse_mla_forward", _forward),
    "sparse_mla_backward": ("sparse_mla_backward", _backward),
    "sparse_mla_backward, deterministic": ("sparse_mla_backward", _deterministic_backward),
    "attention_distribution": ("attention_distribution", _distribution),
    "lightning_indexer": ("lightning_indexer", _indexer),
    "lightning_indexer_backward": ("lightning_indexer_backward", _indexer_backward),
    "indexer_dense_loss": ("indexer_dense_loss", _dense_loss),
    "paged_attention": ("paged_attention", _paged),
    "nvfp4_gemv": ("nvfp4_gemv", _gemv),
    "nvfp4_linear, 1 column": ("nvfp4_linear", _linear(1)),
    "nvfp4_linear, 4 columns": ("nvfp4_linear", _linear(4)),
    "nvfp4_linear, 70 columns": ("nvfp4_linear", _linear(70)),
    "nvfp4_linear_backward": ("nvfp4_linear_backward", _linear_backward),
    "nvfp4_matmul": ("nvfp4_matmul", _matmul),
    "nvfp4_quantize": ("nvfp4_quantize", _quantize),
    "nvfp4_dequantize": ("nvfp4_dequantize", _dequantize),
    "normalize_l1": ("normalize_l1", _normalize),
    "kv_compress": ("kv_compress", _compress),
    "kv_compress_backward": ("kv_compress_backward", _compress_backward),
}
OUTPUTS = ("max_logits", "dq", "dkv", "attn", "row_loss")  # and out and lse, where they are not the forward's


def _fastest(array: Any) -> int:
    """The axis along which elements lie together, as operators want it; none of a vector."""
    return int(np.argmin(array.strides)) if array.ndim > 1 else -1


def _backwards(array: Any) -> Any:
    axes = tuple(axis for axis in range(array.ndim) if axis != _fastest(array) or array.ndim == 1)
    return np.flip(np.flip(array, axes).copy("K"), axes)


def _apart(array: Any) -> Any:
    """With a gap of 16 bytes after each row."""
    axis = _fastest(array) if array.ndim > 1 else 0
    moved = np.moveaxis(array, axis, -1)
    wide = np.zeros((*moved.shape[:-1], moved.shape[-1] + 16 // array.itemsize), array.dtype)
    wide[..., : moved.shape[-1]] = moved
    return np.moveaxis(wide[..., : moved.shape[-1]], -1, axis)


def _poisoned(arguments: Arguments, operator: str) -> Iterator[tuple[str, Any]]:
    outputs = OUTPUTS if operator == "sparse_mla_backward" else (*OUTPUTS, "out", "lse")
    read = {"attention_distribution": ("lse",), "indexer_dense_loss": ("lse",), "normalize_l1": ("attn",)}
    for name, value in arguments.items():
        if name in outputs and name not in read.get(operator, ()):
            value.fill(-77)
            yield name, value


@pytest.mark.parametrize("lie", [_backwards, _apart], ids=["backwards", "apart"])
@pytest.mark.parametrize("call", CALLS)
def test_it_does_not_matter_how_rows_lie(call: str, lie: Callable[[Any], Any], rng: np.random.Generator) -> None:
    operator, make = CALLS[call]
    arguments = make(rng)

    def results(**changed: Any) -> list[Any]:
        given = arguments | changed
        written = dict(_poisoned(given, operator))
        returned = getattr(hopwell, operator)(**given)
        returned = returned if isinstance(returned, tuple) else (returned,)
        return [np.array(result, np.float64) for result in (*returned, *written.values()) if result is not None]

    expected = results()
    for name, value in arguments.items():
        if not isinstance(value, np.ndarray):
            continue
        for x, y in zip(results(**{name: lie(value)}), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=2**-6, atol=2**-7 * np.abs(y).max(), err_msg=name)
