"""Memory with guarded ends. An access beyond one end is a segmentation fault; a write beyond the other end is detected
after the call.

Only one call's memory exists at a time: a new `Memory` reuses the pages of the previous one.
"""

import ctypes
import mmap
from typing import Any, ClassVar

import numpy as np

PATTERN = 0xA5
_SIZE = 8 << 20
_MARGIN = 512  # bytes of pattern next to a block, at the end without a protected page


def _arena() -> Any:
    """Allocates _SIZE bytes between two protected pages."""
    page = mmap.PAGESIZE
    everything = np.frombuffer(mmap.mmap(-1, page + _SIZE + page), np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for offset in (0, page + _SIZE):
        if protect(ctypes.c_void_p(everything.ctypes.data + offset), ctypes.c_size_t(page), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    return everything[page : page + _SIZE]


class Block:
    """Bytes that end (or begin) at a protected page, with a pattern at their other end."""

    def __init__(self, arena: Any, size: int, at_end: bool) -> None:
        assert size + _MARGIN <= _SIZE
        start = _SIZE - size if at_end else 0
        self.bytes = arena[start : start + size]
        self._margin = arena[start - _MARGIN : start] if at_end else arena[size : size + _MARGIN]
        self._margin[:] = PATTERN
        self.before: bytes = b""

    def margin_holds(self) -> bool:
        return bool((self._margin == PATTERN).all())


class Memory:
    """The blocks of one call."""

    _arenas: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def block(self, size: int, at_end: bool) -> Block:
        if len(self.blocks) == len(self._arenas):
            self._arenas.append(_arena())
        self.blocks.append(Block(self._arenas[len(self.blocks)], size, at_end))
        return self.blocks[-1]

    def remember(self) -> None:
        """Saves the contents that the blocks have before the call."""
        for block in self.blocks:
            block.before = block.bytes.tobytes()

    def restore(self) -> None:
        for block in self.blocks:
            block.bytes[:] = np.frombuffer(block.before, np.uint8)
