"""The `hopwell` command of an installed wheel: the compiled program that lies beside this file."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Becomes the program, with the same arguments."""
    program = Path(__file__).parent / "bin" / "hopwell"
    os.execv(program, [str(program), *sys.argv[1:]])
