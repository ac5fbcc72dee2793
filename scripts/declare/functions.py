"""The Python functions of all operators, and the stub of the compiled module."""

from __future__ import annotations

import json
import re
import textwrap

import declarations
from declare import (
    KEYWORD_ONLY,
    REQUIRED,
    Argument,
    Boolean,
    Choice,
    Integer,
    Number,
    NumberOrTensor,
    Operator,
    Output,
    PythonOnly,
    Tensor,
    flatten,
    one_line,
)

WIDTH = 120
HOOKS = declarations.OPERATIONS.parents[1] / "python" / "hopwell" / "_hooks.py"

FUNCTIONS = '''\
"""The operators as Python functions. Generated from src/ops/<operator>/declaration.py: do not edit."""

from typing import Any, Generic, Literal, NamedTuple

from . import _hopwell
from ._arrays import (
    Array,
    ArrayT,
    DType,
    Outputs,
    check_size,
    dims,
    dtype_name,
    dtype_of,
    extent,
    flag,
    shape_of,
)
from ._hooks import (
{hooks}
)

__all__ = [
{names}
]


{functions}
'''

RESULT = '''\
class {name}(NamedTuple, Generic[ArrayT]):
    """Results of `{operator}`."""

{fields}


'''
FUNCTION = '''\
{result_class}def {name}(
{parameters}
) -> {result}:
    """{doc}
    """
{body}
    _hopwell.{name}(
{arguments}
    )  # fmt: skip
    {returned}
'''

STUB = """\
# The compiled module: every argument positional, outputs allocated by the caller. None stands for an absent array.
# Generated from src/ops/<operator>/declaration.py and scripts/declare/functions.py: do not edit.
from typing import Any

class Error(RuntimeError): ...

class Explanation:
    def __init__(self) -> None: ...
    @property
    def text(self) -> str: ...

def backends(operator_name: str = ...) -> list[str]: ...
def version() -> str: ...
def num_threads() -> int: ...
def set_num_threads(threads: int) -> None: ...
def check_given(operator_name: str, argument: str, array: Any, /) -> None: ...
def tell_written(arrays: tuple[Any, ...], /) -> None: ...
{functions}
"""

COMMON_DOCS = {
    "backend": "A name from `backends()`; None picks the best.",
    "stream": "A CUDA stream; None is the framework's current one.",
}
RAISES = """\
Raises:
    ValueError: An argument is wrong. No output was written.
    Error: A device reports an error, or the backend is missing."""


# ---- signature and docstring ---------------------------------------------------------------------------------------


def is_parameter(argument: Argument) -> bool:
    return not (isinstance(argument, Output) and argument.allocation == "new")


def must_be_given(output: Output) -> bool:
    """Whether a call must have the array to be written, such as a cache."""
    return output.allocation == "given" and not output.optional


def arguments_of(operator: Operator) -> list[Argument]:
    """The arguments in the order of their declaration, with those that only Python has."""
    return flatten(a for a in operator.arguments if a != KEYWORD_ONLY)


def inputs_of(operator: Operator) -> list[Tensor]:
    return [a for a in operator.flat if isinstance(a, Tensor) and not isinstance(a, Output)]


def like_argument(operator: Operator) -> str:
    """The input whose framework and device new outputs have: the first one that a call must have."""
    return next(a.python_name for a in inputs_of(operator) if not a.optional)


def annotation(argument: Argument) -> str:
    if isinstance(argument, Choice):
        return f"Literal[{', '.join(json.dumps(value) for value in argument.enum.values)}]"
    if isinstance(argument, PythonOnly):
        kind = "DType" if argument.type == "dtype" else argument.type
    else:
        kinds = {NumberOrTensor: "float | Array", Number: "float", Integer: "int", Boolean: "bool"}
        kind = next((text for cls, text in kinds.items() if isinstance(argument, cls)), "Array")
    if isinstance(argument, Output) and argument.may_be_false:
        kind += " | Literal[False]"
    absent = argument.optional if isinstance(argument, Tensor) else getattr(argument, "default", REQUIRED) is None
    return f"{kind} | None" if absent or (isinstance(argument, Output) and not must_be_given(argument)) else kind


