"""Partial results of attention over parts of the keys, and how they become one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hopwell._checks import require, require_one_device, require_sizes


def merge_partials(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor], attn_sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merges results over parts of the keys, which the ranks of decode context parallelism have, for example.

    Each part comes from `sparse_mla_decode` or `sparse_mla_forward` over its own keys, without the sink. The formula is

        lse = log Σ_r exp(lse_r)                          over the parts with lse_r ≠ +inf; +inf if there are none
        out = Σ_r exp(lse_r − lse)·out_r / (1 + exp(attn_sink − lse))                       0 if there are none

    It is computed in float32, in ascending order of r, by PyTorch operations.

    Args:
        outs: [n, …, h, d_v], or a sequence of n tensors […, h, d_v]; float32 keeps the most accuracy.
        lses: float32 [n, …, h] or a sequence, natural logarithms; +inf where a part has no valid key.
        attn_sink: float32 [h].

    Returns:
        out like outs[0], lse float32 […, h].

    Raises:
        ValueError: an argument has the wrong dtype, shape or device.
    """
    name = "merge_partials"
    n = len(outs)
    require(n >= 1, name, "outs", "at least one part", n)
    require(len(lses) == n, name, "lses", f"{n} parts as outs has", len(lses))
    shape = outs[0].shape
    require(len(shape) >= 2, name, "outs", "[n, …, h, d_v]", outs[0])
    require_one_device(name, **{f"{a}[{r}]": x[r] for a, x in (("outs", outs), ("lses", lses)) for r in range(n)})
    for r in range(n):
        require_sizes(name, f"outs[{r}]", outs[r], shape)
        require_sizes(name, f"lses[{r}]", lses[r], shape[:-1])
        require(outs[r].is_floating_point(), name, f"outs[{r}]", "of floating-point numbers", outs[r])
        require(lses[r].dtype == torch.float32, name, f"lses[{r}]", "float32", lses[r])
    if attn_sink is not None:
        require_one_device(name, outs=outs[0], attn_sink=attn_sink)
        fits = attn_sink.dtype == torch.float32 and attn_sink.shape == shape[-2:-1]
        require(fits, name, "attn_sink", f"float32 [{shape[-2]}]", attn_sink)
    largest = torch.full_like(lses[0], -torch.inf)
    present = torch.zeros_like(lses[0], dtype=torch.bool)
    for lse in lses:
        largest = torch.where(lse == torch.inf, largest, torch.maximum(largest, lse))
        present |= lse != torch.inf
    reference = torch.where(largest == -torch.inf, 0.0, largest)
    total = torch.zeros_like(reference)
    for lse in lses:
        total = total + torch.where(lse == torch.inf, 0.0, (lse - reference).exp())
    merged = torch.where(present, reference + total.log(), torch.inf)
    out = torch.zeros(shape, dtype=torch.float32, device=merged.device)
    for part, lse in zip(outs, lses, strict=True):
        there = lse != torch.inf
        weight = (lse - reference).exp() / total  # lse - merged would have the error of a rounded lse
        out = out + torch.where(there[..., None], weight[..., None] * part.float(), 0.0)
    if attn_sink is not None:
        out = torch.where(present[..., None], out * torch.sigmoid(merged - attn_sink)[..., None], 0.0)
    return out.to(outs[0].dtype), merged
