# %% [markdown]
# # Swap one import
#
# The GLM-5 plug-ins of slime and Miles import two names from TileLang's kernels: `SparseMLA` and `lighting_indexer`.
# Here a small model with the same structure trains twice from the same seed. One run uses both names in plain PyTorch,
# the other imports both from `hopwell.compat.tilelang`. The two loss curves must coincide.
#
#     python examples/swap_one_import.py            # two runs on the CPU, a picture, exit code 0 if the curves agree
#     python examples/swap_one_import.py --steps 20
# %%
import argparse
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

# PyTorch's threads spin while they wait, and take processor time from the library's threads. PyTorch's OpenMP reads
# this variable at import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from hopwell.compat import tilelang
from hopwell.torch import key_ranges
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

# %% [markdown]
# ## The two names in plain PyTorch
#
# This version gathers and stores everything: `s_q × topk` keys for the attention, `s_q × s_kv` scores for the indexer.
# Kernels avoid this; as a definition it is short.


# %%
def plain_sparse_mla(q: Tensor, kv: Tensor, indices: Tensor, scaling: float, d_v: int) -> tuple[Tensor, Tensor]:
    """q [s_q, heads, d_qk], kv [s_kv, 1, d_qk], indices [s_q, 1, topk] → out [s_q, heads, d_v], lse to base 2."""
    entries = indices[:, 0]
    keys = kv[entries.clamp(min=0).long(), 0]
    scores = torch.einsum("shd,sid->shi", q, keys) * scaling
    scores = scores.masked_fill(entries[:, None] < 0, -torch.inf)
    out = torch.einsum("shi,sid->shd", scores.softmax(-1), keys[..., :d_v])
    return out, scores.detach().logsumexp(-1) / math.log(2)


def plain_lighting_indexer(
    q: Tensor, k: Tensor, weights: Tensor, start: Tensor, end: Tensor, topk: int
) -> tuple[Tensor, Tensor]:
    """Each query's topk keys with the largest Σ_j weights·relu(q·k), and the scores; padded with −1 and −inf."""
    scores = torch.einsum("sjt,sj->st", torch.einsum("sjd,td->sjt", q, k).relu(), weights)
    keys = torch.arange(len(k))
    scores = scores.masked_fill((keys < start[:, None]) | (keys >= end[:, None]), -torch.inf)
    best, indices = (t[:, :topk] for t in scores.sort(descending=True, stable=True))  # ties: smaller keys
    return best, indices.int().masked_fill(best.detach() == -torch.inf, -1)


PLAIN = SimpleNamespace(SparseMLA=SimpleNamespace(apply=plain_sparse_mla), lighting_indexer=plain_lighting_indexer)

# %% [markdown]
# ## A model of GLM-5's shape
#
# All heads share one latent key, an indexer precedes each attention, and several documents are packed one after
# another. The indexer learns from the divergence between its scores and the attention of the selected keys. `kernels`
# is the only difference between the two runs.


# %%
class Layer(nn.Module):
    """Indexer, sparse attention and a feed-forward network."""

    def __init__(self, kernels: SimpleNamespace, width: int, heads: int = 4, d_qk: int = 48, d_v: int = 32) -> None:
        super().__init__()
        self.kernels, self.heads, self.d_qk, self.d_v, self.topk = kernels, heads, d_qk, d_v, 16
        self.norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key = nn.Linear(width, heads * d_qk), nn.Linear(width, d_qk)
        self.out = nn.Linear(heads * d_v, width)
        self.index_query, self.index_key = nn.Linear(width, 2 * 32), nn.Linear(width, 32)
        self.index_weights = nn.Linear(width, 2)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """x [s, width] → the next x, and the indexer's loss."""
        y = self.norm(x)
        q, kv = self.query(y).unflatten(-1, (self.heads, self.d_qk)), self.key(y)[:, None]
        fixed = y.detach()  # the indexer learns only from its own loss
        index_q = self.index_query(fixed).unflatten(-1, (2, 32)) / 32
        scores, indices = self.kernels.lighting_indexer(
            index_q, self.index_key(fixed), self.index_weights(fixed), start, end, self.topk
        )
        scaling = self.d_qk**-0.5
        out, lse = self.kernels.SparseMLA.apply(q, kv, indices[:, None], scaling, self.d_v)
        x = x + self.out(out.flatten(1))
        x = x + self.feed(self.feed_norm(x))
        return x, self.indexer_loss(scores, indices, q.detach(), kv.detach(), lse, scaling)

    def indexer_loss(
        self, scores: Tensor, indices: Tensor, q: Tensor, kv: Tensor, lse: Tensor, scaling: float
    ) -> Tensor:
        """KL(attention of the selected keys ‖ softmax of their scores), per query."""
        logits = torch.einsum("shd,sid->shi", q, kv[indices.clamp(min=0).long(), 0]) * scaling
        attention = (logits - lse[..., None] * math.log(2)).exp().mean(1).masked_fill(indices < 0, 0)
        log_p = scores.masked_fill(indices < 0, -1e30).log_softmax(-1)
        return functional.kl_div(log_p, attention, reduction="sum") / len(q)


