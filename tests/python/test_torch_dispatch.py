"""hopwell.torch: the operators as PyTorch sees them: opcheck, modes, traces, torch.compile, wrong arguments."""

from typing import Any

import hopwell
import pytest
import torch
from hopwell import torch as hw
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch_inputs import (
    DTYPES,
    assert_gradients,
    dense_loss_inputs,
    indexer_inputs,
    indexer_key_ranges,
    paged_inputs,
    sparse_inputs,
)

pytestmark = pytest.mark.usefixtures("torch_seed")


def op_samples() -> dict[str, tuple[Any, ...]]:
    """Arguments for every op, by position."""
    samples: dict[str, tuple[Any, ...]] = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        inputs = sparse_inputs(dtype)
        q, kv, sink = (x.requires_grad_() for x in (inputs["q"], inputs["kv"], torch.randn(5)))
        rest = inputs["indices"], 0.5, 12
        out, _, lse = hopwell.sparse_mla_forward(q.detach(), kv.detach(), *rest)
        samples[f"sparse_mla_forward {name}"] = (q, kv, *rest, sink)
        samples[f"sparse_mla_forward {name}, no sink"] = (q, kv, *rest, None, None, None, 4, 2)
        ranges = torch.arange(9, dtype=torch.int32), torch.full((9,), 15, dtype=torch.int32)
        samples[f"sparse_mla_forward {name}, key ranges"] = (q, kv, *rest, sink, None, None, None, 1, *ranges)
        backward = (torch.randn_like(out), q.detach(), kv.detach(), inputs["indices"], out, lse, 0.5, 12)
        samples[f"sparse_mla_backward {name}"] = (*backward, sink.detach(), None, None, None, 1, *ranges, True, name)
        samples[f"sparse_mla_forward {name}, hints"] = (q, kv, *rest, sink, *(None,) * 3, 1, None, None, True, True)
        window = (
            torch.randn(12, 20).to(dtype),
            3,
            torch.arange(9, dtype=torch.int32),
            torch.full((9,), 9, dtype=torch.int32),
        )
        options: tuple[Any, ...] = *(None,) * 3, 1, None, None, False, False
        leaf = window[0].clone().requires_grad_()
        samples[f"sparse_mla_forward {name}, window"] = (q, kv, *rest, sink, *options, leaf, *window[1:])
        options = *(None,) * 3, 1, None, None, True, name, True, True, False, False
        samples[f"sparse_mla_backward {name}, window"] = (*backward, None, *options, *window)
        samples[f"attention_distribution {name}"] = (q, kv, inputs["indices"], lse, 0.5, None, None, None, 1, *ranges)
        index = indexer_inputs(dtype)
        q_index, k_index, weights = (index[n].requires_grad_() for n in ("q_index", "k_index", "weights"))
        # Without gradients: opcheck cannot add the scores to integers. test_compiled_gradients_of_the_scores has them.
        plain_index = (x.detach() for x in (q_index, k_index, weights))
        samples[f"lightning_indexer {name}"] = (*plain_index, 5, None, 0, 1, None, None, None, None, False)
        samples[f"indexer_scores {name}"] = *(x.detach() for x in (q_index, k_index, weights)), index["indices"]
        loss = index["target"], q_index, k_index, weights, index["indices"]
        samples[f"lightning_indexer_backward {name}"] = loss
        ranges, row_weights = indexer_key_ranges().values(), torch.rand(11)
        samples[f"lightning_indexer_backward {name}, key ranges"] = (*loss, *ranges, None, row_weights, False, 0.5)
        given = None, q_index, k_index, weights, index["indices"], None, None, torch.randn(index["target"].shape)
        samples[f"lightning_indexer_backward {name}, d_scores"] = given
        dense = dense_loss_inputs(dtype)
        samples[f"indexer_dense_loss {name}"] = (*dense[:3], *(x.requires_grad_() for x in dense[3:6]), dense[6])
        samples[f"sparse_mla_forward {name}, every key"] = (q, kv, None, 0.5, 12, sink)
        samples[f"paged_attention {name}"] = paged_inputs(dtype)
        x = torch.randn(3, 64).to(dtype)
        quantized = hw.nvfp4_quantize(torch.randn(10, 64))
        for op in ("nvfp4_linear", "nvfp4_linear_any_rows"):
            leaves = x.clone().requires_grad_(), torch.randn(10, dtype=dtype, requires_grad=True)
            samples[f"{op} {name}"] = leaves[0], *quantized, leaves[1]
        samples[f"nvfp4_linear_backward {name}"] = (torch.randn(3, 10).to(dtype), *quantized)
        pool = [torch.randn(14, 8).to(dtype).requires_grad_() for _ in range(2)]
        bias, offsets = torch.randn(3, 8, requires_grad=True), torch.tensor([0, 8, 14], dtype=torch.int32)
        packed = *pool, 3, bias, True, offsets, hw.compressed_lengths(offsets, 3)
        samples[f"kv_compress {name}"] = packed
        samples[f"kv_compress {name}, plain"] = *pool, 3, None, False, None, None, "float32"
        given = (x.detach() if isinstance(x, torch.Tensor) else x for x in packed)
        samples[f"kv_compress_backward {name}"] = torch.randn(4, 4).to(dtype), *given
        rotation = torch.arange(3), torch.randn(4, 64), 448, False
        rows = torch.randn(3, 512).to(dtype), torch.zeros(2, 4, 656, dtype=torch.uint8), torch.tensor([5, -1, 2])
        samples[f"mla_cache_append {name}"] = *rows, torch.randn(3, 64).to(dtype), *rotation, "fp32"
        one_scale = torch.zeros(2, 4, 512, dtype=torch.uint8), rows[2], *(None,) * 4, True, "pow2", torch.tensor(0.5)
        samples[f"mla_cache_append {name}, one scale"] = rows[0].clone().requires_grad_(), *one_scale
        decode = torch.randn(2, 3, 512).to(dtype), torch.randn(4, 2, 512), torch.randint(-1, 9, (2, 70)).int(), 0.3, 40
        samples[f"sparse_mla_decode {name}"] = decode
        tables = torch.randint(0, 4, (2, 3)).int(), torch.tensor([5, 3]).int(), torch.tensor([70, 9]).int()
        coded = decode[0], torch.zeros(4, 2, 512, dtype=torch.uint8), *decode[2:]
        samples[f"sparse_mla_decode {name}, tables"] = *coded, *tables, *(None,) * 5, torch.tensor(0.5), None, None, 64
        keys = torch.randn(4, 5, 16).to(dtype), torch.randn(2, 3, 4)
        paged = torch.randn(2, 3, 4, 16).to(dtype), *keys, 7, tables[0], tables[1]
        samples[f"paged_lightning_indexer {name}"] = paged
        samples[f"paged_lightning_indexer {name}, no scores"] = *paged, None, False, True, False
        for layout in ("plain", "blocked"):
            samples[f"nvfp4_quantize {name}, {layout}"] = (x, layout)
        samples[f"nvfp4_dequantize {name}"] = (*quantized, "plain", name)
    codes = torch.randint(0, 256, (1, 4, 16), dtype=torch.uint8).permute(1, 2, 0)
    scales = torch.randint(40, 70, (1, 4, 2), dtype=torch.uint8).permute(1, 2, 0)
    samples["nvfp4_gemv"] = (codes, codes[:1], scales, scales[:1])
    flat = codes[:, :, 0], codes[:3, :, 0], scales[:, :, 0], scales[:3, :, 0]
    samples["normalize_l1"] = (torch.rand(3, 5),)
    samples["nvfp4_matmul"] = (*flat, 0.5, torch.randn(3), "float32")
    return samples


