"""Right calls of paged_lightning_indexer."""

from typing import Any

import numpy as np
from calls import DTYPES, FLOAT8
from hopwell import reference
from hypothesis import strategies as st

from .call import WORK, FuzzedCall, fit, given
from .draw import E4M3, Maker, integers_around, rows_of_indices
from .right_cache import make_cache


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
def paged_lightning_indexer(draw: st.DrawFn) -> FuzzedCall:
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
