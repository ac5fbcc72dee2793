"""Paged caches of MLA latents and of index keys."""

from typing import Any

import torch
from torch import Tensor

import hopwell

from ._register import arguments_of, exporting, operator, stop_gradient, tensor_or_number

_hopwell_append = exporting(hopwell.mla_cache_append)


def _append_fake(**_: Any) -> None:
    return None


@operator("mla_cache_append", _append_fake, writes=("cache",))
@arguments_of(hopwell.mla_cache_append, kv_scale=Tensor | None, kv_scale_value=float | None)
def _append(kv_scale: Tensor | None, kv_scale_value: float | None, **given: Any) -> None:
    _hopwell_append(kv_scale=kv_scale_value if kv_scale is None else kv_scale, **given)


stop_gradient("mla_cache_append")


def mla_cache_append(
    kv: Tensor,
    cache: Tensor,
    slots: Tensor,
    *,
    k_rope: Tensor | None = None,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    rope_offset: int | None = None,
    interleaved: bool = True,
    scale_format: str = "pow2",
    kv_scale: float | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Writes new rows into the slots of a paged cache, and returns the cache: see `hopwell.mla_cache_append`.

    No gradient passes through the cache.
    """
    if cache.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "mla_cache_append: cache requires grad, but the operator writes it in place: detach() it, or call "
            "under torch.no_grad()"
        )
    _append(**tensor_or_number("kv_scale", locals()))
    return cache


def read_mla_cache(cache: Tensor, slots: Tensor, d_qk: int, kv_scale: float | Tensor | None = None) -> Tensor:
    """The rows of some slots of a paged cache of latents, bfloat16 [n, d_qk]. A slot out of range gives zeros.

    It is made of PyTorch operations, for tests and for the prefill over a prefix. The cache is [blocks, block, row] or
    [blocks, block, 1, row]; d_qk and the row's size name its format, as in `hopwell.mla_cache_append`. Rows of index
    keys are not read. `kv_scale` is for a cache with one scale; 1 by default.
    """
    rows = cache.squeeze(2) if cache.dim() == 4 and cache.shape[2] == 1 else cache
    if rows.dim() != 3:
        raise ValueError(
            "read_mla_cache: cache must be [blocks, block, row] or [blocks, block, 1, row]; "
            f"got {cache.dtype} {list(cache.shape)}"
        )
    blocks, block, size = rows.shape
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"read_mla_cache: slots must be int64 or int32 [n]; got {slots.dtype} {list(slots.shape)}")
    is_bytes = cache.element_size() == 1
    formats = {(576, 656): "v32", (512, 656): "v32", (512, 584): "v4", (512, 528): "v41", (d_qk, d_qk): "one scale"}
    form = formats.get((d_qk, size), "") if is_bytes else ("plain" if size == d_qk else "")
    if not form:
        raise ValueError(f"read_mla_cache: cache must be of rows of a size that goes with d_qk = {d_qk}; got {size}")
    if kv_scale is not None and form != "one scale":
        raise ValueError(
            "read_mla_cache: kv_scale needs a cache of bytes with one scale; the rows of this one have none"
        )
    if is_bytes and blocks > 0 and not rows[0].is_contiguous():
        raise ValueError(f"read_mla_cache: cache must be contiguous inside a block; got strides {list(cache.stride())}")
    if blocks == 0:
        return torch.zeros(len(slots), d_qk, dtype=torch.bfloat16, device=cache.device)
    there = (slots >= 0) & (slots < blocks * block)
    slots = torch.where(there, slots, 0).long()
    of, i = slots // block, slots % block
    if form == "plain":
        values = rows[of, i].bfloat16()
    else:
        memory = rows.view(torch.uint8).as_strided((blocks, block * size), (rows.stride(0), 1))
        values = _values(memory, of, i, block, d_qk, form, kv_scale)
    return torch.where(there[:, None], values, 0.0)


def _values(
    memory: Tensor, of: Tensor, i: Tensor, block: int, d: int, form: str, kv_scale: float | Tensor | None
) -> Tensor:
    """Rows i of blocks `of`, bfloat16; memory is [blocks, bytes of a block]."""

    def at(first: Tensor | int, pitch: int, count: int) -> Tensor:
        """`count` bytes of each row, from first + pitch·i on."""
        offsets = (first + pitch * i)[:, None] + torch.arange(count, device=i.device)
        return memory[of[:, None], offsets]

    if form == "one scale":
        scale = 1.0 if kv_scale is None else kv_scale
        return (at(0, d, d).view(torch.float8_e4m3fn).float() * scale).bfloat16()
    plain = None
    if form == "v32":
        codes, scales = at(0, 656, 512), at(512, 656, 16).view(torch.float32)
        plain = at(528, 656, 128) if d == 576 else None
    elif form == "v4":
        codes, scales, plain = at(0, 576, 448), _power(at(576 * block, 8, 7)), at(448, 576, 128)
    else:
        codes, scales = at(0, 512, 512), _power(at(512 * block, 16, 16))
    width = codes.shape[1] // scales.shape[1]  # of a tile
    values = (codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(width, 1)).bfloat16()
    return values if plain is None else torch.cat([values, plain.view(torch.bfloat16)], 1)


def _power(exponents: Tensor) -> Tensor:
    """2^(byte − 127); NaN for 255."""
    bits = torch.where(exponents == 0, 1 << 22, exponents.int() << 23)  # 2^-127 is subnormal
    bits = torch.where(exponents == 255, 0x7FC00000, bits)
    return bits.int().view(torch.float32)
