"""Bad input: a ValueError that names operator, argument, expected and got; outputs untouched; never a crash."""

from collections.abc import Iterator
from typing import Any

import hopwell
import numpy as np
import pytest
import torch
from bad_calls import check_message, make, run, run_in_torch
from calls import as_torch, results
from operators import OPERATORS
from torch._subclasses import FakeTensorMode


def array_arguments() -> Iterator[tuple[str, str]]:
    for operator in OPERATORS:
        for name, value in make(operator).arguments.items():
            if isinstance(value, np.ndarray):
                yield operator, name


every_array = pytest.mark.parametrize(("operator", "name"), list(array_arguments()))
every_operator = pytest.mark.parametrize("operator", OPERATORS)


@every_array
@pytest.mark.parametrize(
    "wrong",
    [
        [1.0, 2.0],
        "array",
        object(),
        np.array(["a"]),
        np.zeros((2, 2), object),
        np.zeros(3, "datetime64[s]"),
        np.zeros((1,) * 9, np.float32),
        torch.zeros(2, 2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.zeros(2, 2, dtype=torch.complex64),
    ],
    ids=["list", "str", "object", "text", "objects", "dates", "nine_dimensions", "meta", "sparse", "complex"],
)
def test_what_is_no_array_of_numbers(operator: str, name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"{operator}: {name} must be .*; got ."):
        run(make(operator), **{name: wrong})


@every_array
def test_wrong_dtype(operator: str, name: str) -> None:
    call = make(operator)
    with pytest.raises(ValueError, match=rf"{operator}: {name} must be .*; got (float|int|complex)64 \["):
        run(call, **{name: np.zeros(call.arguments[name].shape, np.float64 if name != "x" else np.int64)})


@every_array
def test_swapped_bytes(operator: str, name: str) -> None:
    call = make(operator)
    value = call.arguments[name]
    if value.dtype.byteorder == "|" or value.itemsize == 1:
        value = value.astype(np.int16)
    with pytest.raises(ValueError, match=rf"{operator}: {name} must be an array of numbers in this machine's"):
        run(call, **{name: value.astype(value.dtype.newbyteorder(">"))})


@every_array
def test_wrong_number_of_dimensions(operator: str, name: str) -> None:
    if name == "weight_global":
        return  # one element, whatever the shape
    call = make(operator)
    value = call.arguments[name]
    with pytest.raises(ValueError, match=rf"{operator}: \w+ must be .*; got "):
        run(call, **{name: value[None, None]})
    if value.ndim:
        with pytest.raises(ValueError, match=rf"{operator}: \w+ must be .*; got "):
            run(call, **{name: value.reshape(-1)[:1].reshape(())})


@every_array
def test_wrong_size(operator: str, name: str) -> None:
    call = make(operator)
    value = call.arguments[name]
    for axis in range(value.ndim):
        if (name, axis) in OPERATORS[operator].free:
            continue
        changed = np.concatenate([value, value.take([0], axis)], axis)
        with pytest.raises(ValueError, match=rf"{operator}: \w+ must be .*; got "):
            run(call, **{name: changed})


@every_array
def test_a_last_dimension_with_gaps(operator: str, name: str) -> None:
    call = make(operator)
    value = call.arguments[name]
    if value.ndim < 2 or operator == "nvfp4_gemv" or name in ("lse", "topk_length"):
        return  # free strides, or an order of their own
    gaps = np.zeros((*value.shape[:-1], 2 * value.shape[-1]), value.dtype)[..., ::2]
    with pytest.raises(ValueError, match=rf"{operator}: {name} must be contiguous"):
        run(call, **{name: gaps})


@every_operator
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, "one", None, [1.0], 1e300])
def test_float_scalars(operator: str, wrong: Any) -> None:
    call = make(operator)
    for name in ("sm_scale", "scale", "alpha", "d_loss"):
        if name in call.arguments:
            with pytest.raises(
                ValueError, match=rf"{operator}: {name} must be (finite|a number( or a 0-d float32 array)?); got "
            ):
                run(call, **{name: wrong})


@every_operator
@pytest.mark.parametrize("wrong", [1.5, "one", 2**63, -(2**70), [1]])
def test_integer_scalars(operator: str, wrong: Any) -> None:
    call = make(operator)
    for name in ("d_v", "kv_stride", "q_start", "window"):
        if name in call.arguments:
            with pytest.raises(ValueError, match=rf"{operator}: {name} must be (an integer|between).*; got "):
                run(call, **{name: wrong})


