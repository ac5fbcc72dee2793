"""Where comparisons run, and how large what they are compared with is."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLD_BYTES = 200e6  # what the calls of a graph read together; larger than any L2
PRODUCT = 8192 if DEVICE == "cuda" else 2048  # rows and columns of the matrix product that is the ceiling
MOST_COPIES = 256  # of the inputs, however small they are


def shrink() -> None:
    """For a dry run: caches stay warm and the ceiling is small, so that times mean nothing."""
    global COLD_BYTES, PRODUCT
    COLD_BYTES, PRODUCT = 1e5, 64


def cold_copies(nbytes: float) -> int:
    """So many copies of inputs of nbytes do not stay in a cache; one on a CPU, where no graph wants several calls."""
    return 1 if DEVICE == "cpu" else min(MOST_COPIES, max(1, round(COLD_BYTES / nbytes)))
