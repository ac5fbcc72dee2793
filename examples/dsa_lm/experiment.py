"""The whole experiment: text, training, the dense twin, quantisation, a sample, and the report."""

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import hopwell
import safetensors.torch
import torch
from rich.console import Console

from dsa_lm import model as network
from dsa_lm import parallel, report, text
from dsa_lm.report import Claim, DemoError, Reporter, Stopwatch, write_atomically
from dsa_lm.training import Settings, Trainer

VALIDATION_WINDOWS = 96
TIMES = "The default run takes about 4 minutes on two idle cores."
SAMPLE_TOKENS = 1024  # at most, for the prompt and its continuation
# The operators that training, quantisation and generation call.
OPERATORS = (
    "sparse_mla_forward",
    "sparse_mla_backward",
    "attention_distribution",
    "lightning_indexer",
    "lightning_indexer_backward",
    "nvfp4_quantize",
    "nvfp4_linear",
)


def choose_device(options: argparse.Namespace) -> torch.device:
    """Returns the GPU if PyTorch and all these operators run on it, else the CPU. The quick run always uses the CPU."""
    on_gpu = not options.quick and torch.cuda.is_available()
    for operator in OPERATORS:
        on_gpu = on_gpu and any(name.startswith("sm") for name in hopwell.backends(operator))
    if on_gpu and parallel.launched():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda" if on_gpu else "cpu")


def choose_settings(options: argparse.Namespace, device: torch.device) -> Settings:
    if options.quick:
        return Settings(network.QUICK, options.steps or 300, sequences=8, seed=options.seed, learning_rate=8e-3)
    if options.large and device.type != "cuda":
        raise DemoError("argument --large: expected a GPU that runs all of Hopwell's operators here; got none")
    if options.large:
        return Settings(
            network.LARGE, options.steps or 300, sequences=8, seed=options.seed, learning_rate=1e-3, validate_every=50
        )
    if device.type == "cuda":
        return Settings(network.GPU, options.steps or 1000, sequences=16, seed=options.seed, learning_rate=1e-3)
    return Settings(network.CPU, options.steps or 1000, seed=options.seed)


@dataclass
class Results:
    """The measurements behind the claims: losses in nats per token over the same validation windows, and others."""

    bigram: float
    dense: float
    sparse: float
    nvfp4: float
    keys_read: float
    quantized_layers: int
    generated_per_s: float
    generated_per_s_before: float  # of the model before quantisation


def claims(results: Results, topk: int) -> list[Claim]:
    sparse, dense, nvfp4 = results.sparse, results.dense, results.nvfp4

    def against(loss: float, reference: float) -> str:
        return f"{loss:.3f} ({loss / reference - 1:+.2%})"

    return [
        Claim(
            "beats the bigram model",
            against(sparse, results.bigram),
            f"< {results.bigram:.3f}",
            sparse < results.bigram,
        ),
        Claim("within 3 % of its dense twin", against(sparse, dense), f"≤ {1.03 * dense:.3f}", sparse <= 1.03 * dense),
        Claim("NVFP4 costs less than 3 %", against(nvfp4, sparse), f"< {1.03 * sparse:.3f}", nvfp4 < 1.03 * sparse),
        Claim(
            "reads a fraction of the keys", f"{results.keys_read:.1%} (topk {topk})", "< 50 %", results.keys_read < 0.5
        ),
    ]


def encode_prompt(corpus: text.Corpus, prompt: str, context: int) -> torch.Tensor:
    ids = corpus.tokenizer.encode(prompt).ids
    if not 1 <= len(ids) < context:
        raise DemoError(f"argument --prompt: expected 1 to {context - 1} tokens; got {len(ids)}")
    return torch.tensor(ids)


def finish(trainer: Trainer, prompt: torch.Tensor, bigram: float, folder: Path) -> tuple[Results, str]:
    """Saves the trained model, quantises it, measures it again and generates a sample; returns results and sample."""
    model, tokenizer = network.Decoder(trainer.settings.size).to(trainer.device), trainer.corpus.tokenizer
    dense = trainer.validation[-1]["loss"]
    model.load_state_dict(trainer.trained)
    size = json.dumps(asdict(trainer.settings.size))
    write_atomically(folder / "model.safetensors", safetensors.torch.save(model.state_dict(), {"size": size}))
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    sparse, keys_read = network.evaluate(model, trainer.windows, "sparse")
    room = min(trainer.settings.size.context, SAMPLE_TOKENS) - len(prompt)
    _, per_s_before = network.generate(model, prompt.to(trainer.device), room, trainer.settings.seed)
    layers = network.quantize(model)
    nvfp4, _ = network.evaluate(model, trainer.windows, "sparse")
    ids, per_s = network.generate(model, prompt.to(trainer.device), room, trainer.settings.seed)
    written = tokenizer.decode(prompt.tolist() + ids.tolist())
    write_atomically(folder / "sample.txt", written.encode())
    return Results(bigram, dense, sparse, nvfp4, keys_read, layers, per_s, per_s_before), written


