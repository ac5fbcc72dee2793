"""Properties over shapes, strides and index patterns that hypothesis generates."""

from typing import Any

import hopwell
import numpy as np
from calls import DTYPES, Call, assert_results
from hopwell import reference
from hypothesis import given, settings
from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(["float32", "bfloat16"])
sizes = st.integers(1, 9)
settings.register_profile("operators", deadline=None, max_examples=60)
settings.load_profile("operators")


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Any:
    """Random numbers with any order of dimensions, gaps and negative strides; the last dimension is contiguous."""
    lead = draw(st.permutations(range(len(shape) - 1)))
    steps = [draw(st.sampled_from([1, 2, -1])) for _ in lead]
    memory = rng.standard_normal([*(shape[i] * 2 for i in lead), shape[-1] + draw(st.integers(0, 3))])
    view = memory.astype(DTYPES[dtype])[..., : shape[-1]]
    view = view[tuple(slice(None, None, step) for step in steps)]
    view = view[tuple(slice(0, shape[i]) for i in lead)]
    return view.transpose([*(list(lead).index(i) for i in range(len(lead))), len(shape) - 1])


@st.composite
def selections(draw: st.DrawFn, s_q: int, s_kv: int, topk: int) -> Any:
    """Index rows: arbitrary, a few keys repeated, ascending with −1 at the end, or without a valid entry."""
    extremes = st.sampled_from([-(2**31), -1, s_kv, s_kv + 1, 2**31 - 1])
    valid = st.integers(0, max(s_kv - 1, 0)) if s_kv else extremes
    row = st.one_of(
        st.lists(st.one_of(valid, extremes), min_size=topk, max_size=topk),
        st.lists(valid, min_size=1, max_size=2).map(lambda few: (few * topk)[:topk]),
        st.lists(valid, max_size=topk).map(lambda keys: (sorted(set(keys)) + [-1] * topk)[:topk]),
        st.lists(extremes, min_size=topk, max_size=topk),
    )
    return np.array([draw(row) for _ in range(s_q)], np.int32).reshape(s_q, topk)


