"""Packed documents: several documents one after another in one sequence, as trainers pack them."""

import torch
from torch import Tensor

from hopwell._checks import INTEGERS, require


def key_ranges(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *, causal: bool = True, s_q: int | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the keys that each query of a pack sees: `k_start` and `k_end` of the operators.

    A query sees only keys of its own document.

    Args:
        cu_seqlens_q: int32 or int64 [documents + 1], from 0 on: the queries of document d are cu_seqlens_q[d] …
            cu_seqlens_q[d + 1] − 1. Documents may be empty.
        cu_seqlens_k: likewise the keys of each document; its last keys belong to its queries. None if every document
            has as many keys as queries.
        causal: a query does not see the keys after its own.
        s_q: queries of the pack. None reads the last element of cu_seqlens_q, and on a GPU the host waits for it. With
            s_q the host never waits. Queries after the last document see no key: their range is 0 … 0.

    Returns:
        (k_start, k_end): int32 [s_q], on the device of cu_seqlens_q.

    Raises:
        ValueError: an argument has the wrong dtype, shape or device.
    """
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        fits = isinstance(offsets, Tensor) and offsets.dtype in INTEGERS
        fits = fits and offsets.ndim == 1 and offsets.shape[0] > 0
        require(fits, "key_ranges", name, "int32 or int64 [documents + 1]", offsets)
    documents = cu_seqlens_q.shape[0] - 1  # len() and a size in a text would fix the number in an exported program
    if cu_seqlens_k.shape != cu_seqlens_q.shape or cu_seqlens_k.device != cu_seqlens_q.device:
        expected = f"[{documents + 1}] on {cu_seqlens_q.device} as cu_seqlens_q is"
        require(False, "key_ranges", "cu_seqlens_k", expected, f"{list(cu_seqlens_k.shape)} on {cu_seqlens_k.device}")
    if s_q is None:
        s_q = int(cu_seqlens_q[-1])
    require(s_q >= 0, "key_ranges", "s_q", "at least 0", s_q)
    query = torch.arange(s_q, device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
    document = torch.searchsorted(cu_seqlens_q[1:], query, right=True)  # documents that end at or before the query
    following = (document + 1).clamp(max=documents)
    start, end = cu_seqlens_k[document], cu_seqlens_k[following]
    if causal:
        end = end - cu_seqlens_q[following] + query + 1
    outside = document == documents
    return start.masked_fill(outside, 0).int(), end.masked_fill(outside, 0).int()