@pytest.mark.parametrize(
    ("operator", "changes", "message"),
    [(name, changes, message) for name, one in OPERATORS.items() for changes, message in one.messages],
)
def test_messages(operator: str, changes: dict[str, Any], message: str) -> None:
    check_message(operator, changes, message)


INTEGERS = ("d_v", "kv_stride", "q_start", "window", "topk")


@every_operator
@pytest.mark.parametrize("number", [2**62, 2**63, -(2**70), 2.5])
def test_integers_in_torch(operator: str, number: Any) -> None:
    """Those that PyTorch's dispatcher does not take, too."""
    call = make(operator)
    for name in INTEGERS:
        if name in call.arguments and not (number == 2**62 and name in ("kv_stride", "window")):
            for changes in ({}, {"backend": "cpu"}):
                with pytest.raises(ValueError, match=rf"{operator}: {name} must be .*; got {number}"):
                    run_in_torch(call, **{name: number}, **changes)


@pytest.mark.parametrize(
    ("operator", "changes", "message"),
    [(name, changes, message) for name, one in OPERATORS.items() for changes, message in one.fake_messages],
)
def test_fake_kernels_say_it_too(operator: str, changes: dict[str, Any], message: str) -> None:
    call = make(operator)
    with FakeTensorMode() as mode:
        for name, value in call.arguments.items():
            if isinstance(value, np.ndarray):
                call.arguments[name] = mode.from_tensor(as_torch(value))
        with pytest.raises(ValueError, match=operator) as raised:
            run_in_torch(call, **changes)
    assert str(raised.value).startswith(f"{operator}: {message}")


@pytest.mark.parametrize("wrong", [None, "one", float("nan"), 1e300])
def test_globals_in_torch(wrong: Any) -> None:
    for operator, name in (
        ("nvfp4_linear", "weight_global"),
        ("nvfp4_linear_backward", "weight_global"),
        ("nvfp4_dequantize", "global_scale"),
        ("nvfp4_quantize", "global_scale"),
    ):
        if (operator, wrong) != ("nvfp4_quantize", None):
            with pytest.raises(ValueError, match=f"{operator}: {name} must be a finite number or a 0-d float32 tensor"):
                run_in_torch(make(operator), **{name: wrong})


@pytest.mark.parametrize("wrong", [0.0, -0.0, 1e-40, -1e-45, float("inf"), float("nan")])
@pytest.mark.parametrize("run_it", [run, run_in_torch])
@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("nvfp4_linear", "weight_global"),
        ("nvfp4_linear_backward", "weight_global"),
        ("nvfp4_dequantize", "global_scale"),
        ("nvfp4_gemv", "alpha"),
        ("nvfp4_matmul", "alpha"),
    ],
)
def test_reciprocals_without_a_factor(operator: str, name: str, run_it: Any, wrong: float) -> None:
    """In silence they would make every result infinite, or NaN. A number, and an array that the host can read."""
    call = make(operator)
    given = [wrong] if name == "alpha" else [wrong, np.array(wrong, np.float32)]
    for value in given:
        changes = {name: value if run_it is run else as_torch(value), "global_is_reciprocal": True}
        with pytest.raises(ValueError, match=f"{operator}: {name} must be (a )?finite"):
            run_it(call, **changes)
        with pytest.raises(ValueError, match=f"{operator}: {name} must be finite with a finite reciprocal|finite"):
            getattr(hopwell.reference, operator)(**call.arguments | {name: value, "global_is_reciprocal": True})
    run_it(call, **{name: 4.0, "global_is_reciprocal": True})


