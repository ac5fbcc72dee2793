"""Compares the results of two calls, and times the calls in turns with the machine's ceiling."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from . import scale
from .operators import OPERATORS
from .problem import Call, Peer, Problem, Shape
from .scale import DEVICE

Row = dict[str, Any]
Work = Callable[[], object]


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Prints `text` on standard error if the block needs more than two seconds."""
    timer = threading.Timer(2, lambda: print(f"… {text}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills new tensors with NaN, or with the largest integer, so that unwritten memory is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # this fills uninitialised memory
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about operations that are not deterministic
            if not torch.empty(4, device=DEVICE).isnan().all():
                raise RuntimeError("this PyTorch does not fill new tensors")
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the norm of the difference, divided by the larger of both norms; 0 if both are zero."""
    return float((a - b).norm() / torch.maximum(a.norm(), b.norm()).clamp_min(1e-300))


def difference(problem: Problem, peer: Peer, theirs: Call) -> float:
    """Returns the largest relative difference of the results; NaN if an element is unwritten."""
    with poisoned():
        pairs = list(zip(problem.read(problem.ours(0)), peer.read(theirs(0)), strict=True))
        for a, b in pairs:
            if a.shape != b.shape:
                raise ValueError(f"gives {list(b.shape)} where ours is {list(a.shape)}")
        errors = [relative(a.double(), b.double()) for a, b in pairs]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def prepared(call: Call, copies: int) -> tuple[Work, bool]:
    """Returns work that runs one call for each copy of the inputs, and True if it is a CUDA graph."""

    def work() -> None:
        for i in range(copies):
            call(i)

    work()
    if DEVICE == "cpu":
        return work, False
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except Exception as error:
        print(f"no graph, started by Python: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return work, False
    return graph.replay, True


def seconds_in_turns(works: list[Work], rounds: int) -> list[list[float]]:
    """Returns for each work its time in every round. A warm-up round comes first and is not returned."""
    times: list[list[float]] = [[] for _ in works]
    other = torch.ones(int(scale.COLD_BYTES) // 4, device=DEVICE)
    for round_ in range(rounds + 1):
        taken = []
        if DEVICE == "cpu":
            for work in works:
                other.sum()
                started = time.perf_counter()
                work()
                taken.append(time.perf_counter() - started)
        else:
            events = []
            for work in works:
                other.sum()
                begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
                begin.record()
                work()
                end.record()
                events.append((begin, end))
            torch.cuda.synchronize()
            taken = [begin.elapsed_time(end) * 1e-3 for begin, end in events]
        if round_:
            for of_work, seconds in zip(times, taken, strict=True):
                of_work.append(seconds)
    return times


def ceiling(problem: Problem) -> tuple[str, Work, float]:
    """Returns the ceiling's name, its work, and the part of this work that one call has to do."""
    if problem.operations:
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        a, b, c = torch.randn(3, scale.PRODUCT, scale.PRODUCT, dtype=dtype, device=DEVICE).unbind()
        return "matrix product", lambda: torch.mm(a, b, out=c), problem.operations / (2 * scale.PRODUCT**3)
    numbers = max(1, round(problem.bytes / 4))
    memory = torch.ones(problem.copies, numbers, device=DEVICE)
    reading, _ = prepared(lambda i: memory[i].sum(), problem.copies)
    return "read", reading, 1 / problem.copies


def alone(problem: Problem, rounds: int) -> Row:
    """Measures Hopwell without a peer: microseconds of a call, and its share of the ceiling."""
    ours, _ = prepared(problem.ours, problem.copies)
    name, limit, part = ceiling(problem)
    times = seconds_in_turns([ours, limit], rounds)
    return {
        "us": median(times[0]) * 1e6 / problem.copies,
        "ceiling": name,
        "share": median(c * part * problem.copies / t for t, c in zip(*times, strict=True)),
    }


def compare(problem: Problem, peer: Peer, rounds: int) -> Row:
    """Measures Hopwell and a peer. A peer that is missing, disagrees or fails also yields a row, with the reason."""
    try:
        theirs = peer.prepare()
    except ImportError as error:
        return {"missing": f"needs {peer.package}: {error}"}
    except Exception as error:
        return {"failed": named(error)}
    try:
        error_ = difference(problem, peer, theirs)
    except Exception as error:
        return {"failed": named(error)}
    agreement: Row = {"error": None if math.isnan(error_) else error_, "tolerance": problem.tolerance}
    if not error_ < problem.tolerance:
        by = "holds NaN where one of the two is not" if math.isnan(error_) else f"differs by {error_:.1e}"
        return {"disagrees": f"{by}; at most {problem.tolerance:.0e} is rounding", **agreement}
    try:
        return {**timed(problem, theirs, rounds), **agreement, **({"note": peer.note} if peer.note else {})}
    except Exception as error:
        return {"failed": named(error)}


def timed(problem: Problem, theirs: Call, rounds: int) -> Row:
    """Times Hopwell, the peer and the ceiling in turns."""
    ours, _ = prepared(problem.ours, problem.copies)
    others, in_graph = prepared(theirs, problem.copies)
    name, limit, part = ceiling(problem)
    times = seconds_in_turns([ours, others, limit], rounds)
    ratios = sorted(b / a for a, b in zip(times[0], times[1], strict=True))
    shares = [median(c * part * problem.copies / t for t, c in zip(times[i], times[2], strict=True)) for i in (0, 1)]
    return {
        "us": median(times[0]) * 1e6 / problem.copies,
        "peer_us": median(times[1]) * 1e6 / problem.copies,
        "times_as_fast": median(ratios),
        "middle_half": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "ceiling": name,
        "share": shares[0],
        "peer_share": shares[1],
        "peer_in_graph": in_graph,
    }


def named(error: Exception) -> str:
    """Returns the type and the message of an error, at most 600 characters."""
    return f"{type(error).__name__}: {error}".strip()[:600]


def measure(
    name: str,
    shapes: list[Shape],
    rounds: int,
    packages: Callable[[str], bool] | None,
    keep: Callable[[list[Row]], None],
) -> list[Row]:
    """Returns the rows of an operator. `keep` gets all rows after each new row, so that a crash loses none.

    Args:
        name: a key of OPERATORS.
        shapes: settings that a shape does not name have their default.
        rounds: turns after the warm-up.
        packages: tells whether to compare with peers of this package; None: measure without peers.
        keep: called with all rows so far.
    """
    operator, rows = OPERATORS[name], []

    def add(shape: Shape, peer: str, found: Row) -> None:
        row = {"operator": name, "shape": shape, "settings": operator.settings(shape), "peer": peer, **found}
        print(line(row), flush=True)
        rows.append(row)
        keep(rows)

    def of_shape(shape: Shape) -> None:
        what = f"{name} {text_of(shape)}"
        try:
            with progress(f"{what}: makes its inputs"):
                problem = operator.problem(**operator.settings(shape))
            if packages is None:
                with progress(f"{what}: times it and the ceiling in turns"):
                    add(shape, "", alone(problem, rounds))
                return
        except Exception as error:
            add(shape, "", {"failed": named(error)})
            return
        for peer in filter(lambda peer: packages(peer.package), problem.peers):
            with progress(f"{what}: compares it with {peer.name}, then times both in turns"):
                found = compare(problem, peer, rounds)
            add(shape, peer.name, found)

    for shape in shapes:
        of_shape(shape)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    return rows


def text_of(shape: Shape) -> str:
    """Formats a shape without spaces."""
    return ",".join(f"{key}={value}" for key, value in shape.items()) or "default"


HEAD = f"{'operator':26} {'shape':44} {'peer':22} {'us':>10} {'peer us':>10} {'times':>8}   share  peer's"


def line(row: Row) -> str:
    """Formats a row of the table."""
    text = f"{row['operator']:26} {text_of(row['shape']):44} {row['peer'] or 'Hopwell itself':22} "
    for verdict in ("failed", "missing", "disagrees"):
        if verdict in row:
            said = str(row[verdict]).splitlines()[0]
            return f"{text}{'DISAGREES' if verdict == 'disagrees' else verdict}: {said[:110]}"
    if "peer_us" not in row:
        return f"{text}{row['us']:10.1f} {'':10} {'':8} {row['share']:7.3f}"
    times = f"{row['us']:10.1f} {row['peer_us']:10.1f} {row['times_as_fast']:8.3f}"
    return f"{text}{times} {row['share']:7.3f} {row['peer_share']:7.3f}"


def problems_of(rows: list[Row]) -> list[Row]:
    """Returns the rows that make a comparison fail: a peer that disagrees, a failure of Hopwell, a dead process."""
    return [row for row in rows if "disagrees" in row or ("failed" in row and not row.get("peer"))]


def dump(rows: list[Row]) -> str:
    """Returns the rows as JSON."""
    return json.dumps(rows, allow_nan=False)
