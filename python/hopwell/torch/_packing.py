"""Packed documents: several documents one after another in one sequence, as trainers pack them."""

import torch
from torch import Tensor

from hopwell._checks import INTEGERS, require


def key_ranges(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = True,
    s_q: int | None = None,
    kv_stride: int = 1,
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
        kv_stride: consecutive tokens that one key stands for, as compressed keys do. If it is above 1, cu_seqlens_k are
            the offsets of the compressed keys (`compressed_lengths`), and a query sees a key if it is not before the
            key's last token.

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
    require(kv_stride >= 1, "key_ranges", "kv_stride", "at least 1", kv_stride)
    query = torch.arange(s_q, device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
    document = torch.searchsorted(cu_seqlens_q[1:], query, right=True)  # documents that end at or before the query
    following = (document + 1).clamp(max=documents)
    start, end = cu_seqlens_k[document], cu_seqlens_k[following]
    if causal and kv_stride > 1:
        seen = (query - cu_seqlens_q[document] + 1) // kv_stride
        end = torch.minimum(end, start + seen)
    elif causal:
        end = end - cu_seqlens_q[following] + query + 1
    outside = document == documents
    return start.masked_fill(outside, 0).int(), end.masked_fill(outside, 0).int()


def compressed_lengths(cu_seqlens: Tensor, ratio: int) -> Tensor:
    """Computes the offsets of each document's compressed keys: `cu_compressed` of `kv_compress`.

    A document of n tokens has n // ratio compressed keys.

    Args:
        cu_seqlens: int32 or int64 [documents + 1]: the tokens of document d are cu_seqlens[d] … cu_seqlens[d + 1] − 1.
        ratio: tokens of a block, at least 1.

    Returns:
        int32 [documents + 1] on the device of cu_seqlens, from 0 on. The host never waits.

    Raises:
        ValueError: an argument has the wrong dtype, shape or value.
    """
    fits = isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype in INTEGERS
    fits = fits and cu_seqlens.ndim == 1 and cu_seqlens.shape[0] > 0
    require(fits, "compressed_lengths", "cu_seqlens", "int32 or int64 [documents + 1]", cu_seqlens)
    require(ratio >= 1, "compressed_lengths", "ratio", "at least 1", ratio)
    keys = torch.diff(cu_seqlens).clamp(min=0) // ratio
    return torch.nn.functional.pad(keys.cumsum(0), (1, 0)).int()
