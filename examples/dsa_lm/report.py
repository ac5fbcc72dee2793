"""The output of a run: progress, files that are complete or absent, the picture, and the table at the end."""

import io
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table


class DemoError(Exception):
    """An error that the user can correct; its text is one line."""


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a temporary file and renames it, so that an older file stays complete if the disk is full."""
    name = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException as error:
        if name:
            Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise DemoError(f"cannot write {path}: {error.strerror}") from None
        raise


@dataclass
class Claim:
    """A claim that the run must meet: `measured` against its bound."""

    text: str
    measured: str
    bound: str
    holds: bool


class Reporter:
    """Shows a progress bar on a terminal. In a pipe, prints a line after every tenth of a stage."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress: Progress | None = None
        self.expect(0)

    def expect(self, steps: int) -> None:
        """Starts the clock of the remaining time: `steps` steps follow, of all stages together."""
        self.expected, self.finished, self.began = steps, 0, time.perf_counter()

    def remaining(self) -> str:
        """Returns the remaining time of all stages, if the steps to come take as long as the steps so far."""
        seconds = (time.perf_counter() - self.began) / self.finished * max(0, self.expected - self.finished)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"

    def begin(self, stage: str, done: int, steps: int) -> None:
        self.stage, self.steps, self.line_at = stage, steps, done
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description:11}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
            )
            self.progress = Progress(*columns, console=self.console)
            self.task = self.progress.add_task(stage, total=steps, completed=done, figures="")
            self.progress.start()

    def step(self, done: int, record: dict[str, Any]) -> None:
        self.finished += 1
        figures = (
            f"loss {record['loss']:.3f}  indexer {record['indexer_loss']:.3f}  {record['tokens_per_s']:,.0f} tokens/s  "
            f"{self.remaining()}"
        )
        if self.progress:
            self.progress.update(self.task, completed=done, figures=figures)
        elif done >= self.line_at or done == self.steps:
            self.console.print(f"{self.stage:11} {done:5d}/{self.steps}  {figures}", highlight=False, soft_wrap=True)
            self.line_at = done + max(1, self.steps // 10)

    def end(self) -> None:
        if self.progress:
            self.progress.stop()
            self.progress = None

    def say(self, text: str) -> None:
        """Prints text. Control characters become replacement characters, because a model may generate any text."""
        plain = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        self.console.print(plain, highlight=False, markup=False, soft_wrap=True)


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def table(title: str, claims: list[Claim]) -> Table:
    result = Table(title=title, title_justify="left")
    for heading in ("claim", "measured", "bound", ""):
        result.add_column(heading)
    for claim in claims:
        verdict = "[green]PASS[/]" if claim.holds else "[red]FAIL[/]"
        result.add_row(claim.text, claim.measured, claim.bound, verdict)
    return result


def metrics_json(metrics: dict[str, Any]) -> bytes:
    return (json.dumps(metrics, indent=1) + "\n").encode()


def smooth(values: list[float], weight: float = 0.95) -> list[float]:
    """Exponential moving average without the bias of its start."""
    result, mean, norm = [], 0.0, 0.0
    for value in values:
        mean, norm = weight * mean + (1 - weight) * value, weight * norm + (1 - weight)
        result.append(mean / norm)
    return result


def loss_picture(metrics: dict[str, Any]) -> bytes:
    """Draws training and validation loss of the model, the dense twin and the bigram model, over updates of the main
    model.

    Below are the tokens per second of both models, and the indexer's loss over the steps of warm-up and sparse
    training.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (axes, speed, below) = pyplot.subplots(3, figsize=(8, 9), height_ratios=(3, 1, 1))
    steps = metrics["steps"]
    shared = [record for record in steps if record["stage"] == "dense"]
    curves = (
        ("sparse", "sparse attention", "tab:blue", [record for record in steps if record["stage"] != "warm-up"]),
        ("dense twin", "dense twin", "tab:orange", shared + metrics["dense_twin"]),
    )
    for model, label, colour, records in curves:
        losses, style = smooth([r["loss"] for r in records]), "-" if model == "sparse" else "--"
        axes.plot([r["update"] for r in records], losses, style, color=colour, label=f"{label}, training")
        apart = [r for r in records if r["stage"] != "dense"]  # the first updates are common to both
        speeds = smooth([r["tokens_per_s"] for r in apart])
        speed.plot([r["update"] for r in apart], speeds, style, color=colour, label=label)
        points = [v for v in metrics["validation"] if v["model"] == model]
        marks = "o" if model == "sparse" else "x"
        updates = [v["update"] for v in points]
        axes.plot(updates, [v["loss"] for v in points], marks, color=colour, label="… validation")
    axes.axhline(metrics["bigram"], color="gray", linestyle=":", label="bigram model, validation")
    axes.set(
        xlabel="updates of the main model", ylabel="loss (nats a token)", title="DeepSeek Sparse Attention on real text"
    )
    axes.legend()
    learning = [record for record in steps if record["stage"] != "dense"]
    below.plot([r["step"] for r in learning], [r["indexer_loss"] for r in learning], color="tab:green")
    below.set(xlabel="steps, warm-up and sparse training", ylabel="indexer's loss (nats)", ylim=(0, None))
    speed.set(xlabel="updates of the main model", ylabel="tokens/s", ylim=(0, None))
    for panel in (axes, speed, below):
        panel.grid(alpha=0.3)
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    pyplot.close(figure)
    return picture.getvalue()


class Stopwatch:
    """Wall-clock time since its creation, and processor time over all threads."""

    def __init__(self) -> None:
        self.began = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self.began[0], "cpu_seconds": time.process_time() - self.began[1]}
