"""FlashInfer-Bench's definitions, against float64."""

import math
from typing import Any

import pytest
import torch
from hopwell.compat.flashinfer_bench import dsa_sparse_attention, dsa_topk_indexer_fp8
from torch import Tensor

pytestmark = pytest.mark.usefixtures("torch_seed")


def attention_inputs(tokens: int, heads: int = 16, topk: int = 2048, pages: int = 5) -> dict[str, Any]:
    indices = torch.randint(0, 64 * pages, (tokens, topk), dtype=torch.int32)
    indices[torch.rand(tokens, topk) < 0.2] = -1
    return {
        "q_nope": torch.randn(tokens, heads, 512).bfloat16(),
        "q_pe": torch.randn(tokens, heads, 64).bfloat16(),
        "ckv_cache": torch.randn(pages, 64, 512).bfloat16(),
        "kpe_cache": torch.randn(pages, 64, 64).bfloat16(),
        "sparse_indices": indices,
        "sm_scale": 192**-0.5,
    }


def plain_attention(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    ckv, kpe = call["ckv_cache"].double().flatten(0, 1), call["kpe_cache"].double().flatten(0, 1)
    out = torch.zeros(call["q_nope"].shape, dtype=torch.float64)
    lse = torch.full(out.shape[:2], -math.inf, dtype=torch.float64)
    for t, row in enumerate(call["sparse_indices"].tolist()):
        slots = [slot for slot in row if 0 <= slot < len(ckv)]
        if slots:
            logits = call["q_nope"][t].double() @ ckv[slots].T + call["q_pe"][t].double() @ kpe[slots].T
            logits *= call["sm_scale"]
            lse[t] = logits.logsumexp(-1) / math.log(2)
            out[t] = logits.softmax(-1) @ ckv[slots]
    return out, lse


@pytest.mark.parametrize(("tokens", "heads", "topk"), [(3, 16, 2048), (2, 5, 300), (1, 64, 64), (0, 16, 2048)])
def test_dsa_sparse_attention(tokens: int, heads: int, topk: int) -> None:
    call = attention_inputs(tokens, heads, topk)
    if tokens > 1:
        call["sparse_indices"][0] = torch.tensor([-1, -9, 320, 2**31 - 1] * (topk // 4))
    out, lse = dsa_sparse_attention(**call)
    right = plain_attention(call)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert (out.double() - right[0]).norm() <= 4e-3 * right[0].norm()
    torch.testing.assert_close(lse.double(), right[1], atol=2e-5, rtol=2**-15)
    if tokens > 1:
        assert out[0].eq(0).all() and lse[0].eq(-math.inf).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_nope": torch.zeros(2, 512)}, r"q_nope must be \[num_tokens, num_qo_heads, head_dim_ckv\]; got \[2, 512\]"),
        ({"q_pe": torch.zeros(2, 3, 64).bfloat16()}, r"q_pe must be \[num_tokens=2, num_qo_heads=16, head_dim_kpe\]"),
        ({"q_pe": torch.zeros(2, 16, 64)}, "q_pe must be torch.bfloat16 as q_nope is; got torch.float32"),
        (
            {"ckv_cache": torch.zeros(5, 64, 500).bfloat16()},
            r"ckv_cache must be .*head_dim_ckv=512\]; got \[5, 64, 500\]",
        ),
        ({"kpe_cache": torch.zeros(5, 32, 64).bfloat16()}, "kpe_cache must be .*"),
        ({"sparse_indices": torch.zeros(2, 9)}, "sparse_indices must be int32 .*; got float32"),
        ({"sm_scale": math.inf}, "sm_scale must be finite; got inf"),
    ],
)
def test_wrong_arguments_of_the_attention(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^dsa_sparse_attention: " + message):
        dsa_sparse_attention(**{**attention_inputs(2, topk=9), **change})


# ---- the indexer -----------------------------------------------------------------------------------------------------


def indexer_inputs(lengths: list[int], pages: int) -> dict[str, Any]:
    """Small integers as keys and queries, so that scores are exact and many are equal."""
    batch, heads, d = len(lengths), 64, 128
    codes = torch.randint(-1, 2, (pages * 64, d)).float().to(torch.float8_e4m3fn).view(torch.uint8)
    scales = 2.0 ** torch.randint(-1, 2, (pages * 64, 1))
    cache = torch.cat([codes.view(pages, -1), scales.float().view(torch.uint8).view(pages, -1)], 1)
    return {
        "q_index_fp8": torch.randint(-1, 2, (batch, heads, d)).float().to(torch.float8_e4m3fn),
        "k_index_cache_fp8": cache.view(torch.int8).view(pages, 64, 1, 132),
        "weights": torch.randint(-1, 2, (batch, heads)).float(),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "block_table": torch.stack([torch.randperm(pages) for _ in lengths]).int(),
    }


def test_dsa_topk_indexer() -> None:
    call = indexer_inputs([0, 5, 2048, 2500, 2560], 40)
    actual = dsa_topk_indexer_fp8(**call)
    assert actual.dtype == torch.int32 and actual.shape == (5, 2048)
    data = call["k_index_cache_fp8"].view(torch.uint8).view(40, -1)
    keys = data[:, : 64 * 128].reshape(-1, 128).view(torch.float8_e4m3fn).double()
    keys *= data[:, 64 * 128 :].reshape(-1, 4).view(torch.float32).double()
    for s, length in enumerate(call["seq_lens"].tolist()):
        position = torch.arange(length)
        slots = call["block_table"][s].long()[position // 64] * 64 + position % 64
        dots = (call["q_index_fp8"][s].double() @ keys[slots].T).relu()
        scores = (call["weights"][s].double() @ dots).tolist()
        best = sorted(sorted(range(length), key=lambda p: (-scores[p], p))[:2048])
        assert actual[s, : len(best)].tolist() == slots[best].tolist() and actual[s, len(best) :].eq(-1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_index_fp8": torch.zeros(1, 64, 128)}, "q_index_fp8 must be float8_e4m3fn; got torch.float32"),
        ({"k_index_cache_fp8": torch.zeros(2, 64, 1, 128).char()}, "k_index_cache_fp8 must be .*"),
        ({"weights": torch.zeros(1, 63)}, "weights must be .*"),
        ({"seq_lens": torch.zeros(1)}, "seq_lens must be int32 .*; got float32"),
        ({"block_table": torch.zeros(1, 2)}, "block_table must be int32 .*; got float32"),
    ],
)
def test_wrong_arguments_of_the_indexer(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^dsa_topk_indexer_fp8: " + message):
        dsa_topk_indexer_fp8(**{**indexer_inputs([9], 2), **change})
