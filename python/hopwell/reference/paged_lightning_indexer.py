"""The indexer of decode: the best positions of a paged cache of index keys."""

import math
import struct

import numpy as np
import numpy.typing as npt

from ._arrays import (
    Array,
    Float64,
    Int64,
    Tensor,
    as_array,
    as_float64,
    as_indices,
    deliver,
    describe,
    require,
    require_shape,
)

NAME = "paged_lightning_indexer"


def _e4m3(code: int) -> float:
    """The value of an e4m3 code."""
    if code % 128 == 127:
        return math.nan
    exponent, mantissa = code // 8 % 16, code % 8
    value = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return -value if code >= 128 else value


class _Keys:
    """The keys of a checked cache, read one by one."""

    def __init__(self, cache: Tensor, d: int, is_fp8: bool, dtype: str) -> None:
        array = as_array(cache)
        shaped = array.ndim == 3 or (array.ndim == 4 and array.shape[2] == 1)
        require(shaped, NAME, "cache", "[blocks, block, row] or [blocks, block, 1, row]", describe(array))
        self.array = array if array.ndim == 3 else array[:, :, 0]
        self.blocks, self.block, row = self.array.shape
        self.d, self.is_fp8 = d, is_fp8
        require(1 <= self.block <= 65536, NAME, "cache", "in blocks of 1 to 65536 rows", self.block)
        in_order = self.blocks == 0 or self.array[0].flags.c_contiguous
        require(in_order, NAME, "cache", "contiguous inside a block", array.strides)
        if is_fp8:
            require(array.itemsize == 1, NAME, "cache", "of bytes for a q_index of float8_e4m3fn", describe(array))
            require(row == d + 4 and d % 4 == 0, NAME, "cache", f"rows of {d + 4} bytes", row)
        else:
            require(array.dtype.name == dtype, NAME, "cache", "of the dtype of q_index", describe(array))
            require(row == d, NAME, "cache", f"rows of {d} elements", row)

    def key(self, page: int, row: int) -> tuple[Float64, float]:
        """The columns of a key, and its scale."""
        if not self.is_fp8:
            return self.array[page, row].astype(np.float64), 1.0
        data = self.array[page].tobytes()
        codes = data[self.d * row : self.d * (row + 1)]
        at = self.d * self.block + 4 * row
        return np.array([_e4m3(code) for code in codes]), struct.unpack("<f", data[at : at + 4])[0]


def _score(q: Float64, weights: Float64, key: Float64, scale: float, relu: bool) -> float:
    """scale·Σ_j w[j]·relu(q[j]·key). NaN counts as −inf; relu(NaN) is NaN."""
    total = 0.0
    with np.errstate(all="ignore"):
        for head, weight in zip(q, weights, strict=True):
            product = float(np.float64(head @ key))
            total += float(weight) * (0.0 if relu and product < 0.0 else product)
        score = float(np.float64(scale) * np.float64(total))
    return -math.inf if math.isnan(score) else score


def _counts(context_lens: Tensor, b: int, q_len: int) -> Int64:
    """How many positions each query sees, [b, q_len]."""
    lens = as_indices(NAME, "context_lens", context_lens)
    if lens.ndim == 2:
        require_shape(NAME, "context_lens", lens, "[b, q_len]", (b, q_len))
        return lens
    require_shape(NAME, "context_lens", lens, "[b]", (b,))
    seen = np.zeros((b, q_len), np.int64)
    for i in range(q_len):  # the last query sees all, the one before it all but one, ...
        seen[:, i] = lens - (q_len - 1 - i)
    return seen


def paged_lightning_indexer(
    q_index: Tensor,
    cache: Tensor,
    weights: Tensor,
    topk: int,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    q_scale: Tensor | None = None,
    relu: bool = True,
    slots: bool = False,
    indices: Array | None = None,
    scores: Array | bool | None = None,
    lengths: Array | None = None,
) -> tuple[npt.NDArray[np.int32], Array | None]:
    """The topk visible positions of largest index score, in ascending order, and their scores.

        score[s,i,p] = k_scale[p]·Σ_j weights[s,i,j]·q_scale[s,i,j]·relu(q_index[s,i,j,:]·k[p,:])

    Position p of sequence s is row p mod block of block block_tables[s, p div block]. It is visible if p is less than
    the query's number of positions and that block exists. Of equal scores the smaller positions are taken; a position
    of score −inf is taken after all others. With `slots`, indices are slots of the cache, in the order of positions.
    Returns indices [b, q_len, topk] and scores, or None in their place if `scores` is False. There is no q_len for a
    q_index [b, h_index, d_index]. Rows with fewer positions end in −1 with score −inf. `lengths` [b, q_len] is written.
    """
    q, w, dtype = as_float64(q_index), as_float64(weights), as_array(q_index).dtype.name
    flat, is_fp8 = q.ndim == 3, dtype == "float8_e4m3fn"
    require((q.ndim in (3, 4) and q.size > 0) or 0 in q.shape[:1], NAME, "q_index", "[b, q_len, h, d]", describe(q))
    require_shape(NAME, "weights", w, "[b, q_len, h_index]", q.shape[:-1])
    require(is_fp8 or q_scale is None, NAME, "q_scale", "absent without float8_e4m3fn", dtype)
    if q_scale is not None:
        of_head = as_float64(q_scale)
        require_shape(NAME, "q_scale", of_head, "[b, q_len, h_index]", w.shape)
        with np.errstate(invalid="ignore"):
            w = w * of_head
    require(topk >= 0, NAME, "topk", "at least 0", topk)
    if flat:
        q, w = q[:, None], w[:, None]
    b, q_len, _, d = q.shape
    keys = _Keys(cache, d, is_fp8, dtype)
    tables = as_indices(NAME, "block_tables", block_tables)
    require(tables.ndim == 2 and len(tables) == b, NAME, "block_tables", "[b, max_blocks]", describe(tables))
    seen = _counts(context_lens, b, q_len)

    found = np.full((b, q_len, topk), -1, np.int32)
    best = np.full((b, q_len, topk), -np.inf)
    counts = np.zeros((b, q_len), np.int32)
    for s in range(b):
        for i in range(q_len):
            visible = []  # (position, slot, score)
            for p in range(min(int(seen[s, i]), tables.shape[1] * keys.block)):
                page, row = int(tables[s, p // keys.block]), p % keys.block
                if 0 <= page < keys.blocks:
                    score = _score(q[s, i], w[s, i], *keys.key(page, row), relu)
                    visible.append((p, page * keys.block + row, score))
            chosen = sorted(sorted(visible, key=lambda one: -one[2])[:topk])  # sorting is stable: smaller positions win
            for at, (position, slot, score) in enumerate(chosen):
                found[s, i, at], best[s, i, at] = slot if slots else position, score
            counts[s, i] = len(chosen)
    if flat:
        found, best, counts = found[:, 0], best[:, 0], counts[:, 0]
    if lengths is not None:
        require_shape(NAME, "lengths", lengths, "[b, q_len]", counts.shape)
        lengths[...] = counts
    if indices is not None:
        require_shape(NAME, "indices", indices, "[b, q_len, topk]", found.shape)
        indices[...] = found
    of_scores = None if isinstance(scores, bool) else deliver(NAME, "scores", best, scores)
    return (found if indices is None else indices), of_scores
