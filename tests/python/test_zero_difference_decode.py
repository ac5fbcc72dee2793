"""What belongs to one query of decode has the same bits in any batch, on any pages and beside any heads.

As in test_zero_difference.py, on every backend that runs here.
"""

from typing import Any

import hopwell
import numpy as np
import pytest
import torch
from zero_difference import SCALE, check_parts, device_of, on_pages, padded, random, same_bits, some_heads

pytestmark = pytest.mark.usefixtures("numbers_only")


class Decode:
    """A problem of decode over paged latents, and calls for some of its sequences, queries and heads on other pages."""

    def __init__(self, rng: np.random.Generator, backend: str) -> None:
        self.rng, self.backend, self.device = rng, backend, device_of(backend)
        # On GPUs now and then rows of bf16 in one cache, without splits: the forward's kernels.
        self.by_forward = backend != "cpu" and rng.integers(3) == 0
        small = rng.integers(2) or backend != "cpu"
        self.b, self.q_len, self.h_q = (*((3, 3) if small else (9, 2)), int(rng.choice((20, 80))))
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


@pytest.mark.parametrize("backend", hopwell.backends("sparse_mla_decode"))
def test_sparse_mla_decode(backend: str, rng: np.random.Generator) -> None:
    check_parts(Decode, backend, rng)
