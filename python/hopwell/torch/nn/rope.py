"""Rotary position embedding."""

import torch
from torch import Tensor


def rotate(x: Tensor, start: int | Tensor = 0, theta: float = 10_000.0) -> Tensor:
    """Rotary position embedding of x [b, s, d] or [b, s, h, d], d even, for the positions start … start + s − 1."""
    if x.ndim not in (3, 4) or x.shape[-1] % 2:
        raise ValueError(f"rotate: x must be [b, s, d] or [b, s, h, d] with d even; got {list(x.shape)}")
    s, d = x.shape[1], x.shape[-1]
    positions = torch.arange(s, device=x.device, dtype=torch.float32) + start
    frequencies = theta ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = positions[:, None] * frequencies
    if x.ndim == 4:
        angle = angle[:, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x.chunk(2, dim=-1)
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
