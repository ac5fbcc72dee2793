"""The fuzzer's layer that puts a call's memory on a device, with the CPU as the device; and its judge of Hopper's e4m3.

The GPU itself is fuzzed by `test_fuzz.py`.
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import torch
from fuzz import backends, bounds, run
from fuzz.__main__ import Run, groups_of, main
from fuzz.call import FuzzedCall
from fuzz.device import Backwards, DeviceCall
from hypothesis import HealthCheck, Phase, given, settings
from operators import OPERATORS
from operators.lightning_indexer import check_selection

CPU = torch.device("cpu")


def for_calls(operator: str, check: Callable[[FuzzedCall], None], count: int = 10) -> None:
    @hypothesis.seed(0)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(OPERATORS[operator].right())
    def all_of_them(call: FuzzedCall) -> None:
        check(call)

    all_of_them()


def view_of(array: Any) -> Any:
    """The array's bits by numpy, of what DLPack exports."""
    if isinstance(array, torch.Tensor):
        return array.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[array.itemsize]).numpy()
    tensor = array._tensor
    strides = [stride * tensor.bits // 8 for stride in array._strides]
    span = sum(abs(stride) * (size - 1) for stride, size in zip(strides, array.shape, strict=True)) + tensor.bits // 8
    below = sum(-stride * (size - 1) for stride, size in zip(strides, array.shape, strict=True) if stride < 0)
    memory = (ctypes.c_uint8 * span).from_address(tensor.data - below)
    return np.ndarray(array.shape, array.dtype, memory, below, strides)


@pytest.mark.parametrize("operator", OPERATORS)
def test_arrays_are_the_same_views(operator: str) -> None:
    def check(call: FuzzedCall) -> None:
        there = DeviceCall(call, CPU)
        for name, value in call.arguments.items():
            if isinstance(value, np.ndarray):
                assert tuple(there.arguments[name].shape) == value.shape
                assert np.ascontiguousarray(view_of(there.arguments[name])).tobytes() == value.tobytes(), name

    for_calls(operator, check)


@pytest.mark.parametrize("operator", OPERATORS)
def test_right_calls_through_the_layer(operator: str) -> None:
    def check(call: FuzzedCall) -> None:
        assert backends.check(call, "cpu", CPU) is None

    for_calls(operator, check)


def test_arrays_that_lie_backwards_are_exported() -> None:
    found = []

    def check(call: FuzzedCall) -> None:
        found.extend(x for x in DeviceCall(call, CPU).arguments.values() if isinstance(x, Backwards))

    for_calls("paged_attention", check, 30)
    assert len(found) > 5


@pytest.mark.parametrize("where", ["before", "after", "between"])
def test_a_stray_write_is_noticed(where: str) -> None:
    noticed = []

    def check(call: FuzzedCall) -> None:
        call.memory.remember()
        there = DeviceCall(call, CPU)
        block, buffer = there._buffers[0]
        size = len(block.bytes)
        start = 512 + int(block.bytes.ctypes.data) % 256
        place = {"before": start - 1, "after": start + size, "between": start}[where]
        if size == 0:
            return
        buffer[place] ^= 1
        try:
            there.fetch()
            run.check_memory(call)
        except AssertionError:
            noticed.append(True)
        else:
            noticed.append(False)

    for_calls("sparse_mla_forward", check)
    assert noticed and all(noticed)


def test_bound_of_hopper_products() -> None:
    """Products as published measurements say that Hopper makes them are within the bound, and not far below it."""
    rng = np.random.default_rng(0)
    most = 0.0
    for spread in (0.0, 3.0, 6.0):
        q, k = (
            (rng.standard_normal((n, 128)) * 2.0 ** rng.uniform(-spread, spread, (n, 128))).astype(
                ml_dtypes.float8_e4m3fn
            )
            for n in (16, 40)
        )
        exact = q.astype(np.float64) @ k.astype(np.float64).T
        off = np.abs(hopper_products(q, k) - exact)
        bound = bounds.e4m3_cut(q, k)
        assert (off <= bound).all()
        most = max(most, float((off / bound).max()))
    assert most > 0.05


def hopper_products(q: Any, k: Any) -> Any:
    """q·k as one `wgmma` after another: products aligned to the largest exponent and cut 13 bits below it."""
    total = np.zeros((len(q), len(k)))
    exponent_of = [np.maximum(np.frexp(np.abs(x.astype(np.float64)))[1] - 1, -6) for x in (q, k)]
    a, b = q.astype(np.float64), k.astype(np.float64)
    for first in range(0, q.shape[1], 32):
        step = slice(first, first + 32)
        exponents = exponent_of[0][:, None, step] + exponent_of[1][None, :, step]
        of_sum = np.frexp(np.abs(total))[1] - 1
        largest = np.maximum(exponents.max(axis=-1), np.where(total == 0, -1000, of_sum))
        unit = 2.0 ** (largest - 13.0)
        terms = np.trunc(a[:, None, step] * b[None, :, step] / unit[..., None]).sum(axis=-1) + np.trunc(total / unit)
        total = terms * unit
        last = 2.0 ** (np.frexp(np.abs(total))[1] - 1.0 - 13.0)
        total = np.where(total == 0, 0.0, np.trunc(total / last) * last)
    return total


def test_scores_of_hopper_are_judged_by_its_own_bound() -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 8, 128)).astype(ml_dtypes.float8_e4m3fn)
    k = rng.standard_normal((60, 128)).astype(ml_dtypes.float8_e4m3fn)
    weights = rng.standard_normal((2, 8)).astype(np.float32)
    scores = np.stack([w @ np.maximum(hopper_products(x, k), 0) for x, w in zip(q, weights, strict=True)])
    indices = np.tile(np.arange(60, dtype=np.int32), (2, 1))
    arguments = {"q_index": q, "k_index": k, "weights": weights, "topk": 60}
    results = indices, scores.astype(np.float32)
    for backend in ("sm90", "emu:sm90"):
        check_selection(arguments, backend, *results)
    for backend in ("cpu", "sm80"):
        with pytest.raises(AssertionError, match="is off by"):
            check_selection(arguments, backend, *results)
    results[1][0, 7] += 1
    with pytest.raises(AssertionError, match="is off by"):
        check_selection(arguments, "sm90", *results)


