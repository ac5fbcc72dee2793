"""Arrays anywhere in memory: they begin at any element, and strides have any order and are odd, 0 or negative.

An emulated backend gives the CPU's numbers and its checker finds nothing, misaligned accesses included. Or the backend
does not support the views and says why.

`VIEWS_DRAWS` is the number of odd strides that are tried for each call and backend; 1000 tries all. A run prints its
`VIEWS_SEED`, which repeats it.
"""

import os
import zlib
from collections.abc import Callable
from typing import Any

import hopwell
import ml_dtypes
import numpy as np
import pytest
from fuzz.call import FuzzedCall
from fuzz.draw import Place
from fuzz.memory import Memory
from fuzz.wrong import FREE_STRIDES
from test_layouts import CALLS as PLAIN_CALLS

BACKENDS = ("emu:sm80", "emu:sm90", "emu:sm100")
DRAWS = int(os.environ.get("VIEWS_DRAWS", "2"))
SEED = int(os.environ.get("VIEWS_SEED", np.random.SeedSequence().generate_state(1)[0]))
Arguments = dict[str, Any]
Odd = set[int]  # dimensions, and BASE
BASE = -1  # where the first element lies


def _paged(
    layout: str, dtype: Any, bias: str = "", q_len: int = 1, h_kv: int = 2, d: int = 64
) -> tuple[str, Callable[[np.random.Generator], Arguments]]:
    def arguments(rng: np.random.Generator) -> Arguments:
        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(dtype)

        blocks, block, h_q, x = 5, 16, 4, 16 // np.dtype(dtype).itemsize
        k, v = (normal(blocks, block, h_kv, d) for _ in "kv")
        if layout == "hnd":
            k, v = (cache.transpose(0, 2, 1, 3) for cache in (k, v))
        if layout == "vllm":
            k, v = k.reshape(blocks, block, h_kv, d // x, x).transpose(0, 2, 3, 1, 4), v.transpose(0, 2, 3, 1)
        more = {
            "": {},
            "u": {"pos_bias_u": normal(h_q, d)},
            "r": {"pos_bias_u": normal(h_q, d), "pos_bias_v": normal(h_q, d), "r": normal(h_q, 30, d)},
            "one row of r": {"r": normal(1, 1, d), "out_of_range": "clamp"},
            "key": {"bias": normal(2, h_q, q_len, 64)},
            "distance": {"bias": normal(2, h_q, 30), "bias_kind": "distance"},
        }
        return {
            "q": normal(2, q_len, h_q, d),
            "k_cache": np.ascontiguousarray(k),
            "v_cache": np.ascontiguousarray(v),
            "block_tables": rng.integers(0, blocks, (2, 3)).astype(np.int32),
            "context_lens": np.array([37, 20], np.int32),
            "scale": 0.1,
            "layout": layout,
            "out": np.empty((2, q_len, h_q, d), dtype),
            "lse": np.empty((2, q_len, h_q), np.float32),
            **more[bias],
        }

    return "paged_attention", arguments


BF16 = ml_dtypes.bfloat16
CALLS = PLAIN_CALLS | {
    "paged_attention, vllm": _paged("vllm", BF16),
    "paged_attention, vllm, u and 2 queries": _paged("vllm", np.float16, "u", q_len=2),
    "paged_attention, vllm, float32": _paged("vllm", np.float32, "key"),
    "paged_attention, vllm, r": _paged("vllm", BF16, "r", q_len=2),
    "paged_attention, rows, groups": _paged("nhd", BF16, "key", h_kv=1),
    "paged_attention, rows, u and 2 queries": _paged("hnd", np.float16, "u", q_len=2),
    "paged_attention, packed rows": _paged("nhd", BF16, "distance", h_kv=4, d=40),
    "paged_attention, rows, float32": _paged("hnd", np.float32, "r"),
    "paged_attention, one row of r": _paged("nhd", BF16, "one row of r", q_len=2),
}
# Shapes and strides of K in layout vllm, in 16-bit elements. The stride of tokens is not a multiple of 16 bytes.
ODD_KEYS = [
    ((3, 2, 16, 16, 8), (0, 192, 0, 9, 1)),
    ((8, 2, 16, 16, 8), (0, 0, 0, 9, 1)),
    ((3, 1, 5, 256, 8), (0, 0, 2832, 11, 1)),
]
WRITTEN = {
    "sparse_mla_forward": ("out", "max_logits", "lse"),
    "sparse_mla_backward": ("dq", "dkv", "attn"),
    "lightning_indexer_backward": ("row_loss",),
    "paged_attention": ("out", "lse"),
}
EXACT = ("lightning_indexer", "nvfp4_quantize")  # in integers or bytes
WITH_FREE_BIAS = ("nvfp4_linear", "nvfp4_matmul")


def _values(rng: np.random.Generator, operator: str, arguments: Arguments) -> Arguments:
    """The indexer gets integers, because only exact scores give one right selection on every backend."""
    if operator != "lightning_indexer":
        return arguments
    names = ("q_index", "k_index", "weights")
    return arguments | {
        name: rng.integers(-2, 3, arguments[name].shape).astype(arguments[name].dtype) for name in names
    }


def _place(rng: np.random.Generator, shape: tuple[int, ...], rows: bool, written: bool, unit: int, odd: Odd) -> Place:
    """Dimensions in random order. A stride in `odd` is not a multiple of `unit` elements, every other stride is.

    Strides may be negative, and 0 if the array is only read. With `rows` the last dimension is contiguous.
    """
    slow = list(range(len(shape) - 1 if rows else len(shape)))
    strides, extent, lowest = [1] * len(shape), shape[-1] if rows else 1, 0
    for i in rng.permutation(slow) if slow else slow:
        step = -(-extent // unit) * unit + int(rng.choice([0, unit]))
        off = int(rng.integers(1, max(unit, 2))) if i in odd else 0
        steps = [step + off, step + off, -step - off] if written and shape[i] > 1 else [step + off, -step - off, off]
        strides[i] = int(rng.choice(steps))
        if shape[i] > 1:
            extent += abs(strides[i]) * (shape[i] - 1)
            lowest += max(-strides[i], 0) * (shape[i] - 1)
    return Place(shape, tuple(strides), lowest, extent)


def _lay(memory: Memory, rng: np.random.Generator, value: Any, rows: bool, written: bool, odd: Odd | None) -> Any:
    """The values in new memory, with NaN in the gaps. The first element is misaligned if `odd` contains BASE. If `odd`
    is None, the memory has no gaps.
    """
    unit = max(16 // value.itemsize, 1)
    if odd is None:
        place, odd = Place(value.shape, tuple(x // value.itemsize for x in value.strides), 0, value.size), set()
    else:
        place = _place(rng, value.shape, rows, written, unit, odd)
    skipped = place.lowest + (int(rng.integers(1, max(unit, 2))) if BASE in odd else -place.lowest % unit)
    block = memory.block(-(-(skipped + place.extent) // unit) * unit * value.itemsize, at_end=True)
    block.bytes[:] = 0xFF
    strides = [stride * value.itemsize for stride in place.strides]
    array = np.ndarray(place.shape, value.dtype, block.bytes, skipped * value.itemsize, strides)
    array[...] = value
    return array


def _viewed(call: str, rng: np.random.Generator, odd_of: Callable[[str, int], Odd | None]) -> FuzzedCall:
    """The call with new arrays. `odd_of(name, ndim)` says which strides of an array are odd; None: it is plain."""
    operator, make = CALLS[call]
    arguments, memory = _values(rng, operator, make(rng)), Memory()
    written = WRITTEN.get(operator, ("out",))
    for name, value in arguments.items():
        if not isinstance(value, np.ndarray):
            continue
        rows = name not in FREE_STRIDES and not (name == "bias" and operator in WITH_FREE_BIAS)
        base = value.transpose(2, 0, 1) if operator == "nvfp4_gemv" else value  # [rows, K, L], with K fastest
        laid = _lay(memory, rng, base, rows, name in written, odd_of(name, value.ndim))
        arguments[name] = laid.transpose(1, 2, 0) if operator == "nvfp4_gemv" else laid
    outputs = tuple(name for name in written if name in arguments)
    return FuzzedCall(operator, arguments, outputs, memory)


def _odd_places(call: str) -> list[tuple[str, int]]:
    """Pairs of an array and a dimension, or BASE."""
    arrays = CALLS[call][1](np.random.default_rng(0))
    return [
        (name, i) for name, value in arrays.items() if isinstance(value, np.ndarray) for i in range(BASE, value.ndim)
    ]


def _results(call: FuzzedCall, arguments: Arguments, backend: str) -> list[Any]:
    for name in call.outputs:
        arguments[name].fill(-77)
    returned = getattr(hopwell, call.operator)(**arguments, backend=backend)
    returned = returned if isinstance(returned, tuple) else (returned,)
    return [np.array(x) for x in (*returned, *(arguments[name] for name in call.outputs)) if x is not None]


def _plain(operator: str, array: Any) -> Any:
    if operator == "nvfp4_gemv":
        return np.ascontiguousarray(array.transpose(2, 0, 1)).transpose(1, 2, 0)
    return np.ascontiguousarray(array)


def _check(call: FuzzedCall, backend: str) -> None:
    plain = {
        name: _plain(call.operator, value) if isinstance(value, np.ndarray) else value
        for name, value in call.arguments.items()
    }
    expected = _results(call, plain, "cpu")
    try:
        found = _results(call, call.arguments, backend)
    except hopwell.Error as error:
        if "no backend runs this" not in str(error):
            raise
        return
    for x, y in zip(found, expected, strict=True):
        if call.operator in EXACT:
            np.testing.assert_array_equal(x, y)
            continue
        x, y = x.astype(np.float64), y.astype(np.float64)
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
        size = np.abs(y[np.isfinite(y)]).max(initial=0)
        np.testing.assert_allclose(x, y, rtol=2**-6, atol=2**-7 * size + 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", CALLS)
def test_any_view(call: str, backend: str) -> None:
    if backend not in hopwell.backends(CALLS[call][0]):
        pytest.skip("no kernel")
    rng = np.random.default_rng([SEED, zlib.crc32(f"{call} {backend}".encode())])
    print(f"VIEWS_SEED={SEED}")
    places = _odd_places(call)
    for odd_name, i in [places[k] for k in rng.permutation(len(places))[:DRAWS]]:
        _check(_viewed(call, rng, lambda name, _: {i} if name == odd_name else None), backend)  # noqa: B023
    _check(_viewed(call, rng, lambda _, ndim: {i for i in range(BASE, ndim) if rng.integers(2)}), backend)


@pytest.mark.parametrize("backend", ["emu:sm80", "emu:sm90"])
@pytest.mark.parametrize(("shape", "strides"), ODD_KEYS)
def test_keys_that_no_vector_load_reads(
    shape: tuple[int, ...], strides: tuple[int, ...], backend: str, rng: np.random.Generator
) -> None:
    if backend not in hopwell.backends("paged_attention"):
        pytest.skip("no kernel")
    blocks, h_kv, groups, block, x = shape
    memory = rng.standard_normal(1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)))
    arguments = {
        "q": rng.standard_normal((2, 2 * h_kv, groups * x)).astype(np.float16),
        "k_cache": np.lib.stride_tricks.as_strided(memory.astype(np.float16), shape, [2 * s for s in strides]),
        "v_cache": rng.standard_normal((blocks, h_kv, groups * x, block)).astype(np.float16),
        "block_tables": rng.integers(0, blocks, (2, 3)).astype(np.int32),
        "context_lens": np.array([2 * block + 3, block - 1], np.int32),
        "scale": 0.1,
        "layout": "vllm",
    }
    _check(FuzzedCall("paged_attention", arguments, (), Memory()), backend)
