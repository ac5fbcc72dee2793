"""Options of the examples. A wrong option is reported in one line."""

import argparse
from collections.abc import Callable
from typing import NoReturn

from dsa_lm.report import DemoError


class Parser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        raise DemoError(message)


def at_least(least: int, below: int | None = None) -> Callable[[str], int]:
    """Returns the type of an option for whole numbers that are at least `least` and less than `below`."""

    def number(value: str) -> int:
        if value.isdecimal() and int(value) >= least and (below is None or int(value) < below):
            return int(value)
        limit = f" and below {below}" if below else ""
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}{limit}; got {value!r}")

    return number


seed = at_least(0, below=2**64)  # the range of PyTorch's seeds
