"""Bad input of the operators with paged caches."""

import numpy as np
import pytest
from bad_calls import make, run


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