@st.composite
def sparse_problems(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    rng, dtype = np.random.default_rng(draw(seeds)), draw(dtypes)
    s_q, s_kv, h_q, topk = draw(st.integers(0, 6)), draw(st.integers(0, 20)), draw(sizes), draw(st.integers(0, 20))
    d_qk = draw(st.integers(1, 20))
    arguments: dict[str, Any] = {
        "q": draw(strided((s_q, h_q, d_qk), dtype, rng)),
        "kv": draw(strided((s_kv, d_qk), dtype, rng)),
        "indices": draw(selections(s_q, s_kv, topk)),
        "sm_scale": draw(st.sampled_from([0.5, -0.25, 0.0, 3.0])),
        "kv_stride": draw(st.integers(1, 5)),
    }
    if draw(st.booleans()):
        arguments["topk_length"] = np.array([draw(st.integers(-2, topk + 2)) for _ in range(s_q)], np.int32)
    masking = draw(st.sampled_from(["none", "start", "positions"]))
    if masking == "start":
        arguments["q_start"] = draw(st.integers(-3, 40))
    if masking == "positions":
        arguments["q_positions"] = np.array([draw(st.integers(-3, 60)) for _ in range(s_q)], np.int32)
    if draw(st.booleans()):
        bounds = st.one_of(st.integers(-3, s_kv + 3), st.sampled_from([-(2**31), 2**31 - 1]))
        for name in ("k_start", "k_end"):
            arguments[name] = np.array([draw(bounds) for _ in range(s_q)], np.int32)
    return dtype, arguments


def bound(dtype: str) -> float:
    return 1e-4 if dtype == "float32" else 4e-3


@given(sparse_problems(), st.data())
def test_sparse_mla_forward(problem: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
    dtype, arguments = problem
    arguments["d_v"] = data.draw(st.integers(1, arguments["q"].shape[2]))
    if data.draw(st.booleans()):
        sinks = st.sampled_from([0.0, 1.5, np.inf, -np.inf, 1e38, -1e38])
        arguments["attn_sink"] = np.array([data.draw(sinks) for _ in range(arguments["q"].shape[1])], np.float32)
    call = Call("sparse_mla_forward", arguments, (bound(dtype), 1e-5, 1e-5))
    assert_results(call, hopwell.sparse_mla_forward(**arguments), reference.sparse_mla_forward(**arguments))


@given(sparse_problems(), seeds)
def test_sparse_mla_backward(problem: tuple[str, dict[str, Any]], seed: int) -> None:
    dtype, arguments = problem
    d_v = arguments["q"].shape[2]
    out, _, lse = reference.sparse_mla_forward(**arguments, d_v=d_v)
    arguments |= {
        "d_v": d_v,
        "out": out.astype(DTYPES[dtype]),
        "lse": lse.astype(np.float32),
        "d_out": np.random.default_rng(seed).standard_normal(out.shape).astype(DTYPES[dtype]),
    }
    dq, dkv, _ = hopwell.sparse_mla_backward(**arguments)
    dq_reference, dkv_reference, _ = reference.sparse_mla_backward(**arguments)
    for got, wanted in ((dq, dq_reference), (dkv, dkv_reference)):
        error = np.linalg.norm(got.astype(np.float64) - wanted)
        # Results may cancel (with one key, ds is only the rounding of out), so the size of the summands bounds the
        # error.
        size = np.linalg.norm(wanted) + np.abs(arguments["d_out"].astype(np.float64)).sum() * 0.05
        assert error <= bound(dtype) * size + 1e-6


@given(sparse_problems(), st.sampled_from(["none", "l1"]))
def test_attention_distribution(problem: tuple[str, dict[str, Any]], normalize: str) -> None:
    _, arguments = problem
    _, _, lse = reference.sparse_mla_forward(**arguments, d_v=1)
    arguments |= {"lse": lse.astype(np.float32), "normalize": normalize}
    call = Call("attention_distribution", arguments, (2e-3,))
    actual = hopwell.attention_distribution(**arguments)
    assert_results(call, actual, reference.attention_distribution(**arguments))
    if normalize == "l1":
        np.testing.assert_allclose(actual.sum(axis=1), np.where(actual.any(axis=1), 1, 0), atol=1e-5)


@given(seeds, dtypes, st.integers(0, 5), st.integers(0, 30), sizes, st.integers(1, 12), st.integers(0, 40), st.data())
def test_lightning_indexer(
    seed: int, dtype: str, s_q: int, s_kv: int, h: int, d: int, topk: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    q = np.round(data.draw(strided((s_q, h, d), "float32", rng)) * 2).astype(DTYPES[dtype])  # exact scores, many ties
    k = np.round(data.draw(strided((s_kv, d), "float32", rng)) * 2).astype(DTYPES[dtype])
    arguments = {"q_index": q, "k_index": k, "weights": rng.integers(-2, 3, (s_q, h)).astype(np.float32), "topk": topk}
    if data.draw(st.booleans()):
        arguments |= {"q_start": data.draw(st.integers(-3, 40)), "kv_stride": data.draw(st.integers(1, 5))}
    arguments["relu"] = data.draw(st.booleans())
    call = Call("lightning_indexer", arguments, (0, 0))
    indices, scores = hopwell.lightning_indexer(**arguments)
    assert_results(call, (indices, scores), reference.lightning_indexer(**arguments))
    for row in indices:
        taken = row[row >= 0]
        assert (np.diff(taken) > 0).all() and (row[len(taken) :] == -1).all()


@given(seeds, dtypes, st.integers(0, 5), st.integers(0, 20), sizes, st.integers(1, 12), st.integers(0, 20), st.data())
def test_lightning_indexer_backward(
    seed: int, dtype: str, s_q: int, s_kv: int, h: int, d: int, topk: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    q = (np.round(data.draw(strided((s_q, h, d), "float32", rng)) * 4) / 4).astype(DTYPES[dtype])  # exact q·k
    k = (np.round(data.draw(strided((s_kv, d), "float32", rng)) * 4) / 4).astype(DTYPES[dtype])
    target = rng.random((s_q, topk)) * (rng.random((s_q, topk)) < 0.7)
    target /= np.maximum(target.sum(axis=1, keepdims=True), 1e-9)
    arguments = {
        "target": target.astype(np.float32),
        "q_index": q,
        "k_index": k,
        "weights": rng.standard_normal((s_q, h)).astype(np.float32),
        "indices": data.draw(selections(s_q, s_kv, topk)),
        "d_loss": data.draw(st.sampled_from([1.0, -0.5, 0.0])),
    }
    if data.draw(st.booleans()):
        arguments |= {name: rng.integers(-2, s_kv + 3, s_q).astype(np.int32) for name in ("k_start", "k_end")}
    arguments["relu"] = data.draw(st.booleans())
    if data.draw(st.booleans()):
        arguments["row_weights"] = rng.integers(-1, 2, s_q).astype(np.float32)
    if data.draw(st.booleans()):
        arguments |= {"d_scores": rng.standard_normal((s_q, topk)).astype(np.float32), "target": None}
    losses, expected_losses = np.full((2, s_q), np.nan, np.float32)
    given = {} if arguments["target"] is None else {"row_loss": losses}
    loss, *gradients = hopwell.lightning_indexer_backward(**arguments, **given)
    expected_loss, *expected = reference.lightning_indexer_backward(**arguments, row_loss=expected_losses)
    if given:
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-4, atol=1e-5 * max(1, s_q))
    else:
        assert loss is None and expected_loss is None and not expected_losses.any()
    for got, wanted, limit in zip(gradients, expected, (bound(dtype), 1e-4, 1e-4), strict=True):
        error = np.linalg.norm(np.asarray(got, np.float64) - wanted)
        assert error <= limit * np.linalg.norm(wanted) + 1e-5


@given(seeds, st.integers(1, 5), st.integers(1, 6), st.sampled_from(["plain", "blocked"]), st.data())
def test_nvfp4_round_trip(seed: int, rows: int, groups: int, layout: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    x = data.draw(strided((rows, 16 * groups), "float32", rng))
    x *= 10.0 ** data.draw(st.integers(-20, 20))
    codes, scales, factor = hopwell.nvfp4_quantize(x, scale_layout=layout)
    for got, wanted in zip((codes, scales, factor), reference.nvfp4_quantize(x, scale_layout=layout), strict=True):
        np.testing.assert_array_equal(got, wanted)
    back = hopwell.nvfp4_dequantize(codes, scales, factor, scale_layout=layout)
    np.testing.assert_allclose(
        back, reference.nvfp4_dequantize(codes, scales, factor, scale_layout=layout), rtol=1e-6, atol=1e-40
    )
    again = hopwell.nvfp4_quantize(back, scale_layout=layout, global_scale=factor)
    np.testing.assert_allclose(hopwell.nvfp4_dequantize(*again, scale_layout=layout), back, rtol=1e-5, atol=1e-40)


@given(seeds, st.sampled_from(["float32", "float16", "bfloat16"]), st.integers(0, 20), st.integers(1, 40), st.data())
def test_nvfp4_linear(seed: int, dtype: str, n: int, rows: int, data: st.DataObject) -> None:
    rng, k = np.random.default_rng(seed), 16 * data.draw(st.integers(1, 8))
    arguments = {
        "x": data.draw(strided((n, k), dtype, rng)),
        "weight": rng.integers(0, 256, (rows, k // 2)).astype(np.uint8),
        "weight_scale": rng.integers(0x20, 0x50, (rows, k // 16)).astype(np.uint8),
        "weight_global": data.draw(st.sampled_from([0.01, 4.0])),
        "global_is_reciprocal": data.draw(st.booleans()),
    }
    call = Call("nvfp4_linear", arguments, ({"float32": 1e-4, "float16": 1e-3, "bfloat16": 4e-3}[dtype],))
    assert_results(call, hopwell.nvfp4_linear(**arguments), reference.nvfp4_linear(**arguments))


@given(seeds, st.sampled_from(["float32", "float16", "bfloat16"]), st.integers(1, 4), st.integers(1, 3), st.data())
def test_paged_attention(seed: int, dtype: str, b: int, q_len: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    h_kv, group, block, d = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), data.draw(sizes), 32
    pages, blocks = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 6))
    arguments: dict[str, Any] = {
        "q": data.draw(strided((b, q_len, h_kv * group, d), dtype, rng)),
        "k_cache": data.draw(strided((blocks, block, h_kv, d), dtype, rng)),
        "v_cache": data.draw(strided((blocks, block, h_kv, d), dtype, rng)),
        "block_tables": rng.integers(-1, blocks + 1, (b, pages)).astype(np.int32),
        "context_lens": rng.integers(-1, pages * block + 3, b).astype(np.int32),
        "scale": 0.2,
        "window": data.draw(st.one_of(st.none(), st.integers(1, 12))),
        "out_of_range": data.draw(st.sampled_from(["zero", "clamp", "-inf"])),
    }
    if data.draw(st.booleans()):
        arguments["bias"] = rng.standard_normal((b, h_kv * group, 7)).astype(np.float32)
        arguments["bias_kind"] = "distance"
        arguments["pre_scale"] = data.draw(st.booleans())
    limits = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 4e-3}
    call = Call("paged_attention", arguments, (limits[dtype], 1e-5))
    assert_results(call, hopwell.paged_attention(**arguments), reference.paged_attention(**arguments))
