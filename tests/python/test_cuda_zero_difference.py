"""On a GPU: a deterministic dq of a query has the same bits alone and in a call of 700 queries.

The sums of dkv do not fit in L2, and calls ask for other outputs.
"""

from typing import Any

import hopwell
import pytest
import torch
from torch import Tensor

BACKENDS = [name for name in hopwell.backends("sparse_mla_backward") if name.startswith("sm")]

pytestmark = pytest.mark.skipif(not BACKENDS, reason="needs a GPU")

SCALE, S_Q, TOPK = 576**-0.5, 700, 2048
# Fewer queries than multiprocessors, a single query, queries of the last wave, and more than one wave.
PARTS = [slice(0, 132), slice(100, 101), slice(650, 700), slice(0, 134)]


def backward(given: dict[str, Any], queries: slice, indices: Tensor, **options: Any) -> Tensor:
    of_queries = {name: given[name][queries] for name in ("d_out", "q", "out", "lse")}
    dq: Tensor = hopwell.sparse_mla_backward(
        **of_queries, kv=given["kv"], indices=indices, sm_scale=SCALE, deterministic=True, **options
    )[0]
    return dq


@pytest.mark.parametrize("s_kv", [20_000, 60_000, 140_000])
@pytest.mark.parametrize("h_q", [16, 64, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_deterministic_dq_of_few_queries(backend: str, h_q: int, s_kv: int) -> None:
    generator = torch.Generator("cuda").manual_seed(s_kv + h_q)
    on_gpu: dict[str, Any] = {"device": "cuda", "generator": generator}
    q = torch.randn(S_Q, h_q, 576, dtype=torch.bfloat16, **on_gpu)
    kv = torch.randn(s_kv, 576, dtype=torch.bfloat16, **on_gpu)
    d_out = torch.randn(S_Q, h_q, 512, dtype=torch.bfloat16, **on_gpu)
    indices = torch.randint(0, s_kv, (S_Q, TOPK), dtype=torch.int32, **on_gpu)
    out, _, lse = hopwell.sparse_mla_forward(q, kv, indices, SCALE, backend=backend)
    given = {"q": q, "kv": kv, "d_out": d_out, "out": out, "lse": lse}
    whole = backward(given, slice(0, S_Q), indices, backend=backend)
    attn = torch.empty(S_Q, TOPK, device="cuda")
    for options in ({"need_dkv": False}, {"dkv_dtype": "bfloat16"}, {"attn": attn}, {"need_dkv": False, "attn": attn}):
        assert torch.equal(backward(given, slice(0, S_Q), indices, backend=backend, **options), whole), options
    for queries in PARTS:
        for padding in (0, 3000):  # past the longest row that is put in order at once
            rows = torch.nn.functional.pad(indices[queries], (0, padding), value=-1)
            for need_dkv in (True, False):
                part = backward(given, queries, rows, backend=backend, need_dkv=need_dkv)
                assert torch.equal(part, whole[queries]), f"{queries}, padding {padding}, need_dkv {need_dkv}"
