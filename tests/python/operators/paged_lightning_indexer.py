"""The lightning indexer over a paged cache."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from calls import DTYPES, FLOAT8, Call, Rng
from fuzz.call import WORK, FuzzedCall, fit, given
from fuzz.draw import E4M3, Maker, integers_around, rows_of_indices
from hopwell import reference
from hypothesis import strategies as st

from ._operator import Operator
from .lightning_indexer import check_selection
from .mla_cache import make_cache


def call(rng: Rng, dtype: str) -> Call:
    """Small integers, so that the selection has one right answer; pages that do not exist."""
    b, q_len, h_index, d_index, blocks, block = 4, 2, 3, 16, 9, 5

    def integers(shape: tuple[int, ...]) -> Any:
        return rng.integers(-3, 4, shape).astype(ml_dtypes.float8_e4m3fn if dtype == FLOAT8 else DTYPES[dtype])

    arguments = {
        "q_index": integers((b, q_len, h_index, d_index)),
        "cache": integers((blocks, block, d_index)),
        "weights": integers((b, q_len, h_index)).astype(np.float32 if dtype == FLOAT8 else DTYPES[dtype]),
        "topk": 17,
        "block_tables": rng.integers(-1, blocks + 1, (b, 7)).astype(np.int32),
        "context_lens": np.array([35, 20, 1, 99], np.int32),
    }
    if dtype == FLOAT8:
        arguments["q_scale"] = np.exp2(rng.integers(-3, 4, (b, q_len, h_index))).astype(np.float32)
        scales = np.exp2(rng.integers(-3, 4, (blocks, block))).astype(np.float32)
        codes = arguments["cache"].view(np.uint8).reshape(blocks, -1)
        whole = np.concatenate([codes, scales.view(np.uint8)], axis=1)
        arguments["cache"] = whole.reshape(blocks, block, d_index + 4)
    return Call("paged_lightning_indexer", arguments, (0, 0), ("indices", "scores"))


def _cache(maker: Maker, dtype: str, blocks: int, block: int, d: int) -> Any:
    """A cache of new keys in all slots, sometimes of any bytes."""
    is_fp8 = dtype == FLOAT8
    kind = maker.choose(np.uint8, np.int8, E4M3) if is_fp8 else DTYPES[dtype]
    cache = make_cache(maker, blocks, block, d + 4 if is_fp8 else d, kind)
    if maker.chance(4):
        return cache
    kv = maker.rng.standard_normal((blocks * block, d)).astype(np.float32)
    if is_fp8:
        reference.mla_cache_append(kv, cache, np.arange(len(kv)), scale_format=maker.choose("pow2", "fp32"))
    else:
        cache[...] = kv.reshape(cache.shape).astype(kind)
    return cache


@st.composite
def right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype = maker.choose("float32", "bfloat16", FLOAT8)
    h_index, d = maker.size(1, 33), maker.size(1, 130)
    if maker.for_kernels:
        dtype = maker.choose("bfloat16", FLOAT8)
        h_index, d = maker.choose(h_index, 16, 32, 64, maker.size(1, 130)), maker.choose(32, 64, 128)
    if dtype == FLOAT8:
        d = -(-d // 4) * 4
    flat = maker.chance(4)
    b, q_len = maker.size(0, 9), 1 if flat else maker.choose(1, 2, 3, 8)
    blocks, block = maker.size(0, 9), maker.choose(1, 2, maker.size(1, 20), 64)
    pages = maker.choose(0, 1, 3, 7, 20)
    b, q_len, h_index = fit([b, q_len, h_index, d], max(10 * WORK // max(pages * block, 1), 1))[:3]
    positions = pages * block
    rows = (b,) if flat else (b, q_len)
    lens_shape = maker.choose((b,), (b, q_len))
    lens = integers_around(maker, int(np.prod(lens_shape)), [0, positions // 2, positions]).reshape(lens_shape)
    arguments: dict[str, Any] = {
        "q_index": maker.floats((*rows, h_index, d), dtype),
        "cache": _cache(maker, dtype, blocks, block, d),
        "weights": maker.floats((*rows, h_index), maker.choose("float32", "bfloat16")),
        "topk": maker.choose(maker.size(0, 300), positions, positions + 3),
        "block_tables": maker.values(rows_of_indices(maker, b, blocks, pages)),
        "context_lens": maker.values(lens.astype(np.int32), rows=False),
    }
    if dtype == FLOAT8 and maker.chance():
        arguments["q_scale"] = maker.floats((*rows, h_index), "float32")
    if maker.chance(3):
        arguments["relu"] = maker.chance()
    if maker.chance(3):
        arguments["slots"] = maker.chance()
    results = {"indices": ((*rows, arguments["topk"]), np.int32, True), "lengths": (rows, np.int32, False)}
    if maker.chance(4):
        arguments["scores"] = False
    else:
        results["scores"] = ((*rows, arguments["topk"]), np.float32, True)
    return given(maker, "paged_lightning_indexer", arguments, results)


def check(a: dict[str, Any], backend: str, results: tuple[Any, ...]) -> None:
    """As `check_selection`, query by query over the keys that it sees."""
    q = a["q_index"] if a["q_index"].ndim == 4 else a["q_index"][:, None]
    (b, q_len, _, d), topk = q.shape, a["topk"]
    has_scores = a.get("scores") is not False
    indices = results[0].reshape(b, q_len, topk)
    scores = results[1].reshape(b, q_len, topk) if has_scores else None
    lengths = results[-1].reshape(b, q_len) if len(results) > 1 + has_scores else None
    keys, scales = _paged_keys(a["cache"], d, a["q_index"].dtype.name == "float8_e4m3fn")
    blocks, block = a["cache"].shape[:2]
    for s in range(b):
        for i in range(q_len):
            lens = a["context_lens"].astype(np.int64)
            seen = lens[s, i] if lens.ndim == 2 else lens[s] - (q_len - 1 - i)
            positions = np.arange(min(max(seen, 0), a["block_tables"].shape[1] * block))
            pages = a["block_tables"][s].astype(np.int64)[positions // block]
            there = (pages >= 0) & (pages < blocks)
            positions, slots = positions[there], (pages * block + positions % block)[there]
            row, at = indices[s, i].copy(), 0
            for j, index in enumerate(row[: min(topk, len(slots))]):  # of equal slots the first position is chosen
                names = slots if a.get("slots") else positions
                while at < len(names) and names[at] != index:
                    at += 1
                assert at < len(names), f"indices[{s}, {i}, {j}] = {index} is not visible, or does not ascend"
                row[j], at = at, at + 1
            one = {"q_index": q[s, i][None], "k_index": keys[slots], "topk": topk, "relu": a.get("relu", True)}
            one["weights"] = a["weights"].reshape(b, q_len, -1)[s, i][None]
            if "q_scale" in a:
                one["q_scale"] = a["q_scale"].reshape(b, q_len, -1)[s, i][None]
            if scales is not None:
                one["k_scale"] = scales[slots]
            if scores is not None:
                check_selection(one, backend, row[None], scores[s, i][None])
            elif len(slots) <= topk:
                assert (row[: len(slots)] == np.arange(len(slots))).all() and (row[len(slots) :] == -1).all()
            if lengths is not None:
                assert lengths[s, i] == min(topk, len(slots)), f"lengths[{s}, {i}]"


def _paged_keys(cache: Any, d: int, is_fp8: bool) -> tuple[Any, Any]:
    """The keys [slots, d] of a cache, and their scales."""
    blocks, block = cache.shape[:2]
    flat = np.ascontiguousarray(cache).reshape(blocks, block * cache.shape[-1])
    if not is_fp8:
        return flat.reshape(blocks * block, d), None
    codes, scales = flat.view(np.uint8)[:, : block * d], flat.view(np.uint8)[:, block * d :]
    keys = np.ascontiguousarray(codes).view(E4M3).reshape(blocks * block, d)
    return keys, np.ascontiguousarray(scales).view(np.float32).reshape(blocks * block)


def dimensions(a: dict[str, Any]) -> dict[str, str]:
    rows = "b" if a["q_index"].ndim == 3 else "b q_len"
    return {
        "q_index": f"{rows} h_index d_index!",
        "cache": "blocks block row!" if a["cache"].ndim == 3 else "blocks block 1! row!",
        "block_tables": "b max_blocks",
        "context_lens": "b" if a["context_lens"].ndim == 1 else "b q_len",
        "lengths": rows,
        **dict.fromkeys(("weights", "q_scale"), f"{rows} h_index"),
        **dict.fromkeys(("indices", "scores"), f"{rows} topk!"),
    }


def samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    tables, lens = torch.randint(0, 4, (2, 3)).int(), torch.tensor([5, 3]).int()
    paged = torch.randn(2, 3, 4, 16).to(dtype), torch.randn(4, 5, 16).to(dtype), torch.randn(2, 3, 4), 7, tables, lens
    return {"": paged, "no scores": (*paged, {"relu": False, "slots": True, "without_scores": True})}


OPERATOR = Operator(
    name="paged_lightning_indexer",
    dtypes=("float32", "bfloat16", FLOAT8),
    call=call,
    right=right,
    check=check,
    dimensions=dimensions,
    samples=samples,
    free={("cache", 0), ("cache", 1), ("block_tables", 1)},
    results=("indices", "scores"),
    omits=True,
    also_written=("lengths",),
    messages=[
        ({"cache": np.zeros((9, 5, 17), np.float32)}, "cache must be rows of d = 16 element"),
        ({"cache": np.zeros((9, 5, 16), np.uint8)}, "cache must be rows of 20 (index keys) bytes for d = 16; got 16"),
        ({"cache": np.zeros((9, 5, 20), np.uint8)}, "cache must be of the dtype of q_index; got a cache of bytes"),
        ({"cache": np.zeros((9, 5, 16), ml_dtypes.bfloat16)}, "cache must be of the dtype of q_index; got bfloat16"),
        (
            {"q_index": np.zeros((4, 2, 3, 16), ml_dtypes.float8_e4m3fn)},
            "cache must be of bytes for a q_index of float8_e4m3fn; got float32",
        ),
        (
            {"cache": np.zeros((9, 2, 5, 16), np.float32)},
            "cache must be [blocks, block, row] or [blocks, block, 1, row]; got ",
        ),
        ({"cache": np.zeros((9, 0, 16), np.float32)}, "cache must be in blocks of 1 to 65536"),
        ({"cache": np.broadcast_to(np.float32(0), (1, 65537, 16))}, "cache must be "),
        ({"cache": np.zeros((9, 10, 16), np.float32)[:, ::2]}, "cache must be contiguous inside a block; got "),
        ({"q_scale": np.ones((4, 2, 3), np.float32)}, "q_scale needs float8_e4m3fn q_index"),
        ({"weights": np.ones((4, 2, 4), np.float32)}, "weights must be float32 or bfloat16 ["),
        ({"block_tables": np.zeros((3, 7), np.int32)}, "block_tables must be int32 [b=4, "),
        ({"block_tables": np.zeros((4, 7), np.int64)}, "block_tables must be int32 [b=4, "),
        ({"block_tables": None}, "block_tables must be "),
        ({"context_lens": np.zeros(3, np.int32)}, "context_lens must be int32 [b=4]; got "),
        ({"context_lens": np.zeros((4, 3), np.int32)}, "context_lens must be int32 [b=4, q_len=2]; got "),
        ({"context_lens": None}, "context_lens must be "),
        ({"topk": -1}, "topk must be an integer of at least 0; got -1"),
        ({"indices": np.zeros((4, 2, 18), np.int32)}, "indices must be of topk = 17 columns; got [4, 2, 18]"),
        ({"lengths": np.zeros((4, 1), np.int32)}, "lengths must be int32 [b=4, q_len=2]; "),
        ({"lengths": np.zeros((4, 2), np.int64)}, "lengths must be int32 [b=4, q_len=2]; "),
    ],
)
