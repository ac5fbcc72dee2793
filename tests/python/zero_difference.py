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
    while left > 0:
        made = problem(rng, backend)
        for _ in range(min(left, PARTS)):
            hopwell.set_num_threads(int(rng.integers(1, 5)))  # of the CPU
            made.check_part(rng)
        left -= PARTS
