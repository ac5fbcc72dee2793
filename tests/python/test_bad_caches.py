"""Bad input of the operators with paged caches."""

from typing import Any

import numpy as np
import pytest
from bad_calls import check_message, make, run


@pytest.mark.parametrize(
    ("operator", "changes", "message"),
    [
        ("paged_attention", {"layout": "dhn"}, "layout must be 'nhd' or 'hnd' or 'vllm'; got 'dhn'"),
        ("paged_attention", {"bias_kind": 1}, "bias_kind must be 'key' or 'distance'; got 1"),
        ("paged_attention", {"out_of_range": "inf"}, "out_of_range must be 'zero' or 'clamp' or '-inf'; got 'inf'"),
        ("paged_attention", {"window": -1}, "window must be at least 1, or 0 for every key; got -1"),
        (
            "mla_cache_append",
            {"cache": np.zeros((3, 4, 584), np.uint8)},
            "cache must be rows of 656 (V3.2), 576 (one scale) or 580 (index keys) bytes for d = 576; got 584",
        ),
        (
            "mla_cache_append",
            {"cache": np.zeros((3, 4, 2, 656), np.uint8)},
            "cache must be [blocks, block, row] or [blocks, block, 1, row]; got ",
        ),
        ("mla_cache_append", {"cache": np.zeros((3, 4, 512), np.float32)}, "cache must be rows of d = 576 elements; "),
        ("mla_cache_append", {"cache": np.zeros((3, 0, 656), np.uint8)}, "cache must be in blocks of 1 to 65536 rows"),
        (
            "mla_cache_append",
            {"cache": np.zeros((3, 8, 656), np.uint8)[:, ::2]},
            "cache must be contiguous inside a block; got ",
        ),
        (
            "mla_cache_append",
            {"cache": np.broadcast_to(np.zeros((1, 65537, 656), np.uint8), (2, 65537, 656))},
            "cache must be ",
        ),
        ("mla_cache_append", {"slots": np.zeros(5, np.int16)}, "slots must be int64 or int32"),
        ("mla_cache_append", {"slots": np.zeros(4, np.int64)}, "slots must be int64 or int32 [n=5]; got "),
        ("mla_cache_append", {"kv_scale": 0.5}, "kv_scale needs a cache of bytes with one scale"),
        ("mla_cache_append", {"kv_scale": np.ones((), np.float32)}, "kv_scale needs a cache of bytes with one scale"),
        ("mla_cache_append", {"positions": None}, "positions and cos_sin are given together"),
        ("mla_cache_append", {"cos_sin": None}, "positions and cos_sin are given together"),
        (
            "mla_cache_append",
            {"cos_sin": None, "positions": None},
            "rope_offset needs positions and cos_sin",
        ),
        (
            "mla_cache_append",
            {"cos_sin": np.zeros((6, 47), np.float32)},
            "cos_sin must be [max_positions, r] with an even r between 2 and d = 576; got ",
        ),
        (
            "mla_cache_append",
            {"cos_sin": np.zeros((6, 0), np.float32)},
            "cos_sin must be [max_positions, r] with an even r between 2 and d = 576; got ",
        ),
        ("mla_cache_append", {"rope_offset": 529}, "rope_offset must be between 0 and d - r = 528; got 529"),
        ("mla_cache_append", {"rope_offset": -1}, "rope_offset must be between 0 and d - r = 528; got -1"),
        ("mla_cache_append", {"scale_format": "linear"}, "scale_format must be "),
        (
            "sparse_mla_decode",
            {"cache": np.zeros((9, 5, 600), np.uint8)},
            "cache must be rows of 656 (V3.2), 576 (one scale) bytes for d = 576; got 600",
        ),
        ("sparse_mla_decode", {"cache": np.zeros((9, 0, 656), np.uint8)}, "cache must be in blocks of 1 to 65536 rows"),
        ("sparse_mla_decode", {"indices": np.zeros((3, 2, 9))}, "indices must be int32 [b=3, q_len=2, topk]; got "),
        (
            "sparse_mla_decode",
            {"indices": np.zeros((3, 9), np.int32)},
            "indices must be int32 [b=3, q_len=2, topk]; got ",
        ),
        ("sparse_mla_decode", {"topk_length": np.zeros(2, np.int32)}, "topk_length must be int32 [b=3]; got "),
        (
            "sparse_mla_decode",
            {"context_lens": np.zeros((3, 3), np.int32)},
            "context_lens must be int32 [b=3, q_len=2]",
        ),
        ("sparse_mla_decode", {"block_tables": None}, "context_lens needs block_tables"),
        (
            "sparse_mla_decode",
            {"block_tables": None, "context_lens": None},
            "block_tables and extra_block_tables are given together, because both caches have block tables or none",
        ),
        ("sparse_mla_decode", {"extra_cache": None}, "extra_cache and extra_indices are given together"),
        ("sparse_mla_decode", {"extra_indices": None}, "extra_cache and extra_indices are given together"),
        ("sparse_mla_decode", {"extra_cache": None, "extra_indices": None}, "extra_topk_length needs extra_cache"),
        (
            "sparse_mla_decode",
            {"extra_cache": None, "extra_indices": None, "extra_topk_length": None},
            "extra_block_tables needs extra_cache",
        ),
        (
            "sparse_mla_decode",
            {"extra_cache": np.zeros((7, 7, 576), np.uint8)},
            "extra_cache must be of the row format of ",
        ),
        ("sparse_mla_decode", {"kv_scale": 0.5}, "kv_scale needs a cache of bytes with one scale"),
        (
            "sparse_mla_decode",
            {"rope_cache": np.zeros((9, 5, 552), np.uint8)},
            "cache must be rows of 24 (one scale) bytes for d = 24; got 656",
        ),
        ("sparse_mla_decode", {"keys_per_split": 0}, "keys_per_split must be a positive multiple of 64; got 0"),
        ("sparse_mla_decode", {"keys_per_split": 100}, "keys_per_split must be a positive multiple of 64; got 100"),
        ("sparse_mla_decode", {"keys_per_split": -64}, "keys_per_split must be a positive multiple of 64; got -64"),
        ("sparse_mla_decode", {"attn_sink": np.zeros(4, np.float32)}, "attn_sink must be float32 [h_q=3]; got "),
        ("sparse_mla_decode", {"d_v": 0}, "d_v must be between 1 and d_qk = 576; got 0"),
        ("sparse_mla_decode", {"d_v": 577}, "d_v must be between 1 and d_qk = 576; got 577"),
        ("sparse_mla_decode", {"sm_scale": float("inf")}, "sm_scale must be finite; got inf"),
    ],
)
def test_messages(operator: str, changes: dict[str, Any], message: str) -> None:
    check_message(operator, changes, message)


