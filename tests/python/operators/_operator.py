"""The description of an operator, from which tests of all operators take calls and expected results."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from calls import Call, Rng
from fuzz.bounds import Expected
from fuzz.call import FuzzedCall
from hypothesis import strategies as st

Arguments = dict[str, Any]


@dataclass(kw_only=True)
class Operator:
    """An operator's right calls, wrong calls and results."""

    name: str
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    call: Callable[[Rng, str], Call]  # on random data of a dtype
    samples: Callable[[torch.dtype], dict[str, tuple[Any, ...]]]  # for opcheck; options are a dict; the first is ""

    # The fuzzer's calls, and what `hopwell.reference` expects of the results.
    right: Callable[[], st.SearchStrategy[FuzzedCall]]
    expected: Callable[[Arguments], list[Expected]] | None = None
    reads_outputs: bool = False  # the reference takes the arrays that are written, too
    # Judges the results on a backend, in place of `expected`, if several results are right.
    check: Callable[[Arguments, str, tuple[Any, ...]], None] | None = None
    results: tuple[str, ...] = ()  # names of the results, where it matters which one is which
    omits: bool = False  # results may be None; these are not judged
    also_written: tuple[str, ...] = ()  # arguments that are written if they are given, and not returned
    must_be_given: tuple[str, ...] = ()  # arguments that a call must have, and writes

    # Names of each array's dimensions. A name that ends in ! has one right size; one that occurs in several arrays has
    # the same size in all; "" may be several. `dimensions_of` knows kv, window keys and indices of
    # sparse attention.
    dimensions: dict[str, str] | Callable[[Arguments], dict[str, str]]
    free: set[tuple[str, int]] = field(default_factory=set)  # argument and axis of `call` that may have any size
    choices: dict[str, str] = field(default_factory=dict)  # arguments that choose, and something they may be
    messages: list[tuple[Arguments, str]] = field(default_factory=list)  # changes of `call`, and how the error begins
    fake_messages: list[tuple[Arguments, str]] = field(default_factory=list)  # the same of fake kernels

    def dimensions_of(self, arguments: Arguments) -> dict[str, str]:
        """The dimensions' names of the arrays of a call."""
        names = dict.fromkeys(("kv", "dkv"), "s_kv d_qk") | dict.fromkeys(("window_kv", "d_window_kv"), "s_w d_qk")
        names["indices"] = "s_q topk"
        for name in names:
            if isinstance(array := arguments.get(name), np.ndarray) and array.ndim == 3:
                names[name] = names[name].replace(" ", " 1! ")  # with a dimension h_kv
        return names | (self.dimensions(arguments) if callable(self.dimensions) else self.dimensions)
