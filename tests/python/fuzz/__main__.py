"""Right calls of every operator on the backends of GPUs and on emulated ones, in processes of their own: a call that
ends its process, or loses the device, is reported with its seed, and the rest goes on.

    cd tests/python
    FUZZ_SECONDS=600 FUZZ_SEED=1 python -m fuzz --report fuzz.json          # every backend but the CPU's
    python -m fuzz --backends sm80,sm90 --operators paged_attention
    FUZZ_SECONDS=0 FUZZ_SEED=7 python -m fuzz --backends sm80 --operators paged_attention --call 12      # one call
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hopwell
from operators import OPERATORS

HANGS = 300  # seconds that no call takes
MOST_FAILURES = 200
EVERY = 10  # an emulated backend makes one in ten of the calls that are drawn: a call takes longer than a draw


@dataclass
class Summary:
    """What became of the calls, by operator and backend."""

    ran: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def failed(self, now: dict[str, Any], error: str, text: str) -> None:
        task = {name: now.get(name) for name in ("operator", "backend", "seed", "call")}
        again = "FUZZ_SECONDS=0 FUZZ_SEED={seed} python -m fuzz --backends {backend} --operators {operator}"
        again += " --call {call}" if task["call"] is not None else ""
        self.failures.append(
            task | {"error": error, "replay": again.format(**task), "of": now.get("text"), "text": text}
        )

    def as_json(self) -> dict[str, Any]:
        rows = [
            {"operator": operator, "backend": backend, "ran": self.ran[operator, backend], "refused": dict(reasons)}
            for (operator, backend), reasons in sorted(self.refused.items())
        ]
        return {"calls": rows, "failures": self.failures}

    def text(self) -> str:
        lines = [f"{'operator':28}{'backend':12}{'ran':>7}{'refused':>9}  most refused, for"]
        for (operator, backend), reasons in sorted(self.refused.items()):
            most = reasons.most_common(1)[0][0] if reasons else ""
            count = self.ran[operator, backend], reasons.total()
            lines.append(f"{operator:28}{backend:12}{count[0]:7}{count[1]:9}  {most[:100]}".rstrip())
        for failure in self.failures:
            lines.append(f"\nFAILED: {failure['operator']} on {failure['backend']}: {failure['error'][:500]}")
            lines.append(f"  again: {failure['replay']}\n  {str(failure['of'])[:1500]}")
        total = self.ran.total(), sum(reasons.total() for reasons in self.refused.values()), len(self.failures)
        lines.append("\n{} calls ran, {} were refused, {} failed".format(*total))
        return "\n".join(lines)


class Run:
    """Workers, one after another, until the time is up."""

    def __init__(self, tasks: list[tuple[str, str]], seconds: float, seed: int, more: list[str]) -> None:
        self.summary = Summary(refused={task: Counter() for task in tasks})
        self._tasks, self._seconds, self._seed, self._more = tasks, seconds, seed, more
        self._now: dict[str, Any] = {}
        self._rounds = 0  # begun

    def __call__(self) -> Summary:
        end = time.monotonic() + self._seconds
        while True:
            begun = self._rounds
            with tempfile.TemporaryFile("w+") as errors:
                whole = self._work(max(end - time.monotonic(), 0), errors)
                errors.seek(0)
                last_words = errors.read()[-4000:]
            if whole is not None and "dies" in self._now:
                self.summary.failed(self._now, whole, last_words)
            over = time.monotonic() >= end and (self._seconds > 0 or self._rounds >= len(self._tasks))
            if whole is None or over or self._rounds == begun or len(self.summary.failures) >= MOST_FAILURES:
                return self.summary

    def _work(self, seconds: float, errors: Any) -> str | None:
        """One worker's rounds. None: it has come to its end; else what ended it."""
        tasks = ",".join("@".join(task) for task in self._tasks)
        command = [sys.executable, "-m", "fuzz.worker", "--tasks", tasks, "--first-round", str(self._rounds)]
        command += ["--seed", str(self._seed), "--seconds", str(seconds), *self._more]
        here = str(Path(__file__).parents[1])
        paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._now = {"dies": True}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | {"PYTHONPATH": paths}
        ) as worker:
            lines: queue.Queue[str] = queue.Queue()
            assert worker.stdout is not None
            threading.Thread(target=_pass_on, args=(worker.stdout, lines), daemon=True).start()
            try:
                while line := lines.get(timeout=HANGS):
                    if self._note(json.loads(line)):
                        worker.wait()
                        return None
            except queue.Empty:
                worker.kill()
                return f"no end within {HANGS} s"
            status = worker.wait()
        return f"the process ended with {signal.Signals(-status).name if status < 0 else f'status {status}'}"

    def _note(self, event: dict[str, Any]) -> bool:
        """Notes an event of a worker; True if the worker is done."""
        if "failed" in event:
            self._now["call"] = event["call"]
            self.summary.failed(self._now, event["failed"], event["traceback"])
            self._now.pop("dies", None)  # if the process ends now, this is why
        elif "refused" in event:
            task = self._now["operator"], self._now["backend"]
            if event["refused"] is None:
                self.summary.ran[task] += 1
            else:
                self.summary.refused[task][event["refused"]] += 1
            for of_call in ("call", "text"):  # it has ended
                self._now.pop(of_call, None)
        elif "round" in event:
            self._now = event | {"dies": True}
            self._rounds = event["round"] + 1
        elif "call" in event:
            self._now |= event | {"dies": True}
        return "ended" in event


