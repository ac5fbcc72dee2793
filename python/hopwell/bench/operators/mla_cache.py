"""New rows of a paged cache beside the same in eager PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

import hopwell

from ..problem import Call, Problem, measured, randn, torch_peer
from ..scale import DEVICE, cold_copies

ROW, CODES, TILE = 656, 512, 128  # DeepSeek-V3.2


def _append(kv: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    tiles = kv[:, :CODES].float().reshape(-1, CODES // TILE, TILE)
    scales = (tiles.abs().amax(-1) / 448).log2().ceil().clamp_min(-13).exp2()
    codes = (tiles / scales[..., None]).to(torch.float8_e4m3fn).flatten(1)
    cache.view(-1, ROW)[slots] = torch.cat([x.view(torch.uint8) for x in (codes, scales, kv[:, CODES:])], 1)
    return cache


@measured([{}, {"n": 64}], on_cpu=[{"n": 1024}], tiny={"n": 16})
def mla_cache_append(n: int = 8192, block: int = 64) -> Problem:
    """Quantises n new tokens of DeepSeek-V3.2 and writes them into slots in random order."""
    from hopwell.torch import read_mla_cache

    d, blocks = 576, 2 * n // block + 1
    size = n * (2 * d + ROW)
    copies = cold_copies(size)
    kv = randn(copies, n, d)
    caches = torch.zeros(copies, blocks, block, ROW, dtype=torch.uint8, device=DEVICE)
    slots = torch.randperm(blocks * block, device=DEVICE)[:n]

    def read(results: list[Tensor]) -> list[Tensor]:
        rows = read_mla_cache(results[0], slots, d)
        results[0].zero_()  # the next call has to write it
        return [rows]

    def pytorch() -> Call:
        return lambda i: [_append(kv[i], caches[i], slots)]

    return Problem(
        lambda i: [hopwell.mla_cache_append(kv[i], caches[i], slots)],
        read,
        [torch_peer("torch eager", pytorch, read)],
        copies=copies,
        bytes=size,
    )
