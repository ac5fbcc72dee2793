"""The queries of a call and the keys that each query sees, for all layouts of the wrappers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..._checks import INTEGERS, require, require_shape
from .._tensors import in_rows


@dataclass
class Rows:
    """All queries of a call in one dimension, with the keys that each sees. [B, S, …] is a pack of equal sequences."""

    shape: list[int]  # of the queries: [B, S_q], or [total_q]
    start: Tensor  # first key of the query's sequence
    end: Tensor
    width: int  # keys of the longest sequence
    one_sequence: bool

    def flat(self, x: Tensor) -> Tensor:
        """Flattens [B, S, …] to [B·S, …]; a packed tensor keeps its shape. The last dimension becomes contiguous."""
        return in_rows(x.flatten(0, 1) if len(self.shape) == 2 else x)

    def all_keys(self, some: slice) -> Tensor:
        """Returns an index table for these rows: all keys of each row's sequence."""
        column = torch.arange(self.width, device=self.start.device, dtype=torch.int32)
        start = self.start[some]
        if self.one_sequence and len(self.shape) == 2:
            return column.expand(len(start), -1)
        return start[:, None] + column

    def hidden(self, some: slice) -> Tensor:
        """Marks the columns that a query does not see, for these rows. Columns count from the sequence's first key."""
        column = torch.arange(self.width, device=self.start.device)
        return column >= (self.end[some] - self.start[some])[:, None]


def require_index_dtypes(wrapper: str, q_name: str, q: Tensor, k_name: str, k: Tensor, *, fp8: bool = False) -> None:
    """Checks that an indexer's queries and keys have one dtype, and that the precision allows it."""
    kinds = (torch.float8_e4m3fn,) if fp8 else (torch.bfloat16, torch.float32)
    require(q.dtype in kinds, wrapper, q_name, " or ".join(map(str, kinds)), q.dtype)
    require(k.dtype == q.dtype, wrapper, k_name, f"{q.dtype} as {q_name} is", k.dtype)


def require_offsets(wrapper: str, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    """Checks that both or neither are given, int32 and of equal size."""
    given = (cu_seqlens_q is None) == (cu_seqlens_k is None)
    require(given, wrapper, "cu_seqlens_k", "given with cu_seqlens_q", cu_seqlens_k)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        sequences = len(cu_seqlens_q) - 1
        for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            require(offsets.dtype == torch.int32, wrapper, name, "int32", offsets.dtype)
            require_shape(wrapper, name, offsets, offsets=max(sequences, 0) + 1)


def find_rows(
    wrapper: str,
    q: Tensor,
    k: Tensor,
    ratio: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_k: int | None,
    q_causal_offsets: Tensor | None,
) -> Rows:
    """Builds the rows from these arguments, which all wrappers of dense scores have."""
    require(ratio >= 1, wrapper, "ratio", "at least 1", ratio)
    require_offsets(wrapper, cu_seqlens_q, cu_seqlens_k)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        sequences = len(cu_seqlens_q) - 1
        require_shape(wrapper, "q", q, total_q=None, heads=None, d=None)
        if max_seqlen_k is None:
            lengths = cu_seqlens_k.diff()
            max_seqlen_k = int(lengths.max()) if sequences else 0  # a copy to the host, which waits for the device
        require(max_seqlen_k >= 0, wrapper, "max_seqlen_k", "at least 0", max_seqlen_k)
        query = torch.arange(len(q), device=q.device, dtype=torch.int32)
        sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), query, right=True).clamp(max=sequences - 1)
        query = query - cu_seqlens_q[sequence]
        start, keys = cu_seqlens_k[sequence], cu_seqlens_k[sequence + 1] - cu_seqlens_k[sequence]
        keys = keys * (query < cu_seqlens_q[sequence + 1] - cu_seqlens_q[sequence])  # no keys past the last sequence
        shape, width = [len(q)], max_seqlen_k
    else:
        require_shape(wrapper, "q", q, B=None, S_q=None, heads=None, d=None)
        sequences, s_q = q.shape[:2]
        require(k.ndim >= 3 and k.shape[0] == sequences, wrapper, "k", f"[B={sequences}, S_k, heads, d]", list(k.shape))
        width, shape = k.shape[1], [sequences, s_q]
        row = torch.arange(sequences * s_q, device=q.device, dtype=torch.int32)
        sequence, query = row // max(s_q, 1), row % max(s_q, 1)
        start, keys = (sequence * width).int(), torch.full_like(row, width)
    if q_causal_offsets is not None:
        require(q_causal_offsets.dtype == torch.int32, wrapper, "q_causal_offsets", "int32", q_causal_offsets.dtype)
        require_shape(wrapper, "q_causal_offsets", q_causal_offsets, B=sequences)
        query = query + q_causal_offsets[sequence]
    visible = torch.minimum((query + 1) // ratio, keys).clamp(min=0)
    return Rows(shape, start, start + visible, width, sequences == 1)


def entries_of(
    wrapper: str, q: Tensor, k: Tensor, topk_indices: Tensor, topk_length: Tensor | None, are_global: bool
) -> tuple[Rows, Tensor]:
    """Returns the rows of [B, S_q, …], and their entries as key indices of the flattened k (−1: invalid)."""
    require_shape(wrapper, "q", q, B=None, S_q=None, H=None, D=None)
    b, s_q, _, d = q.shape
    require_shape(wrapper, "k", k, B=b, S_k=None, D=d)
    require_shape(wrapper, "topk_indices", topk_indices, B=b, S_q=s_q, topk=None)
    require(topk_indices.dtype in INTEGERS, wrapper, "topk_indices", "int32 or int64", topk_indices.dtype)
    rows = find_rows(wrapper, q, k, 1, None, None, None, None)
    table, end = topk_indices.flatten(0, 1), rows.start[:, None] + rows.width
    if not are_global and b > 1:
        table = table.clamp(-1, rows.width) + rows.start[:, None]
    valid = (table >= rows.start[:, None]) & (table < end)
    if topk_length is not None:
        require_shape(wrapper, "topk_length", topk_length, B=b, S_q=s_q)
        require(topk_length.dtype in INTEGERS, wrapper, "topk_length", "int32 or int64", topk_length.dtype)
        valid &= torch.arange(table.shape[1], device=q.device) < topk_length.flatten()[:, None]
    return rows, in_rows(table.masked_fill(~valid, -1).int())
