"""Random parts of a problem, computed in calls of their own and compared with one call for all of it.

ZERO_DIFFERENCE_SPLITS is the number of parts a backend (a few in `make test`; 10,000 by hand).
"""

import os
from collections.abc import Callable
from typing import Any

import hopwell
import numpy as np
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
    """The same rows with places behind their entries that name none, sometimes past what GPUs put in order at once."""
    return torch.nn.functional.pad(entries, (0, int(rng.choice((0, PADDING, 4096)))), value=value)


PADDING = 70
PARTS = 10  # of a problem


def device_of(backend: str) -> str:
    return "cuda" if backend.startswith("sm") else "cpu"


def check_parts(problem: Callable[[np.random.Generator, str], Any], backend: str, rng: np.random.Generator) -> None:
    """Compares parts of one problem, or of several."""
    left = splits(backend)
    try:
        while left > 0:
            made = problem(rng, backend)
            for _ in range(min(left, PARTS)):
                hopwell.set_num_threads(int(rng.integers(1, 5)))  # of the CPU
                made.check_part(rng)
            left -= PARTS
    finally:
        hopwell.set_num_threads(0)


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