class Model(nn.Module):
    """Maps bytes to logits of the next byte."""

    def __init__(self, kernels: SimpleNamespace, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.place = nn.Embedding(128, width)
        self.layers = nn.ModuleList(Layer(kernels, width) for _ in range(layers))

    def forward(self, tokens: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Packed documents → logits and the sum of the indexers' losses."""
        start, end = key_ranges(cu_seqlens)  # causal, within each document
        x = self.embedding(tokens) + self.place(end.long() - start - 1)
        losses = []
        for layer in self.layers:
            x, loss = layer(x, start, end)
            losses.append(loss)
        return self.head(x), torch.stack(losses).sum()


# %% [markdown]
# ## Two runs
#
# The text is the source of Python's standard library, cut into documents of 128 bytes.


# %%
def text() -> Tensor:
    """Returns some hundred thousand bytes of the standard library."""
    names = ("argparse.py", "ast.py", "datetime.py", "decimal.py", "inspect.py", "typing.py")
    folder = Path(sysconfig.get_path("stdlib"))
    raw = b"".join(path.read_bytes() for path in (folder / name for name in names) if path.exists())
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()


def train(kernels: SimpleNamespace, data: Tensor, steps: int, documents: int = 4, length: int = 128) -> list[float]:
    """Returns the loss of each step, including the indexers' part."""
    torch.manual_seed(0)
    model = Model(kernels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    cu_seqlens = torch.arange(documents + 1, dtype=torch.int32) * length
    chances, losses = torch.Generator().manual_seed(1), []
    shown = {"console": Console(stderr=True), "transient": True, "disable": not sys.stderr.isatty()}
    for _ in track(range(steps), "plain PyTorch" if kernels is PLAIN else "Hopwell", **shown):
        starts = torch.randint(len(data) - length - 1, (documents,), generator=chances)
        rows = torch.stack([data[i : i + length + 1] for i in starts.tolist()])
        logits, indexer_loss = model(rows[:, :-1].flatten(), cu_seqlens)
        loss = functional.cross_entropy(logits, rows[:, 1:].flatten()) + indexer_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def timed(run: Callable[[], list[float]]) -> tuple[list[float], float]:
    begin = time.perf_counter()
    return run(), time.perf_counter() - begin


def draw(plain: list[float], hopwell: list[float], path: Path) -> None:
    """Draws both curves in one picture."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(plain, color="#9aa5b1", linewidth=5, label="plain PyTorch")
    axes.plot(hopwell, color="#0b6e4f", linewidth=1.5, label="hopwell.compat.tilelang")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, the indexers' part included")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


class Parser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Runs both, draws the curves and compares them."""
    parser = Parser(
        prog="swap_one_import",
        description="Trains a small model twice, on the CPU: with plain PyTorch and with hopwell.compat.tilelang. The"
        " exit code is 0 only if the losses of every step agree within 1 %.",
    )
    parser.add_argument(
        "--steps", type=int, default=120, help="steps of each run (default: 120, about 20 processor seconds)"
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        default=Path("swap_one_import.png"),
        help="picture of both loss curves (default: swap_one_import.png)",
    )
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"argument --steps: expected at least 1; got {options.steps}")
    if not options.picture.absolute().parent.is_dir():
        parser.error(f"argument --picture: expected a file in a folder that exists; got {options.picture}")
    data = text()
    plain, plain_seconds = timed(lambda: train(PLAIN, data, options.steps))
    ours, our_seconds = timed(lambda: train(tilelang, data, options.steps))  # the one import
    draw(plain, ours, options.picture)
    largest = max(abs(a - b) / a for a, b in zip(plain, ours, strict=True))
    print(f"loss {plain[0]:.3f} → {plain[-1]:.3f} in plain PyTorch ({plain_seconds:.1f} s)")
    print(f"loss {ours[0]:.3f} → {ours[-1]:.3f} with Hopwell ({our_seconds:.1f} s); {options.picture}")
    print(f"{'PASS' if largest < 0.01 else 'FAIL'}  every step's losses within 1 %: largest difference {largest:.4%}")
    return 0 if largest < 0.01 else 1


# %%
if __name__ == "__main__":
    if "ipykernel" in sys.modules:  # in a notebook
        from IPython.display import Image, display

        main([])
        display(Image("swap_one_import.png"))
    else:
        sys.exit(main())
