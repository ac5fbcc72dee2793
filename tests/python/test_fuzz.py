"""Fuzzing: right and wrong calls of every operator that hypothesis thinks of. `fuzz/__init__.py` is the way in."""

import os

import pytest
from fuzz import others, run, wrong
from fuzz.__main__ import emulated_gpus, fuzz, gpus, tasks_of
from operators import OPERATORS

SECONDS = float(os.environ.get("FUZZ_SECONDS", "60"))  # for all of the tests here, one round of calls each at least
SEED = int(os.environ.get("FUZZ_SEED", "0"))

every_operator = pytest.mark.parametrize("operator", OPERATORS)


@every_operator
def test_right_calls(operator: str) -> None:
    run.rounds(OPERATORS[operator].right(), run.check_right, 0.7 * SECONDS / len(OPERATORS), SEED)


@every_operator
def test_wrong_calls(operator: str) -> None:
    run.rounds(wrong.wrong_call(operator), run.check_wrong, 0.2 * SECONDS / len(OPERATORS), SEED)


@every_operator
def test_other_arrays(operator: str) -> None:
    run.rounds(others.other_call(operator), others.check_other, 0.07 * SECONDS / len(OPERATORS), SEED)


@every_operator
def test_wrong_torch_calls(operator: str) -> None:
    run.rounds(others.wrong_torch_call(operator), others.check_wrong_torch, 0.03 * SECONDS / len(OPERATORS), SEED)


@pytest.mark.parametrize(("backends", "share"), [(gpus(), 1.0), (emulated_gpus(), 0.2)], ids=["gpus", "emulated"])
def test_right_calls_on_gpus(backends: list[str], share: float) -> None:
    """A GPU gets as long as all tests above together."""
    if not backends:
        pytest.skip("no such backend runs here")
    summary = fuzz(tasks_of(backends, list(OPERATORS)), share * SECONDS, SEED)
    print(summary.text())
    assert not summary.failures
