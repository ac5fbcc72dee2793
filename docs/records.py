"""The committed records of benchmarks for the documents, which take figures from here only."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "results" / "h200"
BENCH = ROOT / "python" / "hopwell" / "bench"

Row = dict[str, Any]
Record = dict[str, Any]


def program(path: Path) -> ModuleType:
    """Loads a Python file as a module from any folder."""
    spec = importlib.util.spec_from_file_location(f"hopwell_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look up their module here
    spec.loader.exec_module(found)
    return found


def module(name: str) -> ModuleType:
    """Loads a module of hopwell.bench from its file, because the package needs the compiled module and documents do
    not.
    """
    return program(BENCH / f"{name}.py")


provenance = module("provenance").provenance


def read(name: str) -> Record:
    """Returns the H200's record `name`.json."""
    record: Record = json.loads((FOLDER / f"{name}.json").read_text())
    return record


def bench_rows(operator: str, machine: str = "h200") -> list[tuple[Row, Record]]:
    """Returns the rows of `hopwell bench` for an operator, each with its record."""
    records = [read(f"../{machine}/{path.stem}") for path in sorted((FOLDER.parent / machine).glob("*.json"))]
    return [
        (row, record)
        for record in records
        for row in record.get("results", [])
        if row.get("operator") == operator and "median_seconds" in row
    ]


def operators() -> list[str]:
    """Returns the operators of the H200's records of `hopwell bench`, in alphabetical order."""
    found = (row for path in FOLDER.glob("*.json") for row in read(path.stem).get("results", []))
    return sorted({row["operator"] for row in found if "operator" in row and "median_seconds" in row})


def peer_records(machine: str) -> list[Record]:
    """Returns a machine's records of comparisons with other packages. Each record has some of the operators."""
    return [read(f"../{machine}/{path.stem}") for path in sorted((FOLDER.parent / machine).glob("peers*.json"))]


def peer_record(operator: str) -> tuple[str, Record]:
    """Returns the H200's record of comparisons that contains an operator, with its name."""
    names = [path.stem for path in sorted(FOLDER.glob("peers*.json"))]
    (name,) = (name for name in names if any(row["operator"] == operator for row in read(name)["results"]))
    return name, read(name)


def peer_rows(operator: str, machine: str = "h200") -> list[Row]:
    """Returns an operator's comparisons with other packages, without packages that did not run."""
    rows = (row for record in peer_records(machine) for row in record["results"])
    return [row for row in rows if row["operator"] == operator and "times_as_fast" in row]


def peer_rows_by_keys(operator: str, peer: str, machine: str = "h200") -> list[Row]:
    """Returns the comparisons with a peer that differ in heads and keys only, without windows."""
    rows = peer_rows(operator, machine)
    return [row for row in rows if row["peer"] == peer and row["shape"].keys() == {"h_q", "s_kv"}]


def peers_that_failed(operator: str) -> dict[str, str]:
    """Returns the packages that did not run in an operator's comparisons, with the reason."""
    return {
        row["peer"]: row[verdict]
        for row in peer_record(operator)[1]["results"]
        for verdict in ("missing", "failed", "disagrees")
        if row["operator"] == operator and verdict in row
    }


@functools.cache
def default_shapes() -> dict[str, dict[str, int]]:
    """Returns the shapes that hopwell.bench uses if a row names none: the defaults of its functions."""
    trees = [ast.parse(path.read_text()) for path in sorted((BENCH / "operators").glob("*.py"))]
    return {
        node.name: {
            argument.arg: ast.literal_eval(value)
            for argument, value in zip(node.args.args[-len(node.args.defaults) :], node.args.defaults, strict=True)
        }
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.args.defaults
    }


def number(value: int) -> str:
    """Formats 8192 as 8 K, 512 as 512."""
    return f"{value // 1024} K" if value >= 1024 and value % 1024 == 0 else f"{value:,}"


def shape_text(row: Row) -> str:
    """Formats a row's whole shape: the defaults and the sizes that the row names."""
    shape = {**default_shapes().get(row["operator"], {}), **row["shape"]}
    return ", ".join(f"{name} {number(value)}" for name, value in shape.items() if value)


def short_text(row: Row) -> str:
    """Formats the sizes that distinguish a row from the other rows of its operator."""
    return ", ".join(f"{name} {number(value)}" for name, value in row["shape"].items()) or "default shape"
