"""Writes the line below each marker of a generated piece, for readers of the raw pages: it names a command or a file.

python docs/raw.py            writes these lines into all pages
python docs/raw.py --check    fails if a page's lines differ

The site has the piece instead of the line.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import generated

ROOT = Path(__file__).resolve().parents[1]


def stand_in(page: Path, piece: str, arguments: str) -> str:
    """Returns the line for a piece of a page."""
    name = page.relative_to(ROOT)

    def link(text: str, target: str) -> str:
        return f"[{text}]({os.path.relpath(ROOT / target, page.parent)})"

    if piece == "python":
        names = [word if "." in word else f"hopwell.{word}" for word in arguments.split()]
        return f"Not in the raw page: {' and '.join(f'`help({word})`' for word in names)} in Python prints it."
    if piece in ("module", "docstring"):
        return f'Not in the raw page: `help("{arguments}")` in Python prints it.'
    if piece == "compat":
        files = link("the files", "python/hopwell/compat")
        return f'Not in the raw page: `help("hopwell.compat.NAME")` in Python prints it. NAME: as in {files}.'
    if piece == "backends":
        return f"Not in the raw page: `hopwell check {arguments} --list` prints it."
    if piece == "cpp":
        return f"{link('A program', f'tests/install/operators/{arguments}.cpp')}. The site has the argument struct too."
    if piece == "command":
        return "Not in the raw page: `hopwell --help` prints it, and `hopwell check --help` for one command."
    if piece == "instructions":
        return f"Described in {link('the headers', f'src/arch/{arguments}')}."
    if piece == "file":
        return f"This page is {link(arguments, arguments)}."
    return f"Not in the raw page: `python docs/generated.py {name}` prints it."


def written(page: Path) -> str:
    """Returns the page's text with its lines."""

    def lines(found: re.Match[str]) -> str:
        marker = found[0].split("\n")[0]
        return marker if found[1] == "contents" else f"{marker}\n> {stand_in(page, found[1], found[2])}"

    return generated.MARKER.sub(lines, page.read_text())


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    """Runs the command line."""
    wrong = [page for page in pages() if page.read_text() != written(page)]
    for page in wrong:
        if "--check" in sys.argv:
            print(f"{page.relative_to(ROOT)}: run python docs/raw.py", file=sys.stderr)
        else:
            page.write_text(written(page))
    return 1 if wrong and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
