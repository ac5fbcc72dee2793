"""Makes the reference of the instruction layer from its headers (src/arch) and from the record of the certification."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pieces import table

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "h100" / "certification.json"
PTX = "https://docs.nvidia.com/cuda/parallel-thread-execution/"
FUNCTION = re.compile(r"HOPWELL_DEVICE [^(]*?(\w+)\(")  # as tests/arch/certify/coverage.hpp finds them


def functions(header: Path) -> dict[str, str]:
    """Returns the device functions of a header with their comments. Overloads share an entry."""
    found: dict[str, list[str]] = {}
    comment: list[str] = []
    hidden = False  # in namespace detail
    for line in header.read_text().splitlines():
        if line.startswith(("namespace detail", "}  // namespace detail")):
            hidden = line.startswith("namespace")
        if line.startswith("///"):
            comment.append(line.removeprefix("///").strip())
        elif (match := FUNCTION.match(line)) and not hidden:
            found.setdefault(match[1], []).extend(comment)
            comment = []
        elif not line.startswith(("#", "template")):
            comment = []
    return {name: " ".join(text) for name, text in found.items()}


def description(comment: str) -> str:
    """The comment as a cell of a table, with links to PTX's sections."""
    text = comment.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[").replace("]", "\\]")
    return re.sub(r"PTX: (#[\w-]+)", rf"[PTX]({PTX}\1)", text)


def instructions(generation: str) -> str:
    """The functions of one folder of src/arch, such as sm90, by header."""
    record = json.loads(RECORD.read_text())
    text = ""
    for header in sorted((ROOT / "src" / "arch" / generation).glob("*.hpp")):
        rows = []
        for name, comment in functions(header).items():
            agrees = record["functions"].get(name) == "agrees" and generation != "sm100"
            rows.append(
                [
                    f"`{name}`",
                    description(comment) or "see the function above",
                    record["device"].split()[1] if agrees else "no",
                ]
            )
        if rows:
            text += f"\n### `<hopwell/arch/{generation}/{header.name}>`\n\n"
            text += table(["function", "instruction", "certified on"], rows)
    return text
