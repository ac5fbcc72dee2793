"""DeepSeek-V4's compressor, differentiable in kv, gate and position_bias."""

from typing import Any

import torch
from torch import Tensor

import hopwell
from hopwell._arrays import dtype_name

from ._register import (
    Named,
    NamedGradients,
    arguments_of,
    contiguous_rows,
    differentiable,
    exporting,
    no_gradient,
    operator,
)

_compress, _backward = exporting(hopwell.kv_compress), exporting(hopwell.kv_compress_backward)


def _out_dtype_name(dtype: str | torch.dtype | None, kv: Tensor) -> str:
    return dtype_name("kv_compress", "out_dtype", kv.dtype if dtype is None else dtype, ("bfloat16", "float32"))


def _kv_compress_fake(kv: Tensor, ratio: int, overlap: bool, out_dtype: str | None, **_: Any) -> Tensor:
    s, w = kv.shape
    dtype = getattr(torch, _out_dtype_name(out_dtype, kv))
    return kv.new_empty((s // ratio, w // 2 if overlap else w), dtype=dtype)


@operator("kv_compress", _kv_compress_fake)
@arguments_of(hopwell.kv_compress, "out", out_dtype=str | None)
def _kv_compress(**given: Any) -> Tensor:
    out: Tensor = _compress(**given)
    return out


def _kv_compress_backward_fake(kv: Tensor, position_bias: Tensor | None, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    bias = kv.new_empty(0 if position_bias is None else position_bias.shape, dtype=torch.float32)
    return kv.new_empty(kv.shape), kv.new_empty(kv.shape), bias


@operator("kv_compress_backward", _kv_compress_backward_fake)
@arguments_of(hopwell.kv_compress_backward, "d_kv", "d_gate")
def _kv_compress_backward(kv: Tensor, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """An op cannot return None, so d_position_bias is an empty tensor without a position_bias."""
    d_kv, d_gate, d_position_bias = _backward(kv=kv, **given)
    return d_kv, d_gate, kv.new_empty(0, dtype=torch.float32) if d_position_bias is None else d_position_bias


no_gradient("kv_compress_backward")


def kv_compress(
    kv: Tensor,
    gate: Tensor,
    ratio: int,
    *,
    position_bias: Tensor | None = None,
    overlap: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_compressed: Tensor | None = None,
    out_dtype: str | torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compressed keys [s // ratio, d] of blocks of tokens: see `hopwell.kv_compress`. Differentiable in kv, gate and
    position_bias; it saves only its inputs. The gradients have the same bits every time.

    kv and gate are bfloat16 or float32 [s, w], w = d, or 2·d with `overlap`; position_bias float32 [ratio, w].
    Documents: cu_seqlens and cu_compressed, which `compressed_lengths` computes, int32 [documents + 1].
    """
    out_dtype = None if out_dtype is None else _out_dtype_name(out_dtype, kv)
    return _kv_compress(**locals())


def kv_compress_backward(
    d_out: Tensor,
    kv: Tensor,
    gate: Tensor,
    ratio: int,
    *,
    position_bias: Tensor | None = None,
    overlap: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_compressed: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `kv_compress`: (d_kv, d_gate, d_position_bias); the last is None without a position_bias."""
    d_kv, d_gate, d_bias = _kv_compress_backward(**locals())
    return d_kv, d_gate, None if position_bias is None else d_bias


def _gradients(given: Named, _: set[str], d_out: Tensor) -> NamedGradients:
    del given["out_dtype"]
    d_kv, d_gate, d_bias = kv_compress_backward(contiguous_rows(d_out), **given)
    return {"kv": d_kv, "gate": d_gate, "position_bias": d_bias}


differentiable("kv_compress", _gradients, lambda given, _: given)
