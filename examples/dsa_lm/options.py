"""Options of the examples, and their main function. A wrong option is reported in one line."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from dsa_lm.report import DemoError, console

QUICK = "a smaller model on a part of the text: seconds instead of minutes"


class Parser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        raise DemoError(message)


class ExperimentParser(Parser):
    """Has the options of both experiments. `name`: the folder in runs/ for the results if --name is not given."""

    def __init__(self, program: str, description: str | None, name: str) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=program, description=description, formatter_class=formatter)
        self.add_argument(
            "--text",
            nargs="+",
            type=Path,
            default=[],
            metavar="PATH",
            help="files or folders of UTF-8 text (default: the Python standard library's sources)",
        )
        self.add_argument("--name", default=name, help=f"results go to runs/NAME (default: {name})")

    def options(self, arguments: list[str] | None) -> argparse.Namespace:
        """Returns the checked options."""
        options = self.parse_args(arguments)
        if Path(options.name).name != options.name:
            self.error(f"argument --name: expected a plain name; got {options.name!r}")
        return options


def run_experiment(
    program: str, parse: Callable[[], argparse.Namespace], module: str, interrupted: str = "interrupted"
) -> int:
    """Runs `module.run(options, console)` and returns the exit code: 0 if all claims held, 1 if not, 2 after an error,
    which is printed in one line.
    """
    # PyTorch's threads spin while they wait, and take processor time from the library's threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        options = parse()
        run = importlib.import_module(module).run  # after the line above: OpenMP reads it when PyTorch is imported
        return 0 if run(options, console()) else 1
    except DemoError as error:
        reason = str(error)
    except KeyboardInterrupt:
        reason = interrupted
    print(f"{program}: {reason}", file=sys.stderr)
    return 2


def at_least(least: int, below: int | None = None) -> Callable[[str], int]:
    """Returns the type of an option for whole numbers that are at least `least` and less than `below`."""

    def number(value: str) -> int:
        if value.isdecimal() and int(value) >= least and (below is None or int(value) < below):
            return int(value)
        limit = f" and below {below}" if below else ""
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}{limit}; got {value!r}")

    return number


seed = at_least(0, below=2**64)  # the range of PyTorch's seeds
