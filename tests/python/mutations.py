"""Plants the bugs that `test_reference_*.py` name in `hopwell.reference`, one at a time, and runs these tests.

    python tests/python/mutations.py        one line per bug: its number and pytest's exit code (1: caught)

The process imports the large packages once. Each bug then has a forked process, which imports the changed module.
"""

import ast
import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Bug(NamedTuple):
    test: Path  # that must notice it
    module: str
    right: str
    wrong: str
    meaning: str


def bugs_of(test: Path) -> list[Bug]:
    """The bugs in a test file. It is not imported, because a process imports the reference after it planted a bug."""
    assigned = [node for node in ast.parse(test.read_text()).body if isinstance(node, ast.Assign)]
    found = [node.value for node in assigned if ast.unparse(node.targets[0]) == "BUGS"]
    assert found, f"{test.name}: name bugs in BUGS that these tests must notice"
    return [Bug(test, module, *row) for module, rows in ast.literal_eval(found[0]).items() for row in rows]


TESTS = sorted(HERE.glob("test_reference_*.py"))
BUGS = [bug for test in TESTS for bug in bugs_of(test)]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, bug: Bug) -> None:
        self.bug = bug

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != f"hopwell.reference.{self.bug.module}":
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert found is not None
        assert found.origin is not None
        loader = _Loader(Path(found.origin), self.bug)
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)


class _Loader(importlib.abc.InspectLoader):
    def __init__(self, path: Path, bug: Bug) -> None:
        self.path, self.bug = path, bug

    def get_source(self, fullname: str) -> str:
        source = self.path.read_text()
        assert source.count(self.bug.right) >= 1, f"{self.bug.module} no longer holds {self.bug.right!r}"
        return source.replace(self.bug.right, self.bug.wrong, 1)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_source(fullname), str(self.path))


class ShortestFirst:
    """A plugin of pytest: the run without a bug records the time of each test, other runs begin with the shortest."""

    def __init__(self, record: Path, *, writes: bool) -> None:
        self.record, self.writes = record, writes
        self.seconds: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if not self.writes and self.record.exists():
            seconds = json.loads(self.record.read_text())
            items.sort(key=lambda item: seconds.get(item.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        if self.writes:
            complete = self.record.with_suffix(".new")
            complete.write_text(json.dumps(self.seconds))
            complete.replace(self.record)


def start_tests(test: Path, bug: Bug | None, records: Path) -> int:
    """Forks a process that plants the bug, runs the tests and exits with pytest's code. Returns its id."""
    import pytest

    child = os.fork()
    if child != 0:
        return child
    with contextlib.redirect_stdout(io.StringIO()):
        if bug is not None:
            sys.meta_path.insert(0, _Finder(bug))
        order = ShortestFirst(records / f"{test.stem}.json", writes=bug is None)
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", str(test)], plugins=[order])
    os._exit(int(code))


def main() -> None:
    import hypothesis  # noqa: F401  the tests import these; imported once for all processes below
    import ml_dtypes  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.fx.experimental.symbolic_shapes  # otherwise the first gradient imports it, which takes seconds

    torch.set_num_threads(1)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins, which have imports of their own
    gc.freeze()  # otherwise each process scans all imported objects at exit
    waiting: list[tuple[str, Path, Bug | None]]
    waiting = [(str(number), bug.test, bug) for number, bug in reversed(list(enumerate(BUGS)))]
    waiting += [(test.stem, test, None) for test in TESTS]
    running: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as records:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                name, test, bug = waiting.pop()
                running[start_tests(test, bug, Path(records))] = name
            child, status = os.wait()
            print(running.pop(child), os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
