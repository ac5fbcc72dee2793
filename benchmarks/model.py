"""The emulator's model of time: its results for the Blackwell kernels, and its error for the Hopper kernels.

    python benchmarks/model.py count                      counts on the emulator: benchmarks/results/emulator
    python benchmarks/model.py blackwell                  the tables of docs/performance/blackwell.md, from the records
    python benchmarks/model.py hopper                     the tables of docs/performance/model.md, from the records
    python benchmarks/model.py counters --json FILE       the card's record; needs a Hopper GPU and a usable `ncu`

The emulator counts queries of two lengths; one CTA (or cluster) computes the whole query. The difference of the counts,
divided by the number of further steps of 64 keys, is the cost of a step. The rest is a query's constant cost. Tiles of
a product are counted the same way, with two values of K and steps of 256. `counters` profiles one launch of the same
kernels with 4,096 queries of 2,048 keys out of 8,192; clocks are not locked.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COUNTERS, COUNTS = "h200/model.json", "emulator"  # the card's record; the folder of the emulator's records
SHORT, LONG = 1024, 2048  # keys, or K
QUERIES, SMS = 4096, 132  # of the card's record
BYTES_A_CYCLE = 128  # bandwidth of the banks of shared memory

UNITS = ["tensor pipe", "shared memory", "gather", "additions"]

Model = dict[str, Any]  # the emulator's results for a launch
Table = tuple[list[str], list[list[str]]]  # head and rows


@dataclass
class Kernel:
    name: str
    operator: str
    cases: str  # name of the cases, without the size at the end
    ctas: int = 1  # CTAs that compute one query or tile together
    step: int = 64  # keys, or K
    shape: str = ""  # shape of `hopwell bench`
    h_q: int = 0
    d_qk: int = 576

    def case(self, size: int) -> str:
        return f"{self.cases}_{size}"


def query(name: str, operator: str, h_q: int, ctas: int = 1) -> Kernel:
    shape = "h128-8k" if h_q == 128 else "h64-8k" if h_q == 64 else f"h64-8k,h_q={h_q}"
    return Kernel(name, operator, f"query_h_q_{h_q}_topk", ctas, shape=shape, h_q=h_q)


BLACKWELL = [
    query("backward, 64 heads", "sparse_mla_backward", 64),
    Kernel("backward, 64 heads, d_qk 512", "sparse_mla_backward", "query_h_q_64_d_qk_512_topk", h_q=64, d_qk=512),
    query("backward, 128 heads (each of two CTAs)", "sparse_mla_backward", 128, ctas=2),
    query("forward, 64 heads", "sparse_mla_forward", 64),
    query("forward, 128 heads (each of two CTAs)", "sparse_mla_forward", 128, ctas=2),
    query("distribution, 128 heads", "attention_distribution", 128),
    query("distribution, 64 heads", "attention_distribution", 64),
]
PRODUCTS = [
    Kernel("128 × 128", "nvfp4_matmul", "tile_128_k", step=256),
    Kernel("256 × 256 (each of two CTAs)", "nvfp4_matmul", "tile_256_k", ctas=2, step=256),
]
HOPPER = [
    query("forward, 128 heads", "sparse_mla_forward", 128),
    query("forward, 64 heads", "sparse_mla_forward", 64),
    query("forward, 32 heads", "sparse_mla_forward", 32),
    query("forward, 16 heads", "sparse_mla_forward", 16),
    query("backward, 64 heads", "sparse_mla_backward", 64),
    query("backward, 128 heads", "sparse_mla_backward", 128, ctas=2),
    query("distribution, 128 heads", "attention_distribution", 128),
    query("distribution, 64 heads", "attention_distribution", 64),
]

METRICS = {
    "elapsed": "sm__cycles_elapsed.max",
    "active": "sm__cycles_active.avg",
    "tensor pipe": "sm__pipe_tensor_cycles_active.avg",  # summed over the four parts of an SM
    "bank reads": "l1tex__data_bank_reads.avg",  # 4 bytes each
    "bank writes": "l1tex__data_bank_writes.avg",
    "nanoseconds": "gpu__time_duration.sum",
}
# The main kernels, without preprocess and postprocess.
KERNELS = "^(sparse_mla_(fwd|bwd)|attention_distribution)_sm[0-9]+(_pair|_single)?$"


def counted(command: Path, kernel: Kernel, backend: str) -> dict[int, Model]:
    """Returns, for each size, the model of the launch with the most products."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        arguments = ["check", kernel.operator, "--backend", backend, "--case", kernel.cases + "_*"]
        subprocess.run(
            [command, *arguments, "--model", "--no-checker", "--json", file.name],
            env=os.environ | {"HOPWELL_EMULATOR_SMS": str(kernel.ctas)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        results = json.loads(Path(file.name).read_text())["results"]
    models = {result["case"]: max(result["model"], key=lambda m: m["full_rate_cycles"]) for result in results}
    for model in models.values():
        if model["ctas"] != kernel.ctas:
            raise SystemExit(f"model.py: {kernel.name}: {model['ctas']} CTAs for a query, not {kernel.ctas}")
    return {size: models[kernel.case(size)] for size in (SHORT, LONG)}


def count(command: Path) -> None:
    """Records the emulator's counts of each kernel, for both sizes."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    folder = RESULTS / COUNTS
    folder.mkdir(exist_ok=True)
    for target, kernels in (("sm90", HOPPER), ("sm100", BLACKWELL + PRODUCTS)):
        results = [
            {
                "operator": kernel.operator,
                "case": kernel.case(size),
                "model": {name: value for name, value in model.items() if name != "roles"},
            }
            for kernel in kernels
            for size, model in counted(command, kernel, f"emu:{target}").items()
        ]
        record = {"date": datetime.date.today().isoformat(), "device": f"emu:{target}", "commit": commit}
        (folder / f"{target}.json").write_text(json.dumps({**record, "results": results}, indent=1) + "\n")


def recorded(results: Path, target: str) -> Callable[[Kernel], dict[int, Model]]:
    """Returns a function that gives the recorded counts of a kernel, by size."""
    rows = json.loads((results / COUNTS / f"{target}.json").read_text())["results"]
    models = {(row["operator"], row["case"]): row["model"] for row in rows}
    return lambda kernel: {size: models[kernel.operator, kernel.case(size)] for size in (SHORT, LONG)}


def step_and_rest(models: dict[int, Model], keys: int, unit: str | None) -> tuple[float, float]:
    """Returns a CTA's cycles of a step of `keys` keys (or K), and a query's (or tile's) cycles outside its steps."""
    short, long = (m["cycles"][unit] if unit else m["full_rate_cycles"] for m in (models[SHORT], models[LONG]))
    step = (long - short) * keys / (LONG - SHORT)
    return step, long - step * LONG / keys


def cell(step: float, rest: float, binds: bool) -> str:
    text = f"**{step:,.0f}**" if binds else f"{step:,.0f}"
    return "–" if step == 0 else text + (f" + {rest:,.0f}" if rest >= 0.5 else "")


def compared(ours: float, theirs: float) -> list[str]:
    """Formats both numbers in millions, and the difference of the first from the second in percent."""
    percent = round(100 * (ours / theirs - 1), 1) + 0.0  # avoids a negative zero
    return [f"{ours / 1e6:.3f}", f"{theirs / 1e6:.3f}", f"{percent:+.1f} %"]


def blackwell(results: Path = RESULTS, kernels: list[Kernel] = BLACKWELL) -> Table:
    """The table of cycles of a CTA by unit (a step + the rest of a query or tile), and the upper bound of the share."""
    models_of, rows = recorded(results, "sm100"), []
    units = [*UNITS, "tensor memory", "exponentials"]
    for kernel in kernels:
        models = models_of(kernel)
        steps = {unit: step_and_rest(models, kernel.step, unit) for unit in units}
        binds = models[LONG]["binds"]
        full_rate, _ = step_and_rest(models, kernel.step, None)
        cap = models[LONG]["cap"]
        rows.append([kernel.name, f"{full_rate:,.0f}", *(cell(*steps[u], u == binds) for u in units), f"{cap:.2f}"])
    return ["", "full rate", *units, "cap"], rows


def hopper(results: Path = RESULTS) -> tuple[Table, Table]:
    """The tables that compare counts with the card's counters, and predicted cycles with measured cycles."""
    measured = {(r["operator"], r["shape"]): r for r in json.loads((results / COUNTERS).read_text())["results"]}
    models_of, predictions, counts = recorded(results, "sm90"), [], []
    for kernel in HOPPER:
        models = models_of(kernel)
        found, model = measured[kernel.operator, kernel.shape], models[LONG]
        per_sm = QUERIES * kernel.ctas / SMS
        predicted = model["cycles"][model["binds"]] * per_sm
        cells = [cell(*step_and_rest(models, kernel.step, unit), unit == model["binds"]) for unit in UNITS]
        predictions.append([kernel.name, *cells, *compared(predicted, found["active"])])
        banks = (found["bank reads"] + found["bank writes"]) * 4 / BYTES_A_CYCLE
        pairs = [(model["full_rate_cycles"], found["tensor pipe"] / 4), (model["cycles"]["shared memory"], banks)]
        counts.append([kernel.name, *(text for ours, theirs in pairs for text in compared(ours * per_sm, theirs))])
    heads = ["", "products at the full rate", "tensor pipe active", "", "shared memory", "its banks", ""]
    return (heads, counts), (["", *UNITS, "predicted", "measured", ""], predictions)


def printed(table: Table) -> None:
    head, rows = table
    for line in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(line) + " |")


def profiled(command: Path, ncu: str, kernel: Kernel) -> dict[str, Any]:
    arguments = ["--clock-control", "none", "--csv", "--page", "raw", "--print-kernel-base", "function"]
    arguments += ["--kernel-name", f"regex:{KERNELS}", "--launch-count", "1", "--metrics", ",".join(METRICS.values())]
    arguments += [str(command), "bench", kernel.operator, "--backend", "sm90", "--shape", kernel.shape]
    run = subprocess.run([ncu, *arguments], capture_output=True, text=True, check=False)
    rows = list(csv.reader(line for line in run.stdout.splitlines() if line.startswith('"')))
    if run.returncode or len(rows) < 3:
        raise SystemExit(f"model.py: ncu failed\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    cells = dict(zip(rows[0], rows[2], strict=True))
    counters = {name: float(cells[metric].replace(",", "")) for name, metric in METRICS.items()}
    return {"operator": kernel.operator, "shape": kernel.shape, "kernel": cells["Kernel Name"], **counters}


def counters(command: Path, path: Path | None) -> None:
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("model.py: needs ncu; found none")
    info = subprocess.run([command, "info"], check=True, capture_output=True, text=True).stdout
    if "H200" not in info and "H100" not in info:
        raise SystemExit("model.py: counters needs a Hopper GPU; hopwell info lists none")
    version = Path("/proc/driver/nvidia/version")
    driver = re.search(r"\d+\.\d+(\.\d+)?", version.read_text() if version.exists() else "")
    results = [profiled(command, ncu, kernel) for kernel in HOPPER]
    text = json.dumps(
        {
            "date": datetime.date.today().isoformat(),
            "device": "H200" if "H200" in info else "H100",
            "driver": driver[0] if driver else "",
            "results": results,
        },
        indent=1,
    )
    print(text)
    if path:
        path.write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["count", "blackwell", "hopper", "counters"])
    parser.add_argument(
        "--command", type=Path, default=Path(sys.executable).with_name("hopwell"), help="hopwell program"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="for counters: write the record to FILE")
    options = parser.parse_args()
    if options.what == "count":
        count(options.command)
    elif options.what == "counters":
        counters(options.command, options.json)
    else:
        for table in (blackwell(), blackwell(kernels=PRODUCTS)) if options.what == "blackwell" else hopper():
            printed(table)
            print()


if __name__ == "__main__":
    main()
