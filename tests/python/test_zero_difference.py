"""What belongs to one query has the same bits whatever else is in the call: other queries, padding, other heads.

Random parts of a problem are computed in calls of their own, on every backend that runs here, and compared with one
call for all of it. ZERO_DIFFERENCE_SPLITS is the number of parts a backend (a few in `make test`; 10,000 by hand).
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import hopwell
import numpy as np
import pytest
import torch

SCALE = 576**-0.5


def splits(backend: str) -> int:
    """How many parts are compared."""
    few = 40 if backend == "cpu" else 3 if backend.startswith("emu:") else 200
    return int(os.environ.get("ZERO_DIFFERENCE_SPLITS", few))


def some_heads(rng: np.random.Generator, backend: str, heads: int) -> slice:
    """Random ones of up to 128 heads. On sm100 as many of them as the same kernel takes (docs/bits.md)."""
    least = 65 if backend.endswith("sm100") and heads > 64 else 1
    count = int(rng.integers(least, heads + 1))
    first = int(rng.integers(heads - count + 1))
    return slice(first, first + count)


def random(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).bfloat16()


def same_bits(a: Any, b: Any) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def padded(rng: np.random.Generator, entries: torch.Tensor, value: float) -> torch.Tensor:
    """The same rows with places behind their entries that name none."""
    return torch.nn.functional.pad(entries, (0, PADDING), value=value) if rng.random() < 0.5 else entries


PADDING = 70
PARTS = 10  # of a problem


class SparseMla:
    """A problem of sparse MLA, and calls for some of its queries and heads."""

    def __init__(self, rng: np.random.Generator, backend: str) -> None:
        self.backend, self.device = backend, "cuda" if backend.startswith("sm") else "cpu"
        self.h_q = int(rng.choice((64, 128)))
        # Few queries, or more than the CPU shares out by tiles of 512 keys, of which there are up to three.
        self.s_q, self.topk, self.s_kv = (4, 80, 150) if rng.integers(2) or backend != "cpu" else (20, 1100, 1200)
        self.q, self.kv = random(rng, self.s_q, self.h_q, 576), random(rng, self.s_kv, 576)
        self.d_out = random(rng, self.s_q, self.h_q, 512)
        chosen = [rng.permutation(self.s_kv)[: self.topk] for _ in range(self.s_q)]
        self.indices = torch.from_numpy(np.stack(chosen).astype(np.int32))
        self.sink = random(rng, self.h_q).float()
        self.whole = self.run(slice(None), slice(None), self.indices)

    def run(self, queries: slice, heads: slice, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Out, max_logits, lse and dq of these queries and heads, and the distributions over these heads."""
        q, d_out, sink = (
            x.to(self.device) for x in (self.q[queries, heads], self.d_out[queries, heads], self.sink[heads])
        )
        kv, indices = self.kv.to(self.device), indices.to(self.device)
        given = {"attn_sink": sink, "backend": self.backend}
        out, max_logits, lse = hopwell.sparse_mla_forward(q, kv, indices, SCALE, **given)
        dq, _, _ = hopwell.sparse_mla_backward(d_out, q, kv, indices, out, lse, SCALE, deterministic=True, **given)
        attn, attn_l1 = (
            hopwell.attention_distribution(q, kv, indices, lse, SCALE, normalize=norm, backend=self.backend)
            for norm in ("none", "l1")
        )
        return out, max_logits, lse, dq, attn, attn_l1

    def check_part(self, rng: np.random.Generator) -> None:
        """Compares one random part."""
        first = int(rng.integers(self.s_q))
        queries = slice(first, int(rng.integers(first, self.s_q)) + 1)
        heads = some_heads(rng, self.backend, self.h_q) if rng.random() < 0.7 else slice(0, self.h_q)
        part = self.run(queries, heads, padded(rng, self.indices[queries], -1))
        for name, whole, mine in zip(("out", "max_logits", "lse", "dq"), self.whole, part, strict=False):
            assert same_bits(whole[queries, heads], mine), f"{name} of queries {queries}, heads {heads}"
        if heads == slice(0, self.h_q):
            for name, whole, mine in zip(("attn", "attn, l1,"), self.whole[4:], part[4:], strict=True):
                assert same_bits(whole[queries], mine[:, : self.topk]), f"{name} of queries {queries}"


class Indexer:
    """A problem of the lightning indexer, and calls for some of its queries."""

    s_q, s_kv, heads, topk = 5, 700, 8, 90

    def __init__(self, rng: np.random.Generator, backend: str) -> None:
        self.backend, self.device = backend, "cuda" if backend.startswith("sm") else "cpu"
        self.q, self.k = random(rng, self.s_q, self.heads, 128), random(rng, self.s_kv, 128)
        self.relu = bool(rng.integers(2))
        self.weights, self.target = (
            random(rng, self.s_q, self.heads).float(),
            random(rng, self.s_q, self.topk).float().abs(),
        )
        self.whole = self.run(slice(None), rng, pad=False)

    def run(self, queries: slice, rng: np.random.Generator, pad: bool = True) -> tuple[torch.Tensor, ...]:
        """Indices, scores, d_q_index, d_weights and row losses of these queries."""
        q, weights, target = (x[queries].to(self.device) for x in (self.q, self.weights, self.target))
        k = self.k.to(self.device)
        indices, scores = hopwell.lightning_indexer(q, k, weights, self.topk, relu=self.relu, backend=self.backend)
        row_loss = torch.empty(len(q), device=self.device)
        wide = pad and rng.random() < 0.5
        fill = (0, PADDING if wide else 0)
        _, d_q, _, d_weights = hopwell.lightning_indexer_backward(
            torch.nn.functional.pad(target, fill), q, k, weights, torch.nn.functional.pad(indices, fill, value=-1),
            relu=self.relu, deterministic=True, row_loss=row_loss, backend=self.backend,
        )  # fmt: skip
        return indices, scores, d_q, d_weights, row_loss

    def check_part(self, rng: np.random.Generator) -> None:
        """Compares one random part."""
        first = int(rng.integers(self.s_q))
        queries = slice(first, int(rng.integers(first, self.s_q)) + 1)
        names = ("indices", "scores", "d_q_index", "d_weights", "row_loss")
        for name, whole, mine in zip(names, self.whole, self.run(queries, rng), strict=True):
            assert same_bits(whole[queries], mine), f"{name} of queries {queries}"


