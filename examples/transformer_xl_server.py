#!/usr/bin/env python3
"""Trains a small Transformer-XL on real text and serves it: continuous batching over a paged KV cache.

The model follows Dai et al. 2019 (arXiv:1901.02860). It has relative positions with the biases u and v and the
matrix R, segments that attend to a memory of the previous segment, and a window of the same size for every token. Each
request holds pages of the cache while its window covers them. Attention is one `hopwell.paged_attention` per layer
(fused form: u, v and R) for all requests that decode, and one for all requests that still read their prompt, 16 tokens
at a time.

Then the trained model decodes every request again on its own, in plain PyTorch without a cache. Both must choose the
same tokens. Both compute in fp32 but add in different orders, so a token can differ if the best two logits are closer
than the rounding error. The report states the smallest such margin and the largest difference of logits. A request that
differs fails the run in any case. The exit code is 0 only if every claim held.
"""

import argparse
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# PyTorch's threads spin while they wait, and take processor time from the library's threads. PyTorch's OpenMP reads
# this variable at import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hopwell
import numpy as np
import torch
from dsa_lm.options import Parser, at_least, seed
from dsa_lm.report import Claim, DemoError, Stopwatch, console, table
from dsa_lm.text import Corpus, load
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional

BLOCK = 16  # tokens per page
CHUNK = 16  # prompt tokens that a request reads in one step: the limit of paged_attention


@dataclass(frozen=True)
class Size:
    vocabulary: int = 1024
    layers: int = 3
    heads: int = 6
    d: int = 32  # head size
    window: int = 128  # keys that a token sees, including itself

    @property
    def width(self) -> int:
        return self.heads * self.d


@dataclass(frozen=True)
class Plan:
    """Sizes of a run."""

    size: Size = field(default_factory=Size)
    steps: int = 300
    streams: int = 8
    segment: int = 128
    requests: int = 64
    running: int = 16  # limit of concurrent requests
    text_bytes: int | None = None


QUICK = Plan(Size(512, 2, 2, 32, 40), steps=80, segment=64, requests=12, running=4, text_bytes=400_000)


# ---- the model


class Layer(nn.Module):
    """Relative attention and a feed-forward network, each after a norm and with a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key_value = nn.Linear(size.width, 2 * size.width, bias=False)
        self.position = nn.Linear(size.width, size.width, bias=False)
        self.u, self.v = (nn.Parameter(0.02 * torch.randn(size.heads, size.d)) for _ in "uv")
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.Linear(size.width, 4 * size.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width, bias=False),
        )

    def heads(self, x: Tensor) -> Tensor:
        """[..., width] → [..., heads, d]"""
        return x.unflatten(-1, (self.size.heads, self.size.d))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of x [..., width], each [..., heads, d]."""
        x = self.attention_norm(x)
        key, value = self.key_value(x).chunk(2, dim=-1)
        return self.heads(self.query(x)), self.heads(key), self.heads(value)

    def r(self) -> Tensor:
        """R [heads, window, d]: the projected sinusoids of the distances 0 … window − 1."""
        size = self.size
        frequency = 10000 ** -(torch.arange(0, size.width, 2) / size.width)
        angle = torch.arange(size.window)[:, None] * frequency
        return self.heads(self.position(torch.cat([angle.sin(), angle.cos()], dim=-1))).transpose(0, 1)

    def attend(self, x: Tensor, memory: Tensor) -> Tensor:
        """Attention of x [b, s, width] to itself and to the preceding memory [b, m, width]; m < window."""
        window, s, m = self.size.window, x.shape[1], memory.shape[1]
        q, _, _ = self.project(x)
        _, k, v = self.project(torch.cat([memory, x], dim=1))
        content = torch.einsum("bihd,bjhd->bhij", q + self.u, k)
        # Column window − 1 − δ of row i belongs to key m + i − δ, so each row is shifted by one more column.
        position = torch.einsum("bihd,hed->bhie", q + self.v, self.r().flip(1))
        position = functional.pad(position, (0, s)).flatten(2)[..., : s * (window - 1 + s)].unflatten(-1, (s, -1))
        position = position[..., window - 1 - m :]
        distance = m + torch.arange(s)[:, None] - torch.arange(m + s)
        seen = (distance >= 0) & (distance < window)
        logits = (content + position) * self.size.d**-0.5
        weights = logits.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended.flatten(-2))
        return x + self.feed_forward(self.feed_forward_norm(x))