def default_of(argument: Argument, keyword_only: bool) -> str:
    """` = 1.0`, or nothing for an argument that a call must have."""
    if isinstance(argument, Tensor):
        return " = None" if keyword_only else ""
    if getattr(argument, "default", REQUIRED) is REQUIRED or (
        isinstance(argument, NumberOrTensor) and not argument.optional
    ):
        return ""
    default = argument.default  # type: ignore[attr-defined]
    return f' = "{default}"' if isinstance(default, str) else f" = {default}"


def parameters(operator: Operator) -> str:
    lines, keyword_only = [], False
    for declared in operator.arguments:
        if declared == KEYWORD_ONLY:
            lines.append("*")
            keyword_only = True
            continue
        for one in filter(is_parameter, flatten([declared])):
            kind = "ArrayT" if one.python_name == like_argument(operator) else annotation(one)
            lines.append(f"{one.python_name}: {kind}{default_of(one, keyword_only)}")
    lines += ["backend: str | None = None", "stream: Any = None"]
    return "\n".join(f"    {line}," for line in lines)


def dtypes_and_shape(argument: Argument, has_dtype_option: bool = False) -> str:
    if isinstance(argument, NumberOrTensor):
        return "A number, or fp32 of one element."
    if not isinstance(argument, Tensor):
        return ""
    names = {"fp8": "float8_e4m3fn", "fp4x2": "float4_e2m1fn_x2"}
    dtypes = re.sub(r"\b(fp8|fp4x2)\b", lambda found: names[found[1]], argument.dtype)
    if isinstance(argument, Output) and argument.allocation == "new" and not has_dtype_option:
        dtypes = dtypes.split(" | ")[0]
    dtypes = " or ".join(dtypes.replace(" | ", ", ").rsplit(", ", dtypes.count("|") and 1))
    shape = f" {argument.shape}" if argument.shape.startswith("[") else f", {argument.shape}"
    return (
        dtypes
        + (", 0-d" if shape == " []" else shape)
        + (", written in place." if isinstance(argument, Output) else ".")
    )


def argument_doc(argument: Argument) -> str:
    parts = [dtypes_and_shape(argument), one_line(argument.doc)]
    if isinstance(argument, Choice):
        parts.append("; ".join(f'"{value}": {doc}' for value, doc in argument.enum.values.items()) + ".")
    if isinstance(argument, PythonOnly) and argument.choices:
        parts.append(", ".join(f'"{choice}"' for choice in argument.choices[:-1]) + f' or "{argument.choices[-1]}".')
    if isinstance(argument, Output) and argument.allocation == "given or new":
        parts.append("None: a new array." + (" False: it is left out." if argument.may_be_false else ""))
    return " ".join(part for part in parts if part)


def returns_doc(operator: Operator) -> str:
    """The results. Those that are no arguments have their dtype, shape and meaning here."""
    parts = [f"({', '.join(operator.returns)})."] if len(operator.returns) > 1 else []
    for output in outputs_of(operator):
        if output.allocation == "new" or len(operator.returns) == 1:
            has_option = any(isinstance(a, PythonOnly) and output.name in a.of.split() for a in arguments_of(operator))
            text = dtypes_and_shape(output, has_option).replace(", written in place", "")
            parts.append(f"{output.python_name}: {text} {one_line(output.doc)}".strip())
    return " ".join([*parts, one_line(operator.returns_doc)]).strip()


def docstring(operator: Operator) -> str:
    """The docstring without its indentation: summary, formula, notes, arguments, results, errors."""
    parts = [textwrap.fill(one_line(operator.doc), WIDTH - 7)]
    if operator.formula:
        parts.append(textwrap.indent(textwrap.dedent(operator.formula).strip("\n"), "    ").rstrip())
    if operator.notes:
        parts.append(textwrap.fill(one_line(operator.notes), WIDTH - 4, break_on_hyphens=False))
    docs = {a.python_name: argument_doc(a) for a in arguments_of(operator) if is_parameter(a)} | COMMON_DOCS
    lines = [textwrap.fill(f"{name}: {doc}", WIDTH - 8, subsequent_indent="    ", break_on_hyphens=False)
             for name, doc in docs.items()]  # fmt: skip
    parts.append("Args:\n" + textwrap.indent("\n".join(lines), "    "))
    parts.append("Returns:\n" + textwrap.indent(textwrap.fill(returns_doc(operator), WIDTH - 8), "    "))
    return "\n\n".join([*parts, RAISES])