class LinearBackward:
    """A problem of the gradient over NVFP4 weights, and calls for some of its rows.

    The second half of a sum cancels the first. So the rounding errors of the sum remain, which depend on its order.
    """

    def __init__(self, rng: np.random.Generator, backend: str) -> None:
        self.backend, self.device = backend, "cuda" if backend.startswith("sm") else "cpu"
        long = 2500 if backend.startswith("sm") else 650
        n, half, k = (int(rng.choice(sizes)) for sizes in ((20, 70, 300), (150, long), (64, 272)))
        d_out = random(rng, n, half).to(torch.bfloat16 if rng.integers(2) else torch.float16)
        codes, scales, factor = hopwell.nvfp4_quantize(random(rng, half, k))
        weights = torch.cat([codes, codes]), torch.cat([scales, scales]), factor
        self.d_out, *self.weights = (x.to(self.device) for x in (torch.cat([d_out, -d_out], dim=1), *weights))
        self.whole = self.run(slice(None))

    def run(self, rows: slice) -> torch.Tensor:
        d_x: torch.Tensor = hopwell.nvfp4_linear_backward(self.d_out[rows], *self.weights, backend=self.backend)
        return d_x

    def check_part(self, rng: np.random.Generator) -> None:
        """Compares one random part: few rows, or any number of them."""
        first = int(rng.integers(len(self.d_out)))
        most = first + 20 if rng.integers(2) else len(self.d_out)
        rows = slice(first, int(rng.integers(first, most)) + 1)
        assert same_bits(self.whole[rows], self.run(rows)), f"d_x of rows {rows}"


BACKENDS = [name for name in hopwell.backends("sparse_mla_backward") if name in hopwell.backends("sparse_mla_forward")]


@pytest.fixture(autouse=True)
def _default_threads() -> Iterator[None]:
    yield
    hopwell.set_num_threads(0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_mla(backend: str, rng: np.random.Generator) -> None:
    check_parts(SparseMla, backend, rng)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.endswith("sm100")])
def test_heads_of_ranks(backend: str, rng: np.random.Generator) -> None:
    """Ranks with 1 to 128 heads, all queries or a few: 11 tiles of keys, masked entries, and references that move."""
    device = "cuda" if backend.startswith("sm") else "cpu"
    s_q, s_kv, heads, topk = 9 if device == "cpu" else 300, 900, 128, 680
    indices = torch.from_numpy(rng.integers(-s_kv // 10, s_kv, (s_q, topk)).astype(np.int32))
    indices[:, 256:384] = indices[:, 256:384].abs()  # whole tiles that count
    lengths = torch.from_numpy(rng.integers(topk // 2, topk + 1, s_q).astype(np.int32))
    q, kv = random(rng, s_q, heads, 576), random(rng, s_kv, 576)

    def run(queries: slice, some: slice) -> tuple[torch.Tensor, ...]:
        given = {"topk_length": lengths[queries].to(device), "backend": backend}
        return hopwell.sparse_mla_forward(
            q[queries, some].contiguous().to(device), kv.to(device), indices[queries].to(device), 6 * SCALE, **given
        )

    whole = run(slice(None), slice(None))
    for count in (1, 8, 16, 20, 32, 40, 64):
        first = int(rng.integers(heads // count)) * count
        some = slice(first, first + count)
        for queries in (slice(None), slice(2, 4)):
            for name, expected, mine in zip(("out", "max_logits", "lse"), whole, run(queries, some), strict=True):
                assert same_bits(expected[queries, some], mine), f"{name} of queries {queries}, heads {some}"


@pytest.mark.parametrize("backend", hopwell.backends("lightning_indexer_backward"))
def test_lightning_indexer(backend: str, rng: np.random.Generator) -> None:
    check_parts(Indexer, backend, rng)


@pytest.mark.parametrize("backend", hopwell.backends("nvfp4_linear_backward"))
def test_nvfp4_linear_backward(backend: str, rng: np.random.Generator) -> None:
    check_parts(LinearBackward, backend, rng)


def check_parts(problem: Callable[[np.random.Generator, str], Any], backend: str, rng: np.random.Generator) -> None:
    """Compares parts of one problem, or of several."""
    left = splits(backend)
    while left > 0:
        made = problem(rng, backend)
        for _ in range(min(left, PARTS)):
            hopwell.set_num_threads(int(rng.integers(1, 5)))  # of the CPU
            made.check_part(rng)
        left -= PARTS
