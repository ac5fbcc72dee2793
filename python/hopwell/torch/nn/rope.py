"""Rotary position embedding, with YaRN.

The formulae come from DeepSeek-V3.2's published inference code (`inference/model.py` of DeepSeek-V3.2-Exp) and from
Hugging Face's transformers (`modeling_rope_utils.py`, `modeling_deepseek_v3.py`). YaRN is arXiv 2309.00071.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True)
class Yarn:
    """YaRN: a longer context. Slow frequencies are divided by `factor`, fast ones are kept.

    Attributes:
        factor: new context / original_context.
        original_context: tokens of the context that the model was trained with first
            (`original_max_position_embeddings`).
        beta_fast: frequencies with more rotations over original_context are kept.
        beta_slow: frequencies with fewer rotations over original_context are divided.
        mscale: weight of the numerator of `amplitude`. 0: not given.
        mscale_all_dim: weight of the denominator of `amplitude` and of the softmax factor. 0: not given.
        attention_factor: `amplitude` itself. None: as mscale and mscale_all_dim say.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None

    @property
    def amplitude(self) -> float:
        """The factor of sine and cosine. With equal mscale and mscale_all_dim, as DeepSeek-V3.2 has them, it is 1."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """The factor of the softmax scale: mscale², with mscale = 0.1 · mscale_all_dim · ln(factor) + 1."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2

    def share_kept(self, d: int, theta: float, device: torch.device) -> Tensor:
        """How much of each frequency is kept, from 0 (divided by `factor`) to 1: float32 [d/2]."""

        def pair(rotations: float) -> float:
            """The pair of elements that turns this many times within the original context."""
            return d * math.log(self.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(pair(self.beta_fast)), 0), min(math.ceil(pair(self.beta_slow)), d - 1)
        pairs = torch.arange(d // 2, device=device, dtype=torch.float32)
        return 1 - ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)


@dataclass(frozen=True)
class Rope:
    """How positions turn pairs of elements.

    Attributes:
        theta: pair i of d/2 turns by theta^(−2i/d) a position.
        interleaved: pair i is the elements 2i and 2i + 1. False: the elements i and i + d/2 (half-split).
        yarn: the change of frequencies for a longer context, or None.
    """

    theta: float = 10_000.0
    interleaved: bool = False
    yarn: Yarn | None = None

    def frequencies(self, d: int, device: torch.device) -> Tensor:
        """Radians a position of each pair: float32 [d/2]."""
        plain = self.theta ** (-torch.arange(0, d, 2, device=device, dtype=torch.float32) / d)
        if self.yarn is None:
            return plain
        kept = self.yarn.share_kept(d, self.theta, device)
        return plain * kept + plain / self.yarn.factor * (1 - kept)


def rotate(x: Tensor, start: int | Tensor = 0, rope: Rope = Rope(), *, inverse: bool = False) -> Tensor:
    """Rotary position embedding of x [b, s, d] or [b, s, h, d], d even, in float32 and rounded once.

    The positions are 0 … s − 1, plus `start`: a number, or a tensor of one element or of [s]. With `inverse` the pairs
    turn back.
    """
    if x.ndim not in (3, 4) or x.shape[-1] % 2:
        raise ValueError(f"rotate: x must be [b, s, d] or [b, s, h, d] with d even; got {list(x.shape)}")
    s, d = x.shape[1], x.shape[-1]
    positions = torch.arange(s, device=x.device, dtype=torch.float32) + start
    angle = positions[:, None] * rope.frequencies(d, x.device)
    if inverse:
        angle = -angle
    if x.ndim == 4:
        angle = angle[:, None]
    amplitude = 1.0 if rope.yarn is None else rope.yarn.amplitude
    cos, sin = angle.cos() * amplitude, angle.sin() * amplitude
    pairs = x.float()
    if rope.interleaved:
        first, second = pairs[..., ::2], pairs[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2).to(x.dtype)
    first, second = pairs.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rotate_last(x: Tensor, d_rope: int, start: int | Tensor, rope: Rope, *, inverse: bool = False) -> Tensor:
    """Rotates the last d_rope columns of x, as DeepSeek-V4 has them."""
    if d_rope == 0:
        return x
    rotated = rotate(x[..., -d_rope:], start, rope, inverse=inverse)
    return torch.cat([x[..., :-d_rope], rotated], dim=-1)
