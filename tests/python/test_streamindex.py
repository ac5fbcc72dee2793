"""benchmarks/streamindex.py runs, and checks the selections that it times."""

import sys
from importlib import util
from pathlib import Path

import pytest

pytest.importorskip("torch")
PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "streamindex.py"


def test_it_prints_a_row_for_each_length(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = util.spec_from_file_location("streamindex", PROGRAM)
    assert spec is not None and spec.loader is not None
    program = util.module_from_spec(spec)
    spec.loader.exec_module(program)
    monkeypatch.setattr(sys, "argv", ["streamindex.py", "--tokens", "64", "96"])
    program.main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["tokens", "64", "96"]