@pytest.mark.parametrize("sample", list(op_samples()))
def test_opcheck(sample: str) -> None:
    arguments = op_samples()[sample]
    torch.library.opcheck(getattr(torch.ops.hopwell, sample.split()[0]).default, arguments)


class Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_calls_without_gradients_that_others_have_to_see() -> None:
    """They go through PyTorch's dispatcher: modes, fake and meta tensors, transforms and traces."""
    weight, x = hw.nvfp4_quantize(torch.randn(10, 64)), torch.randn(3, 64)

    def linear(x: Tensor) -> Tensor:
        return hw.nvfp4_linear(x, *weight)

    with Listener() as listener:
        linear(x)
    assert "hopwell.nvfp4_linear.default" in listener.heard
    with torch.profiler.profile() as profile:
        linear(x)
    assert "hopwell::nvfp4_linear" in [event.key for event in profile.key_averages()]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        assert linear(fake).shape == (3, 10)
    assert type(linear(fake)) is type(fake)
    assert hw.nvfp4_linear(*(t.to("meta") for t in (x, *weight))).is_meta
    assert torch.equal(torch.jit.trace(linear, x)(x + 1), linear(x + 1))
    assert torch.equal(make_fx(linear)(x)(x + 1), linear(x + 1))
    batch = torch.stack([x, -x])
    assert torch.equal(torch.vmap(linear)(batch), torch.stack([linear(x), linear(-x)]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dtype: torch.dtype, dynamic: bool) -> None:
    """Selection, attention of packed documents, target and loss in one graph: the numbers do not change."""
    cuts = torch.tensor([0, 4, 4, 11], dtype=torch.int32)

    def step(q: Tensor, kv: Tensor, q_index: Tensor, k_index: Tensor, weights: Tensor) -> Tensor:
        indices, _ = hw.lightning_indexer(q_index, k_index, weights, 6, q_start=0)
        k_start, k_end = hw.key_ranges(cuts, s_q=len(q))
        ranges = {"k_start": k_start, "k_end": k_end}
        out, _, lse = hw.sparse_mla(q * 2, kv, indices, 0.3, 12, indices_ascending=True, share_keys=True, **ranges)
        target = hw.attention_distribution(q * 2, kv, indices, lse, 0.3, normalize="l1", **ranges)
        return out.float().square().sum() + hw.indexer_loss(q_index, k_index, weights, indices, target)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for s in (15, 18):
        shapes = (s, 5, 20), (s, 20), (s, 4, 32), (s, 32), (s, 4)
        leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
        expected, actual = step(*leaves), compiled(*leaves)
        torch.testing.assert_close(actual, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)
        assert_gradients(torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), leaves)


