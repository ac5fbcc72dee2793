"""Every operator of the compiled library against `hopwell.reference`, through every way of passing arrays."""

import ctypes
import hashlib
import inspect
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import calls
import hopwell
import hopwell.bench.operators
import ml_dtypes
import numpy as np
import pytest
import torch
from calls import DTYPES, FLOAT8, as_torch, assert_results, results
from hopwell import _hopwell, reference
from hopwell.reference._visible import visible_keys
from operators import OPERATOR_AND_DTYPE, OPERATORS

every_call = pytest.mark.parametrize(("operator", "dtype"), OPERATOR_AND_DTYPE)
WITH_OUTPUTS = {name for name in OPERATORS if OPERATORS[name].call(np.random.default_rng(0), "float32").outputs}
every_operator = pytest.mark.parametrize("operator", OPERATORS)


def run(call: calls.Call, **changes: Any) -> Any:
    return getattr(hopwell, call.operator)(**call.given(**changes))


def expected(call: calls.Call) -> Any:
    return getattr(reference, call.operator)(**call.given())


def with_gaps(x: Any, name: str = "") -> Any:
    """The same values with gaps between rows, and the first dimension of three moved inwards in memory."""
    if not isinstance(x, np.ndarray) or x.ndim < 2:
        return x
    if name in ("cache", "extra_cache"):  # the gaps are between blocks
        return np.concatenate([x, x], axis=1).reshape(len(x), 2, *x.shape[1:])[:, 0]
    shape = list(x.shape)
    order = [1, 0, *range(2, x.ndim)] if x.ndim > 2 else list(range(x.ndim))
    memory = np.empty([*(shape[i] for i in order[:-1]), shape[order[-1]] + 3], x.dtype)
    memory.view(np.uint8).fill(0x7F)  # NaN, or an index out of range
    view = memory[..., : shape[order[-1]]].transpose(order)
    view[...] = x
    return view


def test_every_operator_has_its_functions() -> None:
    folders = {
        "reference": reference.__all__,
        "torch/ops": hopwell.torch.ops.__all__,
        "bench/operators": hopwell.bench.operators.OPERATORS,
    }
    missing = {folder: sorted(set(OPERATORS) - set(names)) for folder, names in folders.items()}
    assert not any(missing.values()), "write these functions in files of their names, as normalize_l1 has them"


@every_call
def test_numpy(operator: str, dtype: str, rng: np.random.Generator) -> None:
    call = OPERATORS[operator].call(rng, dtype)
    before = {name: value.tobytes() for name, value in call.arguments.items() if isinstance(value, np.ndarray)}
    actual = run(call)
    assert all(isinstance(x, np.ndarray) for x in results(actual))
    assert_results(call, actual, expected(call))
    for name, value in before.items():
        assert call.arguments[name].tobytes() == value, f"{name} was changed"


@every_call
def test_torch(operator: str, dtype: str, rng: np.random.Generator) -> None:
    call = OPERATORS[operator].call(rng, dtype)
    actual = run(call, **{name: as_torch(value) for name, value in call.given().items()})
    assert all(isinstance(x, torch.Tensor) for x in results(actual))
    assert_results(call, actual, expected(call))


@every_call
def test_dtypes_are_those_of_numpy_and_torch(operator: str, dtype: str, rng: np.random.Generator) -> None:
    call = OPERATORS[operator].call(rng, dtype)
    arrays = results(run(call))
    tensors = results(run(call, **{name: as_torch(value) for name, value in call.given().items()}))
    assert [x.dtype.name for x in arrays] == [str(x.dtype).removeprefix("torch.") for x in tensors]
    for array, tensor in zip(arrays, tensors, strict=True):  # the same bits, too
        np.testing.assert_array_equal(calls.as_numpy(array), calls.as_numpy(tensor))


@pytest.mark.parametrize(("operator", "dtype"), [pair for pair in OPERATOR_AND_DTYPE if "nvfp4" not in pair[0]])
def test_strides(operator: str, dtype: str, rng: np.random.Generator) -> None:
    call = OPERATORS[operator].call(rng, dtype)
    actual = run(call, **{name: with_gaps(value, name) for name, value in call.given().items()})
    for got, wanted in zip(results(actual), results(run(call)), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("operator", "dtype"), [pair for pair in OPERATOR_AND_DTYPE if pair[0] in WITH_OUTPUTS])
