"""Two thread pools in one process, Hopwell's and PyTorch's OpenMP: costs of calls alone and in turns, with the slowest.

    python benchmarks/thread_pools.py                 a table
    python benchmarks/thread_pools.py --json FILE     and a record

OpenMP's threads spin for a while after a region unless OMP_WAIT_POLICY forbids it; Hopwell's threads sleep. Each line
of the table has processes of its own, one per round, and the lines take turns. The lines measure an operator
(sparse_mla_forward of few queries) and a product of PyTorch, alone and in turns; the operator with one thread, which
uses no pool; and numpy's product, which uses OpenBLAS' threads, in place of the operator. On a busy machine spinning
threads delay others more, so the record states the number of processes that were ready to run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

TURNS, UNCOUNTED = 100, 20  # calls of a process; the first ones are not counted
SIZE = 256  # rows and columns of the product's matrices
ONE_THREAD, SLEEPING = {"HOPWELL_NUM_THREADS": "1"}, {"OMP_WAIT_POLICY": "PASSIVE"}
LINES: dict[str, tuple[list[str], dict[str, str]]] = {  # the calls that take turns, and their process's environment
    "operator": (["operator"], {}),
    "operator, one thread": (["operator"], ONE_THREAD),
    "product": (["product"], {}),
    "operator and product": (["operator", "product"], {}),
    "operator on one thread and product": (["operator", "product"], ONE_THREAD),
    "numpy's product and product": (["numpy's product", "product"], {}),
    "product, OMP_WAIT_POLICY=PASSIVE": (["product"], SLEEPING),
    "operator and product, OMP_WAIT_POLICY=PASSIVE": (["operator", "product"], SLEEPING),
}


def functions() -> dict[str, Callable[[], object]]:
    import hopwell
    import numpy as np
    import torch

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(16, 8, 64, generator=generator)
    kv = torch.randn(512, 64, generator=generator)
    indices = torch.randint(0, 512, (16, 64), dtype=torch.int32, generator=generator)
    x = torch.randn(SIZE, SIZE, generator=generator)
    y = np.asarray(x)
    return {
        "operator": lambda: hopwell.sparse_mla_forward(q, kv, indices, 64**-0.5, 48),
        "product": lambda: x @ x,
        "numpy's product": lambda: y @ y,
    }


def in_turns(names: list[str]) -> dict[str, list[float]]:
    """Returns the microseconds of every call in this process."""
    calls = {name: functions()[name] for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(UNCOUNTED + TURNS):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - began) * 1e6)
    return {name: of_call[UNCOUNTED:] for name, of_call in times.items()}


def in_a_process(names: list[str], variables: dict[str, str]) -> dict[str, list[float]]:
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "HOPWELL_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | variables
    words = [sys.executable, __file__, "--in-turns", *names]
    times: dict[str, list[float]] = json.loads(
        subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record to FILE")
    parser.add_argument("--in-turns", nargs="+", metavar="CALL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_turns:
        print(json.dumps(in_turns(options.in_turns)))
        return
    from hopwell.bench import record

    times: dict[tuple[str, str], list[float]] = {}
    load = [os.getloadavg()[0]]
    for _ in range(options.rounds):
        for line, (names, variables) in LINES.items():
            for name, of_call in in_a_process(names, variables).items():
                times.setdefault((line, name), []).extend(of_call)
        load.append(os.getloadavg()[0])
    results = []
    print(f"{'µs':46} {'':16} {'median':>9} {'mean':>9} {'99 %':>9} {'largest':>9}")
    for (line, name), of_call in times.items():
        ordered = sorted(of_call)
        row = {
            "line": line,
            "call": name,
            "calls": len(ordered),
            "median_us": median(ordered),
            "mean_us": mean(ordered),
        }
        row |= {"us_99": ordered[int(0.99 * (len(ordered) - 1))], "largest_us": ordered[-1]}
        results.append(row)
        figures = " ".join(f"{row[key]:9.0f}" for key in ("median_us", "mean_us", "us_99", "largest_us"))
        print(f"{line:46} {name:16} {figures}")
    record.write(options.json, results, load=load, processors=os.cpu_count())


if __name__ == "__main__":
    main()
