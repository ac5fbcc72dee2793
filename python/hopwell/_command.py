"""Runs the commands of an installed wheel. The compiled program lies next to the compiled module."""

import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

from . import _hopwell

COMPARES = {"--peers", "--check", "--plot"}


def main(*words: str) -> None:
    """Replaces this process with the program and puts `words` before the arguments.

    `info` also has Python's facts.
    `hopwell bench` with an option of the comparison with other packages is `hopwell.bench`.
    """
    if sys.argv[1:2] == ["bench"] and COMPARES & {word.partition("=")[0] for word in sys.argv}:
        os.execv(sys.executable, [sys.executable, "-m", "hopwell.bench", *sys.argv[2:]])
    program = Path(_hopwell.__file__).parent / "bin" / "hopwell"
    if not program.exists():
        sys.exit("hopwell: built without the command (HOPWELL_BUILD_CLI=OFF), as make demo does; make build builds it")
    arguments = [str(program), *words, *sys.argv[1:]]
    if arguments[1:] in (["info"], ["info", "--json"]):
        sys.exit(info(arguments))
    os.execv(program, arguments)


def info(command: list[str]) -> int:
    """Prints the program's facts about the machine, and the versions of Python and PyTorch."""
    as_json = command[-1] == "--json"
    ran = subprocess.run(command, stdout=subprocess.PIPE if as_json else None, text=True, check=False)
    if ran.returncode != 0:
        return ran.returncode
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as the program: a reader that ends early is no error
    versions = {"python": platform.python_version(), "torch": None, "system": platform.platform()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch")  # without an import, which takes seconds
    if as_json:
        print(json.dumps(json.loads(ran.stdout) | versions, indent=1))
    else:
        print(f"\nPython {versions['python']}, PyTorch {versions['torch'] or 'not installed'}, {versions['system']}")
    return 0


def emulate() -> None:
    """Runs `hopwell emulate`."""
    main("emulate")
