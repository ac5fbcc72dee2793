"""Every operator that `python -m hopwell.bench` compares, and the shapes that it is measured at.

A function of these modules has an operator's name. It makes random inputs of one shape and gives Hopwell's call and
those of the peers. Its arguments are the shape; their defaults are GPUs'.
"""

from importlib import import_module
from pkgutil import iter_modules

from ..problem import MEASURED

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
OPERATORS = dict(sorted(MEASURED.items()))
