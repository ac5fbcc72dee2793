"""sparse_mla_decode beside sparse_mla_forward over the rows read back: without splits out and lse have equal bits."""

from typing import Any

import hopwell
import numpy as np
import pytest
import torch
from hopwell.torch import mla_cache_append, read_mla_cache

pytestmark = pytest.mark.usefixtures("numbers_only")

SCALE = 576**-0.5
FORMATS = {"bf16": (576, 0), "v32": (576, 656), "v32_without_rope": (512, 656), "v4": (512, 584), "v41": (512, 528)}
TILE = 512  # entries of a tile on the CPU


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def random(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).bfloat16()


def filled(rng: np.random.Generator, form: str, blocks: int, block: int, device: str = "cpu") -> torch.Tensor:
    """A cache whose slots all hold random rows."""
    d, row = FORMATS[form]
    rows = random(rng, blocks * block, d).to(device)
    if form == "bf16":
        return rows.view(blocks, block, d)
    cache = torch.zeros(blocks, block, row, dtype=torch.uint8, device=device)
    return mla_cache_append(rows, cache, torch.arange(blocks * block, device=device))


def integers(rng: np.random.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(low, high, shape).astype(np.int32))


@pytest.mark.parametrize("form", FORMATS)
def test_bits_of_the_forward(form: str, rng: np.random.Generator) -> None:
    blocks, block, d = 90, 13, FORMATS[form][0]
    cache = filled(rng, form, blocks, block)
    values = read_mla_cache(cache, torch.arange(blocks * block), d)
    q, sink, lengths = random(rng, 3, 2, 5, d), torch.randn(5), integers(rng, 500, 1300, 3, 2)
    indices = integers(rng, -90, blocks * block + 90, 3, 2, 1300)
    out, lse = hopwell.sparse_mla_decode(
        q, cache, indices, SCALE, topk_length=lengths, attn_sink=sink, keys_per_split=2048
    )
    flat = q.reshape(6, 5, d), values, indices.reshape(6, 1300), SCALE
    expected, _, expected_lse = hopwell.sparse_mla_forward(*flat, topk_length=lengths.reshape(6), attn_sink=sink)
    assert same_bits(out, expected.view(out.shape))
    assert same_bits(lse, expected_lse.view(lse.shape))


@pytest.mark.parametrize("form", FORMATS)
def test_bits_of_two_caches(form: str, rng: np.random.Generator) -> None:
    """A second cache of up to 512 entries is one more tile of the forward, if the first one's rows fill their tiles."""
    d = FORMATS[form][0]
    first, second = filled(rng, form, 40, 16), filled(rng, form, 11, 9)
    values = torch.cat([read_mla_cache(c, torch.arange(c.shape[0] * c.shape[1]), d) for c in (first, second)])
    q, entries, others = random(rng, 3, 5, d), integers(rng, 0, 640, 3, 700), integers(rng, 0, 99, 3, 130)
    out, lse = hopwell.sparse_mla_decode(
        q, first, entries, SCALE, extra_cache=second, extra_indices=others, keys_per_split=4096
    )
    entries = torch.nn.functional.pad(entries, (0, 2 * TILE - 700), value=-1)
    expected, _, expected_lse = hopwell.sparse_mla_forward(q, values, torch.cat([entries, others + 640], 1), SCALE)
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)


@pytest.mark.parametrize("backend", [b for b in hopwell.backends("sparse_mla_decode") if b != "cpu"])
@pytest.mark.parametrize("h_q", [5, 20, 64])
def test_bits_of_the_forward_on_gpus(backend: str, h_q: int, rng: np.random.Generator) -> None:
    device = "cuda" if backend.startswith("sm") else "cpu"
    cache = filled(rng, "bf16", 20, 13, device)
    q, indices = random(rng, 3, 2, h_q, 576).to(device), integers(rng, -20, 280, 3, 2, 200).to(device)
    given: dict[str, Any] = {"backend": backend}
    out, lse = hopwell.sparse_mla_decode(q, cache, indices, SCALE, keys_per_split=256, **given)
    flat = q.reshape(6, h_q, 576), cache.view(260, 576), indices.view(6, 200), SCALE
    expected, _, expected_lse = hopwell.sparse_mla_forward(*flat, **given)
    assert same_bits(out, expected.view(out.shape))
    assert same_bits(lse, expected_lse.view(lse.shape))


def test_splits_change_last_bits(rng: np.random.Generator) -> None:
    """Splits change the last bits and no more."""
    cache = filled(rng, "v32", 30, 10)
    q, indices = random(rng, 2, 3, 576).float(), integers(rng, 0, 300, 2, 640)
    whole, whole_lse = hopwell.sparse_mla_decode(q, cache, indices, SCALE, keys_per_split=640)
    out, lse = hopwell.sparse_mla_decode(q, cache, indices, SCALE, keys_per_split=64)
    assert torch.allclose(out, whole, atol=1e-5)
    assert torch.allclose(lse, whole_lse, atol=1e-6)
    assert not same_bits(out, whole)


