"""Options of the examples: wrong ones are errors in one line."""

import argparse
from collections.abc import Callable
from typing import NoReturn

from dsa_lm.report import DemoError


class Parser(argparse.ArgumentParser):
    """Errors in one line."""

    def error(self, message: str) -> NoReturn:
        raise DemoError(message)


def at_least(least: int, below: int | None = None) -> Callable[[str], int]:
    """The type of an option that takes whole numbers from `least` on, and below `below`."""

    def number(value: str) -> int:
        if value.isdecimal() and int(value) >= least and (below is None or int(value) < below):
            return int(value)
        limit = f" and below {below}" if below else ""
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}{limit}; got {value!r}")

    return number


seed = at_least(0, below=2**64)  # what PyTorch takes
