"""Draws all pictures of the documents from the committed records.

python docs/plots.py                 the README's picture, docs/pictures/peers.svg
python docs/plots.py --check         fails if that file differs from the picture of the records
python docs/plots.py --all FOLDER    the pictures of the site, for `make docs`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

import records
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

plot = records.module("plot")
plt = plot.plt

README_PICTURE = Path(__file__).parent / "pictures" / "peers.svg"

MACHINES = ("h200", "h100")  # machines of the README's picture
MLA = {
    "sparse_mla_forward": ("Sparse MLA, forward", "FlashMLA"),
    "sparse_mla_backward": ("Sparse MLA, backward", "cuDNN front end"),
    "attention_distribution": ("Attention distribution", "cuDNN front end"),
}


def by_keys(axes: Axes, operator: str, peer: str, machine: str = "h200") -> None:
    """Plots shares of the matrix product over the number of keys: filled marks for 128 heads, open marks for 64."""
    rows = records.peer_rows_by_keys(operator, peer, machine)
    for heads, marker, fill in ((128, "o", "full"), (64, "s", "none")):
        chosen = sorted((r for r in rows if r["shape"]["h_q"] == heads), key=lambda r: r["shape"]["s_kv"])
        keys = [r["shape"]["s_kv"] for r in chosen]
        for name, share, color, line in (("Hopwell", "share", plot.OURS, "-"), (peer, "peer_share", plot.PEER, "--")):
            values = [r[share] for r in chosen]
            label = f"{name}, {heads} heads"
            axes.plot(keys, values, color=color, marker=marker, fillstyle=fill, linestyle=line, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({r["shape"]["s_kv"] for r in rows})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: records.number(int(value))))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_xlabel("keys")
    axes.grid(axis="y", alpha=0.3)


def readme_bars() -> list[tuple[str, float, float, float]]:
    """Returns a bar for each peer and shape of the operators that are limited by bytes or latency."""
    bars = [
        plot.bar(row, f"paged_attention, {describe_decode(row)} · FlashInfer")
        for row in records.peer_rows("paged_attention")
        if row["peer"] == "FlashInfer" and describe_decode(row)
    ]
    bars += [
        plot.bar(row, f"lightning_indexer, {queries(row)} · cuDNN front end")
        for row in records.peer_rows("lightning_indexer")
        if row["peer"] == "cuDNN front end"
    ]
    bars += [
        plot.bar(row, "lightning_indexer_backward · cuDNN front end")
        for row in records.peer_rows("lightning_indexer_backward")
        if row["peer"] == "cuDNN front end"
    ]
    linear = [row for row in records.peer_rows("nvfp4_linear") if row["peer"].startswith("torch")]
    for n in sorted({row["shape"]["n"] for row in linear}):
        chosen = sorted((row for row in linear if row["shape"]["n"] == n), key=lambda row: row["times_as_fast"])
        label = f"nvfp4_linear, batch {n} · bf16 in PyTorch"
        bars.append(
            (
                label,
                median(row["times_as_fast"] for row in chosen),
                chosen[0]["times_as_fast"],
                chosen[-1]["times_as_fast"],
            )
        )
    return bars


def describe_decode(row: records.Row) -> str:
    """Returns a name for the decode shapes that the README shows, or "" for other shapes."""
    shape = row["shape"]
    if not shape:
        return "64 × 4,096 tokens"
    if "shortest" in shape:
        return "ragged"
    if "longest" in shape:
        return f"one 65,536 among 512s, {shape.get('h_q', 32)} heads"
    if shape.get("b") == 1:
        return f"one sequence of {shape['context']:,}"
    return ""


def queries(row: records.Row) -> str:
    count = row["shape"].get("s_q", records.default_shapes()["lightning_indexer"]["s_q"])
    return "one query" if count == 1 else f"{count} queries"


def readme_picture() -> str:
    plot.style()
    figure = plt.figure(figsize=(10, 10), layout="constrained")
    *above, below = figure.subfigures(3, 1, height_ratios=[1, 1, 1.3])
    for part, machine in zip(above, MACHINES, strict=True):
        panels = part.subplots(1, 3, sharey=True)
        for axes, (operator, (title, peer)) in zip(panels, MLA.items(), strict=True):
            by_keys(axes, operator, peer, machine)
            axes.set_title(f"{title}, {machine.upper()}", loc="left")
            axes.legend(frameon=False, fontsize=7, loc="lower left", borderpad=0)
        panels[0].set_ylabel("share of cuBLAS' bf16 product")
    axes = below.subplots()
    plot.ratios(axes, readme_bars())
    axes.set_title("Decode, indexer and 4-bit weights", loc="left")
    made = dict.fromkeys(records.provenance(record) for machine in MACHINES for record in records.peer_records(machine))
    below.supxlabel("Timed in turns on " + ";\n".join(made), fontsize=8)
    return plot.svg(figure)


def operator_picture(operator: str) -> str:
    """Returns the picture for an operator's page, or "" if no peer was measured."""
    rows = records.peer_rows(operator)
    if not rows:
        return ""
    plot.style()
    if operator in MLA:
        figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
        by_keys(axes, operator, MLA[operator][1])
        axes.set_ylabel("share of cuBLAS' bf16 product")
        figure.legend(frameon=False, fontsize=8, loc="outside upper left", ncols=2)
        return plot.svg(figure)
    figure, axes = plt.subplots(figsize=(6.4, 0.8 + 0.27 * len(rows)), layout="constrained")
    plot.ratios(axes, [plot.bar(row, f"{records.short_text(row)} · {row['peer']}") for row in rows])
    return plot.svg(figure)


def draw_all(folder: Path) -> None:
    """Writes a picture for each operator to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for operator in sorted({row["operator"] for record in records.peer_records("h200") for row in record["results"]}):
        (folder / f"{operator}.svg").write_text(operator_picture(operator))


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--all", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.all:
        draw_all(options.all)
        return 0
    picture = readme_picture()
    if options.check:
        same = README_PICTURE.exists() and README_PICTURE.read_text() == picture
        if not same:
            print(f"{README_PICTURE} is out of date: run python docs/plots.py", file=sys.stderr)
        return 0 if same else 1
    README_PICTURE.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
