"""Which keys the tokens of a module's input see, and their positions: sequences of a batch, or packed documents."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from hopwell._checks import require, require_one_device
from hopwell.torch._packing import key_ranges
from hopwell.torch.nn._module import check_type


@dataclass(frozen=True)
class Pack:
    """Tokens [b, s] as one pack of b·s tokens.

    Attributes:
        k_start: int32 [b·s], the first key of the pack that each token sees.
        k_end: int32 [b·s], the first key that it does not see any more.
        start: added to 0 … s − 1 it is the token's position, for `rotate`.
        documents: True if the caller gave documents or key ranges; False if each of the b sequences is causal.
    """

    k_start: Tensor
    k_end: Tensor
    start: int | Tensor
    documents: bool

    @classmethod
    def of(
        cls,
        module: str,
        x: Tensor,
        s: int,
        cu_seqlens: Tensor | None = None,
        k_start: Tensor | None = None,
        k_end: Tensor | None = None,
    ) -> Self:
        """The pack of a module's input x [b, …] with s tokens a sequence; x only gives b and the device."""
        b, device = x.shape[0], x.device
        if cu_seqlens is None and k_start is None and k_end is None:
            return cls(*key_ranges(torch.arange(b + 1, device=device) * s, s_q=b * s), 0, False)
        require(b == 1, module, "x", "[1, s, d_model] with documents or key ranges: one pack", list(x.shape))
        if cu_seqlens is not None:
            require(k_start is None and k_end is None, module, "k_start and k_end", "None with cu_seqlens", "both")
            check_type(module, "cu_seqlens", cu_seqlens, Tensor)
            require_one_device(module, x=x, cu_seqlens=cu_seqlens)
            first, end = key_ranges(cu_seqlens, s_q=s)
            return cls(first, end, -first, True)
        for name, bound in (("k_start", k_start), ("k_end", k_end)):
            fits = isinstance(bound, Tensor) and bound.dtype == torch.int32 and bound.ndim == 1 and len(bound) == s
            require(fits, module, name, "int32 [s], one number for each token, as the other bound is", bound)
        assert k_start is not None and k_end is not None
        require_one_device(module, x=x, k_start=k_start, k_end=k_end)
        return cls(k_start, k_end, 0, True)

    def take(self, s: int, positions: Tensor) -> "Pack":
        """The tokens at `positions` int64 [s_local] of each sequence of s tokens. Keys count in the whole pack."""
        k_start, k_end = (bound.view(-1, s)[:, positions].flatten() for bound in (self.k_start, self.k_end))
        start = positions + (self.start[positions] if isinstance(self.start, Tensor) else self.start)
        start = start - torch.arange(len(positions), device=positions.device)
        return Pack(k_start, k_end, start, self.documents)

    def ranges(self) -> dict[str, Any]:
        """The operators' arguments."""
        return {"k_start": self.k_start, "k_end": self.k_end}

    def mask(self) -> Tensor:
        """True where a token sees a key: bool [b·s, b·s], for PyTorch's attention."""
        keys = torch.arange(self.k_start.shape[0], device=self.k_start.device)
        return (keys >= self.k_start[:, None]) & (keys < self.k_end[:, None])
