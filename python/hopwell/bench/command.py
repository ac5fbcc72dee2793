"""The command line: selects operators, runs each in a process of its own, and writes the results."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import BadArgument, check, record, scale
from .compare import HEAD, Row, dump, measure, problems_of
from .operators import OPERATORS
from .problem import Operator, Shape
from .provenance import provenance
from .scale import DEVICE

NOISE = {"cuda": 0.15, "cpu": 0.4}  # docs/comparisons.md explains the values
PICTURES = (".svg", ".png", ".pdf")
DESCRIPTION = """Compares every operator with the same operation of other packages, in one process, in turns.

  python -m hopwell.bench                                  with plain PyTorch
  python -m hopwell.bench paged_attention --peers          one operator, with every installed package
  python -m hopwell.bench paged_attention --shape b=64,context=4096,h_q=32,h_kv=32,d=128
  python -m hopwell.bench --peers --json FILE --plot FILE.svg
  python -m hopwell.bench --check RECORD                   with a record of --json, as make bench-check does

"times" is the peer's time over Hopwell's: above 1, Hopwell is faster. "share" and "peer's" are relative to the ceiling
that was measured in the same turns: a matrix product, or reading the same number of bytes. If a package is missing,
does not support a shape or gives another result, its line states the reason. Every operator has a process of its own,
so that a peer that crashes or hangs affects only this operator. Exit status: 0; 1 if results disagree, Hopwell fails, a
process dies or --check finds a share that is smaller than the noise allows; 2 for bad arguments; 3 if --check has no
record of this device."""


def shape_of(name: str, operator: Operator, text: str) -> Shape:
    """Parses `a=1,b=2` to a shape; BadArgument names the operator, the expected text and the text it got."""
    known = operator.settings({})
    shape: Shape = {}
    for word in text.split(","):
        key, equals, value = word.partition("=")
        if not equals or key not in known:
            raise BadArgument(f"{name}: --shape: expected NAME=N with NAME one of {', '.join(known)}; got {word!r}")
        if not value.isascii() or not value.isdigit() or len(value) > 12:
            raise BadArgument(f"{name}: --shape: expected a number for {key}; got {value!r}")
        shape[key] = int(value)
    return shape


def parser() -> argparse.ArgumentParser:
    """Returns the parser with all options."""
    options = argparse.ArgumentParser(
        prog="python -m hopwell.bench",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_argument("operator", nargs="*", help=f"operators to run (default: all): {', '.join(OPERATORS)}")
    options.add_argument("--peers", action="store_true", help="compare with every installed package, not only torch")
    options.add_argument("--alone", action="store_true", help="measure Hopwell and the ceiling, without torch")
    options.add_argument(
        "--shape", action="append", default=[], metavar="NAME=N,…", help="run this shape instead; may be repeated"
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="write a record to FILE")
    options.add_argument("--plot", type=Path, metavar="FILE", help=f"draw a picture to FILE: {', '.join(PICTURES)}")
    options.add_argument(
        "--check", type=Path, nargs="+", metavar="RECORD", help="compare with these records, without peers"
    )
    options.add_argument(
        "--noise",
        type=float,
        help="for --check: part by which a share may be smaller, 0 … 1 (0.15 on GPUs, 0.4 on CPUs)",
    )
    options.add_argument("--rounds", type=int, default=15, help="rounds to time (15)")
    options.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="time limit of an operator (300)")
    options.add_argument("--commit", default="", help="commit for the record, if the package does not know its own")
    options.add_argument("--dry-run", action="store_true", help="tiny shapes, to try the program; times mean nothing")
    # Internal: run these shapes of one operator in this process and write its rows to this file.
    options.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    return options


def checked(options: argparse.Namespace) -> None:
    """Raises BadArgument for errors that argparse does not find."""
    for name in options.operator:
        if name not in OPERATORS:
            raise BadArgument(f"operator: expected one of {', '.join(OPERATORS)}; got {name!r}")
    if options.rounds < 1:
        raise BadArgument(f"--rounds: expected at least 1; got {options.rounds}")
    if not options.limit > 0:
        raise BadArgument(f"--limit: expected more than 0 seconds; got {options.limit:g}")
    if options.noise is not None and not 0 < options.noise < 1:
        raise BadArgument(f"--noise: expected between 0 and 1; got {options.noise:g}")
    if options.noise is not None and not options.check:
        raise BadArgument("--noise: expected with --check only")
    if options.alone and (options.peers or options.plot):
        raise BadArgument("--alone: expected without --peers and --plot; there is no peer to compare with")
    if options.check and (options.shape or options.peers or options.dry_run or options.plot):
        raise BadArgument("--check: expected without --peers, --shape, --plot and --dry-run; the records name shapes")
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise BadArgument(f"{option}: expected a file in a folder that exists; got {path}")
    if options.plot is not None:
        if options.plot.suffix not in PICTURES:
            raise BadArgument(f"--plot: expected a name that ends in {', '.join(PICTURES)}; got {options.plot}")
        try:
            from . import plot  # noqa: F401
        except ImportError as error:
            words = f"--plot: expected matplotlib, of hopwell's extra [bench]; {error}: pip install matplotlib"
            raise BadArgument(words) from None


def chosen_shapes(name: str, options: argparse.Namespace) -> list[Shape]:
    """Returns the shapes to measure for an operator."""
    operator = OPERATORS[name]
    if options.shape:
        base = operator.tiny if options.dry_run else {}
        return [{**base, **shape_of(name, operator, text)} for text in options.shape]
    if options.dry_run:
        return [operator.tiny]
    return operator.shapes if DEVICE == "cuda" else operator.on_cpu


def in_its_own_process(name: str, shapes: list[Shape], options: argparse.Namespace) -> list[Row]:
    """Runs an operator in a process of its own and returns its rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        program = [sys.executable, "-m", "hopwell.bench", name, "--rounds", str(options.rounds)]
        program += ["--peers"] * options.peers + ["--alone"] * bool(options.alone or options.check)
        program += ["--dry-run"] * options.dry_run
        ended = ""
        try:
            code = subprocess.run(
                [*program, "--one", json.dumps(shapes), str(path)], timeout=options.limit, check=False
            ).returncode
            ended = f"the process ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            ended = f"stopped after {options.limit:g} s"
        rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    if ended:
        print(f"{name:26} {ended}; later shapes and peers are missing", flush=True)
        rows.append({"operator": name, "failed": ended})
    return rows


