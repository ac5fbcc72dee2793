"""A call that the fuzzer makes: its arguments, and those that it writes."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .draw import Maker
from .memory import Memory

WORK = 300_000  # multiplications a call, for the reference is a loop in Python


@dataclass
class FuzzedCall:
    operator: str
    arguments: dict[str, Any]  # arrays are numpy's; those that are written are among them
    outputs: tuple[str, ...]  # arguments that are written
    memory: Memory

    def __repr__(self) -> str:
        return f"{self.operator}({', '.join(f'{name}={_text(value)}' for name, value in self.arguments.items())})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # what hypothesis prints
        printer.text(repr(self))

    @property
    def inputs(self) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if name not in self.outputs}


def _text(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    steps = [stride // value.itemsize for stride in value.strides]
    first = ", ".join(str(x) for x in value.reshape(-1)[:4]) if 0 < value.size < 10**6 else ""
    return f"<{value.dtype} {list(value.shape)} strides {steps}: {first}{', …' if value.size > 4 else ''}>"


def fit(sizes: list[int], limit: int = WORK) -> list[int]:
    """The sizes, the first ones cut so that their product is at most the limit times `Maker.work`."""
    sizes, limit = list(sizes), int(limit * Maker.work)
    for i in range(len(sizes)):
        others = int(np.prod([max(n, 1) for j, n in enumerate(sizes) if j != i]))
        sizes[i] = min(sizes[i], max(limit // others, 1))
    return sizes


def given(
    maker: Maker, operator: str, arguments: dict[str, Any], results: dict[str, tuple[tuple[int, ...], Any, bool]]
) -> FuzzedCall:
    """The call, with some of the results (shape, dtype, contiguous rows) as arrays given to be written."""
    outputs = tuple(name for name in results if maker.chance(3))
    for name in outputs:
        shape, dtype, rows = results[name]
        arguments[name] = maker.output(shape, dtype, rows)
    if maker.chance(4):
        arguments["backend"] = "cpu"
    return FuzzedCall(operator, arguments, outputs, maker.memory)


def arguments_of(arguments: dict[str, Any], *left_out: str) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in left_out}