def test_bounds_of_gpus() -> None:
    expected = bounds.Expected("lse", np.array([1.0]), 1e-6, np.array([1e-6]), elementwise=True)
    got = np.array([1 + 1.5e-5], np.float32)
    bounds.compare(got, bounds.on_backend("sparse_mla_forward", expected, "sm80"))
    with pytest.raises(AssertionError, match="is off by"):
        bounds.compare(got, bounds.on_backend("sparse_mla_forward", expected, "cpu"))


# ---- the processes


DEATHS = """
import fuzz.backends, fuzz.worker, os
count = 0
def check(call, backend, device):
    global count
    count += 1
    print("a stray line", flush=True)
    if count == 3:
        os.abort()
    assert count != 2, "planted"
fuzz.backends.check = check
fuzz.worker.main()
"""


def test_a_call_that_ends_its_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each process the second call is wrong and the third its last; the calls after it are made by another one."""
    real = subprocess.Popen

    def planted(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", DEATHS, *command[3:]], **options)

    monkeypatch.setattr(subprocess, "Popen", planted)
    summary = Run([("normalize_l1", "cpu"), ("nvfp4_gemv", "cpu")], 0, 5, ["--every", "10"])()
    assert [(f["operator"], f["seed"], f["call"], f["error"]) for f in summary.failures] == [
        ("normalize_l1", 5, 15, "AssertionError: planted"),
        ("normalize_l1", 5, 25, "the process ended with SIGABRT"),
        ("nvfp4_gemv", 5, 15, "AssertionError: planted"),
        ("nvfp4_gemv", 5, 25, "the process ended with SIGABRT"),
    ]
    assert summary.ran.total() == 2


def test_emulated_backends_are_a_run_of_their_own() -> None:
    assert groups_of("sm80,emu:sm90,cpu") == [["sm80", "cpu"], ["emu:sm90"]]
    assert groups_of("emulated")[0] == []
    assert groups_of(None) == [groups_of("gpus")[0], groups_of("emulated")[1]]


def test_command_makes_one_call_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "fuzz.json"
    options = ["--backends", "cpu", "--device", "cpu", "--operators", "normalize_l1", "--call", "2"]
    monkeypatch.setattr(sys, "argv", ["fuzz", *options, "--report", str(report)])
    monkeypatch.setenv("FUZZ_SECONDS", "0")
    monkeypatch.setenv("FUZZ_SEED", "1")
    assert main() == 0
    (summary,) = json.loads(report.read_text())
    assert summary["failures"] == [] and summary["calls"][0]["ran"] == 1
    assert "1 calls ran, 0 were refused, 0 failed" in capsys.readouterr().out
