"""python3 scripts/declare --json | --write FOLDER"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import declarations
import functions
import headers
import packages
import sources
from declare import Operator

PACKAGE = declarations.OPERATIONS.parents[1] / "python" / "hopwell"


def write(folder: Path, operators: list[Operator]) -> None:
    """Writes the generated files. A file that would not change keeps its time, so that nothing is compiled again."""
    files = {
        "include/hopwell/enums.h": headers.enum_header(operators),
        "include/hopwell/operators.h": headers.c_header(operators),
        "include/hopwell/operators.hpp": headers.cpp_header(operators),
        "operators.inc": sources.operator_list(operators),
        "emulated_checks.cmake": sources.emulated_checks(operators),
        "entry_points.cpp": sources.entry_points(operators),
        "python_operators.cpp": sources.binding(operators),
        "python/hopwell/_operators.py": functions.functions(operators),
        "python/hopwell/_hopwell.pyi": functions.stub(operators),
        "python/hopwell/_reference.py": packages.exports(operators, PACKAGE, "reference"),
        "python/hopwell/_torch_ops.py": packages.exports(operators, PACKAGE, "torch/ops", "_"),
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    link_package(folder / "python" / "hopwell")


def link_package(folder: Path) -> None:
    """Links the other files of the Python package beside the generated ones, for tools that read the whole package."""
    for path in folder.iterdir():
        if path.is_symlink() and not path.exists():
            path.unlink()
    for path in PACKAGE.iterdir():
        link = folder / path.name
        if path.name != "__pycache__" and not link.is_symlink():
            link.symlink_to(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/declare", description="What follows from the operators' declarations."
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--json", action="store_true", help="print all declarations")
    action.add_argument("--write", metavar="FOLDER", help="write the generated files")
    given = parser.parse_args()
    operators = declarations.load()
    if given.json:
        print(json.dumps(declarations.as_json(operators), indent=1, ensure_ascii=False))
    else:
        write(Path(given.write), operators)


if __name__ == "__main__":
    main()