# ---- the body ------------------------------------------------------------------------------------------------------


def outputs_of(operator: Operator) -> list[Output]:
    return [a for a in operator.flat if isinstance(a, Output)]


class Body:
    """The lines that check what only Python has, and allocate the outputs."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.arguments = arguments_of(operator)
        self.inputs = inputs_of(operator)
        self.names = {a.python_name for a in self.arguments if is_parameter(a)}
        self.like = like_argument(operator)
        self.shapes: dict[str, str] = {}  # locals with the shapes of inputs
        self.lines = [f'outputs = Outputs("{operator.name}", "{self.like}", {self.like})']
        self.python_only()
        allocations = [line for output in outputs_of(operator) for line in self.allocation(output)]
        self.lines += [f"{name} = {value}" for name, value in self.shapes.items()] + allocations

    def python_only(self) -> None:
        for one in self.arguments:
            if not isinstance(one, PythonOnly):
                continue
            name, given = one.name, f'"{self.operator.name}", "{one.name}", {one.name}'
            if one.type == "dtype":
                allowed = ", ".join(f'"{choice}"' for choice in one.choices)
                indent = "" if one.default is not None else "    "
                self.lines += [f"if {name} is not None:"] if indent else []
                self.lines.append(f"{indent}{name} = dtype_name({given}, ({allowed}))")
            else:
                self.lines.append(f"{name} = {'flag' if one.type == 'bool' else 'check_size'}({given})")
        self.lines += [self.operator.python_check] if self.operator.python_check else []

    def shape_local(self, tensor: Tensor) -> str:
        name = f"{tensor.python_name}_shape"
        self.shapes[name] = f"dims({tensor.python_name}, {tensor.shape.count(',') + 1})"
        return name

    def dimension(self, symbol: str) -> str:
        """An expression for a dimension of an output: a number, an argument, or a dimension of an input."""
        if symbol.isdigit():
            return symbol
        for one in self.arguments:
            if one.name == symbol and isinstance(one, PythonOnly):
                return symbol
            if one.name == symbol and isinstance(one, Integer):
                return f"extent({symbol}, {self.dimension(one.at_most)})"
        whole, _, divisor = symbol.partition("/")
        for tensor in self.inputs:
            if " or " in tensor.shape or tensor.optional or not tensor.shape.startswith("["):
                continue
            place = f"{self.shape_local(tensor)}[{{}}]"
            sizes = tensor.shape[1:-1].split(", ")
            if symbol in sizes:
                return place.format(sizes.index(symbol))
            if whole in sizes:
                return f"{place.format(sizes.index(whole))} // {divisor}"
            if f"{symbol}/2" in sizes:
                return f"2 * {place.format(sizes.index(f'{symbol}/2'))}"
        raise ValueError(f"{self.operator.name}: no input has the dimension {symbol}")

    def shape(self, output: Output) -> str:
        if output.python_shape:
            return output.python_shape
        if match := re.fullmatch(r"the shape of (\w+)( without d)?", output.shape):
            name = f"{match[1]}_shape"
            self.shapes[name] = f"shape_of({match[1]})"
            return f"{name}[:-1]" if match[2] else name
        if output.shape == "[]":
            return "()"
        same = [t for t in self.inputs if t.shape == output.shape]
        related = (output.dtype.removeprefix("like "), output.when)
        for tensor in sorted(same, key=lambda t: t.name not in related):
            if tensor.name in related or not tensor.optional:
                return (
                    self.shape_local(tensor)
                    if not tensor.optional
                    else f"dims({tensor.name}, {tensor.shape.count(',') + 1})"
                )
        before = dict(self.shapes)
        sizes = [self.dimension(symbol) for symbol in output.shape[1:-1].split(", ")]
        self.shapes = before | {
            name: value for name, value in self.shapes.items() if any(name in size for size in sizes)
        }
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

    def dtype(self, output: Output) -> tuple[str, str]:
        """Expressions for an output's dtype and, if an option sets it, the option that a given array must match."""
        like = "outputs.dtype"
        for one in self.arguments:
            if isinstance(one, PythonOnly) and output.name in one.of.split():
                return (one.name, f'"{one.name}"') if one.default is not None else (f"{one.name} or {like}", "")
        if output.dtype.startswith("like "):
            name = output.dtype.removeprefix("like ").split(" | ")[0]
            return (like if name == self.like else f"dtype_of({name})"), ""
        return f'"{declarations.dtypes(output.dtype)[0]["dtype"]}"', ""

    def local(self, output: Output) -> str:
        """The variable of an output: its name, unless an input has the same name."""
        clash = output.allocation == "new" and output.python_name in self.names
        return f"new_{output.python_name}" if clash else output.python_name

    def allocation(self, output: Output) -> list[str]:
        name = self.local(output)
        if output.allocation == "given":
            return [f"if {name} is not None:", f'    outputs.given("{name}", {name})']
        (dtype, option), shape = self.dtype(output), self.shape(output)
        if output.allocation == "new":
            value = f"outputs.new({shape}, {dtype})"
            is_not = "is" if output.when.startswith("not ") else "is not"
            array = output.when.removeprefix("not ")
            return [f"{name} = {value}" + (f" if {array} {is_not} None else None" if output.when else "")]
        value = f'{name} = outputs.given_or_new("{name}", {name}, {shape}, {dtype}{", " + option if option else ""})'
        if output.may_be_false:
            return [f"if {name} is False:", f"    {name} = None", "else:", f"    {value}"]
        if not output.when:
            return [value]
        return [f"if {output.when}:", f"    {value}", "else:", f'    outputs.not_needed("{name}", {name})']


