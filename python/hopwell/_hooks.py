"""What single operators do beyond the pattern of the generated functions: declarations name these functions."""

from typing import Any

from ._arrays import Array, dims, extent, flag, shape_of


def check_accumulate(
    accumulate: Any,
    window_kv: Array | None,
    need_dkv: bool,
    dkv: Array | None,
    need_d_window_kv: bool,
    d_window_kv: Array | None,
) -> None:
    """The gradients to add into must be there."""
    name = "sparse_mla_backward"
    if not flag(name, "accumulate", accumulate):
        return
    if (need_dkv or window_kv is None) and dkv is None:
        raise ValueError(f"{name}: dkv must be given to accumulate into; got None")
    if need_d_window_kv and window_kv is not None and d_window_kv is None:
        raise ValueError(f"{name}: d_window_kv must be given to accumulate into; got None")


def selection_shape(q: Array, kv: Array, indices: Array | None) -> tuple[int, ...]:
    """[s_q, topk], where topk is s_kv without indices."""
    if indices is None:
        return dims(q, 3)[0], (shape_of(kv) or (0,))[0]
    return dims(indices, 2) if len(shape_of(indices)) == 2 else dims(indices, 3)[::2]


def compressed_shape(kv: Array, ratio: Any, overlap: Any) -> tuple[int, ...]:
    """[n, d], with room for every whole block."""
    s, w = dims(kv, 2)
    return s // max(extent(ratio, s + 1), 1), w // 2 if flag("kv_compress", "overlap", overlap) else w


def scales_shape(x: Array, scale_layout: Any) -> tuple[int, ...]:
    """Of the scales of [rows, K]: [rows, K/16], or padded to the blocks of 128 x 4."""
    rows, k = dims(x, 2)
    groups = k // 16
    return (-(-rows // 128) * 128, -(-groups // 4) * 4) if scale_layout == "blocked" else (rows, groups)


def decode_shape(q: Array, d_v: Any) -> tuple[int, ...]:
    """q's shape with d_v columns."""
    shape = shape_of(q)
    return (*shape[:-1], extent(d_v, shape[-1] if shape else 0))


def check_columns(name: str, topk: int, **outputs: Any) -> None:
    """Arrays that are given for these outputs have `topk` columns."""
    for argument, array in outputs.items():
        shape = shape_of(array)
        if shape and shape[-1] != topk:
            raise ValueError(f"{name}: {argument} must be of topk = {topk} columns; got {list(shape)}")
