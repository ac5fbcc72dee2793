"""Gated pooling of blocks of tokens into compressed keys, and its gradients."""

from dataclasses import dataclass

import numpy as np

from ._arrays import Array, Float64, Int64, Tensor, as_float64, as_indices, deliver, describe, require, require_shape


@dataclass(frozen=True)
class _Window:
    """The entries of a compressed key: token, place in its block and first column of each."""

    key: int
    tokens: Int64
    places: Int64
    columns: Int64


class _Pooling:
    """The checked arguments, as float64, and the windows of all compressed keys."""

    def __init__(
        self,
        name: str,
        kv: Tensor,
        gate: Tensor,
        ratio: int,
        position_bias: Tensor | None,
        overlap: bool,
        cu_seqlens: Tensor | None,
        cu_compressed: Tensor | None,
    ) -> None:
        self.kv, self.gate = as_float64(kv), as_float64(gate)
        require(self.kv.ndim == 2, name, "kv", "[s, w]", describe(self.kv))
        require_shape(name, "gate", self.gate, "[s, w]", self.kv.shape)
        require(ratio >= 1, name, "ratio", "at least 1", ratio)
        self.s, self.w = self.kv.shape
        require(self.w >= 1 and not (overlap and self.w % 2), name, "kv", "[s, w], w even with overlap", self.w)
        self.ratio, self.overlap, self.d = ratio, overlap, self.w // 2 if overlap else self.w
        self.bias = np.zeros((ratio, self.w)) if position_bias is None else as_float64(position_bias)
        require_shape(name, "position_bias", self.bias, "[ratio, w]", (ratio, self.w))
        require((cu_seqlens is None) == (cu_compressed is None), name, "cu_compressed", "given with cu_seqlens", None)
        self.documents: list[tuple[int, int, int, int | None]] = [(0, self.s, 0, None)]
        if cu_seqlens is not None and cu_compressed is not None:
            tokens = as_indices(name, "cu_seqlens", cu_seqlens)
            keys = as_indices(name, "cu_compressed", cu_compressed)
            require_shape(name, "cu_compressed", keys, "[documents + 1]", tokens.shape)
            rows = tokens.clip(0, self.s)
            self.documents = [
                (int(rows[i]), int(rows[i + 1]), int(keys[i]), int(keys[i + 1])) for i in range(len(keys) - 1)
            ]

    def windows(self, n: int) -> list[_Window]:
        """The windows of the compressed keys that have a row of out."""
        found = []
        r = np.arange(self.ratio) if self.ratio <= self.s else np.arange(0)
        for first, end, key, key_end in self.documents:
            for j in range(max(end - first, 0) // self.ratio):
                if not 0 <= key + j < (n if key_end is None else min(key_end, n)):
                    continue
                tokens, places = first + j * self.ratio + r, r
                columns = np.full(self.ratio, self.d if self.overlap else 0)
                if self.overlap and j > 0:
                    tokens = np.concatenate([tokens, tokens - self.ratio])
                    places, columns = np.concatenate([r, r]), np.concatenate([columns, np.zeros_like(r)])
                found.append(_Window(key + j, tokens, places, columns))
        return found

    def pool(self, window: _Window) -> tuple[Float64, Float64, Float64]:
        """(weights, values, out) of a window: [entries, d], [entries, d] and [d]. Absent entries have a value of 0."""
        at = window.columns[:, None] + np.arange(self.d)
        gates = self.gate[window.tokens[:, None], at] + self.bias[window.places[:, None], at]
        absent = np.isneginf(gates)
        values: Float64 = np.where(absent, 0.0, self.kv[window.tokens[:, None], at])
        with np.errstate(invalid="ignore"):
            peak = gates.max(axis=0)
            weights = np.where(absent, 0.0, np.exp(gates - np.where(np.isneginf(peak), 0.0, peak)))
            total = weights.sum(axis=0)
            weights = weights / np.where(total == 0.0, 1.0, total)
            return weights, values, (weights * values).sum(axis=0)


def kv_compress(
    kv: Tensor,
    gate: Tensor,
    ratio: int,
    *,
    position_bias: Tensor | None = None,
    overlap: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_compressed: Tensor | None = None,
    out_dtype: str | None = None,
    out: Array | None = None,
) -> Array:
    """out[j,c] = Σ_e softmax_e(gate + position_bias)[c]·kv[c] over the window of block j, [n, d].

    kv and gate [s, w]; w = d, or 2·d with `overlap`; n = s // ratio, or the rows of `out`. Entries with a gate of −inf
    are absent. Rows that no document makes are 0. `out_dtype` has no effect here: results are float64.
    """
    name = "kv_compress"
    pooling = _Pooling(name, kv, gate, ratio, position_bias, overlap, cu_seqlens, cu_compressed)
    result = np.zeros((pooling.s // ratio if out is None else len(out), pooling.d))
    for window in pooling.windows(len(result)):
        result[window.key] = pooling.pool(window)[2]
    return deliver(name, "out", result, out)


def kv_compress_backward(
    d_out: Tensor,
    kv: Tensor,
    gate: Tensor,
    ratio: int,
    *,
    position_bias: Tensor | None = None,
    overlap: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_compressed: Tensor | None = None,
    d_kv: Array | None = None,
    d_gate: Array | None = None,
) -> tuple[Array, Array, Array | None]:
    """(d_kv, d_gate, d_position_bias) of `kv_compress`; the last is None without a position_bias."""
    name = "kv_compress_backward"
    pooling = _Pooling(name, kv, gate, ratio, position_bias, overlap, cu_seqlens, cu_compressed)
    gradient = as_float64(d_out)
    require_shape(name, "d_out", gradient, "[n, d]", (len(gradient), pooling.d))
    of_kv, of_gate, of_bias = np.zeros_like(pooling.kv), np.zeros_like(pooling.kv), np.zeros_like(pooling.bias)
    for window in pooling.windows(len(gradient)):
        weights, values, out = pooling.pool(window)
        at = window.columns[:, None] + np.arange(pooling.d)
        weighted = weights * gradient[window.key]
        of_kv[window.tokens[:, None], at] = weighted
        of_gate[window.tokens[:, None], at] = weighted * (values - out)
        np.add.at(of_bias, (window.places[:, None], at), weighted * (values - out))
    return (
        deliver(name, "d_kv", of_kv, d_kv),
        deliver(name, "d_gate", of_gate, d_gate),
        None if position_bias is None else of_bias,
    )
