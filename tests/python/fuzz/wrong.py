"""A right call with one thing wrong: what is no array, another dtype, shape, stride or memory, a scalar out of its
range, an output that cannot be written or that lies where something else does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import declared
import numpy as np
import torch
from hypothesis import strategies as st
from operators import OPERATORS

from .call import FuzzedCall

INTEGERS: dict[str, tuple[int, ...]] = {  # and values that are out of range
    "d_v": (0, -1, 10**9, 2**62),
    "kv_stride": (0, -1, -(2**63)),
    "q_start": (2**62, -(2**62), 2**63 - 1, -(2**63)),
    "window": (-1, -(2**63)),
    "topk": (-1, -(2**63), 2**62, 2**45),
    "rope_offset": (-1, -(2**63), 2**62, 10**9),
    "keys_per_split": (0, -64, 63, 100, -(2**63)),
}
REALS = (*declared.names("Number"), "d_loss")
GLOBALS = tuple(set(declared.names("NumberOrTensor")) - {"d_loss"})
CHOICES = (*declared.names("Choice"), *declared.names("PythonOnly", "dtype"), "backend")
FLAGS = (*declared.names("Boolean"), *declared.names("PythonOnly", "bool"))
OPTIONAL = (
    "attn_sink", "topk_length", "q_positions", "q_start", "k_start", "k_end", "pos_bias_u", "pos_bias_v", "bias", "r",
    "alibi_slopes", "window", "out", "max_logits", "lse", "dq", "dkv", "attn", "global_scale", "backend",
    "row_weights", "q_scale", "k_scale", "position_bias", "cu_seqlens", "cu_compressed", "d_kv", "d_gate",
    "window_kv", "w_start", "w_end", "d_window_kv", "k_rope", "positions", "cos_sin", "rope_offset", "kv_scale",
    "block_tables", "extra_topk_length", "rope_cache", "scores", "lengths",
)  # fmt: skip
FREE_STRIDES = (
    "lse", "max_logits", "attn_sink", "topk_length", "q_positions", "k_start", "k_end", "context_lens", "alibi_slopes",
    "row_weights", "k_scale", "cu_seqlens", "cu_compressed", "w_start", "w_end", "slots", "positions",
    "extra_topk_length", "lengths",
)  # fmt: skip
INTS_OF_ANY_WIDTH = ("slots", "positions")
_ALSO_FREE = {"nvfp4_gemv": ("out",), "nvfp4_linear": ("bias",), "nvfp4_matmul": ("bias",)}
NO_STRINGS = ("", "nonsense", "CPU", "\ud800", "cpu\0x", "plain\0", "float32\0", b"cpu", 3, ("nhd",), object())
NO_INTEGERS = (1.5, "one", [1], 2**63, -(2**70), 10**400, b"1", 1j, np.float64(2.0))
NO_REALS = (np.nan, np.inf, -np.inf, 1e300, -1e39, "one", [1.0], b"1", 1j, 10**400, object(), np.zeros(2))
NEVER_TAKEN = (
    "float64",
    "int64",
    "int16",
    "bool",
    "complex64",
    "object",
    "S4",
    "U2",
    "datetime64[s]",
    ">f4",
    ">i4",
    "V3",
)


class Broken:
    """Claims to be an array, and is none."""

    def __init__(self, shape: Any = (2, 2)) -> None:
        self.shape, self.dtype = shape, np.dtype(np.float32)

    def __dlpack__(self, **_: Any) -> Any:
        raise RuntimeError("no memory to show")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class BrokenCapsule(Broken):
    """Exports something that is no capsule."""

    def __dlpack__(self, **_: Any) -> Any:
        return "capsule"


class NoTruth:
    """Neither true nor false."""

    def __bool__(self) -> bool:
        raise RuntimeError("who knows")


def _no_arrays() -> tuple[Any, ...]:
    return (
        "array", 7, 1.5, [1.0, 2.0], {}, object(), b"bytes", np.float32, np.ndarray, torch.Tensor, np.array(["a"]),
        np.zeros((1,) * 9, np.float32), torch.zeros(2, 2, device="meta"), torch.eye(2).to_sparse(),
        torch.zeros(2, 2, dtype=torch.complex64),
        torch.zeros((1,) * 9), Broken(), Broken((-1, -1)), Broken((-1, 1, 1)), Broken((2**62, 2, 2)), Broken("shape"),
        BrokenCapsule(), memoryview(b"ab"),
        torch.quantize_per_tensor(torch.zeros(2, 2), 1.0, 0, torch.quint8),
    )  # fmt: skip


@dataclass
class WrongCall:
    call: FuzzedCall
    what: str
    blamed: tuple[str, ...]  # the error is about one of these
    explained: bool  # whether `hopwell.explain` is asked, which raises the same

    def __repr__(self) -> str:
        return f"{'explain: ' if self.explained else ''}{self.what} in {self.call}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


class Wrong:
    """Draws what is wrong; `None` where the drawn thing does not go with the call."""

    def __init__(self, draw: st.DrawFn, call: FuzzedCall) -> None:
        self.draw, self.call, self.arguments = draw, call, call.arguments
        self.arrays = [name for name, value in call.arguments.items() if isinstance(value, np.ndarray)]

    def pick(self, options: Any) -> Any:
        options = list(options)
        return options[self.draw(st.integers(0, len(options) - 1))] if options else None

    def put(self, name: str, value: Any, *others: str) -> tuple[str, ...]:
        self.arguments[name] = value
        return (name, *others)

    def no_array(self) -> tuple[str, ...] | None:
        name = self.pick(self.arrays)
        value = self.pick(_no_arrays())
        number_too = name in GLOBALS and isinstance(value, int | float)
        # A shape that is a lie may size the results, and be blamed on the array that they are like.
        return None if number_too else self.put(name, value, *(self.arrays if isinstance(value, Broken) else ()))

    def nothing(self) -> tuple[str, ...] | None:
        needed = [name for name in self.arrays if name not in OPTIONAL]
        needed = [name for name in needed if name != "indices" or self.call.operator.startswith("lightning")]
        if self.call.operator in ("sparse_mla_backward", "attention_distribution", "indexer_dense_loss"):
            needed += [name for name in ("out", "lse") if name in self.call.inputs]
        if self.call.operator == "normalize_l1":
            needed += ["attn"]
        name = self.pick(needed)
        return self.put(name, None, *(("target",) if name == "d_scores" else ()))  # one of the two must be there

    def alone(self) -> tuple[str, ...] | None:
        """One of two arguments that belong together, without the other."""
        pairs: tuple[tuple[str, ...], ...] = (
            ("k_start", "k_end"),
            ("cu_seqlens", "cu_compressed"),
            ("w_start", "w_end"),
            ("positions", "cos_sin"),
            ("window_kv", "window", "d_window_kv"),  # the last one may be given, too
        )
        name = self.pick([name for pair in pairs for name in pair[:2] if name in self.arrays])
        return None if name is None else self.put(name, None, *next(pair for pair in pairs if name in pair))

    def dtype(self) -> tuple[str, ...] | None:
        name = self.pick(self.arrays)
        dtype = np.dtype(self.pick(NEVER_TAKEN))
        if name in INTS_OF_ANY_WIDTH and dtype == np.int64:
            return None
        return self.put(name, np.zeros(self.arguments[name].shape, dtype))

    def rank(self) -> tuple[str, ...] | None:
        name = self.pick([name for name in self.arrays if name not in GLOBALS and not self._blocked(name)])
        if name is None:
            return None
        value = self.arguments[name]
        return self.put(name, np.zeros((1, 1, 1, *value.shape) if self.pick((0, 1)) else (), value.dtype), *self.arrays)

    def size(self) -> tuple[str, ...] | None:
        dims = dimensions(self.call)
        count: dict[str, int] = {}
        for names in dims.values():
            for name in set(names):
                count[name] = count.get(name, 0) + 1
        bound = [
            (argument, axis)
            for argument, names in dims.items()
            for axis, name in enumerate(names)
            if name.endswith("!") or (count[name] > 1 and name)
        ]
        chosen = self.pick(bound)
        if chosen is None:
            return None
        name, axis = chosen
        value = self.arguments[name]
        shape = list(value.shape)
        shape[axis] += 1 if shape[axis] == 0 else self.pick((1, -1))
        return self.put(name, np.zeros(shape, value.dtype), *self.arrays)

    def gaps(self) -> tuple[str, ...] | None:
        free = FREE_STRIDES + _ALSO_FREE.get(self.call.operator, ())
        last = 1 if self.call.operator == "nvfp4_gemv" else -1  # K is second there
        able = [name for name in self.arrays if name not in free and not self._blocked(name)]
        able = [name for name in able if (value := self.arguments[name]).size and value.ndim and value.shape[last] > 1]
        name = self.pick(able)
        if name is None:
            return None
        value = self.arguments[name]
        moved = np.moveaxis(value, last, -1)
        wide = np.zeros((*moved.shape, 2), value.dtype)[..., 0]
        return self.put(name, np.moveaxis(wide, -1, last))

    def crooked(self) -> tuple[str, ...] | None:
        """Not aligned to its elements."""
        able = [name for name in self.arrays if self.arguments[name].size and self.arguments[name].itemsize > 1]
        name = self.pick(able)
        if name is None:
            return None
        value = self.arguments[name]
        memory = np.zeros(value.nbytes + 1, np.uint8)
        return self.put(name, np.ndarray(value.shape, value.dtype, memory, 1))

    def integer(self) -> tuple[str, ...] | None:
        name = self.pick([name for name in INTEGERS if name in self.arguments])
        if name is None:
            return None
        value = self.pick((*INTEGERS[name], *NO_INTEGERS, *(() if name in OPTIONAL else (None,))))
        empty = name == "topk" and len(self.arguments["q_index"]) == 0
        return None if empty and isinstance(value, int) and value > 0 else self.put(name, value)

    def real(self) -> tuple[str, ...] | None:
        names = [name for name in self.arguments if name in REALS or (name in GLOBALS and name not in self.arrays)]
        name = self.pick(names)
        if name is None:
            return None
        more: tuple[Any, ...] = () if name in OPTIONAL else (None,)
        if self.call.operator == "nvfp4_quantize":
            more = (0.0, -0.0, -1.0, 1e-60)
        return self.put(name, self.pick((*NO_REALS, *more)))

    def choice(self) -> tuple[str, ...] | None:
        name = self.pick([name for name in CHOICES if name in self.arguments])
        if name is None:
            return None
        may_be_none = name in OPTIONAL or self.call.operator == "kv_compress"
        return self.put(name, self.pick((*NO_STRINGS, *(() if may_be_none else (None,)))))

    def flag(self) -> tuple[str, ...] | None:
        name = self.pick([name for name in FLAGS if name in self.arguments])
        return None if name is None else self.put(name, self.pick((NoTruth(), np.zeros(2), torch.zeros(2))))

    def read_only(self) -> tuple[str, ...] | None:
        name = self.pick(self.call.outputs)
        if name is None:
            return None
        value = self.arguments[name].view()
        value.flags.writeable = False
        return self.put(name, value)

    def overlapping_itself(self) -> tuple[str, ...] | None:
        names = [
            name
            for name in self.call.outputs
            if self.arguments[name].size and max(self.arguments[name].shape[:-1], default=0) > 1
        ]
        name = self.pick(names)
        if name is None:
            return None
        value = self.arguments[name]
        strides = list(value.strides)
        strides[int(np.argmax(value.shape[:-1]))] = 0
        return self.put(name, np.lib.stride_tricks.as_strided(value, strides=strides))

    def on_top_of_another(self) -> tuple[str, ...] | None:
        """An output that shares memory with an input, or with another output."""
        name = self.pick([name for name in self.call.outputs if self.arguments[name].size])
        if name is None:
            return None
        wanted = self.arguments[name]
        under = self.pick([other for other in self.arrays if other != name and self.arguments[other].size])
        if under is None:
            return None
        needed = wanted.nbytes
        address = self.arguments[under].ctypes.data
        block = next(b for b in self.call.memory.blocks if 0 <= address - b.bytes.ctypes.data < max(len(b.bytes), 1))
        offset = address - block.bytes.ctypes.data
        offset = min(offset, len(block.bytes) - needed) // wanted.itemsize * wanted.itemsize
        if offset < 0 or (block.bytes.ctypes.data + offset) % wanted.itemsize:
            return None
        value = np.ndarray(wanted.shape, wanted.dtype, block.bytes, offset)
        if self.call.operator == "normalize_l1" and value.ctypes.data == address:
            return None  # in place
        return self.put(name, value, under) if np.shares_memory(value, self.arguments[under]) else None

    def vast(self) -> tuple[str, ...] | None:
        """A first dimension that costs no memory, for its stride is 0; the results would not fit anywhere."""
        able = {"q", "x", "a", "q_index", "codes", "d_out", "attn"}
        if self.call.operator == "kv_compress_backward":
            able.remove("d_out")  # its results do not have its size
        name = self.pick([name for name in self.arrays if name in able and self.arguments[name].size])
        if name is None or self.call.outputs or any(self.arguments[name].size == 0 for name in self.arrays):
            return None  # results without elements fit
        value = self.arguments[name]
        return self.put(name, np.broadcast_to(value[:1], (2**48, *value.shape[1:])), *self.arrays)

    def _blocked(self, name: str) -> bool:
        return name in ("sfa", "sfb", "weight_scale", "scales") and self.arguments.get("scale_layout") == "blocked"


KINDS: tuple[Callable[[Wrong], tuple[str, ...] | None], ...] = (
    Wrong.no_array, Wrong.nothing, Wrong.alone, Wrong.dtype, Wrong.rank, Wrong.size, Wrong.gaps, Wrong.crooked,
    Wrong.integer, Wrong.real, Wrong.choice, Wrong.flag, Wrong.read_only, Wrong.overlapping_itself,
    Wrong.on_top_of_another, Wrong.vast,
)  # fmt: skip


def dimensions(call: FuzzedCall) -> dict[str, tuple[str, ...]]:
    """The dimensions' names of each array that is there."""
    a = call.arguments
    names = OPERATORS[call.operator].dimensions_of(a)
    blocked = a.get("scale_layout") == "blocked"
    return {
        name: tuple(dims.split(" "))
        for name, dims in names.items()
        if isinstance(a.get(name), np.ndarray) and not (blocked and name in ("sfa", "sfb", "weight_scale", "scales"))
    }


@st.composite
def wrong_call(draw: st.DrawFn, operator: str) -> WrongCall | None:
    call = draw(OPERATORS[operator].right())
    kind = KINDS[draw(st.integers(0, len(KINDS) - 1))]
    blamed = kind(Wrong(draw, call))
    explained = draw(st.integers(0, 7)) == 7 and "backend" not in call.arguments
    return None if blamed is None else WrongCall(call, f"{kind.__name__} {blamed[0]}", blamed, explained)
