"""Numbers of numpy are taken wherever Python's are: the same bits, in `hopwell`, `hopwell.torch`, its modules, and the
drop-in modules.
"""

from collections.abc import Callable
from typing import Any

import hopwell
import hopwell.torch
import ml_dtypes
import numpy as np
import pytest
import torch
from calls import as_torch, in_torch, results
from hopwell.compat import cudnn, deep_gemm, megatron, tilelang, vllm
from hopwell.torch import key_ranges, nn
from hopwell.torch.parallel import ContextShard
from operators import OPERATORS
from test_torch_nn import D_MODEL, make_dsa

INTEGERS = (np.int64, np.int32, np.uint8, np.uint64)
FLOATS = (np.float32, np.float64)
MORE = {  # of the arguments that the calls leave out
    "sparse_mla_forward": {"q_positions": None, "q_start": 50},
    "sparse_mla_backward": {"q_positions": None, "q_start": 50},
    "attention_distribution": {"q_positions": None, "q_start": 50},
}


def bits(values: Any) -> list[bytes | None]:
    if isinstance(values, dict):
        values = tuple(values.values())
    return [None if x is None else np.ascontiguousarray(x).tobytes() for x in map(np.asarray, results(values))]


@pytest.mark.parametrize("operator", OPERATORS)
def test_numbers_of_operators(operator: str) -> None:
    call = OPERATORS[operator].call(np.random.default_rng(0), "float32").arguments | MORE.get(operator, {})
    for run, convert in ((getattr(hopwell, operator), lambda x: x), (in_torch(operator), as_torch)):
        given = {name: convert(value) for name, value in call.items()}
        expected = bits(run(**given))
        for name, value in call.items():
            kinds = INTEGERS if type(value) is int else FLOATS if type(value) is float else ()
            for kind in kinds:
                number = value if kind is not np.float32 else float(np.float32(value))
                wanted = expected if number == value else bits(run(**given | {name: number}))
                assert bits(run(**given | {name: kind(value)})) == wanted, f"{run.__module__} {name} {kind.__name__}"


GLOBALS = {"nvfp4_linear": "weight_global", "nvfp4_dequantize": "global_scale", "nvfp4_quantize": "global_scale"}


@pytest.mark.parametrize(("operator", "name"), GLOBALS.items())
def test_globals(operator: str, name: str) -> None:
    """Of any type of number, although arrays are taken too. numpy's bool is not a number."""
    call = OPERATORS[operator].call(np.random.default_rng(0), "float32").arguments
    for run, convert in ((getattr(hopwell, operator), lambda x: x), (in_torch(operator), as_torch)):
        given = {n: convert(value) for n, value in call.items()}
        expected = bits(run(**given | {name: 2.0}))
        for number in (2, *(kind(2) for kind in (*INTEGERS, *FLOATS, np.float16))):
            assert bits(run(**given | {name: number})) == expected
        for wrong in (np.bool_(True), ml_dtypes.bfloat16(2), np.complex64(2), np.array(["a"])[0]):
            with pytest.raises(ValueError, match=f"{operator}: {name} must be "):
                run(**given | {name: wrong})


def test_numbers_of_modules() -> None:
    i, f = np.int64, np.float32
    sizes = {"d_v": 24, "d_rope": 8, "d_nope": 12, "d_head": 10}
    mla = nn.SparseMLA(i(D_MODEL), i(4), **{name: i(n) for name, n in sizes.items()}, rope=nn.Rope(f(1e4)))
    indexer = nn.LightningIndexer(i(D_MODEL), topk=i(6), h_index=i(3), d_index=i(16), d_rope=i(8), rope=nn.Rope(f(1e4)))
    dsa, other, x = make_dsa(), nn.DSA(mla, indexer), torch.randn(2, 9, D_MODEL)
    other.load_state_dict(dsa.state_dict())
    for mode in ("sparse", "warm-up", "dense"):
        for a, b in zip(dsa(x, mode), other(x, mode), strict=True):
            assert (a is b is None) or torch.equal(a, b)
    cache, counted = nn.KeyCache(20), nn.KeyCache(i(20))
    for step in range(4):
        counted.length = i(counted.length)
        assert torch.equal(dsa.extend(x[:1, step : step + 1], cache), other.extend(x[:1, step : step + 1], counted))
        assert type(counted.length) is int
    assert torch.equal(nn.rotate(x, i(3), nn.Rope(f(1e4))), nn.rotate(x, 3))
    shard = ContextShard.zigzag(i(9))
    assert torch.equal(shard.split(x), x)
    offsets = torch.tensor([0, 4, 9])
    assert all(torch.equal(a, b) for a, b in zip(key_ranges(offsets, s_q=i(9)), key_ranges(offsets), strict=True))