@pytest.mark.parametrize("backend", [b for b in hopwell.backends("sparse_mla_decode") if b.startswith("emu:")])
@pytest.mark.parametrize("form", ["bf16", "v32", "v4"])
def test_the_size_of_the_device_does_not_change_bits(
    backend: str, form: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 2 multiprocessors a CTA of few heads has all splits of a query, on 20 some, on 400 one."""
    cache, d = filled(rng, form, 20, 16), FORMATS[form][0]
    q, indices = random(rng, 3, 2, 24, d), integers(rng, -60, 320, 3, 2, 1000)
    indices[0, 0, 64:128] = -1  # a split without keys
    given: dict[str, Any] = {"keys_per_split": 64, "backend": backend, "topk_length": integers(rng, 300, 1000, 3, 2)}
    if form == "bf16":  # slots 0 to 15 have scores of -inf. In a split of them alone the output is NaN, its weight 0
        q[..., 0] = 1
        cache[0, :, 0] = -torch.inf
        indices[(indices >= 0) & (indices < 16)] = 100
        indices[1, 0, :64] = indices[1, 1, 128:192] = torch.arange(64, dtype=torch.int32) % 16
    of_24, lse_of_24 = hopwell.sparse_mla_decode(q, cache, indices, SCALE, **given)
    for multiprocessors, h_q in ((2, 8), (20, 8), (20, 13), (400, 8)):
        monkeypatch.setenv("HOPWELL_EMULATOR_SMS", str(multiprocessors))
        out, lse = hopwell.sparse_mla_decode(q[:, :, :h_q], cache, indices, SCALE, **given)
        assert same_bits(out, of_24[:, :, :h_q])
        assert same_bits(lse, lse_of_24[..., :h_q])
        assert not out.isnan().any()


@pytest.mark.parametrize("backend", [b for b in hopwell.backends("sparse_mla_decode") if b.startswith("emu:")])
@pytest.mark.parametrize(("d", "row"), [(576, 656), (512, 656), (512, 584), (512, 528), (576, 576)])
@pytest.mark.parametrize("keys_per_split", [64, 4096])
def test_the_tile_of_heads_does_not_change_bits(
    backend: str, d: int, row: int, keys_per_split: int, rng: np.random.Generator
) -> None:
    """61 heads against 32 that begin elsewhere in a tile, and against 16 and 8. Some rows need slower code."""
    cache = mla_cache_append(random(rng, 160, d), torch.zeros(10, 16, row, dtype=torch.uint8), torch.arange(160))
    if row == 656:
        cache.view(160, 656)[::7, 512:528].view(torch.float32).mul_(1.37)  # no powers of two
    elif row != 576:
        cache[3, -1, -8:] = 0  # scales of 2^-127: of slot 63, or of some rows of the block
    q, indices = random(rng, 2, 61, d), integers(rng, -30, 190, 2, 150)
    given: dict[str, Any] = {"keys_per_split": keys_per_split, "backend": backend}
    out, lse = hopwell.sparse_mla_decode(q, cache, indices, SCALE, **given)
    for heads in (slice(20, 52), slice(9, 25), slice(53, 61)):
        of_some, lse_of_some = hopwell.sparse_mla_decode(q[:, heads], cache, indices, SCALE, **given)
        assert same_bits(of_some, out[:, heads])
        assert same_bits(lse_of_some, lse[:, heads])


@pytest.mark.parametrize("backend", hopwell.backends("sparse_mla_decode"))
@pytest.mark.parametrize(("d", "row"), [*FORMATS.values(), (576, 576), (512, 512)])
def test_an_infinite_element_of_q_beside_large_ones(backend: str, d: int, row: int, rng: np.random.Generator) -> None:
    """Where q is -inf, all keys are positive: all scores are -inf, and 1e30 elsewhere in q makes none of them NaN."""
    device = "cuda" if backend.startswith("sm") else "cpu"
    rows = random(rng, 128, d).to(device)
    rows[:, 3] = rows[:, 3].abs() + 0.5
    cache = rows.view(8, 16, d)
    if row:
        cache = torch.zeros(8, 16, row, dtype=torch.uint8, device=device)
        mla_cache_append(rows, cache, torch.arange(128, device=device))
    q = random(rng, 2, 9, d).to(device)
    q[:, 1] *= 1e30
    q[:, 1, 3] = -torch.inf
    indices = integers(rng, -10, 140, 2, 100).to(device)
    out, lse = hopwell.sparse_mla_decode(q, cache, indices, SCALE, backend=backend)
    assert bool(torch.all(out[:, 1] == 0))
    assert bool(torch.all(lse[:, 1] == torch.inf))  # as without keys
    assert bool(torch.all(lse[:, [0, 2]].isfinite()))


def test_reasons(rng: np.random.Generator) -> None:
    """What GPUs do not support is said in words that name the argument."""
    gpus = [b for b in hopwell.backends("sparse_mla_decode") if b != "cpu"]
    if not gpus:
        pytest.skip("no GPU backend is built")
    device = "cuda" if gpus[0].startswith("sm") else "cpu"
    right: dict[str, Any] = {
        "q": random(rng, 1, 2, 576).to(device),
        "cache": filled(rng, "bf16", 2, 4, device),
        "indices": integers(rng, 0, 8, 1, 70).to(device),
        "sm_scale": SCALE,
        "keys_per_split": 128,
        "backend": gpus[0],
    }
    hopwell.sparse_mla_decode(**right)
    for change, words in (
        ({"q": right["q"].float()}, "needs q of bfloat16"),
        ({"cache": right["cache"].float()}, "needs a cache of bfloat16 or of bytes"),
        ({"d_v": 100}, "needs d_v 512"),
    ):
        with pytest.raises(Exception, match=words):
            hopwell.sparse_mla_decode(**right | change)
