"""What generation keeps of a sequence."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hopwell._checks import INTEGERS, integer, require, require_one_device, require_shape
from hopwell.torch.nn._module import check_type


@dataclass
class KeyCache:
    """What generation keeps of one sequence: latent keys [max_tokens, d_qk] and index keys [max_tokens, d_index].

    `length` counts the tokens. Once there are any it may be made a 0-d int64 tensor, which the caller counts on: then
    steps differ in nothing but its value, and one that was captured in a CUDA graph serves for all that follow.
    """

    max_tokens: int
    length: int | Tensor = 0
    kv: Tensor | None = field(default=None, repr=False)
    k_index: Tensor | None = field(default=None, repr=False)

    def append(self, kv: Tensor, k_index: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys of new tokens, [s, d_qk] and [s, d_index]; returns all; with a counting tensor, all the room
        there is. A call that is refused adds none.
        """
        count = self.count()
        self._check("kv", kv, self.kv, None)
        self._check("k_index", k_index, self.k_index, len(kv))
        require_one_device("KeyCache", cache=self.kv, kv=kv, k_index=k_index)
        if isinstance(count, Tensor):
            if self.kv is None or self.k_index is None:
                raise ValueError("KeyCache: length must be a number until there are tokens; got a tensor")
            places = count + torch.arange(len(kv), device=count.device)
            return self.kv.index_copy_(0, places, kv), self.k_index.index_copy_(0, places, k_index)
        end = count + len(kv)
        if end > self.max_tokens:
            raise ValueError(f"KeyCache: it holds {self.max_tokens} tokens; got {end}")
        if self.kv is None or self.k_index is None:
            require(count == 0, "KeyCache", "length", "0 until there are tokens", count)
            self.kv, self.k_index = (x.new_zeros(self.max_tokens, x.shape[1]) for x in (kv, k_index))
        self.kv[count:end], self.k_index[count:end] = kv, k_index
        self.length = end
        return self.kv[:end], self.k_index[:end]

    def count(self) -> int | Tensor:
        """`length`, checked; a number as Python's own."""
        if isinstance(self.length, Tensor):
            fits = self.length.ndim == 0 and self.length.dtype in INTEGERS
            require(fits, "KeyCache", "length", "a number or a 0-d int64 tensor", self.length)
            return self.length
        count = integer("KeyCache", "length", self.length)
        require(count >= 0, "KeyCache", "length", "at least 0", count)
        return count

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """If the code within raises, the cache has its tokens of before. Memory behind them may have changed. A model
        of several layers enters this for each layer's cache.
        """
        before = self.length, self.kv, self.k_index
        try:
            yield
        except BaseException:
            self.length, self.kv, self.k_index = before
            raise

    @staticmethod
    def _check(argument: str, new: Tensor, kept: Tensor | None, s: int | None) -> None:
        check_type("KeyCache", argument, new, Tensor)
        require_shape("KeyCache", argument, new, s=s, d=None if kept is None else kept.shape[1])
        if kept is not None:
            require(new.dtype == kept.dtype, "KeyCache", argument, f"{kept.dtype} as the cache's is", new.dtype)
