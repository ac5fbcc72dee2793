"""How much attention each selected key gets."""

from typing import Any

import hopwell
import hopwell.torch
import numpy as np
import torch
from calls import Call, Rng, normal
from fuzz.arguments import sinks
from fuzz.bounds import LARGE, SMALL, Expected, finite, unless
from fuzz.call import FuzzedCall, given
from fuzz.draw import Maker
from hopwell import reference
from hypothesis import strategies as st
from torch_inputs import sparse_inputs

from ._operator import Operator
from .sparse_mla import (
    SPARSE_DIMENSIONS,
    distribution_slack,
    drawn_sparse,
    drawn_window,
    rows_of,
    sparse_arguments,
    topk_of,
    window_arguments,
)


def call(rng: Rng, dtype: str) -> Call:
    arguments = sparse_arguments(rng, dtype)
    _, _, lse = reference.sparse_mla_forward(**arguments, **window_arguments(rng, dtype), d_v=1)
    arguments |= {"lse": lse.astype(np.float32), "normalize": "l1", "attn_sink": normal(rng, (3,), "float32")}
    return Call("attention_distribution", arguments, (2e-3,), ("out",))


@st.composite
def right(draw: st.DrawFn) -> FuzzedCall:
    maker = Maker(draw)
    dtype, arguments = drawn_sparse(maker)
    s_q, h_q, _ = arguments["q"].shape
    if maker.chance(4):
        arguments["lse"] = maker.floats((s_q, h_q), "float32", rows=False)
    else:
        with np.errstate(all="ignore"):
            window = drawn_window(maker, arguments, dtype)  # the target of a joint softmax
            _, _, lse = reference.sparse_mla_forward(**arguments, **window, d_v=1)
            arguments["lse"] = maker.values(lse.astype(np.float32), rows=False)
    if maker.chance():
        arguments["attn_sink"] = sinks(maker, h_q)
    if maker.chance():
        arguments["normalize"] = maker.choose("none", "l1")
    if maker.chance():
        arguments["indices_ascending"] = maker.chance()
    results = {"out": ((s_q, topk_of(arguments)), np.float32, True)}
    return given(maker, "attention_distribution", arguments, results)


def expected(a: dict[str, Any]) -> list[Expected]:
    value = reference.attention_distribution(**a)
    plain = (
        value if a.get("normalize", "none") == "none" else reference.attention_distribution(**a | {"normalize": "none"})
    )
    slack = np.zeros(value.shape)
    for s, row in rows_of(a, "attention_distribution"):
        slack[s, row.entries] = distribution_slack(row, a["lse"][s], a.get("attn_sink"))
    if plain is not value:
        total = finite(plain.sum(axis=1, keepdims=True))
        off = slack.sum(axis=1, keepdims=True)
        slack = slack / total + finite(value) * off / total
        slack = unless((total > LARGE) | (plain.sum(axis=1, keepdims=True) != total) | (off > 0.1 * total), slack)
        slack = np.where((plain == 0).all(axis=1, keepdims=True) & (off < SMALL), 0.0, slack)
    return [Expected("attn", value, 2e-3, slack)]


def samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    inputs = sparse_inputs(dtype)
    q, kv = (inputs[name].requires_grad_() for name in ("q", "kv"))
    _, _, lse = hopwell.sparse_mla_forward(q.detach(), kv.detach(), inputs["indices"], 0.5, 12)
    ranges = {"k_start": torch.arange(9, dtype=torch.int32), "k_end": torch.full((9,), 15, dtype=torch.int32)}
    return {"": (q, kv, inputs["indices"], lse, 0.5, ranges)}


OPERATOR = Operator(
    name="attention_distribution",
    call=call,
    right=right,
    expected=expected,
    dimensions=SPARSE_DIMENSIONS | {"lse": "s_q h_q", "out": "s_q topk"},
    samples=samples,
    free={("kv", 0), ("indices", 2)},
    choices={"normalize": "none"},
    messages=[
        ({"attn_sink": np.zeros(4, np.float32)}, "attn_sink must be float32 [h_q=3]; got"),
        ({"normalize": "l2"}, "normalize must be 'none' or 'l1'; got 'l2'"),
        ({"k_start": None}, "k_start and k_end must both be given, or neither; got k_end alone"),
        ({"k_end": None}, "k_start and k_end must both be given, or neither; got k_start alone"),
        ({"indices": None}, "topk_length needs indices; without them every visible"),
    ],
)
