"""Compares a new run with committed records: `python -m hopwell.bench --check RECORD…`, as `make bench-check` does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from . import BadArgument
from .operators import OPERATORS
from .problem import Shape

AGAIN = 2  # repeats before a smaller share counts, because another process may have disturbed the measurement
SLOWER, OTHER_DEVICE = 1, 3  # exit statuses; 0: as recorded, 2: bad arguments
Recorded = dict[str, dict[str, tuple[Shape, float]]]  # by operator and shape: all settings of the shape, and its share


def read(path: Path) -> dict[str, Any]:
    """Reads a record of `--json`; BadArgument names the fault of the file."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadArgument(f"--check: expected a record of hopwell.bench; {path}: {error}") from None
    if not isinstance(record, dict) or not {"device", "results"} <= record.keys():
        raise BadArgument(f"--check: expected a record of hopwell.bench; {path} has no device or no results")
    return record


def shares(records: list[dict[str, Any]], only: list[str]) -> tuple[Recorded, dict[str, int]]:
    """Returns each shape's share (median over its peers), and for each operator the number of shapes without one."""
    found: dict[str, dict[str, list[float]]] = {}
    shapes: dict[tuple[str, str], Shape] = {}
    without: dict[str, set[str]] = {}
    for row in (row for record in records for row in record["results"]):
        name = row["operator"]
        if name not in OPERATORS:
            raise BadArgument(f"--check: expected one of {', '.join(OPERATORS)}; the record has {name!r}")
        if (only and name not in only) or "shape" not in row:
            continue
        shape = OPERATORS[name].settings(row.get("settings") or row["shape"])  # newer settings have their defaults
        text = ",".join(f"{key}={value}" for key, value in shape.items())
        if "share" in row:
            shapes[name, text] = shape
            found.setdefault(name, {}).setdefault(text, []).append(row["share"])
        elif "us" in row:
            without.setdefault(name, set()).add(text)
    recorded = {name: {t: (shapes[name, t], median(v)) for t, v in by.items()} for name, by in found.items()}
    return recorded, {name: len(texts) for name, texts in without.items()}


def best(rows: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """Returns the largest share of each operator and shape."""
    found: dict[tuple[str, str], float] = {}
    for row in rows:
        if "share" in row:
            key = row["operator"], ",".join(f"{name}={value}" for name, value in row["settings"].items())
            found[key] = max(row["share"], found.get(key, 0.0))
    return found


def slower(recorded: Recorded, fresh: list[dict[str, Any]], noise: float) -> dict[str, list[Shape]]:
    """Returns the measured shapes whose share is below the recorded one by more than the noise."""
    got = best(fresh)
    found = {
        name: [shape for text, (shape, share) in by.items() if got.get((name, text), share) < share * (1 - noise)]
        for name, by in recorded.items()
    }
    return {name: shapes for name, shapes in found.items() if shapes}


def verdicts(recorded: Recorded, fresh: list[dict[str, Any]], noise: float) -> tuple[list[str], bool]:
    """Returns a line for each recorded shape, and True if every shape was measured and none is slower."""
    got = best(fresh)
    lines, held = [], True
    for name, by_shape in recorded.items():
        for text, (_, share) in by_shape.items():
            now = got.get((name, text))
            if now is None:
                verdict = "NOT MEASURED"
            elif now < share * (1 - noise):
                verdict = "SLOWER"
            elif now * (1 - noise) > share:
                verdict = "faster: record it again"
            else:
                verdict = "as recorded"
            held &= verdict not in ("SLOWER", "NOT MEASURED")
            figures = f"{share:9.3f} {now:9.3f} {now / share:8.3f}" if now is not None else f"{share:9.3f} {'':18}"
            lines.append(f"{name:26} {text:60} {figures}  {verdict}")
    return lines, held


def check(
    paths: list[Path],
    only: list[str],
    device: str,
    noise: float,
    measure: Callable[[str, list[Shape]], list[dict[str, Any]]],
) -> int:
    """Returns the exit status and prints the reason.

    Args:
        paths: the records. Only records of this device count, because a share is relative to one device's ceiling.
        only: operators to check; empty: all operators of the records.
        device: this machine's device, as records name it.
        noise: part by which a share may be below the recorded one.
        measure: measures shapes of an operator next to the ceiling, and returns the rows.
    """
    records = [read(path) for path in paths]
    of_this = [record for record in records if record["device"] == device]
    if not of_this:
        known = ", ".join(sorted({str(record["device"]) for record in records}))
        print(f"nothing was compared: the records are of {known}; this is {device}")
        return OTHER_DEVICE
    recorded, without = shares(of_this, only)
    for name, count in without.items():
        print(f"not compared, for they were recorded without a share of a ceiling: {count} of {name}")
    if not recorded:
        print(f"nothing was compared: the records of {device} have no share of {', '.join(only) or 'any operator'}")
        return OTHER_DEVICE
    fresh = [row for name, by in recorded.items() for row in measure(name, [shape for shape, _ in by.values()])]
    for _ in range(AGAIN):
        for name, shapes in slower(recorded, fresh, noise).items():
            print(f"{name}: smaller than the noise allows; measured again")
            fresh += measure(name, shapes)
    lines, held = verdicts(recorded, fresh, noise)
    print(f"\n{'operator':26} {'shape':60} {'recorded':>9} {'now':>9} {'now/then':>8}")
    print("\n".join(lines))
    print(f"{len(lines)} shapes, a share of the ceiling may be {noise:.0%} smaller: {'held' if held else 'NOT HELD'}")
    return 0 if held else SLOWER
