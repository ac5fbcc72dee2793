"""`hopwell.compat.deep_gemm` against plain PyTorch in float64, called as DeepGEMM's tests and vLLM call it."""

import math
from typing import Any

import pytest
import torch
from hopwell.compat import _index_scores
from hopwell.compat.deep_gemm import (
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_paged_mqa_logits_metadata,
)
from support import norm_error
from torch import Tensor
from torch_inputs import RESTRIDES, Restride, restrided


def inputs(s_q: int, s_kv: int, heads: int, d: int) -> dict[str, Any]:
    """e4m3 numbers whose products are exact in bf16's float32 sums, and a scale per key."""
    q, k = torch.randn(s_q, heads, d), torch.randn(s_kv, d)
    scales = k.abs().amax(1).clamp(min=1e-4) / 448
    return {
        "q": q.to(torch.float8_e4m3fn),
        "kv": ((k / scales[:, None]).to(torch.float8_e4m3fn), scales),
        "weights": torch.randn(s_q, heads),
        "cu_seq_len_k_start": torch.zeros(s_q, dtype=torch.int32),
        "cu_seq_len_k_end": torch.arange(s_q, dtype=torch.int32) + (s_kv - s_q),
    }


def visible(call: dict[str, Any]) -> Tensor:
    key = torch.arange(len(call["kv"][0]))
    return (key >= call["cu_seq_len_k_start"][:, None]) & (key < call["cu_seq_len_k_end"][:, None])


def plain(call: dict[str, Any]) -> Tensor:
    keys = call["kv"][0].double() * call["kv"][1].double()[:, None]
    dots = torch.einsum("shd,td->sht", call["q"].double(), keys).relu()
    logits = torch.einsum("sht,sh->st", dots, call["weights"].double())
    return logits.masked_fill(~visible(call), -math.inf)