def one_operator(name: str, shapes: list[Shape], path: Path, options: argparse.Namespace) -> None:
    """Measures one operator in this process."""
    torch.manual_seed(0)
    if options.dry_run:
        scale.shrink()
    packages: Callable[[str], bool] | None = lambda package: options.peers or package == "torch"  # noqa: E731
    measure(name, shapes, options.rounds, None if options.alone else packages, lambda rows: keep(path, rows))


def keep(path: Path, rows: list[Row]) -> None:
    """Replaces the file as a whole, so that the earlier rows survive if the process dies."""
    part = path.with_suffix(".part")
    part.write_text(dump(rows))
    part.replace(path)


def tell(rows: list[Row], missing: list[str], peers: bool) -> None:
    """Prints a summary below the table."""
    if peers and missing:
        print(f"not installed: {', '.join(missing)}")
    if peers:
        print("tilelang: its kernels of these operators are examples that its wheel does not hold; no call to compare")
    timed = sum("times_as_fast" in row for row in rows)
    counts = {verdict: sum(verdict in row for row in rows) for verdict in ("missing", "failed", "disagrees")}
    print(f"{timed} compared" + "".join(f", {count} {verdict}" for verdict, count in counts.items() if count))


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns the exit status."""
    checked(options)
    names = list(dict.fromkeys(options.operator)) or list(OPERATORS)
    if options.check:
        noise = NOISE[DEVICE] if options.noise is None else options.noise
        rows: list[dict[str, Any]] = []

        def fresh(name: str, shapes: list[Shape]) -> list[Row]:
            found = in_its_own_process(name, shapes, options)
            rows.extend(found)
            return found

        status = check.check(options.check, options.operator, record.device(), noise, fresh)
        record.write(options.json, rows, commit=options.commit, rounds=options.rounds)
        return status
    shapes = {name: chosen_shapes(name, options) for name in names}
    print(HEAD, flush=True)
    versions, missing = record.versions()
    results: list[Row] = []
    for name in names:
        results += in_its_own_process(name, shapes[name], options)
        more = {"versions": versions, "missing": missing if options.peers else None}
        record.write(options.json, results, rounds=options.rounds, commit=options.commit, **more)
    tell(results, missing, options.peers)
    if options.plot and any("times_as_fast" in row for row in results):
        from . import plot

        made = record.of(results, commit=options.commit)
        figure = plot.draw(made, provenance(made))
        if options.plot.suffix == ".svg":
            options.plot.write_text(plot.svg(figure))
        else:
            figure.savefig(options.plot, dpi=150)
    return 1 if problems_of(results) else 0


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line, runs it, and returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        if options.one:
            one_operator(options.operator[0], json.loads(options.one[0]), Path(options.one[1]), options)
            return 0
        return run(options)
    except BadArgument as error:
        print(f"hopwell.bench: {error}", file=sys.stderr)
        return 2
