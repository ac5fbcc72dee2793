"""FlashMLA's decode over paged caches of bytes, against a computation in float64 that reads the bytes itself."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hopwell.compat.flash_mla import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata
from torch import Tensor

pytestmark = pytest.mark.usefixtures("torch_seed")

E4M3 = torch.float8_e4m3fn


@dataclass
class Cache:
    """A cache of random bytes with gaps between its blocks, and the values of its slots in float64."""

    data: Tensor  # uint8 [blocks, block, 1, row]
    values: Tensor  # [slots, d_qk]


def codes(*shape: int) -> Tensor:
    """Random e4m3 codes of finite numbers."""
    return (torch.randn(*shape) * 3).to(E4M3).view(torch.uint8)


def bf16_bytes(*shape: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(*shape).bfloat16()
    return x.view(torch.uint8), x.double()


def rounded(x: Tensor) -> Tensor:
    return x.float().bfloat16().double()


def v32(blocks: int, block: int, exact: bool = True) -> Cache:
    """Rows of 656 bytes: 512 codes, 4 fp32 scales, 64 bf16. Scales are powers of two if `exact`."""
    n = blocks * block
    quantised = codes(n, 512)
    scales = 2.0 ** torch.randint(-6, -2, (n, 4)) if exact else torch.rand(n, 4) / 8 - 0.04
    rope, rope_values = bf16_bytes(n, 64)
    rows = torch.cat([quantised, scales.float().view(torch.uint8), rope], 1)
    values = rounded(quantised.view(E4M3).double() * scales.float().double().repeat_interleave(128, 1))
    memory = torch.full((blocks, block + 1, 1, 656), 0x7F, dtype=torch.uint8)[:, :block]
    memory.copy_(rows.view(blocks, block, 1, 656))
    return Cache(memory, torch.cat([values, rope_values], 1))


def v4(blocks: int, block: int) -> Cache:
    """Blocks of rows of 448 codes and 64 bf16, then 7 exponents and a byte of padding a row."""
    n = blocks * block
    quantised, exponents = codes(n, 448), torch.randint(121, 126, (n, 7), dtype=torch.uint8)
    rope, rope_values = bf16_bytes(n, 64)
    scales = 2.0 ** (exponents.double() - 127)
    values = rounded(quantised.view(E4M3).double() * scales.repeat_interleave(64, 1))
    memory = torch.full((blocks, block * 584 + 192), 0x7F, dtype=torch.uint8)[:, : block * 584]
    memory[:, : block * 576] = torch.cat([quantised, rope], 1).view(blocks, -1)
    padded = torch.cat([exponents, torch.full((n, 1), 255, dtype=torch.uint8)], 1)
    memory[:, block * 576 :] = padded.view(blocks, -1)
    return Cache(memory.view(blocks, block, 1, 584), torch.cat([values, rope_values], 1))


Lengths = Tensor | None


def plain(
    q: Tensor, parts: list[tuple[Cache, Tensor, Lengths]], scale: float, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One head of one query at a time, in float64: out [b, s_q, h_q, 512] and lse [b, h_q, s_q]."""
    b, s_q, h_q, _ = q.shape
    out, lse = torch.zeros(b, s_q, h_q, 512, dtype=torch.float64), torch.zeros(b, h_q, s_q, dtype=torch.float64)
    for s, i in torch.cartesian_prod(torch.arange(b), torch.arange(s_q)).tolist():
        keys = []
        for cache, indices, length in parts:
            row = indices[s, i].tolist()[: None if length is None else int(length[s])]
            keys.append(cache.values[[t for t in row if 0 <= t < len(cache.values)]])
        k = torch.cat(keys)
        for h in range(h_q):
            scores = scale * (k @ q[s, i, h].double())
            total = scores.logsumexp(0) if len(k) else torch.tensor(math.inf)
            lse[s, h, i] = total
            if len(k):
                factor = 1.0 if sink is None else torch.sigmoid(total - sink[h].double())
                out[s, i, h] = factor * ((scores - total).exp() @ k[:, :512])
    return out, lse


