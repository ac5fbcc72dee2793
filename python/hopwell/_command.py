"""Runs the commands of an installed wheel. The compiled program lies next to the compiled module."""

import os
import sys
from pathlib import Path

from . import _hopwell

COMPARES = {"--peers", "--check", "--plot"}


def main(*words: str) -> None:
    """Replaces this process with the program and puts `words` before the arguments.

    `hopwell bench` with an option of the comparison with other packages is `hopwell.bench`.
    """
    if sys.argv[1:2] == ["bench"] and COMPARES & {word.partition("=")[0] for word in sys.argv}:
        os.execv(sys.executable, [sys.executable, "-m", "hopwell.bench", *sys.argv[2:]])
    program = Path(_hopwell.__file__).parent / "bin" / "hopwell"
    if not program.exists():
        sys.exit("hopwell: built without the command (HOPWELL_BUILD_CLI=OFF), as make demo does; make build builds it")
    os.execv(program, [str(program), *words, *sys.argv[1:]])


def emulate() -> None:
    """Runs `hopwell emulate`."""
    main("emulate")
