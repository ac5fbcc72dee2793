"""Bad input of the operators with paged caches."""

from typing import Any

import ml_dtypes
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
        (
            "paged_lightning_indexer",
            {"cache": np.zeros((9, 5, 17), np.float32)},
            "cache must be rows of d = 16 element",
        ),
        (
            "paged_lightning_indexer",
            {"cache": np.zeros((9, 5, 16), np.uint8)},
            "cache must be rows of 20 (index keys) bytes for d = 16; got 16",
        ),
        (
            "paged_lightning_indexer",
            {"cache": np.zeros((9, 5, 20), np.uint8)},
            "cache must be of the dtype of q_index; got a cache of bytes",
        ),
        (
            "paged_lightning_indexer",
            {"cache": np.zeros((9, 5, 16), ml_dtypes.bfloat16)},
            "cache must be of the dtype of q_index; got bfloat16",
        ),
        (
            "paged_lightning_indexer",
            {"q_index": np.zeros((4, 2, 3, 16), ml_dtypes.float8_e4m3fn)},
            "cache must be of bytes for a q_index of float8_e4m3fn; got float32",
        ),
        (
            "paged_lightning_indexer",
            {"cache": np.zeros((9, 2, 5, 16), np.float32)},
            "cache must be [blocks, block, row] or [blocks, block, 1, row]; got ",
        ),
        (
            "paged_lightning_indexer",
            {"cache": np.zeros((9, 0, 16), np.float32)},
            "cache must be in blocks of 1 to 65536",
        ),
        (
            "paged_lightning_indexer",
            {"cache": np.broadcast_to(np.float32(0), (1, 65537, 16))},
            "cache must be ",
        ),
        (
            "paged_lightning_indexer",
            {"cache": np.zeros((9, 10, 16), np.float32)[:, ::2]},
            "cache must be contiguous inside a block; got ",
        ),
        ("paged_lightning_indexer", {"q_scale": np.ones((4, 2, 3), np.float32)}, "q_scale needs float8_e4m3fn q_index"),
        (
            "paged_lightning_indexer",
            {"weights": np.ones((4, 2, 4), np.float32)},
            "weights must be float32 or bfloat16 [",
        ),
        ("paged_lightning_indexer", {"block_tables": np.zeros((3, 7), np.int32)}, "block_tables must be int32 [b=4, "),
        ("paged_lightning_indexer", {"block_tables": np.zeros((4, 7), np.int64)}, "block_tables must be int32 [b=4, "),
        ("paged_lightning_indexer", {"block_tables": None}, "block_tables must be "),
        ("paged_lightning_indexer", {"context_lens": np.zeros(3, np.int32)}, "context_lens must be int32 [b=4]; got "),
        (
            "paged_lightning_indexer",
            {"context_lens": np.zeros((4, 3), np.int32)},
            "context_lens must be int32 [b=4, q_len=2]; got ",
        ),
        ("paged_lightning_indexer", {"context_lens": None}, "context_lens must be "),
        ("paged_lightning_indexer", {"topk": -1}, "topk must be an integer of at least 0; got -1"),
        (
            "paged_lightning_indexer",
            {"indices": np.zeros((4, 2, 18), np.int32)},
            "indices must be of topk = 17 columns; got [4, 2, 18]",
        ),
        ("paged_lightning_indexer", {"lengths": np.zeros((4, 1), np.int32)}, "lengths must be int32 [b=4, q_len=2]; "),
        ("paged_lightning_indexer", {"lengths": np.zeros((4, 2), np.int64)}, "lengths must be int32 [b=4, q_len=2]; "),
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


def test_outputs_of_the_paged_indexer_lie_in_memory_of_their_own() -> None:
    call = make("paged_lightning_indexer")
    memory = np.zeros(2 * 4 * 2 * 17, np.int32)
    indices = memory[: 4 * 2 * 17].reshape(4, 2, 17)
    lens = memory[100:104]
    for wrong in (
        {"indices": indices, "context_lens": lens},
        {"indices": indices, "lengths": memory[4:12].reshape(4, 2)},
        {"indices": indices, "scores": memory[17 : 17 + 4 * 2 * 17].view(np.float32).reshape(4, 2, 17)},
    ):
        with pytest.raises(ValueError, match=r"paged_lightning_indexer: \w+ must be an output in memory of its own"):
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
