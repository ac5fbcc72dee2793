"""The whole experiment: text, both trainings, the checks, and the table of claims."""

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from dsa_lm import report, text
from dsa_lm.experiment import VALIDATION_WINDOWS
from dsa_lm.model import validation_loss
from dsa_lm.report import Claim, Reporter, Stopwatch, write_atomically
from dsa_lm.training import Settings
from rich.console import Console

from v4_lm import checks
from v4_lm.model import CPU, QUICK, recall
from v4_lm.training import HybridTrainer

# Bounds of the claims. The gain is the least drop of the loss against windows alone.
GAIN, GAIN_QUICK = 0.01, 0.005
RECALL, RECALL_QUICK = 0.7, 0.5
TOLERANCE = 1e-4
RECALL_WINDOWS = 16


@dataclass
class Results:
    """The measurements behind the claims. Losses are in nats a token over the same validation windows."""

    bigram: float
    windows_alone: float
    hybrid: float
    hybrid_every_key: float  # if CSA attends every visible compressed key
    recall: float
    recall_of_newest: float
    same_bits: bool
    two_ranks_losses: float
    two_ranks_gradients: float
    packed: float


def claims(results: Results, *, quick: bool) -> list[Claim]:
    gain, least = (GAIN_QUICK, RECALL_QUICK) if quick else (GAIN, RECALL)
    hybrid, windows = results.hybrid, results.windows_alone
    differences = [results.two_ranks_losses, results.two_ranks_gradients]
    found = f"{results.recall:.1%}; the newest: {results.recall_of_newest:.1%}"
    return [
        Claim(
            f"{gain:.1%} below windows alone",
            f"{hybrid:.3f} ({hybrid / windows - 1:+.2%})",
            f"< {(1 - gain) * windows:.3f}",
            hybrid < (1 - gain) * windows,
        ),
        Claim("beats the bigram model", f"{hybrid:.3f}", f"< {results.bigram:.3f}", hybrid < results.bigram),
        Claim(
            "the indexer finds the keys of most attention",
            found,
            f"≥ {least:.0%}",
            results.recall >= max(least, results.recall_of_newest),
        ),
        Claim("same bits twice", "equal" if results.same_bits else "different", "equal", results.same_bits),
        Claim(
            "two ranks learn what one does",
            f"{differences[0]:.1e}; gradients {differences[1]:.1e}",
            f"≤ {TOLERANCE:.0e}",
            all(x <= TOLERANCE for x in differences),
        ),
        Claim(
            "packed documents as one by one", f"{results.packed:.1e}", f"≤ {TOLERANCE:.0e}", results.packed <= TOLERANCE
        ),
    ]


def choose_settings(options: argparse.Namespace) -> Settings:
    if options.quick:
        return Settings(QUICK, options.steps or 200, sequences=8, seed=options.seed, learning_rate=8e-3)
    return Settings(CPU, options.steps or 600, seed=options.seed, learning_rate=4e-3)


def run(options: argparse.Namespace, console: Console) -> bool:
    """Runs the experiment; returns True if all claims held."""
    watch = Stopwatch()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    settings = choose_settings(options)
    size, reporter = settings.size, Reporter(console)
    corpus = text.load(options.text, size.vocabulary, size.context, 400_000 if options.quick else None)
    windows = text.validation_windows(corpus.validation, size.context, VALIDATION_WINDOWS)
    bigram = text.Bigram(corpus.train, size.vocabulary).loss(*windows)
    hybrid = HybridTrainer(settings, corpus, windows)
    alone = HybridTrainer(replace(settings, size=size.windows_alone()), corpus, windows, name="windows alone")
    reporter.say(
        f"{corpus.files} files, {len(corpus.train):,} training tokens; layers: "
        f"{', '.join(size.kind(layer) for layer in range(size.layers))}; context {size.context}, window {size.window}, "
        f"ratios {size.csa_ratio} and {size.hca_ratio}, topk {size.topk}"
    )
    for trainer, name in ((hybrid, "hybrid attention"), (alone, "windows alone")):
        parameters = sum(p.numel() for p in trainer.model.parameters())
        reporter.say(f"{name}: {parameters:,} parameters, {settings.steps} updates")
        trainer.run_stages(reporter)
    reporter.say("checks: the same steps twice, on two ranks, and packed documents")
    found, of_newest = recall(hybrid.model, windows[0][:RECALL_WINDOWS])
    results = Results(
        bigram,
        alone.validation[-1]["loss"],
        hybrid.validation[-1]["loss"],
        validation_loss(hybrid.model, windows, "warm-up"),
        found,
        of_newest,
        checks.same_bits(settings, corpus),
        *checks.two_ranks(settings, corpus),
        checks.packed_documents(hybrid.model, corpus.validation),
    )
    made = claims(results, quick=options.quick)
    metrics = {"settings": asdict(settings)} | watch.read() | asdict(results)
    metrics |= {"claims": [asdict(claim) for claim in made], "validation": hybrid.validation + alone.validation}
    metrics |= {"steps": hybrid.steps, "windows_alone_steps": alone.steps}
    folder = Path("runs") / options.name
    write_atomically(folder / "metrics.json", report.metrics_json(metrics))
    console.print(
        report.table(f"{options.name}: loss in nats a token on {windows[1].numel():,} validation tokens", made)
    )
    reporter.say(
        f"with every visible compressed key the loss is {results.hybrid_every_key:.3f}; {metrics['seconds']:.0f} s in "
        f"all, {metrics['cpu_seconds']:.0f} s of processor time; results in {folder}/"
    )
    return all(claim.holds for claim in made)
