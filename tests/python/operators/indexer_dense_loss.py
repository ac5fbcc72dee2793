"""The indexer's loss over every visible key."""

from typing import Any

import numpy as np
import torch
from calls import DTYPES, Call, Rng, bound_of, normal
from fuzz.arguments import causality, key_ranges, sinks
from fuzz.bounds import BOUNDS, Expected
from fuzz.call import FuzzedCall, fit, given
from fuzz.draw import Maker
from hopwell import reference
from hypothesis import strategies as st
from torch_inputs import dense_loss_inputs

from ._operator import Operator
from .lightning_indexer import INDEXER_DIMENSIONS
from .sparse_mla import sparse_arguments


def call(rng: Rng, dtype: str) -> Call:
    arguments = sparse_arguments(rng, dtype) | {"indices": None}
    del arguments["topk_length"]
    _, _, lse = reference.sparse_mla_forward(**arguments, d_v=1)
    del arguments["indices"]
    arguments |= {
        "lse": lse.astype(np.float32),
        "q_index": rng.integers(-3, 4, (5, 3, 16)).astype(DTYPES[dtype]),  # whose products have a certain sign
        "k_index": rng.integers(-3, 4, (90, 16)).astype(DTYPES[dtype]),
        "weights": normal(rng, (5, 3), "float32", 0.1),
        "row_weights": rng.uniform(0.5, 2, 5).astype(np.float32),
        "d_loss": 0.5,
        "attn_sink": normal(rng, (3,), "float32"),
        "normalize": "l1",
    }
    return Call("indexer_dense_loss", arguments, (1e-4, bound_of(dtype), 1e-4, 1e-4))


@st.composite
def right(draw: st.DrawFn) -> FuzzedCall:
    """Of usual numbers, and of index vectors whose products have a certain sign: shapes, masks and memory matter."""
    maker = Maker(draw)
    dtype = maker.choose("float32", "bfloat16")
    s_q, s_kv, h_q, h_index = maker.size(0, 40), maker.size(0, 130), maker.size(1, 9), maker.size(1, 9)
    d_qk, d_index = maker.size(1, 70), maker.size(1, 40)
    if maker.for_kernels:
        dtype, d_qk, d_index = "bfloat16", maker.choose(512, 576), maker.choose(64, 128)
    s_q, s_kv, h_q, d_qk = fit([s_q, s_kv, h_q, d_qk])

    def normal(*shape: int) -> Any:
        return maker.values(maker.rng.standard_normal(shape).astype(DTYPES[dtype]))

    def whole(*shape: int) -> Any:
        return maker.values(maker.rng.integers(-2, 3, shape).astype(DTYPES[dtype]))

    masks = causality(maker, s_q, s_kv) | key_ranges(maker, s_q, s_kv)
    arguments: dict[str, Any] = {
        "q": normal(s_q, h_q, d_qk),
        "kv": normal(s_kv, d_qk) if maker.chance() else normal(s_kv, 1, d_qk),
        "sm_scale": 0.25,
    } | masks
    _, _, lse = reference.sparse_mla_forward(**arguments, indices=None, d_v=1)
    weights = 0.1 * maker.rng.standard_normal((s_q, h_index))
    arguments |= {
        "lse": maker.values(lse.astype(np.float32), rows=False),
        "q_index": whole(s_q, h_index, d_index),
        "k_index": whole(s_kv, d_index),
        "weights": maker.values(weights.astype(DTYPES[maker.choose("float32", "bfloat16")])),
    }
    if maker.chance():
        arguments["attn_sink"] = sinks(maker, h_q)
    if maker.chance():
        arguments["normalize"] = maker.choose("heads", "l1")
    if maker.chance():
        arguments["d_loss"] = maker.choose(0.5, -1.0, 0.0)
    if maker.chance(3):
        arguments["row_weights"] = maker.values(maker.rng.integers(0, 3, s_q).astype(np.float32), rows=False)
    for name in ("relu", "deterministic"):
        if maker.chance(3):
            arguments[name] = maker.chance()
    return given(maker, "indexer_dense_loss", arguments, {})


def expected(a: dict[str, Any]) -> list[Expected]:
    names, dtypes = ("loss", "d_q_index", "d_k_index", "d_weights"), ("float32", str(a["q_index"].dtype), "float32")
    values = reference.indexer_dense_loss(**a)
    # softmax and target are each of size 1 and may cancel; a query adds its errors to what each key gets
    products = 4.0 * a["q_index"].shape[2] * (1 + len(a["q_index"]))
    return [
        Expected(name, value, BOUNDS[dtype], 4e-6 * products, elementwise=name == "loss")
        for name, value, dtype in zip(names, values, (*dtypes, str(a["weights"].dtype)), strict=True)
    ]


def samples(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    dense = dense_loss_inputs(dtype)
    return {"": (*dense[:3], *(x.requires_grad_() for x in dense[3:6]), dense[6])}


OPERATOR = Operator(
    name="indexer_dense_loss",
    call=call,
    right=right,
    expected=expected,
    dimensions=INDEXER_DIMENSIONS | {"q": "s_q h_q d_qk", "lse": "s_q h_q", "attn_sink": "h_q"},
    samples=samples,
    results=("loss", "d_q_index", "d_k_index", "d_weights"),
    messages=[
        ({"attn_sink": np.zeros(4, np.float32)}, "attn_sink must be float32 [h_q=3]; got"),
        ({"normalize": "none"}, "normalize must be 'heads' or 'l1'; got 'none'"),
        ({"k_end": None}, "k_start and k_end must both be given, or neither; got k_start alone"),
        ({"q_start": 0}, "q_positions and q_start exclude each other"),
    ],
)
