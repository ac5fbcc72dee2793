"""Questions about operators: which backends they have, and which backend would run a call."""

from typing import Any

from . import _hopwell, _operators
from ._arrays import explaining, printable

OPERATORS = {name: getattr(_operators, name) for name in _operators.__all__}


def _checked(caller: str, operator: object) -> str:
    if isinstance(operator, str) and operator in OPERATORS:
        return operator
    raise ValueError(f"{caller}: operator must be one of {', '.join(OPERATORS)}; got {printable(operator)}")


def backends(operator: str | None = None, /) -> list[str]:
    """Names of the backends that run here, best first; of an operator, those that have a kernel for it."""
    return _hopwell.backends() if operator is None else _hopwell.backends(_checked("backends", operator))


def explain(operator: str, /, **arguments: Any) -> str:
    """Which backend would run a call, and why not the others: one line a backend, such as `cpu: slower than sm90`.

    `operator` is the name of a function here, `arguments` are its own, by name; nothing is run. Bad arguments raise
    what the call itself would raise.
    """
    function = OPERATORS[_checked("explain", operator)]
    explanation = _hopwell.Explanation()
    before = explaining.set(True)
    try:
        function(**{**arguments, "backend": explanation})
    finally:
        explaining.reset(before)
    return explanation.text
