"""Reads the declarations of all operators, and prints them as JSON for other programs.

The JSON has `structs`, `enums` and `operators`. An operator's `arguments` are flat and in the order of its declaration:
a field of a struct has the struct's name in `struct`. `python` and `keyword_only` are about the Python function.
`dtypes` is a list of `{"dtype": "float32"}` or `{"like": "q"}`, with `"backends"` where only these support the dtype.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from declare import KEYWORD_ONLY, Argument, Choice, Enum, Operator, Struct, Tensor, flatten, one_line

OPERATIONS = Path(__file__).resolve().parents[2] / "src" / "ops"
DTYPES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int32": "int32",
    "uint8": "uint8",
    "int8": "int8",
    "int64": "int64",
    "fp8": "float8_e4m3fn",
    "fp4x2": "float4_e2m1fn_x2",
}


def _read(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def files() -> list[Path]:
    """The declaration files: the shared arguments first, then one for each folder of operators."""
    found = sorted(OPERATIONS.glob("*/declaration.py"))
    return sorted(found, key=lambda path: path.parent.name != "common")


@functools.cache
def load() -> list[Operator]:
    """All operators, ordered by folder and then as their files declare them."""
    sys.dont_write_bytecode = True  # no __pycache__ beside the kernels
    operators: list[Operator] = []
    for path in files():
        folder = path.parent.name
        module = _read("common" if folder == "common" else f"declaration_{folder}", path)
        for value in vars(module).values():
            if isinstance(value, Operator):
                operators.append(_checked(value, folder))
    return operators


def registered(operators: list[Operator]) -> dict[str, set[str]]:
    """The backends of each operator, from the registrations in src/ops/<folder>/<backend>.cpp and .cu. In a folder with
    several operators, the name of the registration ends the operator's name.
    """
    found: dict[str, set[str]] = {operator.name: set() for operator in operators}
    for source in sorted(OPERATIONS.glob("*/*.c*")):
        folder = source.parent.name
        for name in re.findall(r"\bRegistration(?:<\w+>)? (\w+)\{", source.read_text()):
            operator = f"{folder.split('_')[0]}_{name}"
            found[operator if operator in found else folder].add(source.stem)
    return found


def _checked(operator: Operator, folder: str) -> Operator:
    names = [a.python_name for a in flat_with_python(operator)]
    for name in operator.returns:
        if name not in names:
            raise ValueError(f"{operator.name}: returns must be names of arguments; got {name!r}")
    for argument in operator.flat:
        for dtype in dtypes(argument.dtype) if isinstance(argument, Tensor) else ():
            if dtype.get("like", names[0]) not in names:
                raise ValueError(f"{operator.name}: {argument.name} must be like an argument; got {dtype['like']!r}")
    return replace(operator, folder=folder)


def flat_with_python(operator: Operator) -> list[Argument]:
    return flatten(a for a in operator.arguments if isinstance(a, Argument))


def enums(operators: list[Operator]) -> list[Enum]:
    """The enumerations that arguments have, each once."""
    found = [a.enum for operator in operators for a in operator.flat if isinstance(a, Choice)]
    return list({enum.name: enum for enum in found}.values())


def structs(operators: list[Operator]) -> list[Struct]:
    """The structs that arguments are, each once."""
    found = [a for operator in operators for a in operator.fields if isinstance(a, Struct)]
    return list({struct.name: struct for struct in found}.values())


def dtypes(text: str) -> list[dict[str, Any]]:
    """Parses "bf16 | fp32 (CPU)"."""
    found: list[dict[str, Any]] = []
    for part in text.split("|"):
        match = re.fullmatch(r"(like (\w+)|\w+)(?: \((.*)\))?", part.strip())
        if match is None or not (match[2] or match[1] in DTYPES):
            raise ValueError(f"a dtype must be {' or '.join(DTYPES)}, or like another argument; got {part!r}")
        one: dict[str, Any] = {"like": match[2]} if match[2] else {"dtype": DTYPES[match[1]]}
        if match[3]:
            one["backends"] = match[3].lower().split(", ")
        found.append(one)
    return found


def _argument(argument: Argument, struct: str, keyword_only: bool) -> dict[str, Any]:
    facts = {key: value for key, value in vars(argument).items() if key not in ("fields", "taken", "dtype", "enum")}
    facts["kind"] = type(argument).__name__
    facts["python"] = argument.python_name
    facts["keyword_only"] = keyword_only
    facts["doc"] = one_line(argument.doc)
    if struct:
        facts["struct"] = struct
    if isinstance(argument, Tensor):
        facts["dtypes"] = dtypes(argument.dtype)
    if isinstance(argument, Choice):
        facts["enum"], facts["choices"], facts["default"] = argument.enum.name, argument.enum.values, argument.default
    return facts


def as_json(operators: list[Operator]) -> dict[str, Any]:
    return {
        "structs": [s.name for s in structs(operators)],
        "enums": [{"name": e.name, "doc": e.doc, "values": e.values} for e in enums(operators)],
        "operators": [_operator(operator) for operator in operators],
    }


def _operator(operator: Operator) -> dict[str, Any]:
    arguments, keyword_only = [], False
    for argument in operator.arguments:
        if argument == KEYWORD_ONLY:
            keyword_only = True
            continue
        struct = argument.name if isinstance(argument, Struct) else ""
        arguments += [_argument(a, struct, keyword_only) for a in flatten([argument])]
    return {
        "name": operator.name,
        "folder": operator.folder,
        "doc": one_line(operator.doc),
        "formula": operator.formula,
        "notes": operator.notes,
        "arguments": arguments,
        "returns": operator.returns,
        "returns_doc": operator.returns_doc,
    }
