"""Bring-up checklist for a Blackwell card: checks the kernels, measures the units that the emulator's model of time
knows, times every kernel, also next to other packages if they are installed, and compares the model with the results.

    python benchmarks/blackwell_first_hour.py               report.json and report.md under build/blackwell
    python benchmarks/blackwell_first_hour.py --self-test   no card: the measurements' kernels on the emulator only

Needs a card of compute capability 10.x, nvcc and the results of `make build`. If a part fails, the report names it, the
other parts still run, and the exit status is 1.
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
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import model

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "benchmarks/blackwell_first_hour.cu"
EMULATED = ROOT / "build/cuda/tests/arch/blackwell_first_hour_emulated"
COMMAND = Path(sys.executable).with_name("hopwell")
SECONDS = 10  # run time of each kernel while its clock is sampled

# The model's unit that a measurement is about, by the first word of the measurement's name. For all other measurements,
# such as messages between CTAs, the model has no rate.
UNIT_OF = {"additions": "additions", "gather4": "gather", "stream": "HBM"}

Json = dict[str, Any]


def output_of(*command: str | Path, **environment: str) -> str:
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    if run.returncode:
        raise RuntimeError(f"{Path(command[0]).name} ended with {run.returncode}: {(run.stderr or run.stdout)[-600:]}")
    return run.stdout


def card() -> str:
    """Returns the name of the first card. The program ends if it is not a Blackwell card."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    lines = output_of(*query).splitlines() if shutil.which("nvidia-smi") else []
    name, _, capability = lines[0].rpartition(", ") if lines else ("", "", "")
    if not capability.startswith("10."):
        found = f"{name} has compute capability {capability}" if name else "there is no NVIDIA card"
        raise SystemExit(f"blackwell_first_hour.py: needs a Blackwell card (compute capability 10.x); {found}")
    return name


def emulated(folder: Path) -> list[Json]:
    """Runs the measurements on the emulator: returns if their results are right, and the model's rates."""
    if not EMULATED.exists():
        raise SystemExit(f"blackwell_first_hour.py: {EMULATED.relative_to(ROOT)} is missing; make build builds it")
    counts = folder / "model.jsonl"
    counts.unlink(missing_ok=True)
    results: list[Json] = json.loads(output_of(EMULATED, HOPWELL_EMULATOR_MODEL=f"b200:{counts}"))
    models = [json.loads(line) for line in counts.read_text().splitlines()]
    if len(models) != len(results):
        raise RuntimeError(f"{len(models)} launches for {len(results)} measurements")
    for result, launch in zip(results, models, strict=True):
        result["model"] = model_rate(result, launch)
    return results


def model_rate(result: Json, launch: Json) -> float | None:
    """Returns the model's rate (per SM and cycle), or None if the model has no rate for the measurement."""
    if result["unit"] == "products":
        if " beside " in result["name"]:
            return None
        issuing = launch["ctas"] / (2 if result["name"].startswith("pair") else 1)
        return launch["products"] / issuing / launch["cycles"]["tensor pipe"]
    unit = UNIT_OF.get(result["name"].split()[0])
    return result["amount"] / launch["cycles"][unit] if unit else None


def self_test(folder: Path) -> None:
    wrong = [result["name"] for result in emulated(folder) if not result["right"]]
    if wrong:
        raise SystemExit(f"blackwell_first_hour.py: wrong on the emulator: {', '.join(wrong)}")
    print("blackwell_first_hour.py: every measurement is right and clean on the emulator")


def cases(folder: Path) -> list[Json]:
    path = folder / "check.json"
    subprocess.run([COMMAND, "check", "--backend", "sm100", "--json", path], check=False)
    results: list[Json] = json.loads(path.read_text())["results"]
    counts = []
    for operator in sorted({result["operator"] for result in results}):
        of_operator = [result for result in results if result["operator"] == operator]
        failed = [result["case"] for result in of_operator if result["result"] == "failed"]
        passed = sum(result["result"] == "passed" for result in of_operator)
        counts.append({"operator": operator, "passed": passed, "failed": failed})
    if any(count["failed"] for count in counts):
        print("blackwell_first_hour.py: cases failed; the times below are of wrong kernels", file=sys.stderr)
    return counts


def measurements(folder: Path) -> list[Json]:
    program = folder / "blackwell_first_hour"
    flags = ["-std=c++20", "-O3", "-gencode", "arch=compute_100a,code=sm_100a", "--expt-relaxed-constexpr"]
    generated = folder / "generated"
    output_of(sys.executable, ROOT / "scripts" / "declare", "--write", generated)
    flags += ["-DHOPWELL_TARGET=sm100", f"-I{ROOT / 'src'}", f"-I{ROOT / 'include'}", f"-I{ROOT}"]
    flags.append(f"-I{generated / 'include'}")
    output_of("nvcc", *flags, SOURCE, "-o", program)
    results: list[Json] = json.loads(output_of(program))
    expected = emulated(folder)
    # The emulator's tensors have fewer rows. The card measures the same kinds in the same order, for several numbers of
    # rows.
    rates = {kind_of(result["name"]): result["model"] for result in expected}
    for result in results:
        result["model"] = rates.get(kind_of(result["name"]))
    return results


def kind_of(name: str) -> str:
    return re.sub(r", \d+ rows|beside \d+ .*", "", name)


class Clock:
    """Samples the card's clock and power while a block runs."""

    def __enter__(self) -> Clock:
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "100"]
        self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        rows = [row for row in csv.reader(self._process.communicate()[0].splitlines()) if len(row) == 2]
        busy = sorted((float(power), float(clock)) for clock, power in rows)[
            len(rows) // 2 :
        ]  # the half with the higher power
        self.ghz = median(clock for _, clock in busy) / 1000 if busy else 0.0
        self.watts = median(power for power, _ in busy) if busy else 0.0