def test_compiled_decode() -> None:
    weights = hw.nvfp4_quantize(torch.randn(10, 32))

    def decode(x: Tensor) -> Tensor:
        out, _ = hw.paged_attention(*paged)
        return out.sum() + hw.nvfp4_linear(x + 1, *weights).sum() + hw.nvfp4_dequantize(*weights).sum()

    paged, x = paged_inputs(), torch.randn(4, 32)
    torch.testing.assert_close(torch.compile(decode, fullgraph=True)(x), decode(x))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(decode, fullgraph=True)(x), decode(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": torch.zeros(9, 13, dtype=torch.int64)}, "sparse_mla_forward: indices"),
        ({"kv": torch.randn(17, 21)}, "sparse_mla_forward: "),
        ({"d_v": 21}, "sparse_mla_forward: d_v"),
        ({"sm_scale": float("nan")}, "sparse_mla_forward: sm_scale"),
        ({"attn_sink": torch.randn(4)}, "sparse_mla_forward: attn_sink"),
        ({"k_start": torch.zeros(9, dtype=torch.int32)}, "sparse_mla_forward: k_start and k_end"),
        ({"window": 3}, "sparse_mla_forward: window_kv and window"),
        ({"window_kv": torch.randn(4, 20), "window": 0}, "sparse_mla_forward: window must be at least 1"),
        ({"window_kv": torch.randn(4, 21), "window": 1}, "sparse_mla_forward: window_kv"),
        ({"backend": "abacus"}, "sparse_mla_forward: backend"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hw.sparse_mla(**sparse_inputs() | change)
