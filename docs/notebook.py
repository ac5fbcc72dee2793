"""Converts a script in the percent format to a notebook: `# %%` begins a code cell, `# %% [markdown]` a text cell.

python docs/notebook.py SCRIPT NOTEBOOK
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def convert(script: Path, notebook: Path) -> None:
    """Reads the script and writes the notebook."""
    cells = []
    for kind, body in re.findall(
        r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", script.read_text(), re.MULTILINE | re.DOTALL
    ):
        text = body.strip("\n")
        if kind:
            cells.append(
                {"cell_type": "markdown", "metadata": {}, "source": re.sub(r"^# ?", "", text, flags=re.MULTILINE)}
            )
        else:
            code = {"cell_type": "code", "metadata": {}, "source": text, "outputs": [], "execution_count": None}
            cells.append(code)
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    notebook.parent.mkdir(parents=True, exist_ok=True)
    notebook.write_text(
        json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1)
    )


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
