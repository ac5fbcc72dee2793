"""hopwell.torch: rows that are written into a paged cache, and read from it."""

import ml_dtypes
import numpy as np
import pytest
import torch
from bad_calls import make, run
from hopwell import reference
from hopwell import torch as hw
from torch import Tensor

pytestmark = pytest.mark.usefixtures("torch_seed")
FORMATS = [(576, 656), (512, 656), (512, 584), (512, 528), (512, 512), (576, 576)]


def cache_of(row: int) -> Tensor:
    return torch.randint(0, 256, (4, 5, row), dtype=torch.uint8)


@pytest.mark.parametrize(("d", "row"), [*FORMATS, (128, 132)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_bytes_are_the_reference_s(d: int, row: int, dtype: torch.dtype) -> None:
    kv, cache = torch.randn(6, d), cache_of(row)
    slots = torch.tensor([19, -1, 3, 20, 0, 7])
    expected = reference.mla_cache_append(kv.numpy(), cache.numpy().copy(), slots.numpy())
    version = cache._version
    given = cache.view(dtype)
    assert hw.mla_cache_append(kv, given, slots) is given
    assert cache._version > version
    np.testing.assert_array_equal(cache.numpy(), expected)


@pytest.mark.parametrize(("d", "row"), FORMATS)
def test_rows_that_are_read_are_the_reference_s(d: int, row: int) -> None:
    """Any bytes: NaN codes, and every kind of scale."""
    cache = cache_of(row)
    slots = torch.arange(-2, 23, dtype=torch.int32)
    memory = torch.zeros(4, 5 * row + 16, dtype=torch.uint8)
    apart = memory[:, : 5 * row].view(4, 5, 1, row)
    apart.copy_(cache[:, :, None])
    scale = 0.3 if row == d else None
    with np.errstate(all="ignore"):
        values = reference.read_mla_cache(cache.numpy(), slots.numpy(), d, scale)
        expected = values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    for given in (cache, apart, apart.view(torch.float8_e4m3fn)):
        rows = hw.read_mla_cache(given, slots, d, scale)
        assert rows.dtype == torch.bfloat16
        np.testing.assert_array_equal(rows.float().numpy(), expected)
    assert not rows[:2].any() and not rows[22:].any() and rows[2:22].any()


def test_rows_of_bf16_and_of_no_cache() -> None:
    cache = torch.randn(2, 3, 8)
    rows = hw.read_mla_cache(cache, torch.tensor([4, -1]), 8)
    assert torch.equal(rows, torch.stack([cache[1, 1].bfloat16(), torch.zeros(8).bfloat16()]))
    assert not hw.read_mla_cache(torch.empty(0, 3, 584, dtype=torch.uint8), torch.tensor([0]), 512).any()


@pytest.mark.parametrize(
    ("cache", "slots", "scale", "message"),
    [
        (torch.zeros(4, 656), torch.zeros(2).long(), None, r"cache must be \[blocks, block, row\]"),
        (torch.zeros(1, 4, 655).byte(), torch.zeros(2).long(), None, "cache must be of rows of a size .*; got 655"),
        (torch.zeros(1, 4, 580).byte(), torch.zeros(2).long(), None, "cache must be of rows of a size .*; got 580"),
        (torch.zeros(1, 8, 656).byte()[:, ::2], torch.zeros(2).long(), None, "cache must be contiguous inside a block"),
        (torch.zeros(1, 4, 656).byte(), torch.zeros(2), None, r"slots must be int64 or int32 \[n\]"),
        (torch.zeros(1, 4, 656).byte(), torch.zeros(2).long(), 0.5, "kv_scale needs a cache of bytes with one scale"),
    ],
)
def test_reading_refuses(cache: Tensor, slots: Tensor, scale: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=f"^read_mla_cache: {message}"):
        hw.read_mla_cache(cache, slots, 576, scale)


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5)])
def test_one_scale(scale: float | Tensor) -> None:
    kv, cache = torch.randn(3, 512), cache_of(512)
    hw.mla_cache_append(kv, cache, torch.arange(3), kv_scale=scale)
    plain = hw.mla_cache_append(kv * 2, cache_of(512), torch.arange(3))
    assert torch.equal(cache[0, :3], plain[0, :3])


def test_no_gradient_passes() -> None:
    kv, cache = torch.randn(3, 576, requires_grad=True), torch.zeros(2, 2, 576)
    assert not hw.mla_cache_append(kv, cache, torch.arange(3)).requires_grad
    assert torch.equal(cache.view(4, 576)[:3], kv.detach())
    with pytest.raises(ValueError, match="mla_cache_append: cache requires grad"):
        hw.mla_cache_append(kv.detach(), cache.requires_grad_(), torch.arange(3))


def test_autograd_notices_that_a_saved_cache_was_written() -> None:
    x, cache = torch.randn(2, 2, 8, requires_grad=True), torch.randn(2, 2, 8)
    loss = (x * cache).sum()
    hw.mla_cache_append(torch.randn(1, 8), cache, torch.tensor([0]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiled() -> None:
    def append_twice(kv: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        hw.mla_cache_append(kv * 2, cache, slots)
        return hw.mla_cache_append(kv * 2, cache, slots + 1).sum()

    kv, slots, cache = torch.randn(2, 576), torch.tensor([3, 5]), cache_of(656)
    expected = cache.clone()
    total = append_twice(kv, expected, slots)
    compiled = torch.compile(append_twice, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(kv, cache, slots), total)
    assert torch.equal(cache, expected)


# ---- bad input


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
