"""The words of a declaration: an operator and its arguments.

`src/ops/<folder>/declaration.py` declares the operators of its folder with these classes. What follows from a
declaration is generated: `python3 scripts/declare --write FOLDER` writes the C and C++ headers, the entry points, the
Python binding and the Python functions, and `--json` prints all declarations for other programs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

REQUIRED = "required"
KEYWORD_ONLY = (
    "*"  # in a list of arguments: those that follow are keywords in Python, as after `*` in a Python function
)


@dataclass(frozen=True)
class Enum:
    """A C enumeration with its values. Python uses the values' names as strings; the first one is the default."""

    name: str  # hopwell_<name> in C
    prefix: str  # of the enumerators
    values: dict[str, str]  # name in Python -> doc
    doc: str = ""

    def enumerator(self, value: str) -> str:
        return f"{self.prefix}_{value.replace('-', 'neg_').upper()}"


@dataclass(frozen=True)
class Argument:
    """What all arguments have. `name` is the field's name in C and C++; `python` is Python's name, if it differs."""

    name: str
    doc: str = ""
    python: str = ""

    @property
    def python_name(self) -> str:
        return self.python or self.name


@dataclass(frozen=True)
class Tensor(Argument):
    """An input array. An optional one may be absent.

    Dtypes are separated by `|`. `fp32 (CPU)` is a dtype for that backend only, and `like q` is the dtype of q.
    """

    dtype: str = ""
    shape: str = ""
    optional: bool = False


@dataclass(frozen=True)
class Output(Tensor):
    """An array that the operator writes.

    Python allocates it unless the caller gave it ("given or new"), always ("new"), or never ("given"). If there is a
    condition `when` on another argument, Python allocates the array only if it holds. If it `may_be_false`, False
    leaves it out. `python_shape` is a Python expression of the shape, for one that does not follow from the
    dimensions of inputs (python/hopwell/_hooks.py).
    """

    allocation: str = "given or new"
    when: str = ""
    may_be_false: bool = False
    python_shape: str = ""


@dataclass(frozen=True)
class Number(Argument):
    """An fp32 number. A default of None means that it may be absent; C writes that as 0."""

    default: Any = REQUIRED


@dataclass(frozen=True)
class Integer(Argument):
    """A 64-bit integer. A default of None means that it may be absent.

    C writes absence as 0; if 0 is a value (`zero_is_a_value`), it has a field `has_<name>`. One that is a dimension of
    an output has the dimension `at_most` as its bound.
    """

    default: Any = REQUIRED
    zero_is_a_value: bool = False
    at_most: str = ""


@dataclass(frozen=True)
class Boolean(Argument):
    """True or False. One that is True by default is a `hopwell_switch` in C, where a field that is not set is on."""

    default: bool = False


@dataclass(frozen=True)
class Choice(Argument):
    """One value of an enumeration."""

    enum: Enum = None  # type: ignore[assignment]

    @property
    def default(self) -> str:
        return next(iter(self.enum.values))


@dataclass(frozen=True)
class NumberOrTensor(Argument):
    """A number, or an fp32 tensor of one element that is read on the device: one argument in Python, two in C and C++.

    `value` is the number's field. `default` is as in Number; Python requires the argument unless it is optional.
    """

    value: str = ""
    default: Any = 1.0
    optional: bool = False


@dataclass(frozen=True)
class Struct(Argument):
    """A struct of arguments that several operators share. In Python its fields are arguments like all others."""

    fields: tuple[Argument, ...] = ()
    taken: tuple[str, ...] = ()  # names of the fields that the operator takes; it refuses the others

    def only(self, *names: str, doc: str = "") -> Struct:
        return replace(self, taken=names, doc=doc or self.doc)

    def without(self, *names: str, doc: str = "") -> Struct:
        return self.only(*(f.name for f in self.fields if f.name not in names), doc=doc)

    def takes(self, argument: Argument) -> bool:
        return argument.name in self.taken


@dataclass(frozen=True)
class PythonOnly(Argument):
    """An argument of the Python function that C does not have, such as the dtype of the output `of`."""

    type: str = ""
    of: str = ""
    default: Any = REQUIRED
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operator:
    """An operator: a summary of its result, its formula, and notes on corner cases."""

    name: str
    doc: str
    arguments: tuple[Any, ...]
    formula: str = ""
    notes: str = ""
    returns: tuple[str, ...] = ()  # names of outputs, in the order in which Python returns them
    returns_doc: str = ""
    more_returns: tuple[str, str] | None = None  # (an argument, the output that is returned too if it is given)
    python_check: str = ""  # a statement of the Python function, before it allocates outputs (python/hopwell/_hooks.py)
    folder: str = ""  # set when a declaration is read

    @property
    def camel(self) -> str:
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def fields(self) -> list[Argument]:
        """The arguments that C and C++ have, without those that every operator has."""
        return [a for a in self.arguments if isinstance(a, Argument) and not isinstance(a, PythonOnly)]

    @property
    def flat(self) -> list[Argument]:
        """The arguments as the Python binding takes them: the taken fields of structs are arguments."""
        return flatten(self.fields)


def flatten(arguments: Any) -> list[Argument]:
    flat: list[Argument] = []
    for argument in arguments:
        if isinstance(argument, Struct):
            flat += [f for f in argument.fields if argument.takes(f)]
        else:
            flat.append(argument)
    return flat


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
