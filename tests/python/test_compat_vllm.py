"""vLLM's paged attention, called as vLLM calls it, against a plain torch computation."""

import math
from typing import Any

import pytest
import torch
from hopwell.compat import vllm as ops

PARTITION = 512  # vLLM's partition size, for the scratch of v2


def caches(blocks: int, h_kv: int, d: int, block: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = 16 // dtype.itemsize
    shapes = (blocks, h_kv, d // x, block, x), (blocks, h_kv, d, block)
    return torch.full(shapes[0], math.nan, dtype=dtype), torch.full(shapes[1], math.nan, dtype=dtype)


class Problem:
    """Sequences that reshape_and_cache writes token by token to a cache with pages in random order; unused pages are
    NaN.
    """

    def __init__(self, dtype: torch.dtype, h_q: int, h_kv: int, d: int, block: int, lengths: list[int]) -> None:
        self.h_kv, self.block, self.scale = h_kv, block, d**-0.5
        self.q = torch.randn(len(lengths), 3, h_q, d).to(dtype)[:, 1]  # a slice of a projection, with its stride
        self.keys = [torch.randn(n, h_kv, d).to(dtype) for n in lengths]
        self.values = [torch.randn(n, h_kv, d).to(dtype) for n in lengths]
        width = max(-(-n // block) for n in lengths) + 1
        blocks = len(lengths) * width
        self.key_cache, self.value_cache = caches(blocks, h_kv, d, block, dtype)
        self.block_tables = torch.randperm(blocks, dtype=torch.int32).view(len(lengths), width)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        for table, key, value in zip(self.block_tables, self.keys, self.values, strict=True):
            t = torch.arange(len(key))
            slots = table.long()[t // block] * block + t % block
            padded = torch.cat([slots, torch.tensor([-1])])  # a padding token, and a token beyond slot_mapping
            more = torch.full((2, *key.shape[1:]), math.inf, dtype=dtype)
            new = torch.cat([key, more]), torch.cat([value, more])
            ops.reshape_and_cache(*new, self.key_cache, self.value_cache, padded, "auto", torch.ones(1), torch.ones(1))

    def plain(self, alibi_slopes: torch.Tensor | None) -> torch.Tensor:
        rows = []
        for q, key, value in zip(self.q, self.keys, self.values, strict=True):
            k, v = (x.double().repeat_interleave(len(q) // self.h_kv, 1) for x in (key, value))
            logits = self.scale * torch.einsum("hd,jhd->hj", q.double(), k)
            if alibi_slopes is not None:
                logits += alibi_slopes.double()[:, None] * torch.arange(1 - len(k), 1)
            rows.append(torch.einsum("hj,jhd->hd", logits.softmax(-1), v))
        return torch.stack(rows)

    def arguments(self, **changes: Any) -> dict[str, Any]:
        return {
            "query": self.q,
            "key_cache": self.key_cache,
            "value_cache": self.value_cache,
            "num_kv_heads": self.h_kv,
            "scale": self.scale,
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "block_size": self.block,
            "max_seq_len": int(self.seq_lens.max()),
            "alibi_slopes": None,
            "kv_cache_dtype": "auto",
            "k_scale": torch.ones(1),
            "v_scale": torch.ones(1),
            **changes,
        }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize(("h_q", "h_kv", "d", "block"), [(8, 8, 64, 16), (8, 2, 80, 32), (6, 1, 120, 8)])
@pytest.mark.parametrize("alibi", [False, True])
def test_both_versions_agree_with_a_plain_computation(
    dtype: torch.dtype, tolerance: float, h_q: int, h_kv: int, d: int, block: int, alibi: bool
) -> None:
    problem = Problem(dtype, h_q, h_kv, d, block, [1, 7, block, 700])
    slopes = torch.rand(h_q) if alibi else None
    expected = problem.plain(slopes)
    positional = list(problem.arguments(alibi_slopes=slopes).values())
    out = torch.full_like(expected, math.nan, dtype=dtype)
    assert ops.paged_attention_v1(out, *positional) is None
    assert (out.double() - expected).norm() <= tolerance * expected.norm()

    partitions = -(-700 // PARTITION)
    tmp_out = torch.empty(*out.shape[:2], partitions, d, dtype=dtype)
    exp_sum, max_logits = torch.empty(*out.shape[:2], partitions), torch.empty(*out.shape[:2], partitions)
    second = torch.full_like(out, math.nan)
    assert ops.paged_attention_v2(second, exp_sum, max_logits, tmp_out, *positional, 0, 0, 0, 64, 0) is None
    assert torch.equal(out, second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, r"kv_cache_dtype must be auto or float32 \(no fp8 caches\); got fp8"),
        ({"blocksparse_vert_stride": 8}, "blocksparse_vert_stride must be 0 or 1 .*; got 8"),
        ({"num_kv_heads": 4}, "num_kv_heads must be value_cache's h_kv = 2; got 4"),
        ({"block_size": 32}, "block_size must be value_cache's block = 16; got 32"),
        ({"value_cache": torch.zeros(2, 2, 2)}, r"value_cache must be \[blocks, h_kv, d, block\]; got \[2, 2, 2\]"),
        ({"seq_lens": torch.tensor([3])}, r"context_lens must be int32 \[b=1\]; got int64 \[1\]"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_what_is_not_supported_is_refused(version: int, change: dict[str, Any], message: str) -> None:
    problem = Problem(torch.float32, 4, 2, 32, 16, [3])
    out = torch.full(problem.q.shape, 7.0)
    scratch = {name: torch.empty(0) for name in ("exp_sum", "max_logits", "tmp_out")} if version == 2 else {}
    attention = ops.paged_attention_v1 if version == 1 else ops.paged_attention_v2
    with pytest.raises(ValueError, match=message):
        attention(out, **scratch, **problem.arguments(**change))
    assert out.eq(7).all()
    with pytest.raises(ValueError, match=f"paged_attention_v{version}: out must be a tensor to write; got None"):
        attention(None, **scratch, **problem.arguments())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype must be auto or float16"),
        ({"key": torch.zeros(2, 2, 40).half()}, r"key must be \[tokens, 2, 32\]; got \[2, 2, 40\]"),
        ({"value": torch.zeros(2, 2, 32)}, "value must be torch.float16 as its cache is; got torch.float32"),
        ({"key_cache": torch.zeros(4, 2, 8, 16, 4).half()}, r"key_cache must be \[4, 2, 4, 16, 8\]"),
        ({"value_cache": torch.zeros(4, 2)}, r"value_cache must be \[blocks, h_kv, d, block\]; got \[4, 2\]"),
        ({"slot_mapping": torch.tensor([0, 64])}, "slot_mapping must be below 64; got a slot beyond"),
        ({"slot_mapping": torch.tensor([0.5, 1.0])}, "slot_mapping must be int64 or int32; got torch.float32"),
        ({"slot_mapping": torch.tensor([True, False])}, "slot_mapping must be int64 or int32; got torch.bool"),
        ({"slot_mapping": torch.tensor([0, 1, 2])}, r"slot_mapping must be \[up to 2\]; got \[3\]"),
    ],
)
def test_bad_tokens_change_no_cache(change: dict[str, Any], message: str) -> None:
    key_cache, value_cache = caches(4, 2, 32, 16, torch.float16)
    new = torch.randn(2, 2, 32).half()
    arguments: dict[str, Any] = {
        "key": new,
        "value": new,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": torch.tensor([0, 1]),
        "kv_cache_dtype": "auto",
        **change,
    }
    with pytest.raises(ValueError, match="reshape_and_cache: " + message):
        ops.reshape_and_cache(**arguments)
    assert key_cache.isnan().all() and value_cache.isnan().all()
