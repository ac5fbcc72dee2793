"""A step of a server: rows are written to paged caches, positions are selected and attended to.

On the CPU, and on a GPU in a CUDA graph whose replays have other lengths, tables, slots and rows.
"""

from collections.abc import Callable

import pytest
import torch
from hopwell.torch import ops
from torch import Tensor

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
ON_GPU = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU from Ampere on")
CASES = [("cpu", 13), *(pytest.param("cuda", h_q, marks=ON_GPU) for h_q in (8, 13, 64, 128))]  # device, h_q
B, Q_LEN, BLOCK, MAX_BLOCKS, TOPK = 4, 2, 64, 5, 130
TOKENS = BLOCK * MAX_BLOCKS


class Step:
    """Tensors of fixed addresses, filled from a seed."""

    def __init__(self, device: str, h_q: int) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        pages, tokens = B * MAX_BLOCKS + 3, B * Q_LEN
        self.rows, self.keys = empty(tokens, 576), empty(tokens, 128)
        self.cache = empty(pages, BLOCK, 656, dtype=torch.uint8)
        self.index_cache = empty(pages, BLOCK, 132, dtype=torch.uint8)
        self.q, self.q_index = empty(B, Q_LEN, h_q, 576), empty(B, Q_LEN, 64, 128, dtype=torch.float8_e4m3fn)
        self.weights = empty(B, Q_LEN, 64, dtype=torch.float32)
        self.tables = empty(B, MAX_BLOCKS, dtype=torch.int32)
        self.lens, self.slots = empty(B, dtype=torch.int32), empty(tokens, dtype=torch.int64)

    def draw(self, seed: int) -> None:
        """Other tokens in the caches, on other pages, and other new rows. The last sequence is idle."""
        generator = torch.Generator().manual_seed(seed)

        def normal(like: Tensor) -> Tensor:
            return torch.randn(like.shape, generator=generator)

        tables = torch.randperm(len(self.cache), generator=generator)[: B * MAX_BLOCKS].view(B, MAX_BLOCKS)
        lens = torch.randint(Q_LEN, TOKENS + 1, (B,), generator=generator)
        lens[-1] = 0
        positions = lens[:, None] - Q_LEN + torch.arange(Q_LEN)
        slots = tables.gather(1, positions.clamp(min=0) // BLOCK) * BLOCK + positions % BLOCK
        slots[-1] = -1
        for to, values in (
            *((x, normal(x)) for x in (self.rows, self.keys, self.q, self.q_index, self.weights)),
            *((self.tables, tables), (self.lens, lens), (self.slots, slots.view(-1))),
        ):
            to.copy_(values)
        everywhere = torch.arange(len(self.cache) * BLOCK, device=self.cache.device)
        for cache, width in ((self.cache, 576), (self.index_cache, 128)):
            rows = torch.randn(len(everywhere), width, generator=generator).bfloat16().to(cache.device)
            ops.mla_cache_append(rows, cache, everywhere)

    def run(self) -> list[Tensor]:
        ops.mla_cache_append(self.rows, self.cache, self.slots)
        ops.mla_cache_append(self.keys, self.index_cache, self.slots)
        selected = ops.paged_lightning_indexer(
            self.q_index, self.index_cache, self.weights, TOPK, self.tables, self.lens
        )
        attended = ops.sparse_mla_decode(
            *(self.q, self.cache, selected[0], 576**-0.5),
            block_tables=self.tables,
            context_lens=self.lens,
            keys_per_split=64,
        )
        return [*selected, *attended, self.cache, self.index_cache]


def replays(step: Step) -> Callable[[], list[Tensor]]:
    """A function that repeats the step: a graph on a GPU."""
    if not step.q.is_cuda:
        return step.run
    step.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step.run()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay


@pytest.mark.parametrize(("device", "h_q"), CASES)
def test_replays_with_other_lengths_tables_slots_and_rows(device: str, h_q: int) -> None:
    step = Step(device, h_q)
    step.draw(1)
    replay = replays(step)
    for seed in (2, 3, 4):
        step.draw(seed)
        fresh = Step(device, h_q)
        fresh.draw(seed)
        for got, expected in zip(replay(), fresh.run(), strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("device", "h_q"), CASES)
def test_equal_calls_have_equal_bits(device: str, h_q: int) -> None:
    step = Step(device, h_q)
    step.draw(7)
    first = [x.clone() for x in step.run()]
    for _ in range(100 if device == "cuda" else 3):
        for got, expected in zip(step.run(), first, strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
