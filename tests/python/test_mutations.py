"""The suite can fail: each bug that is planted in the reference is caught by the reference's tests."""

import subprocess
import sys
from pathlib import Path

import mutations
import pytest


@pytest.fixture(scope="module")
def exit_codes() -> dict[str, int]:
    """pytest's exit code for each bug (by its number), and without a bug (by the name of the test file)."""
    script = Path(mutations.__file__)
    run = subprocess.run(
        [sys.executable, str(script)], cwd=script.parents[2], check=True, capture_output=True, text=True
    )
    return {name: int(code) for name, code in (line.split() for line in run.stdout.splitlines())}


@pytest.mark.parametrize("number", range(len(mutations.BUGS)), ids=[bug.meaning for bug in mutations.BUGS])
def test_a_planted_bug_is_caught(number: int, exit_codes: dict[str, int]) -> None:
    assert exit_codes[str(number)] == pytest.ExitCode.TESTS_FAILED  # other codes are errors of the run


@pytest.mark.parametrize("test", [test.stem for test in mutations.TESTS])
def test_without_a_bug_the_same_tests_pass(test: str, exit_codes: dict[str, int]) -> None:
    assert exit_codes[test] == pytest.ExitCode.OK


@pytest.mark.parametrize("bug", mutations.BUGS, ids=[bug.meaning for bug in mutations.BUGS])
def test_the_line_to_change_is_still_there(bug: mutations.Bug) -> None:
    import hopwell.reference

    folder = Path(hopwell.reference.__file__).parent
    assert bug.right in (folder / f"{bug.module}.py").read_text()


def test_bugs_are_planted_in_every_module() -> None:
    import hopwell.reference

    modules = {path.stem for path in Path(hopwell.reference.__file__).parent.glob("[a-z]*.py")}
    missing = modules - {bug.module for bug in mutations.BUGS}
    assert missing == set(), "write test_reference_<module>.py with BUGS, as test_reference_kv_compress.py has them"
