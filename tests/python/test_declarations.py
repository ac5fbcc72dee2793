"""The Python functions have the arguments that src/ops/*/declaration.py declares."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hopwell
import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = json.loads(
    subprocess.run(
        [sys.executable, "-B", ROOT / "scripts" / "declare", "--json"], check=True, capture_output=True, text=True
    ).stdout
)


def parameter(argument: dict[str, Any]) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY if argument["keyword_only"] else inspect.Parameter.POSITIONAL_OR_KEYWORD
    default = argument.get("default")
    if default == "required" or (not argument["keyword_only"] and argument["kind"] in ("Tensor", "NumberOrTensor")):
        default = inspect.Parameter.empty
    return inspect.Parameter(argument["python"], kind, default=default)


@pytest.mark.parametrize("operator", TABLE["operators"], ids=lambda operator: operator["name"])
def test_arguments(operator: dict[str, Any]) -> None:
    given = [a for a in operator["arguments"] if a.get("allocation") != "new"]
    declared = {a["python"]: parameter(a) for a in given}
    signature = inspect.signature(getattr(hopwell, operator["name"])).parameters
    found = {
        name: p.replace(annotation=inspect.Parameter.empty)
        for name, p in signature.items()
        if name not in ("backend", "stream")
    }
    assert found == declared
    positional = [name for name, p in found.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == [a["python"] for a in given if not a["keyword_only"]]