def _pass_on(lines: Any, to: "queue.Queue[str]") -> None:
    for line in lines:
        to.put(line)
    to.put("")


def tasks_of(backends: list[str], operators: list[str]) -> list[tuple[str, str]]:
    return [(name, backend) for name in operators for backend in backends if backend in hopwell.backends(name)]


def fuzz(tasks: list[tuple[str, str]], seconds: float, seed: int, *more: str) -> Summary:
    """Rounds of calls of these operators and backends for so long, one round of each at least where `seconds` is 0."""
    emulated = all(backend.startswith("emu:") for _, backend in tasks)
    options = ["--every", str(EVERY)] if emulated else ["--device", "cuda"]
    return Run(tasks, seconds, seed, [*options, *more])()


def gpus() -> list[str]:
    return [name for name in hopwell.backends() if name.startswith("sm")]


def emulated_gpus() -> list[str]:
    return [name for name in hopwell.backends() if name.startswith("emu:")]


def groups_of(words: str | None) -> list[list[str]]:
    """Backends that one run may fuzz together: on emulated ones tensors are on the host, and only a part of the calls
    is made.
    """
    named = {"gpus": gpus(), "emulated": emulated_gpus()}
    backends = [name for word in (words or "gpus,emulated").split(",") for name in named.get(word, [word])]
    return [[name for name in backends if name.startswith("emu:") == emulated] for emulated in (False, True)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--backends", help="names, or `gpus` or `emulated`; default: these two, one after the other")
    parser.add_argument("--operators", default=",".join(OPERATORS))
    parser.add_argument("--report", type=Path, help="a file for the summary, as JSON")
    parser.add_argument("--call", help="the only one to make of each round")
    parser.add_argument("--device", help="where the tensors are; default: cuda for the backends of GPUs")
    given = parser.parse_args()
    for option, words, known in (
        ("--backends", given.backends or "", {"", "gpus", "emulated", *hopwell.backends()}),
        ("--operators", given.operators, set(OPERATORS)),
    ):
        if unknown := sorted(set(words.split(",")) - known):
            parser.error(f"{option}: expected names among {', '.join(sorted(known - {''}))}; got {', '.join(unknown)}")
    seconds, seed = float(os.environ.get("FUZZ_SECONDS", "60")), int(os.environ.get("FUZZ_SEED", "0"))
    options = {"--call": given.call, "--device": given.device}
    more = [word for option in options.items() if option[1] is not None for word in option]
    summaries = []
    for tasks in (tasks_of(group, given.operators.split(",")) for group in groups_of(given.backends)):
        if tasks:
            summaries.append(fuzz(tasks, seconds, seed, *more))
            print(summaries[-1].text(), flush=True)
    if given.report:
        given.report.write_text(json.dumps([summary.as_json() for summary in summaries], indent=1))
    return 1 if any(summary.failures for summary in summaries) else 0


if __name__ == "__main__":
    sys.exit(main())
