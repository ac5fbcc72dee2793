"""The operators, described for the tests that treat all alike: a file each, or one for a few that belong together."""

from importlib import import_module
from pkgutil import iter_modules

import hopwell._ops

from ._operator import Operator

_modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
_found = {one.name: one for module in _modules for one in vars(module).values() if isinstance(one, Operator)}
if missing := set(hopwell._ops.OPERATORS) - set(_found):
    raise LookupError(f"tests/python/operators: describe {', '.join(sorted(missing))}, as normalize_l1.py does")
OPERATORS = {name: _found[name] for name in hopwell._ops.OPERATORS}
OPERATOR_AND_DTYPE = [(name, dtype) for name, operator in OPERATORS.items() for dtype in operator.dtypes]