class TransformerXL(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        nn.init.zeros_(self.head.weight)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def empty_memory(self, b: int) -> list[Tensor]:
        return [torch.empty(b, 0, self.size.width) for _ in self.layers]

    def forward(self, tokens: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Logits [b, s, vocabulary] of tokens [b, s], and the next segment's memory: each layer's last inputs."""
        x, remembered = self.embedding(tokens), []
        for layer, before in zip(self.layers, memory, strict=True):
            remembered.append(torch.cat([before, x.detach()], dim=1)[:, -(self.size.window - 1) :])
            x = layer.finish(x, layer.attend(x, before))
        return self.logits(x), remembered


# ---- training


def progress_over(stage: str, total: int, screen: Console) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields 0 … total − 1, each with a dictionary. Shows its "figures": a bar on a terminal, else a line per tenth."""
    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    shown = {"figures": ""}
    with Progress(*columns, TimeRemainingColumn(), console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task(stage, total=total, figures="")
        for step in range(total):
            yield step, shown
            bar.update(task, completed=step + 1, **shown)
            if not screen.is_terminal and (step + 1) % max(1, total // 5) == 0:
                screen.print(f"{stage:9} {step + 1:5d}/{total}  {shown['figures']}", highlight=False, soft_wrap=True)


def train(plan: Plan, corpus: Corpus, screen: Console) -> TransformerXL:
    """Trains the model. Every stream reads its own part of the text and remembers the previous segment."""
    model = TransformerXL(plan.size)
    inner = [*model.layers.parameters(), *model.norm.parameters()]
    groups = [  # a higher rate for the head and for the embedding, where each token is rare
        {"params": inner, "lr": 3e-3},
        {"params": model.head.parameters(), "lr": 1e-2},
        {"params": model.embedding.parameters(), "lr": 3e-2},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    rises = min(30, plan.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rises, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / plan.steps)))
    )
    length = (len(corpus.train) - 1) // plan.streams
    streams, following = (corpus.train[i : i + plan.streams * length].view(plan.streams, length) for i in (0, 1))
    segments = length // plan.segment
    memory = model.empty_memory(plan.streams)
    for step, shown in progress_over("training", plan.steps, screen):
        watch = Stopwatch()
        first = step % segments * plan.segment
        if first == 0:
            memory = model.empty_memory(plan.streams)
        logits, memory = model(streams[:, first : first + plan.segment], memory)
        target = following[:, first : first + plan.segment]
        loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        shown["figures"] = f"loss {loss.item():.3f}  {target.numel() / watch.read()['seconds']:,.0f} tokens/s"
    return model.eval()


@torch.no_grad()
def validation_loss(model: TransformerXL, ids: Tensor, segment: int, most: int = 32) -> float:
    """Returns nats per token over the first segments of the validation text, read as one stream with its memory."""
    memory, losses = model.empty_memory(1), []
    for first in range(0, min(len(ids) - 1, most * segment), segment):
        window = ids[None, first : first + segment + 1]
        logits, memory = model(window[:, :-1], memory)
        losses.append(functional.cross_entropy(logits[0], window[0, 1:], reduction="none"))
    return torch.cat(losses).mean().item()


def unigram_loss(corpus: Corpus, vocabulary: int) -> float:
    """Returns the loss of the model that knows only the frequency of each token."""
    frequency = torch.bincount(corpus.train, minlength=vocabulary).double() + 1
    return -(frequency / frequency.sum()).log()[corpus.validation].mean().item()


# ---- serving


@dataclass
class Request:
    """A prompt, the number of tokens to generate, and the state of the request while it runs."""

    prompt: list[int]
    wanted: int
    arrives: int  # step of the server at which it arrives
    generated: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # [vocabulary] for each generated token
    pages: list[int] = field(default_factory=list)  # of tokens 0 … BLOCK − 1, …; −1 after release
    cached: int = 0  # tokens whose keys and values are in the cache

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def done(self) -> bool:
        return len(self.generated) == self.wanted

    def most_pages(self, window: int) -> int:
        """Returns the largest number of pages at the same time: the pages of a window and of the chunk being read."""
        whole = -(-(len(self.prompt) + self.wanted) // BLOCK)
        return min(whole, (window + CHUNK) // BLOCK + 2)


class Server:
    """Decodes all running requests together. Keys and values are in pages, which requests allocate and release."""

    def __init__(self, model: TransformerXL, blocks: int, running: int) -> None:
        self.model, self.most_running = model, running
        size = model.size
        shape = (blocks, BLOCK, size.heads, size.d)  # layout nhd
        self.caches = [(torch.full(shape, math.nan), torch.full(shape, math.nan)) for _ in model.layers]
        self.r = [layer.r().contiguous() for layer in model.layers]
        self.free = list(range(blocks))
        self.promised = 0  # upper bound of the pages that running requests can hold at the same time
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.taken = self.steps = self.batched = 0

    def step(self) -> None:
        """Admits requests if there are pages for them, reads a chunk of the prompts, decodes a token of the others."""
        window = self.model.size.window
        while self.waiting and len(self.running) < self.most_running:
            pages = self.waiting[0].most_pages(window)
            if self.promised + pages > self.caches[0][0].shape[0]:
                break
            self.promised += pages
            self.running.append(self.waiting.popleft())
        reading = [r for r in self.running if r.cached < len(r.prompt) - 1]
        decoding = [r for r in self.running if r.cached >= len(r.prompt) - 1]
        for requests, q_len in ((reading, CHUNK), (decoding, 1)):
            if requests:
                self.advance(requests, q_len)
        for request in [r for r in self.running if r.done]:
            self.give_back(request, len(request.pages))
            self.promised -= request.most_pages(window)
            self.running.remove(request)
        self.steps += 1
        self.batched += len(reading) + len(decoding)

    def advance(self, requests: list[Request], q_len: int) -> None:
        """Feeds each request its next tokens, up to q_len. A request whose prompt is complete gets a new token.

        paged_attention's queries are the last q_len tokens of a context. If a request has fewer tokens, they are at the
        end of its row after padding. The keys of the padding are not cached, and its results are unused.
        """
        counts = [min(q_len, len(r.tokens) - r.cached) for r in requests]
        tokens = torch.zeros(len(requests), q_len, dtype=torch.int64)
        real = torch.zeros(len(requests), q_len, dtype=torch.bool)
        slots: list[int] = []
        for i, (request, count) in enumerate(zip(requests, counts, strict=True)):
            tokens[i, q_len - count :] = torch.tensor(request.tokens[request.cached : request.cached + count])
            real[i, q_len - count :] = True
            slots += self.make_room(request, count)
        width = max(len(r.pages) for r in requests)
        tables = torch.tensor([r.pages + [-1] * (width - len(r.pages)) for r in requests], dtype=torch.int32)
        lengths = torch.tensor([r.cached for r in requests], dtype=torch.int32)
        logits = self.forward(tokens, real, torch.tensor(slots), tables, lengths)
        for request, row in zip(requests, logits, strict=True):
            if request.cached == len(request.tokens):
                request.logits.append(row)
                request.generated.append(int(row.argmax()))
            self.give_back(request, max(0, request.cached + 1 - self.model.size.window) // BLOCK)

    def make_room(self, request: Request, count: int) -> list[int]:
        """Allocates the pages for `count` more tokens and returns the slots of these tokens."""
        slots = []
        for t in range(request.cached, request.cached + count):
            if t // BLOCK == len(request.pages):
                request.pages.append(self.free.pop())
                self.taken += 1
            slots.append(request.pages[t // BLOCK] * BLOCK + t % BLOCK)
        request.cached += count
        return slots

    def give_back(self, request: Request, pages: int) -> None:
        """Releases the first pages of a request, because no later token sees them."""
        for i in range(pages):
            if request.pages[i] >= 0:
                self.free.append(request.pages[i])
                request.pages[i] = -1

    def forward(self, tokens: Tensor, real: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        """Returns logits [b, vocabulary] of the last token of each row, and caches the keys and values of real
        tokens.
        """
        size, x = self.model.size, self.model.embedding(tokens)
        for layer, r, (k_cache, v_cache) in zip(self.model.layers, self.r, self.caches, strict=True):
            q, k, v = layer.project(x)
            k_cache.flatten(0, 1)[slots] = k[real]
            v_cache.flatten(0, 1)[slots] = v[real]
            attended, _ = hopwell.paged_attention(
                q, k_cache, v_cache, tables, lengths, size.d**-0.5, pos_bias_u=layer.u, pos_bias_v=layer.v, r=r,
                window=size.window,
            )  # fmt: skip
            x = layer.finish(x, attended)
        return self.model.logits(x[:, -1])


def make_requests(plan: Plan, ids: Tensor, seed: int) -> list[Request]:
    """Prompts of many lengths from the validation text, a few longer than the window; some arrive together."""
    rng = np.random.default_rng(seed)
    window, requests, arrives = plan.size.window, [], 0
    for _ in range(plan.requests):
        length = int(min(1 + rng.geometric(3 / window), 2 * window, len(ids)))
        place = int(rng.integers(0, len(ids) - length + 1))
        arrives += int(rng.integers(0, 4))
        requests.append(Request(ids[place : place + length].tolist(), int(rng.integers(4, window)), arrives))
    return requests


@torch.no_grad()
def serve(plan: Plan, model: TransformerXL, requests: list[Request], screen: Console) -> tuple[Server, float]:
    """Serves all requests and returns the server and the seconds it took."""
    most = sorted((r.most_pages(plan.size.window) for r in requests), reverse=True)
    server = Server(model, blocks=max(most[0], sum(most[: plan.running]) * 2 // 3), running=plan.running)
    coming, watch = deque(requests), Stopwatch()
    for done, shown in progress_over("serving", len(requests), screen):
        while sum(r.done for r in requests) <= done:
            while coming and coming[0].arrives <= server.steps:
                server.waiting.append(coming.popleft())
            server.step()
        tokens = sum(len(r.generated) for r in requests)
        shown["figures"] = f"{len(server.running)} running  {tokens / watch.read()['seconds']:,.0f} tokens/s"
    return server, watch.read()["seconds"]


@dataclass
class Comparison:
    """Compares the served requests with the requests that the model decodes alone."""

    differing: list[str] = field(default_factory=list)
    margin: float = math.inf  # smallest difference of the best two logits
    difference: float = 0.0  # largest difference of a logit between the two
    tokens: int = 0
    seconds: float = 0.0


@torch.no_grad()
def compare(model: TransformerXL, requests: list[Request], screen: Console) -> Comparison:
    """Decodes each request alone, with the memory of training instead of a cache."""
    result = Comparison()
    for i, shown in progress_over("alone", len(requests), screen):
        request, began = requests[i], time.perf_counter()
        tokens, memory = torch.tensor([request.prompt]), model.empty_memory(1)
        for t, (served, row) in enumerate(zip(request.generated, request.logits, strict=True)):
            for piece in tokens.split(model.size.window, dim=1):
                logits, memory = model(piece, memory)
            best = logits[0, -1].topk(2)
            margin = (best.values[0] - best.values[1]).item()
            result.margin = min(result.margin, margin)
            result.difference = max(result.difference, (logits[0, -1] - row).abs().max().item())
            result.tokens += 1
            if int(best.indices[0]) != served:
                result.differing.append(f"request {i}, token {t}: the best two logits are {margin:.1e} apart")
                break
            tokens = best.indices[:1][None]
        result.seconds += time.perf_counter() - began
        shown["figures"] = f"{result.tokens / result.seconds:,.0f} tokens/s"
    return result


# ---- the run


def choose_device(asked: str | None) -> str:
    """Returns the GPU if PyTorch and Hopwell both support it, else the CPU."""
    on_gpu = any(name.startswith("sm") for name in hopwell.backends("paged_attention")) and torch.cuda.is_available()
    if asked == "cuda" and not on_gpu:
        raise DemoError("argument --device: neither PyTorch nor Hopwell may lack the GPU for cuda; one of them does")
    return asked or ("cuda" if on_gpu else "cpu")


def run(plan: Plan, text: list[Path], seed: int, screen: Console) -> bool:
    """Runs everything on PyTorch's default device; returns True if all claims held."""
    torch.manual_seed(seed)
    corpus = load(text, plan.size.vocabulary, plan.segment * plan.streams // 8, plan.text_bytes)
    device = torch.get_default_device()
    corpus.train, corpus.validation = corpus.train.to(device), corpus.validation.to(device)
    screen.print(
        f"{corpus.files} files, {len(corpus.train):,} + {len(corpus.validation):,} tokens of {plan.size.vocabulary}, "
        f"on {device}",
        highlight=False,
    )
    model = train(plan, corpus, screen)
    loss, unigram = validation_loss(model, corpus.validation, plan.segment), unigram_loss(corpus, plan.size.vocabulary)
    requests = make_requests(plan, corpus.validation, seed)
    server, seconds = serve(plan, model, requests, screen)
    alone = compare(model, requests, screen)

    equal, blocks = len(requests) - len(alone.differing), server.caches[0][0].shape[0]
    claims = [
        Claim("validation loss below the unigram model's", f"{loss:.3f}", f"{unigram:.3f}", loss < unigram),
        Claim(
            "requests whose tokens equal those of the unpaged model, alone",
            f"{equal} of {len(requests)}",
            f"{len(requests)}",
            equal == len(requests),
        ),
        Claim("pages handed out, of a pool that size", f"{server.taken}", f"> {blocks}", server.taken > blocks),
        Claim("pages free at the end", f"{len(server.free)}", f"{blocks}", sorted(server.free) == list(range(blocks))),
    ]
    screen.print(table("Transformer-XL over a paged cache", claims))
    generated, read = sum(len(r.generated) for r in requests), sum(len(r.prompt) for r in requests)
    for line in (
        f"served: {generated:,} tokens generated and {read:,} read in {seconds:.1f} s = "
        f"{generated / seconds:,.0f} tokens/s generated, {server.batched / server.steps:.1f} requests a step",
        f"alone, unpaged: {alone.tokens / alone.seconds:,.0f} tokens/s",
        f"smallest margin of the best two logits: {alone.margin:.1e}; "
        f"largest difference of a logit: {alone.difference:.1e}",
        *alone.differing,
    ):
        screen.print(line, highlight=False, soft_wrap=True)
    return all(claim.holds for claim in claims)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="transformer_xl_server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "files or folders of UTF-8 text (default: the Python standard library's sources)"
    parser.add_argument("--text", nargs="+", type=Path, default=[], metavar="PATH", help=text)
    parser.add_argument("--steps", type=at_least(1), help=f"training steps (default: {Plan.steps})")
    parser.add_argument("--requests", type=at_least(1), help=f"requests to serve (default: {Plan.requests})")
    parser.add_argument("--seed", type=seed, default=1, help="seed of weights and requests (default: 1)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    parser.add_argument("--quick", action="store_true", help="a smaller model on a part of the text; takes seconds")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    try:
        options = parse(arguments)
        plan = QUICK if options.quick else Plan()
        changes = {name: getattr(options, name) for name in ("steps", "requests") if getattr(options, name)}
        with torch.device(choose_device(options.device)):
            return 0 if run(Plan(**{**vars(plan), **changes}), options.text, options.seed, console()) else 1
    except DemoError as error:
        print(f"transformer_xl_server: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("transformer_xl_server: interrupted", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
