"""hopwell.torch: the operators as PyTorch sees them: opcheck, modes, traces, torch.compile, wrong arguments."""

from typing import Any

import pytest
import torch
from hopwell import torch as hw
from operators import OPERATORS
from operators.nvfp4 import linear_samples
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch_inputs import (
    DTYPES,
    assert_gradients,
    indexer_inputs,
    paged_inputs,
    sparse_inputs,
)

pytestmark = pytest.mark.usefixtures("torch_seed")


def more_samples(dtype: torch.dtype) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Of ops that are no operators of the library."""
    inputs = indexer_inputs(dtype)
    scores = *(inputs[name] for name in ("q_index", "k_index", "weights")), inputs["indices"]
    return {"indexer_scores": {"": scores}, "nvfp4_linear_any_rows": linear_samples(dtype)}


def op_samples() -> dict[str, tuple[Any, ...]]:
    """Arguments for every op: by position, then a dict of options."""
    samples: dict[str, tuple[Any, ...]] = {}
    for dtype in DTYPES:
        found = {name: operator.samples(dtype) for name, operator in OPERATORS.items()} | more_samples(dtype)
        for op, of_op in found.items():
            for what, arguments in of_op.items():
                samples[f"{op} {str(dtype).removeprefix('torch.')}{what and ', '}{what}"] = arguments
    return samples


@pytest.mark.parametrize("sample", list(op_samples()))
def test_opcheck(sample: str) -> None:
    arguments, options = op_samples()[sample], {}
    if isinstance(arguments[-1], dict):
        *arguments, options = arguments
    torch.library.opcheck(getattr(torch.ops.hopwell, sample.split()[0]).default, tuple(arguments), options)


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