def check(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    out, lse = actual
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert (out.double() - expected[0]).norm() <= 4e-3 * expected[0].norm() + 1e-30
    torch.testing.assert_close(lse.double(), expected[1], atol=2e-5, rtol=2**-15)


def wild(b: int, s_q: int, topk: int, slots: int) -> Tensor:
    """Entries in any order, some equal, some of no slot."""
    indices = torch.randint(0, slots, (b, s_q, topk), dtype=torch.int32)
    bad = torch.tensor([-1, -(2**31), slots, 2**31 - 1], dtype=torch.int32)
    there = torch.rand(b, s_q, topk) < 0.8
    return torch.where(there, indices, bad[torch.randint(0, 4, there.shape)])


@pytest.mark.parametrize("kind", ["V3.2", "V3.2 of any scales", "V4"])
@pytest.mark.parametrize(("h_q", "s_q", "block", "topk"), [(64, 1, 64, 64), (5, 3, 61, 300), (16, 2, 2, 0)])
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_agrees_with_float64(kind: str, h_q: int, s_q: int, block: int, topk: int, extra: bool, given: bool) -> None:
    """`given`: lengths and a sink are given."""
    b, make = 3, {"V3.2": v32, "V4": v4}.get(kind, lambda *sizes: v32(*sizes, exact=False))
    cache, other = make(9, block), make(4, 53)
    q = torch.randn(b, s_q + 1, h_q, cache.values.shape[1]).bfloat16()[:, 1:] / 4
    sink = torch.tensor(([0.5, math.inf, -math.inf, -2.0] * h_q)[:h_q]) if given else None
    parts: list[tuple[Cache, Tensor, Lengths]] = []
    for one, width in ((cache, topk), (other, 70))[: 2 if extra else 1]:
        length = torch.randint(0, width + 9, (b,), dtype=torch.int32) if given else None
        parts.append((one, wild(b, s_q, width, len(one.values)), length))
    more: dict[str, Any] = {}
    if extra:
        more = {
            "extra_k_cache": parts[1][0].data,
            "extra_indices_in_kvcache": parts[1][1],
            "extra_topk_length": parts[1][2],
        }
    metadata, none = get_mla_metadata(1, 2, topk=topk)
    scale = q.shape[-1] ** -0.55
    actual = flash_mla_with_kvcache(
        *(q, cache.data, None, None, 512, metadata, none, scale, False, True, parts[0][1], sink),
        topk_length=parts[0][2],
        **more,
    )
    check(actual, plain(q, parts, scale, sink))


def test_a_query_without_an_entry_and_the_default_scale() -> None:
    cache = v32(2, 64)
    q = torch.randn(2, 1, 8, 576).bfloat16()
    indices = torch.tensor([[[-1, 128, -7]], [[5, -1, 5]]], dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(
        *(q, cache.data.view(E4M3), None, None, 512, get_mla_metadata()[0]), is_fp8_kvcache=True, indices=indices
    )
    assert out[0].eq(0).all() and lse[0].eq(math.inf).all()
    check((out, lse), plain(q, [(cache, indices, None)], 576**-0.5, None))


def test_the_metadata_object_carries_nothing() -> None:
    """Calls of other shapes and lengths may share it, and a query's bits do not change."""
    cache = v4(3, 64)
    q, indices = torch.randn(4, 2, 8, 512).bfloat16(), wild(4, 2, 90, 192)
    metadata, none = get_mla_metadata()
    assert isinstance(metadata, FlashMLASchedMeta) and none is None and not vars(metadata)
    assert metadata.tile_scheduler_metadata is None and metadata.num_splits is None
    arguments = (None, None, 512, metadata, None, 0.04, False, True)
    out, lse = flash_mla_with_kvcache(q, cache.data, *arguments, indices)
    wider = torch.cat([indices, torch.full((4, 2, 38), -1, dtype=torch.int32)], -1)
    alone = flash_mla_with_kvcache(q[2:3], cache.data, *arguments, wider[2:3])
    assert torch.equal(alone[0], out[2:3]) and torch.equal(alone[1], lse[2:3])
    shorter = flash_mla_with_kvcache(q, cache.data, *arguments, indices, topk_length=torch.tensor([0, 1, 90, 7]).int())
    assert torch.equal(shorter[0][2], out[2]) and shorter[0][0].eq(0).all()


def test_the_result_is_written_to_out() -> None:
    cache = v4(3, 64)
    q, indices = torch.randn(2, 1, 8, 512).bfloat16(), wild(2, 1, 90, 192)
    arguments = (None, None, 512, None, None, 0.04, False, True)
    expected, _ = flash_mla_with_kvcache(q, cache.data, *arguments, indices)
    out = torch.full((2, 1, 16, 512), math.nan).bfloat16()
    result, _ = flash_mla_with_kvcache(q, cache.data, *arguments, indices, out=out[:, :, 3:11])
    assert result.data_ptr() == out[:, :, 3:].data_ptr() and torch.equal(out[:, :, 3:11], expected)
    assert out[:, :, :3].isnan().all() and out[:, :, 11:].isnan().all()


def test_rows_of_bf16_and_rows_without_rope() -> None:
    values = torch.randn(2, 8, 1, 96).bfloat16()
    q, indices = torch.randn(2, 1, 4, 96).bfloat16(), wild(2, 1, 9, 16)
    out, lse = flash_mla_with_kvcache(q, values, None, None, 64, None, indices=indices, softmax_scale=0.1)
    whole = Cache(values, torch.zeros(16, 512, dtype=torch.float64))
    whole.values[:, :96] = values.view(16, 96).double()
    wide = torch.zeros(2, 1, 4, 512)
    wide[..., :96] = q
    expected = plain(wide, [(whole, indices, None)], 0.1, None)
    check((out, lse), (expected[0][..., :64], expected[1]))

    cache = v32(2, 8)
    q = torch.randn(2, 1, 4, 512).bfloat16() / 4
    out, lse = flash_mla_with_kvcache(
        *(q, cache.data, None, None, 512, None), is_fp8_kvcache=True, indices=indices, softmax_scale=0.1
    )
    check((out, lse), plain(q, [(Cache(cache.data, cache.values[:, :512]), indices, None)], 0.1, None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": None}, r"indices must be int32 \[b, s_q, topk\] \(no dense decoding\); got None"),
        ({"causal": True}, "causal must be False with indices; got True"),
        ({"num_splits": torch.zeros(3)}, r"num_splits must be None; got torch.float32 \[3\]"),
        ({"is_fp8_kvcache": False}, "k_cache must be of bf16 rows, as is_fp8_kvcache says; got torch.uint8"),
        ({"q": torch.zeros(2, 4, 576)}, r"q must be \[b, s_q, h_q, d_qk\]; got torch.float32 \[2, 4, 576\]"),
        ({"k_cache": torch.zeros(3, 8, 1, 584, dtype=torch.uint8)}, r"k_cache must be rows of 656 .*; got 584"),
        ({"indices": torch.zeros(2, 1, 5)}, r"indices must be int32 \[b=2, q_len=1, topk\]; got float32"),
        ({"head_dim_v": 577}, "head_dim_v must be between 1 and d_qk = 576; got 577"),
        ({"softmax_scale": math.nan}, "softmax_scale must be finite; got nan"),
        ({"attn_sink": torch.zeros(3)}, r"attn_sink must be float32 \[h_q=4\]; got float32 \[3\]"),
        ({"topk_length": torch.zeros(2)}, r"topk_length must be int32 \[b=2\]; got float32 \[2\]"),
        ({"extra_k_cache": torch.zeros(3, 8, 1, 656, dtype=torch.uint8)}, "extra_k_cache and extra_indices_in_kvcache"),
        ({"extra_topk_length": torch.zeros(2, dtype=torch.int32)}, "extra_topk_length needs extra_k_cache"),
    ],
)
def test_unsupported_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 1, 4, 576).bfloat16(),
        "k_cache": torch.zeros(3, 8, 1, 656, dtype=torch.uint8),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": get_mla_metadata()[0],
        "is_fp8_kvcache": True,
        "indices": torch.zeros(2, 1, 5, dtype=torch.int32),
        **change,
    }
    with pytest.raises(ValueError, match="^flash_mla_with_kvcache: " + message):
        flash_mla_with_kvcache(**arguments)
