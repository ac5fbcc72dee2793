"""Index scores of all visible keys. Other projects' kernels store them; Hopwell's kernels do not."""

import torch
from torch import Tensor

from hopwell.torch import ops

from ._tensors import in_rows

_SCORES_AT_A_TIME = 1 << 24


def rows_at_a_time(width: int) -> int:
    """Returns the number of rows of `width` numbers that fit into 64 MiB of float32."""
    return max(1, _SCORES_AT_A_TIME // max(width, 1))


def as_int32(numbers: Tensor, end: int) -> Tensor:
    """Converts entries, lengths or bounds of keys to int32 with a contiguous last dimension. int64 numbers are clamped
    to −1 … end first.
    """
    return in_rows(numbers if numbers.dtype == torch.int32 else numbers.clamp(-1, end).int())


def write_index_scores(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    start: Tensor,
    end: Tensor,
    *,
    k_scale: Tensor | None = None,
    from_start: bool = False,
) -> None:
    """out[s, t] = k_scale[t]·Σ_j weights[s, j]·relu(q[s, j]·k[t]) where start[s] ≤ t < end[s], −inf elsewhere.

    out is [s_q, width], in any float dtype. With from_start, column i is key max(start[s], 0) + i, and keys beyond the
    width are omitted; without it, width is s_kv. q and k may be float8_e4m3fn; bf16 represents these numbers exactly.

    The scores come from a selection of as many keys as a query can see: it returns all of them in ascending order.
    """
    if q.dtype == torch.float8_e4m3fn:
        q, k = q.bfloat16(), k.bfloat16()
    q, k, weights, start, end = in_rows(q), in_rows(k), in_rows(weights), in_rows(start), in_rows(end)
    s_kv, width = len(k), out.shape[1]
    column = torch.arange(width, device=out.device, dtype=torch.int32)
    if from_start:
        end = torch.minimum(end, start.clamp(0, s_kv) + width)
    for first in range(0, len(q), rows_at_a_time(width)):
        rows = slice(first, first + rows_at_a_time(width))
        scores = ops.lightning_indexer(q[rows], k, weights[rows], width, k_start=start[rows], k_end=end[rows])[1]
        first_key = start[rows, None].clamp(0, s_kv)
        if width and not from_start:  # the i-th visible key is key start + i
            scores = scores.gather(1, (column - first_key).clamp(min=0).long())
            scores.masked_fill_((column < first_key) | (column >= end[rows, None]), -torch.inf)
        if k_scale is not None and s_kv:
            key = first_key + column if from_start else column.expand_as(scores)
            hidden = scores == -torch.inf  # these columns keep −inf even if the scale is 0
            scores = (scores * k_scale[key.clamp(max=s_kv - 1)]).masked_fill_(hidden, -torch.inf)
        out[rows] = scores