def test_outputs_are_written_in_place(operator: str, dtype: str, rng: np.random.Generator) -> None:
    call = OPERATORS[operator].call(rng, dtype)
    plain = results(run(call))
    for convert in (lambda x: x, as_torch):
        given = {name: convert(np.full_like(plain[i], 99)) for i, name in enumerate(call.outputs)}
        arguments = {name: convert(value) for name, value in call.arguments.items()}
        written = results(run(call, **{**arguments, **given}))
        for i, name in enumerate(call.outputs):
            assert written[i] is given[name]
            np.testing.assert_array_equal(calls.as_numpy(written[i]), calls.as_numpy(plain[i]))


@every_operator
def test_read_only_inputs(operator: str, rng: np.random.Generator) -> None:
    call = OPERATORS[operator].call(rng, "bfloat16")
    for value in call.arguments.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    assert_results(call, run(call), expected(call))


class Foreign:
    """An array of some other framework: DLPack, a shape and a dtype."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@every_operator
def test_any_array_with_dlpack(operator: str, rng: np.random.Generator) -> None:
    call = OPERATORS[operator].call(rng, "float32")
    foreign = {
        name: Foreign(value) if isinstance(value, np.ndarray) and value.dtype.name in ("float32", "int32") else value
        for name, value in call.arguments.items()
    }
    assert_results(call, run(call, **foreign), expected(call))


class Elsewhere(Foreign):
    """An array that says it lies in another kind of memory."""

    def __init__(self, array: Any, device_type: int) -> None:
        super().__init__(array)
        self.device_type = device_type

    def __dlpack__(self, **_: Any) -> Any:
        capsule, pointer = self.array.__dlpack__(), ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        after_data = pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
        ctypes.c_int32.from_address(after_data).value = self.device_type
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0


def test_pinned_memory_is_the_host_s_and_managed_memory_the_device_s(rng: np.random.Generator) -> None:
    attn, host, pinned, managed = rng.random((2, 4), np.float32), 1, 3, 13  # DLPack's numbers
    exact = hopwell.normalize_l1(Elsewhere(attn, host))
    assert (hopwell.normalize_l1(Elsewhere(attn, pinned)) == exact).all()
    with pytest.raises(ValueError, match="normalize_l1: out must be on cuda:0 as attn is; got cpu"):
        hopwell.normalize_l1(Elsewhere(attn, managed), out=attn.copy())


class Poisoned(np.ndarray):
    """An array that spoils its memory, which others own, when it goes."""

    def __del__(self) -> None:
        self.view(np.ndarray).view(np.uint8).fill(0x7F)


class Temporary:
    """What makes an array when it is asked for one, as numpy's scalars do: only the capsule keeps it."""

    def __init__(self, array: Any) -> None:
        self.memory, self.shape, self.dtype = array.copy(), array.shape, array.dtype

    @property
    def __array_struct__(self) -> Any:
        return self.memory.view(Poisoned).__array_struct__

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("not asked: there is __array_struct__")


@pytest.mark.parametrize(
    "operator", sorted(set(OPERATORS) - {"nvfp4_gemv", "nvfp4_linear", "nvfp4_linear_backward", "nvfp4_matmul"})
)  # whose arrays it can't imitate
def test_arrays_that_only_their_capsule_keeps(operator: str, rng: np.random.Generator) -> None:
    call = OPERATORS[operator].call(rng, "float32")
    inputs = [name for name in call.arguments if name not in call.written]
    arrays = {name: call.arguments[name] for name in inputs if isinstance(call.arguments[name], np.ndarray)}
    temporary = {name: Temporary(x) for name, x in arrays.items()}
    assert_results(call, run(call, **temporary), expected(call))
    for x in temporary.values():
        assert (x.memory.view(np.uint8) == 0x7F).all()  # it did go, afterwards


class Namespace:
    """What an Array API framework offers to turn a numpy array into its own."""

    @staticmethod
    def asarray(array: Any) -> "Framework":
        return Framework(array)