def assert_logits(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert torch.equal(actual.isinf(), expected.isinf()) and not actual.isnan().any()
    finite = ~expected.isinf()
    assert norm_error(actual[finite], expected[finite]) <= tolerance


@pytest.mark.parametrize(("heads", "d"), [(64, 128), (32, 64), (3, 32)])
def test_logits_of_a_causal_sequence(heads: int, d: int) -> None:
    call = inputs(40, 100, heads, d)
    assert list(call) == ["q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end"]
    logits = fp8_mqa_logits(*call.values())
    assert logits.dtype == torch.float32
    assert_logits(logits, plain(call))
    assert torch.equal(logits, fp8_mqa_logits(*call.values(), True))
    assert_logits(fp8_mqa_logits(**call, clean_logits=False), plain(call))


def test_key_ranges_of_packed_documents_and_wild_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges are data: empty, reversed, before the first key, beyond the last key. Rows are computed a few at a
    time.
    """
    monkeypatch.setattr(_index_scores, "_SCORES_AT_A_TIME", 100)
    call = inputs(30, 57, 4, 16)
    call["cu_seq_len_k_start"] = torch.randint(-5, 60, (30,), dtype=torch.int32)
    call["cu_seq_len_k_end"] = torch.randint(-5, 70, (30,), dtype=torch.int32)
    call["cu_seq_len_k_start"][3:6] = torch.tensor([0, 57, -(2**31)])
    call["cu_seq_len_k_end"][3:6] = torch.tensor([57, 57, 2**31 - 1])
    assert_logits(fp8_mqa_logits(**call), plain(call))


def test_compressed_logits_begin_with_each_query_s_first_key() -> None:
    call = inputs(24, 64, 8, 32)
    call["cu_seq_len_k_start"] = torch.arange(24, dtype=torch.int32)
    call["cu_seq_len_k_end"] = torch.arange(24, dtype=torch.int32) * 2 + 5
    most = int((call["cu_seq_len_k_end"] - call["cu_seq_len_k_start"]).max())
    logits = fp8_mqa_logits(**call, clean_logits=False, max_seqlen_k=most)
    assert logits.shape == (24, most)
    full = torch.full((24, 64), -math.inf)
    for row, (start, end) in enumerate(zip(call["cu_seq_len_k_start"], call["cu_seq_len_k_end"], strict=True)):
        full[row, start:end] = logits[row, : end - start]
        assert logits[row, end - start :].eq(-math.inf).all()
    assert_logits(full, plain(call))
    cut = fp8_mqa_logits(**call, clean_logits=False, max_seqlen_k=3)  # the first three keys, not the best three
    assert torch.equal(cut, logits[:, :3])


@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16])
def test_the_form_with_a_choice_of_dtypes(logits_dtype: torch.dtype) -> None:
    call = inputs(16, 48, 8, 64)
    q = call.pop("q")
    weights = call.pop("weights").bfloat16()
    logits = fp8_fp4_mqa_logits((q, None), weights=weights, **call, logits_dtype=logits_dtype)
    assert logits.dtype == logits_dtype
    expected = plain({**call, "q": q, "weights": weights})
    assert_logits(logits, expected, 1e-5 if logits_dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_of_queries_and_keys(dtype: torch.dtype) -> None:
    call = inputs(8, 20, 4, 16)
    call["q"] = torch.randn(8, 4, 16).to(dtype)
    call["kv"] = torch.randn(20, 16).to(dtype), torch.rand(20)
    assert_logits(fp8_mqa_logits(**call), plain(call))


@pytest.mark.parametrize("restride", RESTRIDES)
def test_tensors_of_any_strides(restride: Restride) -> None:
    q, (k, scales), *others = inputs(7, 12, 4, 32).values()
    logits = fp8_mqa_logits(q, (k, scales), *others)
    q, k, scales, *others = restrided(restride, q, k, scales, *others)
    assert torch.equal(fp8_mqa_logits(q, (k, scales), *others), logits)


def test_nothing_to_do_and_nothing_to_see() -> None:
    call = inputs(3, 9, 2, 16)
    none = {**call, "cu_seq_len_k_end": torch.zeros(3, dtype=torch.int32)}
    assert fp8_mqa_logits(**none).eq(-math.inf).all()
    assert fp8_mqa_logits(**inputs(0, 9, 2, 16)).shape == (0, 9)
    empty = {**call, "kv": (call["kv"][0][:0], call["kv"][1][:0])}
    assert fp8_mqa_logits(**empty).shape == (3, 0)
    requiring = {**call, "weights": call["weights"].requires_grad_()}
    assert not fp8_mqa_logits(**requiring).requires_grad


def test_keys_that_are_not_seen_and_a_scale_of_zero() -> None:
    call = inputs(4, 12, 2, 16)
    call["cu_seq_len_k_end"] = torch.full((4,), 8, dtype=torch.int32)
    keys, scales = call["kv"]
    scales[2] = 0.0
    expected = plain(call)
    keys[8:] = math.nan
    scales[8:] = math.nan
    logits = fp8_mqa_logits(**call)
    assert_logits(logits, expected)
    assert logits[:, 2].eq(0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 2, 8, dtype=torch.uint8)}, r"q must be float8_e4m3fn \(no FP4\); got torch.uint8"),
        ({"q": torch.zeros(4, 16).to(torch.float8_e4m3fn)}, r"q must be \[seq_len, heads, head_dim\]; got \[4, 16\]"),
        (
            {"kv": (torch.zeros(9, 16), torch.ones(9))},
            r"kv\[0\] must be torch.float8_e4m3fn as q is; got torch.float32",
        ),
        (
            {"kv": (torch.zeros(9, 8).to(torch.float8_e4m3fn), torch.ones(9))},
            r"kv\[0\] must be \[seq_len_kv, head_dim=16\]; got \[9, 8\]",
        ),
        (
            {"kv": (torch.zeros(9, 16).to(torch.float8_e4m3fn), torch.ones(8))},
            r"kv\[1\] must be \[seq_len_kv=9\]; got \[8\]",
        ),
        (
            {"kv": (torch.zeros(9, 16).to(torch.float8_e4m3fn), torch.ones(9, dtype=torch.int32))},
            r"kv\[1\] must be float32; got torch.int32",
        ),
        ({"kv": torch.zeros(9, 16)}, r"kv must be a pair of keys and their scales; got torch.float32 \[9, 16\]"),
        ({"kv": (torch.zeros(9, 16),)}, r"kv must be a pair of keys and their scales; got tuple"),
        ({"weights": torch.zeros(4, 3)}, r"weights must be \[seq_len=4, heads=2\]; got \[4, 3\]"),
        ({"cu_seq_len_k_start": torch.zeros(4)}, "cu_seq_len_k_start must be int32; got torch.float32"),
        ({"cu_seq_len_k_end": torch.zeros(5, dtype=torch.int32)}, r"cu_seq_len_k_end must be \[seq_len=4\]; got \[5\]"),
        ({"max_seqlen_k": 4}, "clean_logits must be False with max_seqlen_k; got True"),
        ({"clean_logits": 9}, "clean_logits must be True or False; got 9"),
        ({"max_seqlen_k": -1}, "max_seqlen_k must be 0, or the most keys that a query sees; got -1"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^fp8_mqa_logits: " + message):
        fp8_mqa_logits(**{**inputs(4, 9, 2, 16), **change})


def test_fp4_is_refused() -> None:
    call = inputs(4, 9, 2, 16)
    q = call.pop("q")
    with pytest.raises(ValueError, match=r"q\[1\] must be None \(no FP4\); got torch.int32 \[4, 2\]$"):
        fp8_fp4_mqa_logits((q, torch.ones(4, 2, dtype=torch.int32)), **call)
    with pytest.raises(ValueError, match=r"^fp8_fp4_mqa_logits: q must be a pair of queries and None; got torch.f"):
        fp8_fp4_mqa_logits(q, **call)
    with pytest.raises(ValueError, match=r"logits_dtype must be float32 or bfloat16; got torch\.float16"):
        fp8_fp4_mqa_logits((q, None), **call, logits_dtype=torch.float16)


# ---- pages -----------------------------------------------------------------------------------------------------------


def paged_inputs(batch: int, next_n: int, heads: int, d: int, block: int, most: int) -> dict[str, Any]:
    """Sequences of up to `most` keys on pages in random order. Rows of no sequence and gaps hold NaN."""
    blocks_each = -(-most // block) + 1
    blocks = batch * blocks_each + 2
    k = torch.randn(blocks * block, d)
    scales = k.abs().amax(1).clamp(min=1e-4) / 448
    codes = (k / scales[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    memory = torch.full((blocks, block * (d + 4) + 64), 0x7F, dtype=torch.uint8)[:, : block * (d + 4)]
    memory[:, : block * d] = codes.view(blocks, -1)
    memory[:, block * d :] = scales.view(torch.uint8).view(blocks, -1)
    lengths = torch.randint(next_n, most + 1, (batch,), dtype=torch.int32)
    lens = lengths[:, None] - next_n + 1 + torch.arange(next_n, dtype=torch.int32)
    return {
        "q": torch.randn(batch, next_n, heads, d).to(torch.float8_e4m3fn),
        "kv_cache": memory.view(blocks, block, 1, d + 4),
        "weights": torch.randn(batch * next_n, heads),
        "context_lens": lens,
        "block_table": torch.randperm(blocks, dtype=torch.int32)[: batch * blocks_each].view(batch, -1),
        "schedule_meta": get_paged_mqa_logits_metadata(lens, block, 7),
        "max_context_len": most,
    }


def plain_paged(call: dict[str, Any]) -> Tensor:
    """One position at a time, in float64."""
    cache, tables = call["kv_cache"], call["block_table"].tolist()
    batch, next_n, _, d = call["q"].shape
    blocks, block = cache.shape[:2]
    data = cache.reshape(blocks, -1)
    logits = torch.full((batch * next_n, call["max_context_len"]), -math.inf, dtype=torch.float64)
    for s in range(batch):
        for p in range(min(call["max_context_len"], int(call["context_lens"][s].max()), len(tables[s]) * block)):
            page, i = tables[s][p // block], p % block
            if not 0 <= page < blocks:
                continue
            key = data[page, d * i : d * (i + 1)].view(torch.float8_e4m3fn).double()
            scale = data[page, d * block + 4 * i : d * block + 4 * i + 4].clone().view(torch.float32).double()
            for n in range(next_n):
                if p < int(call["context_lens"][s, n]):
                    dots = (call["q"][s, n].double() @ key).relu()
                    logits[s * next_n + n, p] = scale * (call["weights"][s * next_n + n].double() @ dots)
    return logits


@pytest.mark.parametrize(("batch", "next_n", "heads", "d", "block"), [(4, 1, 64, 128, 64), (3, 2, 32, 64, 16)])
@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16])
def test_logits_of_pages(
    batch: int, next_n: int, heads: int, d: int, block: int, logits_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_index_scores, "_SCORES_AT_A_TIME", 300)  # two sequences at a time
    call = paged_inputs(batch, next_n, heads, d, block, 130)
    call["block_table"][0, 0], call["block_table"][1, 1] = -1, 1 << 30  # pages that do not exist
    expected = plain_paged(call)
    q = call.pop("q")
    logits = fp8_fp4_paged_mqa_logits((q, None), **call, logits_dtype=logits_dtype)
    assert logits.dtype == logits_dtype and logits.shape == (batch * next_n, 130)
    assert_logits(logits, expected, 1e-5 if logits_dtype == torch.float32 else 4e-3)
    if logits_dtype == torch.float32:
        assert torch.equal(logits, fp8_paged_mqa_logits(q, *call.values()))
        call["context_lens"] = call["context_lens"][:, -1].clone()  # of all query tokens
        assert torch.equal(logits, fp8_paged_mqa_logits(q, **call, clean_logits=True))


def test_pages_beyond_the_columns_and_no_columns() -> None:
    call = paged_inputs(2, 1, 4, 32, 8, 40)
    call["context_lens"][:] = 40
    whole = fp8_paged_mqa_logits(**call)
    assert torch.equal(fp8_paged_mqa_logits(**{**call, "max_context_len": 13}), whole[:, :13])
    assert fp8_paged_mqa_logits(**{**call, "max_context_len": 0}).shape == (2, 0)
    call["context_lens"][0] = -5
    assert fp8_paged_mqa_logits(**call)[0].eq(-math.inf).all()
    call["context_lens"] = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)
    logits = fp8_paged_mqa_logits(**{**call, "max_context_len": 60})
    assert logits[0].eq(-math.inf).all() and logits[1, :48].isfinite().all() and logits[1, 48:].eq(-math.inf).all()


def test_the_metadata_has_deep_gemm_s_shape() -> None:
    metadata = get_paged_mqa_logits_metadata(torch.zeros(4, 1, dtype=torch.int32), 64, 132)
    assert metadata.dtype == torch.int32 and metadata.shape == (133, 2)
    with pytest.raises(ValueError, match=r"^get_paged_mqa_logits_metadata: indices must be None \(SM100's form\)"):
        get_paged_mqa_logits_metadata(torch.zeros(4, 1), 64, 132, torch.zeros(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 1, 4, 32)[:, 0]}, r"q must be \[batch_size, next_n, heads, head_dim\]; got \[2, 4, 32\]"),
        ({"q": torch.zeros(2, 1, 4, 32, dtype=torch.uint8)}, r"q must be float8_e4m3fn \(no FP4\); got torch.uint8"),
        ({"kv_cache": torch.zeros(9, 8, 1, 32).byte()}, "kv_cache must be .*"),
        ({"weights": torch.zeros(2, 3)}, r"weights must be \[batch_size_next_n=2, heads=4\]; got \[2, 3\]"),
        (
            {"context_lens": torch.zeros(2, 1)},
            r"context_lens must be int32 \[2, 1\] or \[2\]; got torch.float32 \[2, 1\]",
        ),
        ({"block_table": torch.zeros(3, 6).int()}, "block_table must be .*"),
        ({"max_context_len": -1}, "max_context_len must be at least 0; got -1"),
        ({"indices": torch.zeros(2).int()}, r"indices must be None \(SM100's form\); got torch.int32 \[2\]"),
    ],
)
def test_wrong_arguments_of_pages(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^fp8_paged_mqa_logits: " + message):
        fp8_paged_mqa_logits(**{**paged_inputs(2, 1, 4, 32, 8, 40), **change})


def test_fp4_pages_are_refused() -> None:
    call = paged_inputs(2, 1, 4, 32, 8, 40)
    q = call.pop("q")
    with pytest.raises(ValueError, match=r"q\[1\] must be None \(no FP4\); got torch.int32 \[2, 1, 4\]$"):
        fp8_fp4_paged_mqa_logits((q, torch.ones(2, 1, 4, dtype=torch.int32)), **call)
    with pytest.raises(ValueError, match=r"^fp8_fp4_paged_mqa_logits: q must be a pair of queries and None"):
        fp8_fp4_paged_mqa_logits(q, **call)
    with pytest.raises(ValueError, match=r"logits_dtype must be float32 or bfloat16; got torch\.float16"):
        fp8_fp4_paged_mqa_logits((q, None), **call, logits_dtype=torch.float16)
