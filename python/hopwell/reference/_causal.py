"""Causal masking over keys that may each stand for several tokens."""

import numpy as np

from ._arrays import Int64, Tensor, as_indices, require, require_shape


def visible_keys(
    operator: str, s_q: int, s_kv: int, q_positions: Tensor | None, q_start: int | None, kv_stride: int
) -> Int64:
    """How many keys each query sees, int64 [s_q]: always the first ones.

    Key t stands for the tokens t·kv_stride … (t + 1)·kv_stride − 1 and is visible once the last of them is not in the
    future: (t + 1)·kv_stride ≤ position + 1. Without positions there is no mask, whatever the stride.
    """
    require(kv_stride >= 1, operator, "kv_stride", "at least 1", kv_stride)
    require(q_positions is None or q_start is None, operator, "q_start", "absent beside q_positions", q_start)
    if q_positions is not None:
        positions = as_indices(operator, "q_positions", q_positions)
        require_shape(operator, "q_positions", positions, "[s_q]", (s_q,))
    elif q_start is not None:
        positions = int(q_start) + np.arange(s_q, dtype=np.int64)
    else:
        return np.full(s_q, s_kv, dtype=np.int64)
    return np.clip((positions + 1) // int(kv_stride), 0, s_kv)
