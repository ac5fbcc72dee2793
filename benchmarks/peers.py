"""Every operator on a GPU beside the same operation of other packages, as far as they are installed.

    python benchmarks/peers.py                                      a table
    python benchmarks/peers.py --json FILE                          and a record
    python benchmarks/peers.py --only paged_attention --shape b=64,context=4096,h_q=32,h_kv=32,d=128

Both sides run in one process on the same random inputs. Their results are compared first; memory that either leaves
unwritten holds NaN then. Timed are replays of CUDA graphs, in turns, each from a cold L2 cache: a graph goes round
copies of the inputs that are larger together than L2, or other memory is read before it. A ratio is the median over
neighbouring replays: above 1, Hopwell is the faster. "share" is of a bf16 product of 8192³ in the same rounds.

Peers are called through the interface of their installed package. One that is missing, refuses a shape or gives another
result is named in the table and in the record with the reason. Every operator has a process of its own, so that a peer
that crashes or hangs takes nothing else with it.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from statistics import median

import record
import torch
from peer_calls import COLD_BYTES, DEVICE, OPERATORS, Call, Peer, Problem, Shape

PACKAGES = [
    "torch",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "flash-mla",
    "vllm",
    "flashinfer-python",
    "tilelang",
]


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors hold NaN, or the largest integer, until they are written."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills uninitialised memory
    warnings.simplefilter("ignore")  # about operations that are not deterministic
    try:
        if not torch.empty(4, device=DEVICE).isnan().all():
            raise RuntimeError("this PyTorch does not fill new tensors")
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def difference(problem: Problem, peer: Peer, theirs: Call) -> float:
    """The largest of the results; NaN where either has left something unwritten."""
    with poisoned():
        pairs = list(zip(problem.read(problem.ours(0)), peer.read(theirs(0)), strict=True))
        for a, b in pairs:
            if a.shape != b.shape:
                raise ValueError(f"gives {list(b.shape)} where ours is {list(a.shape)}")
        errors = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def prepared(call: Call, copies: int) -> tuple[Callable[[], object], bool]:
    """One call for each copy of the inputs, and whether they are a graph."""

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


def seconds_in_turns(works: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in works]
    if DEVICE == "cpu":
        for _ in range(rounds):
            for i, work in enumerate(works):
                started = time.perf_counter()
                work()
                times[i].append(time.perf_counter() - started)
        return times
    other = torch.ones(int(COLD_BYTES) // 4, device=DEVICE)
    for round_ in range(rounds + 1):  # the first one warms up
        events = []
        for work in works:
            other.sum()
            begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        if round_:
            for i, (begin, end) in enumerate(events):
                times[i].append(begin.elapsed_time(end) * 1e-3)
    return times


def matmul() -> Callable[[], object]:
    a, b, c = torch.randn(3, 8192, 8192, dtype=torch.bfloat16, device=DEVICE).unbind()
    return lambda: torch.mm(a, b, out=c)


def compare(problem: Problem, peer: Peer, rounds: int) -> dict[str, object]:
    theirs = peer.prepare()
    error = difference(problem, peer, theirs)
    if not error < problem.bound:
        raise ValueError(f"its result differs from Hopwell's by {error:.1e}")
    ours, _ = prepared(problem.ours, problem.copies)
    others, in_graph = prepared(theirs, problem.copies)
    ceiling = problem.operations > 0 and DEVICE == "cuda"
    times = seconds_in_turns([ours, others] + [matmul()] * ceiling, rounds)
    ratios = sorted(b / a for a, b in zip(times[0], times[1], strict=True))
    result: dict[str, object] = {
        "us": median(times[0]) * 1e6 / problem.copies,
        "peer_us": median(times[1]) * 1e6 / problem.copies,
        "times_as_fast": median(ratios),
        "middle_half": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "error": error,
        "peer_in_graph": in_graph,
    }
    if ceiling:
        rate = problem.operations / (2 * 8192**3)
        result["share"], result["peer_share"] = (
            median(m * rate / t for t, m in zip(times[i], times[2], strict=True)) for i in range(2)
        )
    return result


def measure(name: str, shapes: list[Shape], rounds: int, keep: Callable[[list[dict[str, object]]], None]) -> None:
    """Writes the results down after each, so that a crash loses none before it."""
    results: list[dict[str, object]] = []

    def add(shape: Shape, peer: str, found: dict[str, object] | Exception) -> None:
        result: dict[str, object] = {"operator": name, "shape": shape, "peer": peer}
        if isinstance(found, Exception):
            result["failed"] = f"{type(found).__name__}: {found}".strip()[:600]
            said = " " + str(result["failed"]).splitlines()[0][:90]
        else:
            result |= found
            said = f"{found['us']:10.1f} {found['peer_us']:10.1f} {found['times_as_fast']:8.3f}"
            said += f"{found['share']:8.3f} {found['peer_share']:6.3f}" if "share" in found else ""
        text = " ".join(f"{key} {value}" for key, value in shape.items()) or "default"
        print(f"{name:26} {text:44} {peer:22}{said}", flush=True)
        results.append(result)
        keep(results)

    for shape in shapes:
        try:
            problem = OPERATORS[name].problem(**shape)
        except Exception as error:
            add(shape, "Hopwell itself", error)
            continue
        for peer in problem.peers:
            try:
                add(shape, peer.name, compare(problem, peer, rounds) | ({"note": peer.note} if peer.note else {}))
            except Exception as error:
                add(shape, peer.name, error)
        del problem, peer
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def in_its_own_process(name: str, arguments: list[str], limit: float) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, __file__, *arguments, "--only", name, "--results", str(path)]
        ended = ""
        try:
            code = subprocess.run(command, timeout=limit, check=False).returncode
            ended = f"the process ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit:.0f} s"
        results: list[dict[str, object]] = json.loads(path.read_text()) if path.exists() else []
    if ended:
        print(f"{name:26} {ended}; later shapes and peers are missing", flush=True)
        results.append({"operator": name, "failed": ended})
    return results


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes a record there")
    parser.add_argument("--only", action="append", choices=OPERATORS, metavar="OPERATOR", help="may be repeated")
    parser.add_argument("--shape", metavar="NAME=N,…", help="this one instead of the operator's shapes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="of an operator")
    parser.add_argument("--commit", default="", help="for the record, where there is no git repository")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on the CPU too: tries the program")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # a process of one operator
    options = parser.parse_args()
    if DEVICE == "cpu" and not options.dry_run:
        raise SystemExit("peers.py: PyTorch sees no GPU")
    torch.manual_seed(0)
    names = options.only or list(OPERATORS)
    if options.results:
        (name,) = names
        shapes = [OPERATORS[name].tiny] if options.dry_run else OPERATORS[name].shapes
        if options.shape:
            shapes = [{key: int(value) for key, value in (word.split("=") for word in options.shape.split(","))}]
        measure(name, shapes, options.rounds, lambda results: options.results.write_text(json.dumps(results)))
        return
    print(f"{'operator':26} {'shape':44} {'peer':22}{'us':>10} {'peer us':>10} {'times':>8}   share  peer's")
    arguments = ["--rounds", str(options.rounds)] + ["--dry-run"] * options.dry_run
    arguments += ["--shape", options.shape] if options.shape else []
    results: list[dict[str, object]] = []
    for name in names:
        results += in_its_own_process(name, arguments, options.limit)
        record.write(options.json, results, rounds=options.rounds, commit=options.commit, versions=versions())


if __name__ == "__main__":
    main()
