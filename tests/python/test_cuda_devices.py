"""On two GPUs: every operator runs on the device of its tensors and does not change the current device."""

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import hopwell
import numpy as np
import pytest
import torch
from calls import as_torch, assert_results, results
from hopwell import reference
from hopwell.torch import nn, sparse_mla
from operators import OPERATORS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

SEED = 7


def on_device(arguments: dict[str, Any], device: int) -> dict[str, Any]:
    return {
        name: as_torch(value).to(f"cuda:{device}") if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


def make_call(operator: str) -> Any:
    """A bfloat16 call that GPU backends support: MLA's kernels need DeepSeek's head dimensions."""
    rng = np.random.default_rng(SEED)
    call = OPERATORS[operator].call(rng, "bfloat16")
    if "mla" in operator or operator in ("attention_distribution", "indexer_dense_loss"):
        wide = (rng.standard_normal((5, 64, 576)), rng.standard_normal((90, 1, 576)))
        call.arguments |= {name: x.astype("bfloat16") for name, x in zip(("q", "kv"), wide, strict=True)}
        call.arguments["sm_scale"] = 0.04
        call.arguments |= {"d_v": 512} if "d_v" in call.arguments else {}
        if "attn_sink" in call.arguments:
            call.arguments["attn_sink"] = rng.standard_normal(64).astype(np.float32)
        if operator != "sparse_mla_forward":
            known = inspect.signature(hopwell.sparse_mla_forward).parameters.keys() - {"out", "lse"}
            forward = {name: x for name, x in call.arguments.items() if name in known}
            out, _, lse = reference.sparse_mla_forward(**{"indices": None} | forward)
            call.arguments["lse"] = lse.astype(np.float32)
            if operator == "sparse_mla_backward":
                call.arguments["out"] = out.astype("bfloat16")
                call.arguments["d_out"] = rng.standard_normal(out.shape).astype("bfloat16")
    if "deterministic" in inspect.signature(getattr(hopwell, operator)).parameters:
        call.arguments["deterministic"] = True  # so that two calls have the same bits
    return call


def check(operator: str, device: int) -> None:
    call = make_call(operator)
    expected = getattr(reference, operator)(**call.arguments)
    arguments = on_device(call.arguments, device)
    actual = getattr(hopwell, operator)(**arguments)
    assert all(x.device.index == device for x in results(actual))
    assert_results(call, tuple(x.cpu() for x in results(actual)), expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_eager(operator: str) -> None:
    torch.cuda.set_device(0)
    check(operator, 1)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("operator", OPERATORS)
def test_in_a_graph(operator: str) -> None:
    torch.cuda.set_device(0)
    call = make_call(operator)
    arguments = on_device(call.arguments, 1)
    expected = results(getattr(hopwell, operator)(**arguments))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device=1)
    torch.cuda.synchronize(1)
    with torch.cuda.device(1), torch.cuda.graph(graph, stream=stream):
        torch.cuda.set_device(0)
        captured = results(getattr(hopwell, operator)(**arguments, stream=stream))
        torch.cuda.set_device(1)
    with torch.cuda.device(1):
        graph.replay()
    torch.cuda.synchronize(1)
    for one, other in zip(captured, expected, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_two_threads_on_two_devices() -> None:
    failures: list[str] = []

    def work(device: int) -> None:
        torch.cuda.set_device(1 - device)
        for _ in range(5):
            for operator in OPERATORS:
                try:
                    check(operator, device)
                except Exception as error:
                    failures.append(f"{operator} on {device}: {error}")

    threads = [threading.Thread(target=work, args=(device,)) for device in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_stream_of_the_other_device(operator: str) -> None:
    arguments = on_device(make_call(operator).arguments, 1)
    with pytest.raises(ValueError, match=f"{operator}: stream must be of cuda:1, where the tensors are; got .*cuda:0"):
        getattr(hopwell, operator)(**arguments, stream=torch.cuda.Stream(device=0))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_autograd_and_modules() -> None:
    torch.cuda.set_device(0)
    grads = []
    for device in (0, 1):
        generator = torch.Generator().manual_seed(SEED)
        q, kv = (torch.randn(shape, generator=generator).bfloat16() for shape in ((150, 64, 576), (600, 576)))
        indices = torch.randint(0, 600, (150, 130), generator=generator, dtype=torch.int32).to(f"cuda:{device}")
        q, kv = (x.to(f"cuda:{device}").requires_grad_() for x in (q, kv))
        out = sparse_mla(q, kv, indices, 0.04)[0]
        out.float().square().sum().backward()
        layer = nn.NVFP4Linear.from_linear(torch.nn.Linear(128, 64, device=f"cuda:{device}", dtype=torch.bfloat16))
        assert layer(torch.ones(3, 128, device=f"cuda:{device}", dtype=torch.bfloat16)).device.index == device
        grads.append([x.grad.cpu() for x in (q, kv)])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
    assert torch.cuda.current_device() == 0
