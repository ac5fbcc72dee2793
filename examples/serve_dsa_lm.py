#!/usr/bin/env python3
"""Trains a language model with DeepSeek Sparse Attention and serves it from paged caches, with the trainer's selection.

The model is the small model of train_dsa_lm.py. In sparse training it selects and attends keys as the server's caches
have them: index keys of e4m3 and latents in rows of 656 bytes, or with --rows bf16 a smaller latent in rows of bf16.
Then a server answers requests that arrive at random, over pages that are handed out and reused in random order. Each
step feeds a request three tokens: the last one and two drafts, which the model verifies.

The run shows, and checks, that the server and the trainer compute the same:
  - every step and layer selects the positions that the trainer's forward over the same tokens selects
  - the logits of a request have the same bits in the batch, in another batch, alone and on other pages

PyTorch's products have other bits for another number of rows. Therefore the server and the forward that it is compared
with multiply one row at a time. The exit code is 0 only if every claim held. It runs on the CPU.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

# PyTorch's threads spin while they wait, and take processor time from the library's threads. PyTorch's OpenMP reads
# this variable at import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from dsa_lm.model import QUICK, Decoder, Size, generate
from dsa_lm.options import Parser, at_least, seed
from dsa_lm.report import Claim, DemoError, Reporter, Stopwatch, console, table
from dsa_lm.serving import CachedDecoder, Request, Server, serve
from dsa_lm.text import load, validation_windows
from dsa_lm.training import Settings, Trainer
from rich.console import Console
from torch import Tensor

BLOCK = 16  # tokens a page
SIZES = {"bytes": replace(QUICK, d_v=512, d_rope=64), "bf16": QUICK}


class CachedTrainer(Trainer):
    """The stages of the main model alone, without checkpoints."""

    network = CachedDecoder

    def lengths(self) -> dict[str, int]:
        return {stage: steps for stage, steps in self.settings.lengths().items() if stage != "dense twin"}

    def save(self, path: Path | None = None) -> None:
        """The run is short."""


def make_requests(size: Size, ids: Tensor, count: int, seed: int) -> list[Request]:
    """Prompts of many lengths from the validation text; some arrive together."""
    rng = np.random.default_rng(seed)
    requests, arrives = [], 0
    for _ in range(count):
        length, wanted = int(rng.integers(2, size.context // 2)), int(rng.integers(8, size.context // 2))
        place = int(rng.integers(0, len(ids) - length))
        arrives += int(rng.integers(0, 8))
        requests.append(Request(ids[place : place + length].tolist(), wanted, arrives))
    return requests


def serve_again(model: CachedDecoder, requests: list[Request], block: int, running: int, seed: int) -> list[Request]:
    """Serves fresh copies of the requests, in another order and on other pages."""
    copies = [request.fresh() for request in requests]
    for copy, arrives in zip(copies, np.random.default_rng(seed).permutation(len(copies)), strict=True):
        copy.arrives = int(arrives)
    pages = max(-(-(len(r.prompt) + r.wanted) // block) for r in requests)
    serve(Server(model, running * pages, block, running, seed), copies)
    return copies


def differing_logits(requests: list[Request], others: list[Request]) -> int:
    """The number of requests with another token, or with a logit of other bits."""
    count = 0
    for one, other in zip(requests, others, strict=True):
        same = one.tokens == other.tokens and torch.equal(torch.stack(one.logits), torch.stack(other.logits))
        count += not same
    return count


@torch.no_grad()
def differing_from_training(model: CachedDecoder, requests: list[Request]) -> tuple[int, int, int]:
    """Compares with the trainer's forward over the tokens of each request: the number of selections, those that
    differ, and the number of tokens with a logit of other bits.
    """
    compared = differ = logits_differ = 0
    for request in requests:
        logits, _ = model(torch.tensor([request.tokens[: request.cached]]))
        selected = torch.stack(request.selected)
        compared += selected.shape[0] * selected.shape[1]
        differ += int((model.selections() != selected).any(-1).sum())
        logits_differ += int((logits[0] != torch.stack(request.logits)).any(-1).sum())
    return compared, differ, logits_differ


def unpaged(model: CachedDecoder, requests: list[Request], seed: int) -> float:
    """Tokens a second that the demo generates from the same weights, one request after another, without pages."""
    plain = Decoder(model.size)
    plain.load_state_dict(model.state_dict())
    seconds = [r.wanted / generate(plain, torch.tensor(r.prompt), r.wanted, seed)[1] for r in requests]
    return sum(r.wanted for r in requests) / sum(seconds)


def run(options: argparse.Namespace, screen: Console) -> bool:
    """Runs everything; returns True if all claims held."""
    whole, size = Stopwatch(), SIZES[options.rows]
    torch.use_deterministic_algorithms(True)
    corpus = load(options.text, size.vocabulary, size.context, 400_000)
    windows = validation_windows(corpus.validation, size.context, 8)
    settings = Settings(size, options.steps, sequences=4, seed=options.seed, learning_rate=4e-3)
    trainer = CachedTrainer(settings, corpus, windows, torch.device("cpu"))
    reporter = Reporter(screen)
    trainer.run(Path(), reporter)
    model = trainer.model
    assert isinstance(model, CachedDecoder)
    model.set_exact()

    requests = make_requests(size, corpus.validation, options.requests, options.seed)
    blocks = size.context // BLOCK * options.running * 2 // 3
    server, watch = Server(model, blocks, BLOCK, options.running, options.seed), Stopwatch()
    serve(server, requests)
    seconds = watch.read()["seconds"]
    other_batch = serve_again(model, requests, 7, 2 * options.running, options.seed + 1)
    alone = serve_again(model, requests, 5, 1, options.seed + 2)
    compared, differ, logits_differ = differing_from_training(model, requests)

    count = len(requests)
    others = [differing_logits(requests, again) for again in (other_batch, alone)]
    claims = [
        Claim("selections that the trainer makes otherwise", f"{differ} of {compared:,}", "0", differ == 0),
        Claim("tokens whose logits the trainer has otherwise", f"{logits_differ}", "0", logits_differ == 0),
        Claim("requests of other bits in another batch, on other pages", f"{others[0]} of {count}", "0", not others[0]),
        Claim("requests of other bits alone, on other pages", f"{others[1]} of {count}", "0", not others[1]),
        Claim("pages handed out, of a pool that size", f"{server.taken}", f"> {blocks}", server.taken > blocks),
        Claim("pages free at the end", f"{len(server.free)}", f"{blocks}", sorted(server.free) == list(range(blocks))),
    ]
    screen.print(table(f"served from paged caches, latents in rows of {options.rows}", claims))
    generated, read = sum(len(r.generated) for r in requests), sum(len(r.prompt) for r in requests)
    for line in (
        f"served: {generated:,} tokens generated and {read:,} read in {seconds:.1f} s = {generated / seconds:,.0f} "
        f"tokens/s generated, {server.batched / server.steps:.1f} requests a step, {server.accepted:,} of "
        f"{server.drafted:,} drafts accepted",
        f"unpaged demo, one request at a time: {unpaged(model, requests[:4], options.seed):,.0f} tokens/s",
        "The server is the slower one where it multiplies one row at a time, which equal bits need here.",
        f"{whole.read()['seconds']:.0f} s in all",
    ):
        reporter.say(line)
    return all(claim.holds for claim in claims)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="serve_dsa_lm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "files or folders of UTF-8 text (default: the Python standard library's sources)"
    parser.add_argument("--text", nargs="+", type=Path, default=[], metavar="PATH", help=text)
    parser.add_argument("--rows", choices=list(SIZES), default="bytes", help="rows of latents (default: bytes)")
    parser.add_argument("--steps", type=at_least(2), default=60, help="updates of the model (default: 60)")
    parser.add_argument("--requests", type=at_least(1), default=10, help="requests to serve (default: 10)")
    parser.add_argument("--running", type=at_least(2), default=4, help="most requests at a time (default: 4)")
    parser.add_argument("--seed", type=seed, default=1, help="seed of weights, pages and requests (default: 1)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    try:
        return 0 if run(parse(arguments), console()) else 1
    except DemoError as error:
        print(f"serve_dsa_lm: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("serve_dsa_lm: interrupted", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
