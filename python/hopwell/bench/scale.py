"""The device of comparisons, and the sizes of the ceiling and of the copies of inputs."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLD_BYTES = 200e6  # read by all calls of a graph together; larger than any L2 cache
PRODUCT = 8192 if DEVICE == "cuda" else 2048  # rows and columns of the matrix product that is the ceiling
MOST_COPIES = 256  # of the inputs


def shrink() -> None:
    """Reduces sizes for a dry run. Caches stay warm and the ceiling is small: its times mean nothing."""
    global COLD_BYTES, PRODUCT
    COLD_BYTES, PRODUCT = 1e5, 64


def cold_copies(nbytes: float) -> int:
    """Returns the number of copies of inputs of nbytes that exceeds a cache; 1 on a CPU, which uses no graphs."""
    return 1 if DEVICE == "cpu" else min(MOST_COPIES, max(1, round(COLD_BYTES / nbytes)))
