"""The operators' declarations, as `scripts/declare --json` prints them."""

import json
import subprocess
import sys
from pathlib import Path

_PROGRAM = Path(__file__).resolve().parents[2] / "scripts" / "declare"
_PRINTED = subprocess.run([sys.executable, "-B", _PROGRAM, "--json"], check=True, capture_output=True)
OPERATORS = json.loads(_PRINTED.stdout)["operators"]


def names(kind: str, of_type: str = "") -> tuple[str, ...]:
    """Python's names of the arguments of a kind in all operators, each once."""
    arguments = [a for operator in OPERATORS for a in operator["arguments"]]
    return tuple(dict.fromkeys(a["python"] for a in arguments if a["kind"] == kind and of_type in (a.get("type"), "")))
