"""Tensors on several devices, meta among them, are an error: a fake kernel would give memory that nothing writes."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from calls import as_torch, in_torch, results
from hopwell.torch import indexer_scores, nn, sparse_mla
from operators import OPERATORS
from torch import Tensor
from torch._subclasses import FakeTensorMode


def tensors_of(operator: str) -> dict[str, Any]:
    call = OPERATORS[operator].call(np.random.default_rng(0), "float32")
    return {name: as_torch(value) for name, value in call.arguments.items()}


def of_indexer_scores() -> dict[str, Any]:
    arguments = tensors_of("lightning_indexer_backward")
    return {name: arguments[name] for name in ("q_index", "k_index", "weights", "indices", "k_start", "k_end")}


@pytest.mark.parametrize("operator", [*OPERATORS, "indexer_scores"])
@pytest.mark.parametrize("gradients", [torch.enable_grad, torch.no_grad])
def test_one_tensor_on_meta(operator: str, gradients: Any) -> None:
    if operator == "indexer_scores":
        run, arguments = indexer_scores, of_indexer_scores()
    else:
        run, arguments = in_torch(operator), tensors_of(operator)
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    with gradients():
        for name, x in tensors.items() if len(tensors) > 1 else ():
            for other in ({}, {n: x.to("meta") for n, x in tensors.items() if n != name}):
                here, there = ("cpu", "meta") if other else ("meta", "cpu")
                with pytest.raises(ValueError, match=rf"^{operator}: \w+ must be on \w+ as \w+ is; got \w+$") as raised:
                    run(**arguments | {name: x.to(here)} | other)
                blamed, words = str(raised.value).partition(": ")[2].split(" must be on ")
                if blamed == name:
                    assert words.startswith(there) and words.endswith(here)
                else:  # the first tensor, which says where the others should be
                    assert words == f"{here} as {name} is; got {there}"
        on_meta = results(run(**arguments | {name: x.to("meta") for name, x in tensors.items()}))
        on_cpu = results(run(**arguments))
    for a, b in zip(on_meta, on_cpu, strict=True):
        assert a is None or (a.is_meta and a.shape == b.shape and a.dtype == b.dtype)


@pytest.mark.parametrize("missed", ["weight", "weight_scale", "weight_global", "bias"])
def test_a_layer_that_did_not_get_all_of_a_checkpoint(missed: str) -> None:
    layer = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 21))
    skeleton = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 21, device="meta"))
    state = {name: x for name, x in layer.state_dict().items() if name != missed}
    skeleton.load_state_dict(state, assign=True, strict=False)
    for gradients in (contextlib.nullcontext, torch.no_grad):
        with gradients(), pytest.raises(ValueError, match=rf"(?i)nvfp4_?linear: {missed} must be on .*cpu.*; got meta"):
            skeleton(torch.randn(3, 64))


def test_a_host_tensor_beside_those_of_a_gpu_while_tracing() -> None:
    """As `torch.compile` and `torch.export` run fake kernels; no GPU is needed to say that the call is wrong."""
    with FakeTensorMode():
        q, kv = torch.empty(3, 2, 16, device="cuda"), torch.empty(5, 16)
        indices = torch.empty(3, 4, dtype=torch.int32, device="cuda")
        with pytest.raises(ValueError, match="sparse_mla_forward: kv must be on cuda:0 as q is; got cpu"):
            sparse_mla(q, kv, indices, 0.1, 8)