def drop_ins() -> dict[str, Callable[[Any, Any], Any]]:
    """Calls with integers of one kind and floats of another."""
    draw = torch.Generator().manual_seed(0)
    r = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    q, k, w, start, end = r(4, 2, 16), r(5, 16), r(4, 2), torch.zeros(4).int(), torch.full((4,), 5).int()
    entries, latent, kv = torch.randint(0, 5, (4, 1, 3), generator=draw).int(), r(4, 2, 48), r(5, 1, 48)
    e4m3, values, offsets = torch.float8_e4m3fn, r(4, 9), torch.tensor([0, 4]).int()
    query, caches, tables = r(2, 4, 32), (r(3, 2, 8, 4, 4), r(3, 2, 32, 4)), torch.zeros(2, 2).int()

    def paged(i: Any, f: Any) -> Any:
        out = torch.empty(2, 4, 32)
        vllm.paged_attention_v1(
            out, query, *caches, i(2), f(0.5), tables, torch.ones(2).int(), i(4), i(8), None, "auto"
        )
        return out

    return {
        "cudnn.indexer_top_k_wrapper": lambda i, f: cudnn.indexer_top_k_wrapper(
            values, torch.tensor([9, 8]).int(), i(3), next_n=i(2), tie_break=i(0)
        ),
        "cudnn.indexer_forward_wrapper": lambda i, f: cudnn.indexer_forward_wrapper(
            *(q, q[:, :1], w),
            ratio=i(1),
            sm_scale=f(0.5),
            qhead_per_kv_head=i(2),
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_k=i(4),
        ),
        "cudnn.indexer_forward_top_k_wrapper": lambda i, f: cudnn.indexer_forward_top_k_wrapper(
            q[None], q[None, :, :1], w[None], i(3), ratio=i(1), sm_scale=f(0.5)
        ),
        "cudnn.local_to_global_wrapper": lambda i, f: cudnn.local_to_global_wrapper(entries, i(5), stream=i(0)),
        "tilelang.SparseMLA": lambda i, f: tilelang.SparseMLA.apply(latent, kv, entries, f(0.5), i(16)),
        "tilelang.lighting_indexer": lambda i, f: tilelang.lighting_indexer(q, k, w, start, end, i(3)),
        "tilelang.v4_lighting_indexer": lambda i, f: tilelang.v4_lighting_indexer(
            q[:, None], k[:2, None], w[:, None], i(2), i(3)
        ),
        "megatron.run_fused_qk_topk": lambda i, f: megatron.run_fused_qk_topk(
            q[:, None], k[:4, None], w[:, None], i(3), start, end - 1, i(8192)
        ),
        "deep_gemm.fp8_mqa_logits": lambda i, f: deep_gemm.fp8_mqa_logits(
            q.to(e4m3), (k.to(e4m3), torch.ones(5)), w, start, end, False, i(5)
        ),
        "vllm.paged_attention_v1": paged,
    }


@pytest.mark.parametrize("name", drop_ins())
def test_numbers_of_drop_in_modules(name: str) -> None:
    call = drop_ins()[name]
    assert bits(call(np.int64, np.float32)) == bits(call(int, float))