class Framework(Foreign):
    def __array_namespace__(self) -> Any:
        return Namespace


def test_results_come_back_in_the_framework_of_the_first_array(rng: np.random.Generator) -> None:
    call = OPERATORS["sparse_mla_forward"].call(rng, "float32")
    actual = run(call, q=Framework(call.arguments["q"]))
    assert all(isinstance(x, Framework) for x in actual)
    assert_results(call, tuple(x.array for x in actual), expected(call))


def test_two_dimensional_kv_and_indices(rng: np.random.Generator) -> None:
    for operator in ("sparse_mla_forward", "sparse_mla_backward", "attention_distribution"):
        call = OPERATORS[operator].call(rng, "float32")
        kv, indices = call.arguments["kv"][:, 0], call.arguments["indices"][:, 0]
        wanted = results(run(call))
        for got, full in zip(results(run(call, kv=kv, indices=indices)), wanted, strict=True):
            np.testing.assert_array_equal(got, full.reshape(got.shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kv_head_of_any_stride(dtype: str, rng: np.random.Generator) -> None:
    """A dimension of one element may have any stride; numpy's new axis has 0, less than a slot's."""
    d, block, x = 32, 8, 16 // np.dtype(DTYPES[dtype]).itemsize
    q = rng.standard_normal((2, 1, d)).astype(DTYPES[dtype])
    k = rng.standard_normal((5, d // x, block, x)).astype(DTYPES[dtype])[:, None]
    v = rng.standard_normal((5, d, block)).astype(DTYPES[dtype])[:, None]
    assert k.strides[1] == v.strides[1] == 0
    tables, lengths = rng.permutation(4).reshape(2, 2).astype(np.int32), np.array([16, 11], np.int32)
    arguments = {"q": q, "k_cache": k, "v_cache": v, "block_tables": tables, "context_lens": lengths, "scale": 0.3}
    call = calls.Call("paged_attention", arguments | {"layout": "vllm"}, ({"float32": 1e-5}.get(dtype, 4e-3), 1e-5))
    assert_results(call, run(call), expected(call))


def test_backward_options(rng: np.random.Generator) -> None:
    call = OPERATORS["sparse_mla_backward"].call(rng, "float32")
    _, dkv, d_sink, d_window_kv = run(call)
    assert [x is None for x in run(call, need_dq=False)] == [True, False, False, False]
    assert [x is None for x in run(call, need_dkv=False)] == [False, True, False, False]
    assert [x is None for x in run(call, need_d_window_kv=False)] == [False, False, False, True]
    without = dict.fromkeys(("window_kv", "window", "w_start", "w_end"))
    assert len(run(call, **without)) == 3
    assert run(call, attn_sink=None)[2] is None
    np.testing.assert_allclose(run(call, deterministic=True)[2], d_sink, rtol=1e-5)
    total, of_window = np.ones_like(dkv), np.ones_like(d_window_kv)
    written = run(call, dkv=total, d_window_kv=of_window, accumulate=True)
    assert written[1] is total and written[3] is of_window
    np.testing.assert_allclose(total, dkv + 1, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_window, d_window_kv + 1, rtol=1e-5, atol=1e-5)
    alone = np.ones_like(d_window_kv)
    run(call, d_window_kv=alone, need_dkv=False, accumulate=True)
    np.testing.assert_array_equal(alone, of_window)
    for half, exact in zip(run(call, dkv_dtype="bfloat16")[1::2], (dkv, d_window_kv), strict=True):
        assert half.dtype == ml_dtypes.bfloat16
        np.testing.assert_allclose(half.astype(np.float32), exact, rtol=2**-7, atol=1e-6)
    attn = np.zeros(call.arguments["indices"][:, 0].shape, np.float32)
    run(call, attn=attn)
    names = ("q", "kv", "indices", "lse", "sm_scale", "topk_length", "q_positions", "kv_stride", "k_start", "k_end")
    distribution = reference.attention_distribution(**{name: call.arguments[name] for name in names})
    np.testing.assert_allclose(attn, distribution, rtol=1e-4, atol=1e-6)
    run(call, attn=attn, attn_with_sink=True)
    given = {name: call.arguments[name] for name in (*names, "attn_sink")}
    np.testing.assert_allclose(attn, reference.attention_distribution(**given), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", torch.float16, np.float16, np.dtype(np.float16)])
def test_a_dtype_can_be_given_in_any_form(dtype: Any, rng: np.random.Generator) -> None:
    call = OPERATORS["nvfp4_gemv"].call(rng, "float16")
    assert run(call, out_dtype=dtype).dtype == np.float16
    assert run(OPERATORS["nvfp4_dequantize"].call(rng, "float32"), dtype=dtype).dtype == np.float16


def test_float4_codes_of_torch(rng: np.random.Generator) -> None:
    call = OPERATORS["nvfp4_linear"].call(rng, "float32")
    weight = as_torch(call.arguments["weight"]).view(torch.float4_e2m1fn_x2)
    x = as_torch(call.arguments["x"])
    bias, scale = as_torch(call.arguments["bias"]), as_torch(call.arguments["weight_scale"])
    actual = run(call, x=x, weight=weight, weight_scale=scale, bias=bias, weight_global=0.02)
    assert_results(call, actual, expected(call))


def test_scalars_may_be_of_numpy_and_torch(rng: np.random.Generator) -> None:
    call = OPERATORS["sparse_mla_forward"].call(rng, "float32")
    plain = run(call)
    for scale, d_v in ((np.float32(0.3), np.int64(24)), (torch.tensor(0.3), torch.tensor(24))):
        np.testing.assert_array_equal(run(call, sm_scale=scale, d_v=d_v)[0], plain[0])


def test_gradients_are_refused_unless_they_are_off(rng: np.random.Generator) -> None:
    call = OPERATORS["sparse_mla_forward"].call(rng, "float32")
    tensors = {name: as_torch(value) for name, value in call.given().items()}
    tensors["kv"].requires_grad_()
    with pytest.raises(ValueError, match="sparse_mla_forward: kv requires grad"):
        run(call, **tensors)
    with torch.no_grad():
        assert not run(call, **tensors)[0].requires_grad
    assert not run(call, **{**tensors, "kv": tensors["kv"].detach()})[0].requires_grad


@every_operator
def test_signature_is_that_of_the_reference(operator: str) -> None:
    def parameters(function: Any) -> tuple[dict[str, Any], list[str]]:
        found = [p for p in inspect.signature(function).parameters.values() if p.name not in ("backend", "stream")]
        if found[-1].kind is inspect.Parameter.VAR_KEYWORD:  # of visible_keys, and topk_length
            *found, masks = found
            defaults = inspect.signature(visible_keys).parameters
            for name in get_args(masks.annotation)[0].__annotations__:
                default = defaults[name].default if name in defaults else None
                found.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
        positional = [p.name for p in found if p.kind is not p.KEYWORD_ONLY]
        return {p.name: (p.kind, p.default) for p in found}, positional

    function = getattr(hopwell, operator)
    assert parameters(function) == parameters(getattr(reference, operator))
    assert [*inspect.signature(function).parameters][-2:] == ["backend", "stream"]
    for name in inspect.signature(function).parameters:
        assert re.search(rf"\b{name}\b", function.__doc__), f"{name} is not documented"


def test_the_stub_names_what_the_module_has() -> None:
    stub = (Path(hopwell.__file__).parent / "_hopwell.pyi").read_text()
    named = set(re.findall(r"^(?:def|class) ([a-zA-Z]\w*)", stub, re.MULTILINE))
    assert named == {name for name in dir(_hopwell) if not name.startswith("_")}


def test_backends_and_version() -> None:
    assert "cpu" in hopwell.backends() and "cpu" in hopwell.backends("nvfp4_linear")
    assert hopwell.backends(None) == hopwell.backends()
    assert re.fullmatch(r"\d+\.\d+\.\d+", hopwell.__version__)


@every_operator
def test_explain(operator: str, rng: np.random.Generator) -> None:
    call = OPERATORS[operator].call(rng, "float32")
    lines = dict(line.split(": ", 1) for line in hopwell.explain(operator, **call.arguments).splitlines())
    assert lines["cpu"] == "chosen"
    assert {"sm80", "sm90", "sm100"} <= set(lines)


def test_explain_checks_its_arguments(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match=r"explain: operator must be one of .*sparse_mla_forward.*; got gemm"):
        hopwell.explain("gemm")
    call = OPERATORS["nvfp4_linear"].call(rng, "float32")
    with pytest.raises(ValueError, match="nvfp4_linear: bias must be"):
        hopwell.explain(call.operator, **{**call.arguments, "bias": call.arguments["x"]})


def digest() -> str:
    """Of all results of all operators on fixed data."""
    bits = hashlib.sha256()
    for operator, dtype in OPERATOR_AND_DTYPE:
        for x in results(run(OPERATORS[operator].call(np.random.default_rng(5), dtype))):
            bits.update(np.ascontiguousarray(x).view(np.uint8).tobytes())
    return bits.hexdigest()


@pytest.fixture
def _default_threads() -> Iterator[None]:
    yield
    hopwell.set_num_threads(0)


@pytest.mark.usefixtures("_default_threads")
def test_any_number_of_threads_gives_the_same_bits() -> None:
    def with_threads(number: int) -> str:
        hopwell.set_num_threads(number)
        return digest()

    in_a_process = subprocess.run(
        [sys.executable, "-c", "import test_operators; print(test_operators.digest())"],
        cwd=Path(__file__).parent, env={**os.environ, "OMP_NUM_THREADS": "5"},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert in_a_process.stdout.strip() == with_threads(1) == with_threads(2)


@pytest.mark.parametrize("number", ["abc", "-1", "2 threads", "1.5", " ", " 2", "2147483648", os.fsdecode(b"\xff2")])
def test_what_is_no_number_of_threads_is_an_error(number: str) -> None:
    """Until one is set: then that of the environment does not count."""
    program = """
import hopwell, numpy as np
x, messages = np.ones((2, 4), np.float32), []
for call in (hopwell.num_threads, lambda: hopwell.normalize_l1(x, out=x)):
    try:
        call()
    except ValueError as error:
        messages.append(str(error))
assert (x == 1).all()
hopwell.set_num_threads(2)
hopwell.normalize_l1(x, out=x)
print(hopwell.num_threads(), x[0, 0], *set(messages), len(messages), sep="|")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HOPWELL_NUM_THREADS": number},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    got = os.fsencode(number).decode(errors="backslashreplace")
    words = f"HOPWELL_NUM_THREADS must be a number from 1 to 2147483647, or 0 for the default; got '{got}'"
    assert done.stdout.strip() == f"2|0.25|{words}|2"


@pytest.mark.usefixtures("_default_threads")
def test_set_num_threads_takes_integers_only() -> None:
    hopwell.set_num_threads(np.int64(3))  # type: ignore[arg-type]
    for number in (-1, 2**31, 2**64, 1.5, "2", None):
        with pytest.raises(ValueError, match=re.escape("set_num_threads: threads must be")):
            hopwell.set_num_threads(number)  # type: ignore[arg-type]
    assert hopwell.num_threads() == 3


def test_the_global_lock_is_released() -> None:
    x = np.zeros((64, 2048), np.float32)
    codes, scales, factor = hopwell.nvfp4_quantize(np.ones((2048, 2048), np.float32))
    worker = threading.Thread(target=lambda: [hopwell.nvfp4_linear(x, codes, scales, factor) for _ in range(5)])
    turns = 0
    worker.start()
    while worker.is_alive():
        worker.join(timeout=0)
        turns += 1
    assert turns > 100  # each needs the lock; held, a call would let at most one through


def test_concurrent_calls_from_python_threads(rng: np.random.Generator) -> None:
    call = OPERATORS["sparse_mla_forward"].call(rng, "bfloat16")
    wanted = run(call)
    found: list[Any] = []
    workers = [threading.Thread(target=lambda: found.extend(run(call) for _ in range(10))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 40
    for actual in found:
        for got, right in zip(actual, wanted, strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), right.view(np.uint8))


def test_all_dtypes_are_covered() -> None:
    assert {dtype for _, dtype in OPERATOR_AND_DTYPE} == {*DTYPES, FLOAT8}
