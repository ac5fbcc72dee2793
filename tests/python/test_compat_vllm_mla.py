"""vLLM's writers of MLA caches and index caches: every byte, against loops over the elements."""

import math
import struct
from typing import Any

import pytest
import torch
from hopwell.compat import vllm as ops
from torch import Tensor

pytestmark = pytest.mark.usefixtures("torch_seed")

# Values of the e4m3 codes 0 … 126, from the format's definition.
VALUES = [(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:127]


def code(x: float) -> int:
    """The e4m3 code nearest to x, of two the even one; saturated."""
    best = min(range(127), key=lambda c: (abs(VALUES[c] - abs(x)), c % 2))
    return best | (0x80 if math.copysign(1.0, x) < 0 else 0)


def fp32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def power_of_two(amax: float, least: int) -> float:
    exponent = least
    while 448 * 2.0**exponent < amax:
        exponent += 1
    return 2.0**exponent


def group(x: list[float], scale: float) -> bytes:
    return bytes(code(fp32(v / scale)) for v in x)


def tokens(n: int, d: int) -> Tensor:
    """Rows of all magnitudes. The middle row is 0."""
    x = torch.randn(n, d) * 2.0 ** torch.randint(-20, 10, (n, 1))
    x[n // 2] = 0
    return x.bfloat16()


def untouched(*shape: int) -> Tensor:
    """A cache with a gap between its blocks, all 0xA5."""
    return torch.full((shape[0], shape[1] + 1, *shape[2:]), 0xA5, dtype=torch.uint8)[:, : shape[1]]


def test_rows_of_fp8_ds_mla() -> None:
    kv_c, k_pe, cache = tokens(7, 512), tokens(7, 64), untouched(3, 4, 656)
    slots = torch.tensor([11, 0, -1, 5, 12])  # one skipped, one beyond the cache, two tokens of padding
    assert ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, "fp8_ds_mla", torch.ones(1)) is None
    expected = torch.full((12, 656), 0xA5, dtype=torch.uint8)
    for row, slot in ((0, 11), (1, 0), (3, 5)):
        tiles = kv_c[row].double().view(4, 128).tolist()
        scales = [power_of_two(max(map(abs, tile)), -13) for tile in tiles]
        data = b"".join(map(group, tiles, scales)) + struct.pack("<4f", *scales)
        data += k_pe[row].view(torch.uint8).numpy().tobytes()
        expected[slot] = torch.tensor(list(data), dtype=torch.uint8)
    assert torch.equal(cache.reshape(12, 656), expected)


def test_scales_that_vllm_s_writer_and_reader_agree_on() -> None:
    """amax 336 has the scale 1, although 336 / 448 < 1; a tile of zeros has 2^-13."""
    kv_c = torch.zeros(1, 512, dtype=torch.bfloat16)
    kv_c[0, 5] = 336
    cache = torch.zeros(1, 64, 656, dtype=torch.uint8)
    ops.concat_and_cache_mla(kv_c, torch.zeros(1, 64).bfloat16(), cache, torch.tensor([3]), "fp8_ds_mla", 1.0)
    assert cache[0, 3, 512:528].view(torch.float32).tolist() == [1.0, 2**-13, 2**-13, 2**-13]


def test_rows_without_rope_and_caches_of_bf16_elements() -> None:
    kv_c = tokens(3, 512)
    rows, of_bf16 = torch.full((2, 4, 656), 0xA5, dtype=torch.uint8), torch.zeros(2, 4, 328, dtype=torch.bfloat16)
    slots = torch.tensor([1, 6, 4], dtype=torch.int32)
    for cache in (rows, of_bf16):
        ops.concat_and_cache_mla(kv_c, kv_c[:, :0], cache, slots, "fp8_ds_mla", 1.0)
    written = rows.view(8, 656)[slots.long()]
    assert written[:, 528:].eq(0).all()
    assert torch.equal(of_bf16.view(torch.uint8).view(8, 656)[slots.long()], written)


@pytest.mark.parametrize("kind", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_rows_of_the_other_kinds(kind: str, as_tensor: bool) -> None:
    kv_c, k_pe = tokens(5, 512), tokens(5, 64)
    whole, slots = torch.cat([kv_c, k_pe], 1), torch.tensor([2, 9, -1, 0, 7])
    if not kind.startswith("fp8"):
        cache = torch.full((2, 5, 576), 7.0, dtype=torch.bfloat16)
        ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, kind, torch.ones(1))
        expected = torch.full((10, 576), 7.0, dtype=torch.bfloat16)
        expected[slots[slots >= 0]] = whole[slots >= 0]
        assert torch.equal(cache.view(10, 576), expected)
        return
    codes, scale = untouched(2, 5, 576), 0.07
    ops.concat_and_cache_mla(kv_c, k_pe, codes, slots, kind, torch.tensor([scale]) if as_tensor else scale)
    rows = torch.full((10, 576), 0xA5, dtype=torch.uint8)
    for row in (0, 1, 3, 4):
        data = group(whole[row].double().tolist(), fp32(scale))
        rows[slots[row]] = torch.tensor(list(data), dtype=torch.uint8)
    assert torch.equal(codes.reshape(10, 576), rows)


@pytest.mark.parametrize("d", [128, 64])
@pytest.mark.parametrize("scales", ["ue8m0", ""])
def test_index_rows_are_written_and_gathered(d: int, scales: str) -> None:
    block, blocks, lengths = 8, 9, [11, 0, 8, 5]
    n, row = sum(lengths), d + 4
    k, cache = tokens(n, d), untouched(blocks, block, row)
    pages = torch.randperm(blocks, dtype=torch.int32)[:8].view(4, 2)
    place = [(s, p) for s, length in enumerate(lengths) for p in range(length)]
    slots = torch.tensor([int(pages[s, p // block]) * block + p % block for s, p in place])
    ops.indexer_k_quant_and_cache(k, cache, torch.cat([slots, slots[:1]]), d, scales)

    expected = torch.full((blocks, block * row), 0xA5, dtype=torch.uint8)
    codes, fp32s = [], []
    for x, slot in zip(k.double().tolist(), slots.tolist(), strict=True):
        amax = max(map(abs, x))
        scale = power_of_two(amax, -22) if scales else fp32(max(amax, fp32(1e-4)) / 448)
        page, i = divmod(slot, block)
        codes.append(torch.tensor(list(group(x, scale)), dtype=torch.uint8))
        fp32s.append(torch.tensor(list(struct.pack("<f", scale)), dtype=torch.uint8))
        expected[page, d * i : d * (i + 1)] = codes[-1]
        expected[page, d * block + 4 * i : d * block + 4 * (i + 1)] = fp32s[-1]
    assert torch.equal(cache.reshape(blocks, -1), expected)

    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    dst_k = torch.full((n + 2, d), 0x5A, dtype=torch.uint8)  # two rows of padding
    for dst_scale in (torch.zeros(n + 2, 4, dtype=torch.uint8), torch.zeros(n + 2, 1)):
        target = dst_k.clone().view(torch.float8_e4m3fn)
        ops.cp_gather_indexer_k_quant_cache(cache, target, dst_scale, pages, offsets)
        assert torch.equal(target.view(torch.uint8)[:n], torch.stack(codes))
        assert torch.equal(dst_scale.view(torch.uint8)[:n], torch.stack(fp32s))
        assert target.view(torch.uint8)[n:].eq(0x5A).all() and dst_scale[n:].eq(0).all()


def test_pages_that_do_not_exist_leave_rows_as_they_are() -> None:
    cache = torch.arange(4 * 20, dtype=torch.uint8).view(2, 2, 20)
    pages = torch.tensor([[1, -1], [2, 0]], dtype=torch.int32)
    dst_k, dst_scale = torch.full((7, 16), 99, dtype=torch.uint8), torch.full((7, 4), 99, dtype=torch.uint8)
    ops.cp_gather_indexer_k_quant_cache(cache, dst_k, dst_scale, pages, torch.tensor([0, 3, 8], dtype=torch.int32))
    block = cache.view(2, 40)
    assert torch.equal(dst_k[:2], block[1, :32].view(2, 16)) and torch.equal(dst_scale[:2], block[1, 32:].view(2, 4))
    assert dst_k[2:5].eq(99).all() and dst_scale[2:5].eq(99).all()
    assert torch.equal(dst_k[5:7], block[0, :32].view(2, 16)) and torch.equal(dst_scale[5:], block[0, 32:].view(2, 4))
    nothing = torch.zeros(0, 2, dtype=torch.int32)
    ops.cp_gather_indexer_k_quant_cache(cache, dst_k, dst_scale, nothing, torch.zeros(1, dtype=torch.int32))
    assert dst_k[2:5].eq(99).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "kv_cache_dtype must be auto, bfloat16, fp8, fp8_e4m3 or fp8_ds_mla; got fp8_e5",
        ),
        ({"skip_scale": True}, "skip_scale must be False; got True"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "kv_cache_dtype must be auto, bfloat16, .*; got nvfp4_ds_mla"),
        ({"kv_cache_dtype": "auto"}, "kv_cache must be torch.bfloat16 as kv_c is for auto; got torch.uint8"),
        ({"kv_cache_dtype": "fp8"}, r"kv_cache must be \[blocks, block, 576\] of bytes for fp8; got torch.uint8"),
        ({"kv_cache": torch.zeros(2, 4, 640, dtype=torch.uint8)}, "kv_cache must be of rows of 656 bytes"),
        ({"kv_c": torch.zeros(3, 448).bfloat16()}, r"kv_c must be \[tokens, 512\] for fp8_ds_mla; got torch.bfloat16"),
        ({"kv_c": torch.zeros(3, 512).half(), "k_pe": torch.zeros(3, 64).half()}, "kv_c must be .*"),
        ({"k_pe": torch.zeros(3, 64)}, "k_pe must be .*"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int64)}, r"kv_c must be \[tokens, d\] with at least 4 tokens"),
        ({"slot_mapping": torch.zeros(3)}, "slot_mapping must be .*"),
    ],
)
def test_bad_latents_change_no_cache(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "kv_c": torch.ones(3, 512).bfloat16(),
        "k_pe": torch.ones(3, 64).bfloat16(),
        "kv_cache": torch.zeros(2, 4, 656, dtype=torch.uint8),
        "slot_mapping": torch.arange(3),
        "kv_cache_dtype": "fp8_ds_mla",
        "scale": torch.ones(1),
        **change,
    }
    with pytest.raises(ValueError, match="^concat_and_cache_mla: " + message):
        ops.concat_and_cache_mla(**arguments)
    assert arguments["kv_cache"].eq(0).all()


