"""The `CSA` namespace: the gated pooling of DeepSeek-V4's compressors, and its gradients."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hopwell.torch import ops

from ..._checks import integer, require, require_one_device, require_sizes
from .._tensors import in_rows
from ._results import TupleDict, on

_DTYPES = torch.bfloat16, torch.float32


def _checked(
    wrapper: str,
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    offsets: tuple[Tensor, Tensor],
    ratio: int,
    head_dim: int | None,
    coff: int,
) -> tuple[int, int, bool]:
    """(ratio, head_dim, overlap)."""
    ratio, coff = integer(wrapper, "ratio", ratio), integer(wrapper, "coff", coff)
    require(ratio >= 1, wrapper, "ratio", "at least 1", ratio)
    require(coff in (1, 2), wrapper, "coff", "1 or 2", coff)
    fits = kv.ndim == 2 and kv.shape[1] % coff == 0 and kv.shape[1] > 0 and kv.dtype in _DTYPES
    require(fits, wrapper, "kv", "bfloat16 or float32 [total_tokens, coff * head_dim]", kv)
    d = kv.shape[1] // coff
    require(head_dim is None or head_dim == d, wrapper, "head_dim", f"{d}, the columns of kv / coff", head_dim)
    require_sizes(wrapper, "score", score, kv.shape)
    require(score.dtype == kv.dtype, wrapper, "score", f"{kv.dtype} like kv", score)
    require_sizes(wrapper, "ape", ape, (ratio, kv.shape[1]))
    require(ape.dtype == torch.float32, wrapper, "ape", "float32", ape)
    for name, given in zip(("cu_seqlens", "cu_seqlens_comp"), offsets, strict=True):
        fits = given.ndim == 1 and given.shape[0] >= 2 and given.dtype == torch.int32
        require(fits, wrapper, name, "int32 [B + 1]", given)
    require_sizes(wrapper, "cu_seqlens_comp", offsets[1], offsets[0].shape)
    named = {"kv": kv, "score": score, "ape": ape, "cu_seqlens": offsets[0], "cu_seqlens_comp": offsets[1]}
    require_one_device(wrapper, **named)
    return ratio, d, coff == 2


def _options(ape: Tensor, overlap: bool, cu_seqlens: Tensor, cu_seqlens_comp: Tensor) -> dict[str, Any]:
    offsets = {"cu_seqlens": in_rows(cu_seqlens), "cu_compressed": in_rows(cu_seqlens_comp)}
    return {"position_bias": in_rows(ape), "overlap": overlap, **offsets}


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """x with its first `rows` rows, and rows of zeros after them if it has fewer."""
    return x[:rows] if len(x) >= rows else torch.cat([x, x.new_zeros(rows - len(x), x.shape[1])])


@torch.no_grad()
def csa_compressor_forward_wrapper(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    total_comp: int | None = None,
    stream: Any = None,
) -> TupleDict:
    """Pools each block of `ratio` tokens, with coff 2 also the block before it: kv and score [total_tokens, coff ·
    head_dim], ape float32 [ratio, coff · head_dim], offsets int32 [B + 1] → {'out': [total_comp, head_dim]}.

    total_comp None reads the last element of cu_seqlens_comp, and the host waits for it.
    """
    name = "csa_compressor_forward_wrapper"
    ratio, _, overlap = _checked(name, kv, score, ape, (cu_seqlens, cu_seqlens_comp), ratio, head_dim, coff)
    with on(name, stream, kv=kv, score=score, ape=ape, cu_seqlens=cu_seqlens, cu_seqlens_comp=cu_seqlens_comp):
        rows = int(cu_seqlens_comp[-1]) if total_comp is None else integer(name, "total_comp", total_comp)
        require(rows >= 0, name, "total_comp", "at least 0", rows)
        out = ops.kv_compress(in_rows(kv), in_rows(score), ratio, **_options(ape, overlap, cu_seqlens, cu_seqlens_comp))
        return TupleDict(out=_with_rows(out, rows))


@torch.no_grad()
def csa_compressor_backward_wrapper(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    grad_out: Tensor,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    stream: Any = None,
) -> TupleDict:
    """Gradients for grad_out [total_comp, head_dim]: {'grad_kv', 'grad_score', both like kv, 'grad_ape': float32 like
    ape}. Elements that no block uses get 0.
    """
    name = "csa_compressor_backward_wrapper"
    ratio, d, overlap = _checked(name, kv, score, ape, (cu_seqlens, cu_seqlens_comp), ratio, head_dim, coff)
    fits = grad_out.ndim == 2 and grad_out.shape[1] == d and grad_out.dtype in _DTYPES
    require(fits, name, "grad_out", f"bfloat16 or float32 [total_comp, {d}]", grad_out)
    tensors = {"kv": kv, "score": score, "ape": ape, "cu_seqlens": cu_seqlens, "cu_seqlens_comp": cu_seqlens_comp}
    with on(name, stream, **tensors, grad_out=grad_out):
        d_out = _with_rows(grad_out, len(kv) // ratio).contiguous()
        options = _options(ape, overlap, cu_seqlens, cu_seqlens_comp)
        results = ops.kv_compress_backward(d_out, in_rows(kv), in_rows(score), ratio, **options)
        return TupleDict(zip(("grad_kv", "grad_score", "grad_ape"), results, strict=True))


CSA = SimpleNamespace(
    csa_compressor_backward_wrapper=csa_compressor_backward_wrapper,
    csa_compressor_forward_wrapper=csa_compressor_forward_wrapper,
)
