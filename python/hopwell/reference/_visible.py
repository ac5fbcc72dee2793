"""The keys that a query may see: its key range, and a causal mask over keys that may represent several tokens."""

from typing import TypedDict

import numpy as np

from ._arrays import Int64, Tensor, as_indices, require, require_shape


class Visibility(TypedDict, total=False):
    """The arguments of `visible_keys` that an operator has as its own."""

    q_positions: Tensor | None
    q_start: int | None
    kv_stride: int
    k_start: Tensor | None
    k_end: Tensor | None


class Masks(Visibility, total=False):
    """Which entries of its row of indices a query attends: the first topk_length[s], and of these the visible keys."""

    topk_length: Tensor | None


def visible_keys(
    operator: str,
    s_q: int,
    s_kv: int,
    q_positions: Tensor | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    k_start: Tensor | None = None,
    k_end: Tensor | None = None,
) -> tuple[Int64, Int64]:
    """The keys first[s] ≤ t < last[s] that each query sees: two int64 [s_q], within 0 … s_kv if there are any keys.

    These are the keys of the query's range, k_start[s] ≤ t < k_end[s]; without ranges, all keys from 0 on. If there are
    positions, the keys must also be in the past. Key t represents the kv_stride tokens from (t − k_start[s])·kv_stride
    on. It is visible if the last of these tokens is not in the future: (t − k_start[s] + 1)·kv_stride ≤ position + 1.
    Without positions there is no causal mask, and kv_stride does not matter.
    """
    require(kv_stride >= 1, operator, "kv_stride", "at least 1", kv_stride)
    require(q_positions is None or q_start is None, operator, "q_start", "absent beside q_positions", q_start)
    first, last = np.zeros(s_q, dtype=np.int64), np.full(s_q, s_kv, dtype=np.int64)
    if k_start is not None:
        first = _of_each_query(operator, "k_start", k_start, s_q)
    if k_end is not None:
        last = _of_each_query(operator, "k_end", k_end, s_q)
    require((k_start is None) == (k_end is None), operator, "k_start", "given together with k_end", "one of the two")

    positions = None
    if q_positions is not None:
        positions = _of_each_query(operator, "q_positions", q_positions, s_q)
    elif q_start is not None:
        positions = int(q_start) + np.arange(s_q, dtype=np.int64)
    if positions is not None:
        last = np.minimum(last, first + (positions + 1) // int(kv_stride))
    return np.maximum(first, 0), np.clip(last, 0, s_kv)


def _of_each_query(operator: str, argument: str, x: Tensor, s_q: int) -> Int64:
    values = as_indices(operator, argument, x)
    require_shape(operator, argument, values, "[s_q]", (s_q,))
    return values