def test_a_bad_scale_is_named() -> None:
    kv_c, k_pe, cache = torch.ones(1, 512).bfloat16(), torch.ones(1, 64).bfloat16(), torch.zeros(1, 4, 576).byte()
    for scale, message in ((torch.ones(2), "one number; got torch.float32"), (-1.0, "positive and finite; got -1")):
        with pytest.raises(ValueError, match=f"^concat_and_cache_mla: scale must be {message}"):
            ops.concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor([0]), "fp8", scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_cache_dtype": "mxfp8"}, "kv_cache_dtype must be ue8m0, or another format with one scale; got mxfp8"),
        ({"quant_block_size": 64}, r"quant_block_size must be d = 128 \(one scale a key\); got 64"),
        ({"kv_cache": torch.zeros(2, 4, 128).byte()}, r"kv_cache must be \[blocks, block, 132\] of bytes"),
        ({"slot_mapping": torch.arange(2)}, r"slot_mapping must be at least \[3\]; got torch.int64 \[2\]"),
        ({"k": torch.zeros(3, 128).half()}, "k must be .*"),
    ],
)
def test_bad_index_keys_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "k": torch.ones(3, 128).bfloat16(),
        "kv_cache": torch.zeros(2, 4, 132).byte(),
        "slot_mapping": torch.arange(3),
        "quant_block_size": 128,
        "kv_cache_dtype": "ue8m0",
        **change,
    }
    with pytest.raises(ValueError, match="^indexer_k_quant_and_cache: " + message):
        ops.indexer_k_quant_and_cache(**arguments)
    assert arguments["kv_cache"].eq(0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dst_k": torch.zeros(3, 128)}, "dst_k must be of bytes; got torch.float32"),
        ({"dst_scale": torch.zeros(3, 2)}, r"dst_scale must be uint8 \[3, 4\] or float32 \[3, 1\] \(one scale a key\)"),
        (
            {"kv_cache": torch.zeros(2, 4, 128).byte()},
            r"kv_cache must be \[blocks, block, row=132\]; got \[2, 4, 128\]",
        ),
        ({"kv_cache": torch.zeros(2, 8, 132).byte()[:, ::2]}, "kv_cache must be of bytes, contiguous inside a block"),
        ({"block_table": torch.zeros(1, 2).long()}, "block_table must be int32; got torch.int64"),
        ({"cu_seq_lens": torch.zeros(3).int()}, r"cu_seq_lens must be \[offsets=2\]; got \[3\]"),
    ],
)
def test_bad_gathers_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "kv_cache": torch.zeros(2, 4, 132).byte(),
        "dst_k": torch.ones(3, 128).byte(),
        "dst_scale": torch.ones(3, 4).byte(),
        "block_table": torch.zeros(1, 2).int(),
        "cu_seq_lens": torch.tensor([0, 3]).int(),
        **change,
    }
    with pytest.raises(ValueError, match="^cp_gather_indexer_k_quant_cache: " + message):
        ops.cp_gather_indexer_k_quant_cache(**arguments)
    assert arguments["dst_k"].eq(1).all() or "dst_k" in change