def test_a_cache_can_be_written_and_lies_in_memory_of_its_own() -> None:
    call = make("mla_cache_append")
    cache = call.arguments["cache"]
    read_only = cache.copy()
    read_only.flags.writeable = False
    overlapping = np.lib.stride_tricks.as_strided(cache.copy(), strides=(0, 656, 1))
    memory = np.zeros(cache.nbytes, np.uint8)
    slots = np.ndarray(5, np.int64, memory, 64)
    for wrong in (
        {"cache": read_only},
        {"cache": overlapping},
        {"cache": memory.reshape(cache.shape), "slots": slots},
    ):
        with pytest.raises(ValueError, match="mla_cache_append: cache must be "):
            run(call, **wrong)
    assert not memory.any()


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_the_one_scale_of_a_cache_is_positive_and_finite(scale: float) -> None:
    call = make("mla_cache_append")
    one = {"cache": np.zeros((3, 4, 576), np.uint8), "scale_format": "pow2", "kv_scale": scale}
    with pytest.raises(ValueError, match="mla_cache_append: kv_scale must be "):
        run(call, **one)
    assert not one["cache"].any()  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [584, 528, 512])
def test_fp32_scales_are_for_rows_with_fp32_scales(size: int) -> None:
    call = make("mla_cache_append")
    arguments = {"kv": np.zeros((5, 448), np.float32), "cache": np.zeros((3, 4, size), np.uint8), "rope_offset": 0}
    with pytest.raises(ValueError, match="scale_format 'fp32' needs rows of 656 bytes or index rows"):
        run(call, **arguments)
    plain = {"cache": np.zeros((3, 4, 512), np.float32)}
    with pytest.raises(ValueError, match="scale_format 'fp32' needs rows of 656 bytes or index rows"):
        run(call, **arguments | plain)