def function(operator: Operator) -> str:
    body = Body(operator)
    passed = [body.local(a) if isinstance(a, Output) else a.python_name for a in operator.flat]
    outputs = {output.python_name: output for output in outputs_of(operator)}
    all_returns = operator.returns + ((operator.more_returns[1],) if operator.more_returns else ())
    results = f"outputs.native({', '.join(body.local(outputs[name]) for name in all_returns)})"
    name, result_class = f"{operator.camel}Result", ""
    if len(operator.returns) > 1:
        fields = [
            f"    {one}: ArrayT{' | None' if outputs[one].when or outputs[one].may_be_false else ''}"
            for one in operator.returns
        ]
        result_class = RESULT.format(name=name, operator=operator.name, fields="\n".join(fields))
    indent = " " * 8
    result = f"{name}[ArrayT]" if result_class else "ArrayT"
    returned = f"return {name}(*{results})" if result_class else f"result: ArrayT = {results}[0]\n    return result"
    if operator.more_returns:
        result, count = "tuple[ArrayT | None, ...]", len(operator.returns)
        returned = f"results: {result} = {results}\n    "
        returned += f"return {name}(*results[:{count}]) if {operator.more_returns[0]} is None else results"
    return FUNCTION.format(
        result_class=result_class,
        name=operator.name,
        parameters=parameters(operator),
        result=result,
        doc=textwrap.indent(docstring(operator), "    ").lstrip(),
        body="\n".join(f"    {line}" for line in body.lines),
        arguments=textwrap.fill(
            ", ".join([*passed, "backend", "stream"]) + ",", WIDTH, initial_indent=indent, subsequent_indent=indent
        ),
        returned=returned,
    )


def functions(operators: list[Operator]) -> str:
    text = "\n\n".join(function(operator) for operator in operators).rstrip("\n")
    defined = re.findall(r"^def (\w+)", HOOKS.read_text(), re.MULTILINE)
    return FUNCTIONS.format(
        hooks="\n".join(f"    {name}," for name in sorted(defined)),
        names="\n".join(f'    "{n}",' for n in sorted(o.name for o in operators)),
        functions=text,
    )


def stub(operators: list[Operator]) -> str:
    lines = []
    for operator in operators:
        names = [a.name for a in operator.flat] + ["backend", "stream"]
        lines.append(
            f"def {operator.name}(\n" + "".join(f"    {name}: Any,\n" for name in names) + "    /,\n) -> None: ..."
        )
    return STUB.format(functions="\n".join(lines))
