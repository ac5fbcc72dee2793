"""What belongs to one query of decode has the same bits in any batch, on any pages and beside any heads.

As in test_zero_difference.py, on every backend that runs here.
"""

from collections.abc import Iterator
from typing import Any

import hopwell
import numpy as np
import pytest
import torch
from zero_difference import SCALE, check_parts, device_of, padded, random, same_bits, some_heads


def on_pages(
    rng: np.random.Generator, tokens: torch.Tensor, row: int, blocks: tuple[int, ...], spare: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with the tokens [b, n, d] of some sequences, in blocks of one of these sizes on random pages, and tables.

    Rows that no token has are NaN or bytes of 255. `spare` more columns of the tables name blocks that do not exist.
    """
    b, n, d = tokens.shape
    block = int(rng.choice(blocks))
    used = -(-n // block)
    count = b * used + int(rng.integers(3))
    tables = np.full((b, used + spare), rng.choice((-1, 2**31 - 1)), np.int32)
    tables[:, :used] = rng.permutation(count)[: b * used].reshape(b, used)
    positions = np.arange(n)
    slots = torch.from_numpy((tables[:, positions // block].astype(np.int64) * block + positions % block).reshape(-1))
    if row == d:
        cache = torch.full((count, block, row), float("nan"), dtype=torch.bfloat16)
    else:
        cache = torch.full((count, block, row), 255, dtype=torch.uint8)
    hopwell.torch.mla_cache_append(tokens.flatten(0, 1), cache, slots, backend="cpu")
    return cache, torch.from_numpy(tables)


class Decode:
    """A problem of decode over paged latents, and calls for some of its sequences, queries and heads on other pages."""

    def __init__(self, rng: np.random.Generator, backend: str) -> None:
        self.rng, self.backend, self.device = rng, backend, device_of(backend)
        # On GPUs now and then rows of bf16 in one cache, without splits: the forward's kernels.
        self.by_forward = backend != "cpu" and rng.integers(3) == 0
        small = rng.integers(2) or backend != "cpu"
        self.b, self.q_len, self.h_q = (3, 3, 20) if small else (9, 2, 20)
        self.topk = 90 if backend != "cpu" else int(rng.choice((90, 700)))
        self.keys_per_split = 4096 if self.by_forward else int(rng.choice((64, 256, 640, 1024)))
        self.d, self.row = ((576, 656), (512, 584), (512, 528), (576, 576))[int(rng.integers(4))]
        if self.by_forward:
            self.row = self.d
        self.tokens = 150  # of a sequence
        self.kv, self.extra = random(rng, self.b, self.tokens, self.d), random(rng, 60, self.d)
        self.q, self.sink = random(rng, self.b, self.q_len, self.h_q, self.d), random(rng, self.h_q).float()
        self.indices = self.integers(-5, self.tokens, self.b, self.q_len, self.topk)
        self.lens = self.integers(self.tokens // 2, self.tokens + 1, self.b)
        self.lengths = self.integers(self.topk // 2, self.topk + 1, self.b, self.q_len)
        self.others = self.integers(-2, 60, self.b, self.q_len, 70)
        self.whole = self.run(slice(None), slice(0, self.q_len), slice(None))

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.integers(low, high, shape).astype(np.int32))

    def paged(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # GPUs need blocks of a multiple of 16 bytes.
        odd = self.backend == "cpu" or self.row != 584
        return on_pages(self.rng, tokens, self.row, (1, 7, 16, 64) if odd else (2, 6, 16, 64))

    def run(self, sequences: slice, queries: slice, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of these queries and heads."""
        cache, tables = self.paged(self.kv[sequences])
        # A sequence's count belongs to its last query in this call.
        lens = self.lens[sequences] - (self.q_len - queries.stop)
        given: dict[str, Any] = {
            "block_tables": tables,
            "context_lens": lens,
            "topk_length": self.lengths[sequences, queries],
            "attn_sink": self.sink[heads],
        }
        if not self.by_forward:
            others, extra_tables = self.paged(self.extra[None].expand(len(tables), -1, -1))
            given |= {"extra_cache": others, "extra_block_tables": extra_tables}
            given["extra_indices"] = padded(self.rng, self.others[sequences, queries], -1)
        indices = padded(self.rng, self.indices[sequences, queries], -1)[..., : 4000 if self.by_forward else None]
        arguments = (x.to(self.device) for x in (self.q[sequences, queries, heads].contiguous(), cache, indices))
        options = {name: x.to(self.device) for name, x in given.items()}
        return hopwell.sparse_mla_decode(
            *arguments, SCALE, keys_per_split=self.keys_per_split, backend=self.backend, **options
        )

    def check_part(self, rng: np.random.Generator) -> None:
        """Compares one random part."""
        first, query = int(rng.integers(self.b)), int(rng.integers(self.q_len))
        sequences = slice(first, int(rng.integers(first, self.b)) + 1)
        queries = slice(query, int(rng.integers(query, self.q_len)) + 1)
        heads = some_heads(rng, self.backend, self.h_q)
        what = f"sequences {sequences}, queries {queries}, heads {heads}, splits of {self.keys_per_split}"
        for name, whole, mine in zip(("out", "lse"), self.whole, self.run(sequences, queries, heads), strict=True):
            assert same_bits(whole[sequences, queries, heads], mine), f"{name} of {what}"


class PagedIndexer:
    """A problem of the paged indexer, and calls for some of its sequences and queries on other pages."""

    def __init__(self, rng: np.random.Generator, backend: str) -> None:
        self.rng, self.backend, self.device = rng, backend, device_of(backend)
        self.b, self.q_len, self.heads = [(3, 3, 8), (9, 2, 32), (2, 1, 64)][int(rng.integers(3))]
        self.tokens, self.topk = int(rng.choice((90, 700))), int(rng.choice((40, 90, 300)))
        self.is_fp8, self.relu = bool(rng.integers(2)), bool(rng.integers(2))
        self.keys = random(rng, self.b, self.tokens, 128)
        self.q = random(rng, self.b, self.q_len, self.heads, 128)
        self.weights = random(rng, self.b, self.q_len, self.heads).float()
        if self.is_fp8:
            self.q = self.q.to(torch.float8_e4m3fn)
        self.lens = torch.from_numpy(rng.integers(0, self.tokens + 1, (self.b, self.q_len)).astype(np.int32))
        self.whole = self.run(slice(None), slice(0, self.q_len))

    def run(self, sequences: slice, queries: slice) -> tuple[torch.Tensor, ...]:
        """Indices, scores and lengths of these queries."""
        row, spare = 132 if self.is_fp8 else 128, int(self.rng.integers(9))
        cache, tables = (
            x.to(self.device) for x in on_pages(self.rng, self.keys[sequences], row, (1, 7, 16, 64), spare)
        )
        q, weights, lens = (x[sequences, queries].to(self.device) for x in (self.q, self.weights, self.lens))
        lengths = torch.empty(lens.shape, dtype=torch.int32, device=self.device)
        options = {"relu": self.relu, "lengths": lengths, "backend": self.backend}
        return *hopwell.paged_lightning_indexer(q, cache, weights, self.topk, tables, lens, **options), lengths

    def check_part(self, rng: np.random.Generator) -> None:
        """Compares one random part."""
        first, query = int(rng.integers(self.b)), int(rng.integers(self.q_len))
        sequences = slice(first, int(rng.integers(first, self.b)) + 1)
        queries = slice(query, int(rng.integers(query, self.q_len)) + 1)
        names = ("indices", "scores", "lengths")
        for name, whole, mine in zip(names, self.whole, self.run(sequences, queries), strict=True):
            assert same_bits(whole[sequences, queries], mine), f"{name} of sequences {sequences}, queries {queries}"


@pytest.fixture(autouse=True)
def _default_threads() -> Iterator[None]:
    yield
    hopwell.set_num_threads(0)


@pytest.mark.parametrize("backend", hopwell.backends("sparse_mla_decode"))
def test_sparse_mla_decode(backend: str, rng: np.random.Generator) -> None:
    check_parts(Decode, backend, rng)


@pytest.mark.parametrize("backend", hopwell.backends("paged_lightning_indexer"))
def test_paged_lightning_indexer(backend: str, rng: np.random.Generator) -> None:
    check_parts(PagedIndexer, backend, rng)
