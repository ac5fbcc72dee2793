"""The lightning indexer and its loss on a GPU, through PyTorch."""

import pytest
import torch
from hopwell.compat.cudnn import DSA
from hopwell.torch import indexer_loss, ops
from torch import Tensor

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU from Ampere on"
)

TOPK = 300


def make_inputs(seed: int, s_q: int = 200, s_kv: int = 3000, h_index: int = 64) -> list[Tensor]:
    """Returns q_index, k_index and weights on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(s_q, h_index, 128, generator=generator).bfloat16()
    k = torch.randn(s_kv, 128, generator=generator).bfloat16()
    return [q, k, torch.randn(s_q, h_index, generator=generator) / 90]


def select(inputs: list[Tensor], q_start: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns indices and scores."""
    q, k, weights = inputs
    indices, scores = ops.lightning_indexer(q, k, weights, TOPK, q_start=q_start)
    return indices, scores


def loss_and_gradients(inputs: list[Tensor], indices: Tensor, *, deterministic: bool = False) -> list[Tensor]:
    q, k, weights = leaves = [x.detach().requires_grad_() for x in inputs]
    target = torch.softmax(torch.arange(TOPK, device=indices.device) % 7 * 0.3, 0).expand(len(indices), TOPK)
    loss = indexer_loss(q, k, weights, indices, target.contiguous(), deterministic=deterministic)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def test_selects_as_on_the_cpu() -> None:
    inputs = make_inputs(1)
    here, scores_here = select([x.cuda() for x in inputs], 2500)
    there, scores_there = select(inputs, 2500)
    same = here.cpu() == there  # elsewhere the rounding of sums swapped keys with nearly equal scores
    assert same.float().mean() > 0.99
    assert torch.allclose(scores_here.cpu()[same], scores_there[same], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_loss_and_gradients_as_on_the_cpu(deterministic: bool) -> None:
    inputs = make_inputs(2)
    indices, _ = select(inputs)
    here = loss_and_gradients([x.cuda() for x in inputs], indices.cuda(), deterministic=deterministic)
    for name, x, y in zip(("loss", "dq", "dk", "dweights"), here, loss_and_gradients(inputs, indices), strict=True):
        assert (x.cpu().float() - y.float()).norm() < 5e-3 * y.float().norm(), name


def test_same_bits_every_time() -> None:
    inputs = [x.cuda() for x in make_inputs(3)]
    indices, scores = select(inputs)
    gradients = loss_and_gradients(inputs, indices, deterministic=True)
    for _ in range(100):
        again = select(inputs)
        assert torch.equal(again[0], indices)
        assert torch.equal(again[1], scores)
        assert all(map(torch.equal, loss_and_gradients(inputs, indices, deterministic=True), gradients))


def test_graph_replayed_with_other_inputs() -> None:
    static = [x.cuda() for x in make_inputs(4)]

    def work() -> list[Tensor]:
        indices, scores = select(static, 2800)
        return [indices, scores, *loss_and_gradients(static, indices, deterministic=True)]

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    for seed in (5, 6):
        for old, new in zip(static, make_inputs(seed), strict=True):
            old.copy_(new)
        graph.replay()
        assert all(map(torch.equal, captured, work()))


@pytest.mark.parametrize("handle", [0, 1, None])
def test_a_stream_of_the_cudnn_wrappers_waits_for_what_is_on_it(handle: int | None) -> None:
    """0 and 1 are the default stream; None means another stream, which the current stream's work does not delay."""
    stream = torch.cuda.default_stream() if handle is not None else torch.cuda.Stream()
    numbers = torch.randn(64, 4096, device="cuda")
    lengths = torch.full((64,), 4096, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        doubled = numbers * 2
    given = stream.cuda_stream if handle is None else handle
    values = DSA.indexer_top_k_wrapper(doubled, lengths, 8, stream=given)["values"]
    stream.synchronize()
    assert torch.equal(values.sort(-1).values, (numbers * 2).topk(8).values.sort(-1).values)
