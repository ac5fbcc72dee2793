"""Rows divided by their sums."""

from typing import Any

import numpy as np
import torch
from calls import Call, Rng
from fuzz.bounds import Expected
from fuzz.call import FuzzedCall, given
from fuzz.draw import Maker
from hopwell import reference
from hypothesis import strategies as st

from ._operator import Operator


def call(rng: Rng, dtype: str) -> Call:
    attn = rng.random((5, 33)) * (np.arange(5) != 2)[:, None]
    return Call("normalize_l1", {"attn": attn.astype(np.float32)}, (1e-6,), ("out",))


@st.composite
def right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    shape = maker.size(0, 70), maker.size(0, 300)
    rows = maker.rng.random(shape) * (maker.rng.random((shape[0], 1)) < 0.7)
    arguments = {"attn": maker.values(rows.astype(np.float32))}
    return given(maker, "normalize_l1", arguments, {"out": (shape, np.float32, True)})


def expected(a: dict[str, Any]) -> list[Expected]:
    return [Expected("out", reference.normalize_l1(**a), 1e-6, 1e-7)]


def samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    return {"": (torch.rand(3, 5),)} if dtype == torch.float32 else {}


OPERATOR = Operator(
    name="normalize_l1",
    call=call,
    right=right,
    expected=expected,
    dimensions={"attn": "rows columns", "out": "rows columns"},
    samples=samples,
    free={("attn", 0), ("attn", 1)},
)