@pytest.mark.parametrize("run_it", [run, run_in_torch])
def test_floats_are_no_codes(run_it: Any) -> None:
    """Their bytes are not what was meant."""
    call = make("nvfp4_linear")
    for name in ("weight", "weight_scale"):
        given = call.arguments[name]
        floats = np.ones((given.shape[0], given.shape[1] // 4), np.float32)
        with pytest.raises(ValueError, match=f"nvfp4_linear: {name} must be uint8"):
            run_it(call, **{name: floats if run_it is run else as_torch(floats)})


@every_operator
@pytest.mark.parametrize("run_it", [run, run_in_torch])
def test_choices_are_strings_of_unicode(operator: str, run_it: Any) -> None:
    """A lone surrogate has no UTF-8, and a zero does not end a string. Messages can be printed all the same."""
    call = make(operator)
    for name, good in {**OPERATORS[operator].choices, "backend": "cpu"}.items():
        run_it(call, **{name: good})
        for wrong in ("\ud800", good + "\0", good + "\0x", "\0"):
            with pytest.raises(ValueError, match=rf"^{operator}: {name} must be .*; got ") as raised:
                run_it(call, **{name: wrong})
            expected = str(raised.value).encode().decode().partition("; got")[0]
            assert good in expected
            assert "\0" not in str(raised.value)


def test_names_of_no_operator() -> None:
    wrong_for_both = ("\ud800", "nvfp4_linear\0", "no such operator", "", [])
    for function, all_wrong in ((hopwell.explain, (*wrong_for_both, None)), (hopwell.backends, wrong_for_both)):
        for wrong in all_wrong:
            expected = f"^{function.__name__}: operator must be one of .*; got "
            with pytest.raises(ValueError, match=expected) as raised:
                function(wrong)
            assert "\0" not in str(raised.value).encode().decode()


def test_what_cannot_be_described() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError("no words")

    class Odd:
        def __repr__(self) -> str:
            return "\ud800"

    with pytest.raises(ValueError, match=r"paged_attention: layout must be .*; got .*Mute$"):
        run(make("paged_attention"), layout=Mute())
    with pytest.raises(ValueError, match=r"paged_attention: layout must be .*; got \\ud800$"):
        run(make("paged_attention"), layout=Odd())


@every_operator
def test_a_backend_that_is_not_there_is_an_error_of_its_own(operator: str) -> None:
    with pytest.raises(hopwell.Error, match=rf"{operator}: no backend runs this \(sm90: "):
        run(make(operator), backend="sm90")
    assert issubclass(hopwell.Error, RuntimeError)


def with_outputs() -> Iterator[tuple[str, str]]:
    for operator in OPERATORS:
        for name in make(operator).outputs:
            yield operator, name


every_output = pytest.mark.parametrize(("operator", "name"), list(with_outputs()))


@every_output
def test_bad_outputs(operator: str, name: str) -> None:
    call = make(operator)
    good = results(run(call))[call.outputs.index(name)]
    read_only = good.copy()
    read_only.flags.writeable = False
    overlapping = np.lib.stride_tricks.as_strided(good.copy(), strides=(0, *good.strides[1:]))
    smaller = good[:, 1:] if operator == "kv_compress" else good[1:]  # out of kv_compress has any number of rows
    for wrong in (read_only, smaller.copy(), good.astype(np.float64), overlapping, [1.0], good[None].copy()):
        with pytest.raises(ValueError, match=rf"{operator}: {name} must be "):
            run(call, **{name: wrong})


@every_output
def test_an_output_lies_in_memory_of_its_own(operator: str, name: str) -> None:
    call = make(operator)
    good = results(run(call))[call.outputs.index(name)]
    inputs = [n for n, value in call.arguments.items() if isinstance(value, np.ndarray) and value.nbytes >= 4]
    size = max(good.nbytes, *(call.arguments[n].nbytes for n in inputs))
    for other in inputs:
        value, memory = call.arguments[other], np.zeros(size + 64, np.uint8)
        shared = np.ndarray(value.shape, value.dtype, memory, 0, value.strides)
        shared[...] = value
        for offset in (0, value.nbytes - good.itemsize):
            if offset % good.itemsize or offset + good.nbytes > memory.nbytes:
                continue
            if operator == "normalize_l1" and offset == 0:
                continue  # in place
            before = memory.copy()
            with pytest.raises(ValueError, match=f"{operator}: {name} must be an output in memory of its own; got "):
                run(call, **{other: shared, name: np.ndarray(good.shape, good.dtype, memory, offset)})
            assert (memory == before).all()


def test_outputs_may_share_memory_with_nothing_but_gaps() -> None:
    """Columns of one array, as of a fused projection and its gradients."""
    call = make("sparse_mla_forward")
    q = call.arguments["q"]
    together = np.concatenate([q, np.zeros((*q.shape[:2], call.arguments["d_v"]), q.dtype)], axis=2)
    out, *_ = run(call, q=together[..., : q.shape[2]], out=together[..., q.shape[2] :])
    np.testing.assert_array_equal(out, run(call)[0])
    np.testing.assert_array_equal(together[..., : q.shape[2]], q)


@pytest.mark.parametrize("value", [np.zeros(2), "no"])
@pytest.mark.parametrize("name", ["need_dq", "need_dkv", "accumulate", "deterministic"])
def test_flags(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"sparse_mla_backward: {name} must be True or False; got "):
        run(make("sparse_mla_backward"), **{name: value})


@every_operator
def test_sizes_whose_results_fit_nowhere(operator: str) -> None:
    """A first dimension of stride 0 costs nothing; results of as many rows would."""
    call = make(operator)
    # No result of kv_compress_backward has the size of its first array, d_out.
    free = ("d_out",) if operator == "kv_compress_backward" else ()
    name, value = next((n, v) for n, v in call.arguments.items() if isinstance(v, np.ndarray) and n not in free)
    shape = (2**48, *value.shape[1:])
    with pytest.raises(ValueError, match=rf"{operator}: \w+ must be "):
        run(call, **{name: np.broadcast_to(value[:1], shape)})
    with pytest.raises(ValueError, match=rf"{operator}: \w+ must be "):
        run(call, **{n: as_torch(v) for n, v in call.arguments.items()} | {name: as_torch(value[:1]).expand(shape)})


def test_a_shape_that_is_none() -> None:
    class Array:
        def __init__(self, shape: Any) -> None:
            self.shape, self.dtype = shape, np.dtype(np.float32)

        def __dlpack__(self, **_: Any) -> Any:
            raise RuntimeError("no memory to show")

    for shape in (7, "abc", (-1, -1, -1), (2**62, 2**62, 2**62)):
        with pytest.raises(ValueError, match="sparse_mla_forward: q must be "):
            run(make("sparse_mla_forward"), q=Array(shape))
    for kind in (np.ndarray, torch.Tensor, np.float32):
        with pytest.raises(ValueError, match="attention_distribution: indices must be "):
            run(make("attention_distribution"), indices=kind)


@every_output
def test_outputs_are_untouched_when_something_else_is_wrong(operator: str, name: str) -> None:
    call = make(operator)
    given = np.full_like(results(run(call))[call.outputs.index(name)], 99)
    for bad in ({"sm_scale": np.nan}, {"scale": np.nan}, {"alpha": np.nan}, {"backend": "sm90"}):
        if next(iter(bad)) in ("backend", *call.arguments):
            with pytest.raises((ValueError, hopwell.Error)):
                run(call, **{name: given}, **bad)
    assert (given == 99).all()


@every_operator
@pytest.mark.parametrize("seed", range(5))
def test_no_index_length_table_or_scale_can_crash(operator: str, seed: int) -> None:
    """Integers are data: any of them. So are scale bytes."""
    rng = np.random.default_rng(seed)
    call = make(operator, "bfloat16")
    for name, value in call.arguments.items():
        if isinstance(value, np.ndarray) and value.dtype == np.int32:
            extremes = np.array([-(2**31), 2**31 - 1, -1, 0, 1, 90, 91], np.int32)
            anything = rng.integers(-(2**31), 2**31, value.shape).astype(np.int32)
            call.arguments[name] = np.where(rng.random(value.shape) < 0.5, rng.choice(extremes, value.shape), anything)
        elif isinstance(value, np.ndarray) and value.itemsize == 1:
            anything = rng.integers(0, 256, value.shape).astype(np.uint8)
            value.view(np.uint8)[...] = anything
        elif isinstance(value, np.ndarray) and rng.random() < 0.5:
            odd = np.array([np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0]).astype(value.dtype)
            call.arguments[name] = np.where(rng.random(value.shape) < 0.2, rng.choice(odd, value.shape), value)
    run(call)
    run(call, **{name: as_torch(value) for name, value in call.arguments.items()})


def test_devices_must_agree() -> None:
    call = make("sparse_mla_forward")

    class OnCuda:
        """An array that says it lives on a CUDA device; nothing reads its memory."""

        def __init__(self, array: Any) -> None:
            self.array, self.shape, self.dtype = array, array.shape, array.dtype

        def __dlpack__(self, **_: Any) -> Any:
            return self.array.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    # What counts is the device in the capsule, which is the host here: the call is fine.
    assert len(run(call, kv=OnCuda(call.arguments["kv"]))) == 3


def test_an_exporter_that_raises_is_reported() -> None:
    class Broken:
        shape, dtype = (5, 3, 40), np.dtype(np.float32)

        def __dlpack__(self, **_: Any) -> Any:
            raise RuntimeError("no memory to show")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    with pytest.raises(ValueError, match="sparse_mla_forward: q must be an array"):
        run(make("sparse_mla_forward"), q=Broken())
