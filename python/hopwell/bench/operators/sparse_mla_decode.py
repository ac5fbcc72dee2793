"""Decode over paged latents beside FlashMLA, and beside the same in eager PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

import hopwell

from ..problem import FLASH_MLA, Call, Peer, Problem, flash_mla, measured, torch_peer
from ..scale import DEVICE, cold_copies

D_V, BLOCK = 512, 64
D_QK = {1152: 576, 656: 576, 584: 512}  # by bytes of a row: bf16, DeepSeek-V3.2, V4
BF16_ROW = 1152
FLASH_MLA_HEADS = 64  # fewest query heads that FlashMLA supports; 128 is the other number


def _cache(row: int, tokens: int) -> Tensor:
    """A cache of random latents in `tokens` slots."""
    d_qk, blocks = D_QK[row], tokens // BLOCK
    if row == 2 * d_qk:
        return torch.randn(blocks, BLOCK, d_qk, dtype=torch.bfloat16, device=DEVICE)
    cache = torch.zeros(blocks, BLOCK, row, dtype=torch.uint8, device=DEVICE)
    for first in range(0, tokens, 1 << 16):
        slots = torch.arange(first, min(first + (1 << 16), tokens), device=DEVICE)
        kv = torch.randn(len(slots), d_qk, dtype=torch.bfloat16, device=DEVICE)
        hopwell.mla_cache_append(kv, cache, slots)
    return cache


def _scaled(codes: Tensor, scales: Tensor) -> Tensor:
    tiles = codes.view(torch.float8_e4m3fn).float().reshape(*scales.shape, -1)
    return (tiles * scales[..., None]).flatten(-2).bfloat16()


def _rows(cache: Tensor, slots: Tensor) -> Tensor:
    """The selected rows as bf16."""
    row = cache.shape[-1]
    if cache.dtype == torch.bfloat16:
        return cache.view(-1, row)[slots]
    if row == 656:
        data = cache.view(-1, row)[slots]
        rope = data[..., 528:].contiguous().view(torch.bfloat16)
        scales = data[..., 512:528].contiguous().view(torch.float32)
        return torch.cat([_scaled(data[..., :512], scales), rope], -1)
    block, i = slots // BLOCK, slots % BLOCK
    of_blocks = cache.view(-1, BLOCK * row)
    data = of_blocks[:, : BLOCK * 576].reshape(-1, BLOCK, 576)[block, i]
    exponents = of_blocks[:, BLOCK * 576 :].reshape(-1, BLOCK, 8)[block, i][..., :7]
    rope = data[..., 448:].contiguous().view(torch.bfloat16)
    return torch.cat([_scaled(data[..., :448], (exponents.float() - 127).exp2()), rope], -1)


def _attend(q: Tensor, keys: Tensor) -> list[Tensor]:
    scores = torch.einsum("bihd,bijd->bihj", q.float(), keys.float()) * q.shape[-1] ** -0.5
    out = torch.einsum("bihj,bijd->bihd", scores.softmax(-1), keys[..., :D_V].float())
    return [out.to(q.dtype), scores.logsumexp(-1)]


@measured(
    [{"h_q": h_q, "b": b} for h_q in (8, 16) for b in (1, 8, 64, 128)]
    + [{"b": 1, "idle": 7}, {"q_len": 2}, {"h_q": 64}, {"h_q": 128}, {"row": 584, "b": 64}, {"h_q": 16, "b": 256}]
    + [{"row": 1152}, *({"row": 1152, "keys_per_split": 2048, "h_q": h_q} for h_q in (8, 64, 128))],
    on_cpu=[{"b": 1, "topk": 512}],
    tiny={"b": 2, "h_q": 4, "topk": 70, "context": 128},
)
def sparse_mla_decode(
    b: int = 8,
    q_len: int = 1,
    h_q: int = 8,
    topk: int = 2048,
    context: int = 8192,
    row: int = 656,
    keys_per_split: int = 256,
    idle: int = 0,
) -> Problem:
    """Selected rows of `row` bytes for b sequences of `context` tokens each; `idle` more sequences select none."""
    d_qk = D_QK[row]
    size = b * q_len * (topk * (row + 4) + h_q * (2 * d_qk + 2 * D_V + 4))
    copies = cold_copies(size)
    q = torch.randn(copies, b + idle, q_len, h_q, d_qk, dtype=torch.bfloat16, device=DEVICE)
    cache = _cache(row, b * context)
    first = context * torch.arange(b, device=DEVICE).view(1, b, 1, 1)
    chosen = (first + torch.randint(0, context, (copies, b, q_len, topk), device=DEVICE)).int()
    indices = torch.cat([chosen, chosen.new_full((copies, idle, q_len, topk), -1)], 1)

    def read(results: list[Tensor]) -> list[Tensor]:
        return [results[0][:b], results[1][:b]]

    def flashmla() -> Call:
        module, options = flash_mla()
        heads = functional.pad(q, (0, 0, 0, max(0, FLASH_MLA_HEADS - h_q)))
        plan, _ = module.get_mla_metadata()  # empty; the first call fills it, and calls of one shape may share it
        return lambda i: module.flash_mla_with_kvcache(
            *(heads[i], cache[:, :, None], None, None, D_V, plan, None),
            softmax_scale=d_qk**-0.5,
            is_fp8_kvcache=True,
            indices=indices[i],
            **options,
        )

    def read_flashmla(results: list[Tensor]) -> list[Tensor]:
        out, lse = results
        return [out[:b, :, :h_q], lse[:b, :h_q].transpose(1, 2)]

    def pytorch() -> Call:
        return lambda i: _attend(q[i, :b], _rows(cache, chosen[i].long()))

    peers = [torch_peer("torch eager", pytorch, read)]
    if row != BF16_ROW:
        note = "the plan of its splits is not timed"
        if h_q < FLASH_MLA_HEADS:
            note += f"; q has {FLASH_MLA_HEADS - h_q} more heads of zeros, whose addition is not timed"
        peers.insert(0, Peer("FlashMLA", FLASH_MLA, flashmla, read_flashmla, note))
    return Problem(
        lambda i: list(hopwell.sparse_mla_decode(q[i], cache, indices[i], d_qk**-0.5, keys_per_split=keys_per_split)),
        read,
        peers,
        copies=copies,
        bytes=size,
    )