def times(folder: Path) -> list[Json]:
    checked = json.loads((folder / "check.json").read_text())["results"]
    results: list[Json] = []
    for operator in sorted({result["operator"] for result in checked}):
        path = folder / "bench.json"
        with Clock() as clock:
            began = time.monotonic()
            while time.monotonic() - began < SECONDS:
                output_of(COMMAND, "bench", operator, "--backend", "sm100,sm80", "--json", path)
        for result in json.loads(path.read_text())["results"]:
            results.append({**result, "ghz": clock.ghz, "watts": clock.watts})
    return results


def caps(_: Path) -> list[Json]:
    """Returns the model's upper bound of the share of the matmul rate for each kernel, at topk 2048."""
    found = []
    for kernel in model.BLACKWELL:
        counted = model.counted(COMMAND, kernel, "emu:sm100")[model.LONG]
        which = {"operator": kernel.operator, "h_q": kernel.h_q, "d_qk": kernel.d_qk}
        found.append({**which, "cap": counted["cap"], "binds": counted["binds"]})
    return found


def peers(folder: Path) -> list[Json]:
    path = folder / "peers.json"
    output_of(sys.executable, "-m", "hopwell.bench", "--peers", "--json", path)
    results: list[Json] = json.loads(path.read_text())["results"]
    return results


PARTS: dict[str, Callable[[Path], list[Json]]] = {
    "cases": cases,
    "measurements": measurements,
    "caps": caps,
    "times": times,
    "peers": peers,
}


def table(rows: list[Json], columns: dict[str, Callable[[Json], object]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    return [*lines, *("| " + " | ".join(str(show(row)) for show in columns.values()) + " |" for row in rows)]


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def against_model(row: Json) -> str:
    return number(row["per_cycle"] / row["model"]) if row.get("model") else "–"


def reached(row: Json, of_caps: list[Json]) -> str:
    """Returns the measured share of the matmul rate, divided by the model's upper bound."""
    which = row["operator"], *(int(row["settings"].get(name, 0)) for name in ("h_q", "d_qk"))
    (cap,) = [c["cap"] for c in of_caps if (c["operator"], c["h_q"], c["d_qk"]) == which] or [0]
    return number(row["share_of_matmul"] / cap) if cap and row["backend"] == "sm100" else "–"


def markdown(report: Json) -> str:
    lines = [f"# {report['card']}, {report['date']}", ""]
    for part, reason in report["failed"].items():
        lines += [f"**{part} failed**: {reason}", ""]
    if "cases" in report:
        columns = {"operator": lambda r: r["operator"], "passed": lambda r: r["passed"]}
        lines += [
            "## Cases",
            *table(report["cases"], columns | {"failed": lambda r: ", ".join(r["failed"]) or "none"}),
            "",
        ]
    if "measurements" in report:
        columns = {
            "measurement": lambda r: r["name"],
            "a cycle and SM": lambda r: f"{number(r['per_cycle'], 4 if r['per_cycle'] < 1 else 1)} {r['unit']}",
            "cycles of one": lambda r: number(1 / r["per_cycle"], 1) if 0 < r["per_cycle"] < 1 else "–",
            "the model's": lambda r: number(r.get("model"), 4 if (r.get("model") or 1) < 1 else 1),
            "measured over model": against_model,
            "right": lambda r: "yes" if r["right"] else "**no**",
        }
        lines += ["## Rates", *table(report["measurements"], columns), ""]
    if "times" in report:
        columns = {
            "operator": lambda r: r["operator"],
            "shape": lambda r: r["shape"],
            "backend": lambda r: r["backend"],
            "ms": lambda r: number(r["median_seconds"] * 1e3, 3),
            "of matmul": lambda r: number(r["share_of_matmul"]),
            "of its cap": lambda r: reached(r, report.get("caps", [])),
            "of read": lambda r: number(r["share_of_read"]),
            "GHz": lambda r: number(r["ghz"]),
            "W": lambda r: number(r["watts"], 0),
        }
        lines += ["## Times", *table(report["times"], columns), ""]
    if "peers" in report:
        columns = {
            "operator": lambda r: r["operator"],
            "shape": lambda r: " ".join(f"{key} {value}" for key, value in r.get("shape", {}).items()),
            "peer": lambda r: r.get("peer", ""),
            "times as fast": lambda r: number(r.get("times_as_fast")),
            "why not": lambda r: str(r.get("failed") or r.get("missing") or "").partition("\n")[0],
        }
        lines += ["## Beside other packages", *table(report["peers"], columns), ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true", help="run on the emulator only, without a card")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/blackwell", help="folder of the report")
    parser.add_argument(
        "--only", action="append", choices=PARTS, metavar="PART", help=f"run only this part: {', '.join(PARTS)}"
    )
    options = parser.parse_args()
    name = "" if options.self_test else card()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.self_test:
        self_test(options.folder)
        return 0
    report: Json = {"card": name, "date": datetime.date.today().isoformat(), "failed": {}}
    for part in options.only or PARTS:
        print(f"{part} …", flush=True)
        try:
            report[part] = PARTS[part](options.folder)
        except Exception as error:
            report["failed"][part] = f"{type(error).__name__}: {error}"
        (options.folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.folder / "report.md").write_text(markdown(report))
    print(markdown(report))
    wrong = any(count["failed"] for count in report.get("cases", []))
    wrong |= any(not result["right"] for result in report.get("measurements", []))
    return 1 if wrong or report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