def explanations(results: Results, trainer: Trainer) -> list[str]:
    """Returns why a rate is lower than a reader may expect, for the rates that are."""
    made = []
    sparse = median(record["tokens_per_s"] for record in trainer.steps if record["stage"] == "sparse")
    dense = median(record["tokens_per_s"] for record in trainer.dense_twin)
    if sparse < dense:
        made.append(
            f"Sparse attention trained at {sparse:,.0f} tokens/s, the dense twin at {dense:,.0f}: with a context of "
            f"{trainer.settings.size.context} a dense query has few keys, and the indexer and its gradients cost more "
            "than the keys that they save. Sparse attention pays on long sequences: docs/performance/training_step.md."
        )
    if trainer.device.type == "cpu" and results.generated_per_s < results.generated_per_s_before:
        made.append(
            f"NVFP4 generated {results.generated_per_s:,.0f} tokens/s, floats {results.generated_per_s_before:,.0f}: a "
            "CPU decodes every 4-bit weight before it multiplies. That pays where weights come from memory; the floats "
            "of a model of this size stay in the cache."
        )
    return made


def run(options: argparse.Namespace, console: Console) -> bool:
    """Runs the experiment; returns True if all claims held."""
    watch = Stopwatch()
    device = choose_device(options)
    settings = choose_settings(options, device)
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    folder = Path("runs") / options.name
    size = settings.size
    corpus = text.load(options.text, size.vocabulary, size.context, 400_000 if options.quick else None)
    prompt = encode_prompt(corpus, options.prompt, min(size.context, SAMPLE_TOKENS))
    windows = text.validation_windows(corpus.validation, size.context, VALIDATION_WINDOWS)
    bigram = text.Bigram(corpus.train, size.vocabulary).loss(*windows)
    mine = parallel.Ranks.join(size.context, device, options.timeout) if parallel.launched() else network.ALONE
    if mine.rank > 0:
        console.quiet = True
    trainer = Trainer(settings, corpus, tuple(w.to(device) for w in windows), device, mine)
    if options.resume:
        trainer.load(folder / "checkpoint.pt")
    parameters = sum(p.numel() for p in trainer.model.parameters())
    reporter = Reporter(console)
    reporter.say(
        f"{corpus.files} files, {len(corpus.train):,} training and {len(corpus.validation):,} validation tokens; "
        f"{parameters:,} parameters, context {size.context}, topk {size.topk}, on {device}; "
        f"the bigram model's loss is {bigram:.3f} nats a token"
    )
    reporter.say(
        f"{sum(settings.lengths().values()):,} steps in four stages; each line has the remaining time. {TIMES}"
    )
    trainer.run(folder / "checkpoint.pt", reporter)
    trainer.leave()
    if mine.rank > 0:
        return True  # the first rank has all weights and evaluates them
    results, written = finish(trainer, prompt, bigram, folder)
    made = claims(results, size.topk)
    metrics = {"settings": asdict(settings), "device": str(device)} | watch.read() | asdict(results)
    metrics |= {"claims": [asdict(claim) for claim in made], "validation": trainer.validation}
    metrics |= {"steps": trainer.steps, "dense_twin": trainer.dense_twin}
    write_atomically(folder / "metrics.json", report.metrics_json(metrics))
    write_atomically(folder / "loss.png", report.loss_picture(metrics))
    reporter.say("\n" + written + "\n")
    console.print(
        report.table(f"{options.name}: loss in nats a token on {windows[1].numel():,} validation tokens", made)
    )
    reporter.say(
        f"{results.quantized_layers} linear layers in NVFP4, generated {results.generated_per_s:,.0f} tokens/s "
        f"({results.generated_per_s_before:,.0f} before); "
        f"{metrics['seconds']:.0f} s in all, {metrics['cpu_seconds']:.0f} s of processor time; results in {folder}/"
    )
    for reason in explanations(results, trainer):
        reporter.say(reason)
    return all(claim.holds for claim in made)
