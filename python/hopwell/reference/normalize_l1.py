"""Rows divided by their sums."""

import numpy as np

from ._arrays import Array, Tensor, as_float64, deliver, describe, require


def normalize_l1(attn: Tensor, *, out: Array | None = None) -> Array:
    """Divides the rows of attn [rows, columns] by their sums; rows of zeros stay zero. `out` may be `attn`."""
    name = "normalize_l1"
    rows = as_float64(attn)
    require(rows.ndim == 2, name, "attn", "[rows, columns]", describe(rows))
    total = rows.sum(axis=1, keepdims=True)
    return deliver(name, "out", rows / np.where(total == 0.0, 1.0, total), out)
