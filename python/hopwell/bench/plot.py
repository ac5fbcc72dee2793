"""Draws records. It imports nothing of Hopwell, because the documents are built without the compiled module."""

from __future__ import annotations

import io
from typing import Any

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

Bar = tuple[str, float, float, float]  # label, ratio, and both ends of the middle half of the runs

OURS, PEER, OTHER = "#0b6e4f", "#9aa5b1", "#d9822b"
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def style() -> None:
    """Sets fonts and frames of all pictures."""
    mpl.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "svg.hashsalt": "hopwell",
            "svg.fonttype": "path",
            "figure.facecolor": "white",
        }
    )


def svg(figure: Figure) -> str:
    """Returns the SVG text. It holds no date and no trailing spaces, so that equal records give equal text."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def ratios(axes: Axes, bars: list[Bar]) -> None:
    """Draws the ratios (peer's time over Hopwell's) as bars that start at 1, with the middle half of the runs."""
    for i, (_, ratio, low, high) in enumerate(bars):
        axes.barh(i, ratio - 1, left=1, color=OURS if ratio >= 1 else OTHER, height=0.65)
        axes.plot([low, high], [i, i], color="black", linewidth=0.8)
        x, side = (max(ratio, high) * 1.03, "left") if ratio >= 1 else (min(ratio, low) / 1.03, "right")
        axes.text(x, i, f"{ratio:.2f}", ha=side, va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    limits(axes, bars)
    axes.set_xlabel("the other's time ÷ Hopwell's: to the right of 1 Hopwell is the faster")


def limits(axes: Axes, bars: list[Bar]) -> None:
    """Sets the range of the axis."""
    longest, shortest = max(ratio for _, ratio, *_ in bars), min(ratio for _, ratio, *_ in bars)
    least = min(0.6, 0.8 * shortest)
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS if least <= tick <= 2 * longest]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(least, 1.5 * longest)


def bar(row: dict[str, Any], label: str) -> Bar:
    """Returns the bar of a record's row."""
    low, high = row["middle_half"]
    return label, row["times_as_fast"], low, high


def draw(record: dict[str, Any], made: str) -> Figure:
    """Draws a panel for each operator with a bar for each comparison, the record's origin, and the failed peers."""
    style()
    measured = [row for row in record["results"] if "times_as_fast" in row]
    without = sorted({f"{row['peer']}" for row in record["results"] if "missing" in row})
    operators = list(dict.fromkeys(row["operator"] for row in measured))
    if not operators:
        raise ValueError("hopwell.bench: nothing to draw: no comparison of the record was timed")
    panels = [[row for row in measured if row["operator"] == operator] for operator in operators]
    heights = [len(rows) + 2.5 for rows in panels]
    figure = plt.figure(figsize=(9, 0.3 * sum(heights) + 0.6), layout="constrained")
    subplots = figure.subplots(len(panels), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, operator, rows in zip(subplots, operators, panels, strict=True):
        texts = [", ".join(f"{name} {value}" for name, value in row["shape"].items()) for row in rows]
        ratios(axes, [bar(r, " · ".join(filter(None, (text, r["peer"])))) for r, text in zip(rows, texts, strict=True)])
        axes.set_title(operator, loc="left")
        axes.set_xlabel("")
    limits(axes, [bar(row, "") for row in measured])
    note = f"Timed in turns on {made}"
    note += f"\nMissing: {', '.join(without)}" if without else ""
    axes.set_xlabel(f"the other's time ÷ Hopwell's: to the right of 1 Hopwell is the faster\n{note}")
    return figure
