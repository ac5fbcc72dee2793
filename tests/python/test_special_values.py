"""The library against `hopwell.reference` where numbers are empty, constant, infinite or NaN."""

import itertools
from typing import Any

import calls
import hopwell
import ml_dtypes
import numpy as np
import pytest
from calls import DTYPES, Call, assert_results, results
from hopwell import reference

Rng = np.random.Generator
INF, NAN = np.inf, np.nan


def assert_same_places(actual: Any, expected: Any, tolerance: float) -> None:
    """NaN and ±inf at the same places, and each element near."""
    for got, wanted in zip(results(actual), results(expected), strict=True):
        np.testing.assert_allclose(calls.as_numpy(got), wanted, rtol=tolerance, atol=tolerance)


def lse_bound(lse: Any, magnitude: float) -> Any:
    """The contract's bound for lse and max_logits on the CPU."""
    return 1e-6 * np.maximum(1, np.abs(lse)) + 2.0**-22 * magnitude


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("a", "b"), [(8, -8), (2.75, 3.25)])
def test_constant_rows_of_sparse_mla(dtype: str, a: float, b: float) -> None:
    s_q, h_q, d_qk, topk, scale = 2, 5, 576, 70, 192**-0.5
    q, kv = np.full((s_q, h_q, d_qk), a, DTYPES[dtype]), np.full((90, d_qk), b, DTYPES[dtype])
    indices = np.tile(np.arange(topk, dtype=np.int32), (s_q, 1))
    magnitude = abs(a * b) * d_qk * scale
    out, max_logits, lse = hopwell.sparse_mla_forward(q, kv, indices, scale)
    _, expected_max, expected_lse = reference.sparse_mla_forward(q, kv, indices, scale)
    assert np.all(np.abs(max_logits - expected_max) <= lse_bound(expected_max, magnitude))
    assert np.all(np.abs(lse - expected_lse) <= lse_bound(expected_lse, magnitude))
    np.testing.assert_allclose(out.astype(np.float64), np.full(out.shape, b), rtol=1e-6)

    given = expected_lse.astype(np.float32)
    call = Call("attention_distribution", {}, (2e-3,))
    attn = hopwell.attention_distribution(q, kv, indices, given, scale)
    assert_results(call, attn, reference.attention_distribution(q, kv, indices, given, scale))
    d_out = np.ones(out.shape, DTYPES[dtype])
    _, dkv, _ = hopwell.sparse_mla_backward(d_out, q, kv, indices, out, given, scale)
    _, expected, _ = reference.sparse_mla_backward(d_out, q, kv, indices, out, given, scale)
    assert_results(Call("sparse_mla_backward", {}, (2e-3,)), dkv, expected)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm"])
def test_constant_rows_of_paged_attention(layout: str) -> None:
    d, block, context = 32, 8, 1000
    shape = {"nhd": (3, block, 1, d), "hnd": (3, 1, block, d), "vllm": (3, 1, d // 4, block, 4)}[layout]
    k, v = np.full(shape, -8, np.float32), np.full((3, 1, d, block) if layout == "vllm" else shape, 0.1, np.float32)
    arguments = {
        "q": np.full((1, 1, d), 8, np.float32), "k_cache": k, "v_cache": v, "layout": layout, "scale": 192**-0.5,
        "block_tables": np.zeros((1, context // block), np.int32), "context_lens": np.array([context], np.int32),
    }  # fmt: skip
    (out, lse), (expected, expected_lse) = hopwell.paged_attention(**arguments), reference.paged_attention(**arguments)
    assert np.all(np.abs(lse - expected_lse) <= lse_bound(expected_lse, 64 * d * 192**-0.5))
    np.testing.assert_allclose(out, expected, rtol=1e-5)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("options", [{}, {"window": 6}, {"bias": 1}, {"scale": 300.0}])
def test_infinite_values_of_paged_attention(
    rng: Rng, layout: str, dtype: str, q_len: int, options: dict[str, Any]
) -> None:
    """Of every key in turn, for contexts that are no multiple of what is taken together; queries that do not see it."""
    d, block, blocks, h_q, h_kv = 32, 4, 6, 6, 2
    lengths = np.arange(1, 18, dtype=np.int32)
    q = rng.standard_normal((len(lengths), q_len, h_q, d)).astype(DTYPES[dtype])
    k, v = rng.standard_normal((2, blocks, block, h_kv, d)).astype(DTYPES[dtype])
    for page, slot in itertools.product(range(blocks), range(block)):
        v[page, slot, :, page * block + slot] = [INF, -INF, NAN][slot % 3]
        v[page, slot, 0, 24:28] = np.where(rng.random(4) < 0.2, INF, v[page, slot, 0, 24:28].astype(np.float64))
    if layout == "hnd":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    if layout == "vllm":
        x = 16 // k.itemsize
        k, v = k.reshape(blocks, block, h_kv, d // x, x).transpose(0, 2, 3, 1, 4), v.transpose(0, 2, 3, 1)
    if "bias" in options:
        bias = rng.standard_normal((1, h_q, q_len, 20)).astype(np.float32)
        options = {"bias": np.where(rng.random(bias.shape) < 0.3, np.float32(-INF), bias)}
    arguments = {
        "q": q, "k_cache": np.ascontiguousarray(k), "v_cache": np.ascontiguousarray(v), "context_lens": lengths,
        "block_tables": np.tile(np.arange(blocks, dtype=np.int32) % 5 + (lengths[:, None] > 9), 1), "scale": 0.2,
        "layout": layout, **options,
    }  # fmt: skip
    arguments["block_tables"][::4, 1] = blocks  # a page that there is not
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    actual, expected = hopwell.paged_attention(**arguments), reference.paged_attention(**arguments)
    assert np.isinf(expected[0]).any() and np.isnan(expected[0]).any() and np.isfinite(expected[0]).any()
    if "scale" in options:  # nearly all weight is on one key, or on two that rounding chooses between
        finite = np.isfinite(expected[0])
        np.testing.assert_array_equal(np.isfinite(calls.as_numpy(actual[0])), finite)
        np.testing.assert_array_equal(calls.as_numpy(actual[0])[~finite], expected[0][~finite])
    else:
        assert_same_places(actual, expected, tolerance)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("backend", hopwell.backends("lightning_indexer"))
def test_scores_of_zero_tie_whatever_their_sign(rng: Rng, backend: str, dtype: str) -> None:
    """Products of zeros of both signs, weights and scales of both signs: of scores 0 the smaller keys are taken."""
    s_kv, heads, d, topk = 600, 64, 128, 40
    signs = lambda *shape: rng.choice([-1.0, 1.0], shape)  # noqa: E731
    q, k, k_scale = np.zeros((1, heads, d)), rng.integers(-2, 3, (s_kv, d)).astype(float), signs(s_kv)
    q[0, :, 0], k[:, 0], weights = signs(heads), 0.0 * signs(s_kv), signs(1, heads)
    best = [100, 101, 102]
    k[best, 0], weights[q[:, :, 0] > 0], k_scale[best] = 3.0, 1.0, 1.0
    number = ml_dtypes.float8_e4m3fn if dtype == "float8_e4m3fn" else ml_dtypes.bfloat16
    scales = {"k_scale": k_scale.astype(np.float32)} if dtype == "float8_e4m3fn" else {}
    call = {"q_index": q.astype(number), "k_index": k.astype(number), "weights": weights.astype(np.float32)}
    indices, scores = hopwell.lightning_indexer(**call, topk=topk, **scales, backend=backend)
    assert indices[0].tolist() == [*range(topk - len(best)), *best]
    assert (scores[0, : -len(best)] == 0).all() and (scores[0, -len(best) :] > 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_gradients_of_the_indexer_pass_closed_gates(rng: Rng, dtype: str) -> None:
    s_q, s_kv, heads, d, topk = 6, 9, 5, 16, 7  # a topk that is no multiple of a vector
    q, k = rng.integers(-3, 4, (s_q, heads, d)), rng.integers(-3, 4, (s_kv, d))
    arguments = {
        "q_index": q.astype(DTYPES[dtype]), "k_index": k.astype(DTYPES[dtype]),
        "weights": rng.random((s_q, heads), np.float32),
        "indices": np.array([rng.permutation(s_kv - 1)[:topk] for _ in range(s_q)], np.int32),
        "target": np.full((s_q, topk), 1 / topk, np.float32),
    }  # fmt: skip
    call = Call("lightning_indexer_backward", arguments, (1e-4, calls.bound_of(dtype), 1e-4, 1e-4))
    arguments["target"][2, 3] = NAN
    actual, expected = (
        hopwell.lightning_indexer_backward(**arguments),
        reference.lightning_indexer_backward(**arguments),
    )
    assert np.isnan(expected[0]) and np.isnan(expected[1][2]).all() and np.isnan(expected[3][2]).all()
    assert np.isnan(expected[2][arguments["indices"][2, 3]]).all() and np.isfinite(expected[1][3]).all()
    assert_results(call, actual, expected)

    arguments["target"][2, 3] = 1 / topk
    arguments["q_index"][:, :, 0], arguments["k_index"][:, 0] = 1, 1
    arguments["q_index"][4, 2:, 0] = -INF  # gates that no key opens
    arguments["k_index"][3, 0] = -INF  # a key that opens none
    actual, expected = (
        hopwell.lightning_indexer_backward(**arguments),
        reference.lightning_indexer_backward(**arguments),
    )
    assert np.isnan(expected[2]).any() and np.isnan(expected[1]).any()
    assert_results(call, actual, expected)


ON_THE_HOST = [name for name in hopwell.backends("lightning_indexer_backward") if not name.startswith("sm")]


@pytest.mark.parametrize("backend", ON_THE_HOST)
@pytest.mark.parametrize("given", ["target", "d_scores"])
def test_gradients_of_the_indexer_beyond_fp32(rng: Rng, backend: str, given: str) -> None:
    """A gradient of a score that is no number of fp32 is NaN on every backend, and so are the sums that have it."""
    s_q, s_kv, heads, d, topk = 4, 9, 5, 16, 7
    given_values = rng.uniform(0.1, 0.5, (s_q, topk)).astype(np.float32)
    arguments = {
        "target": None, given: given_values, "q_index": rng.integers(1, 4, (s_q, heads, d)).astype(DTYPES["bfloat16"]),
        "k_index": rng.integers(1, 4, (s_kv, d)).astype(DTYPES["bfloat16"]),
        "weights": np.full((s_q, heads), 1e-6, np.float32),
        "indices": np.array([rng.permutation(s_kv)[:topk] for _ in range(s_q)], np.int32),
        "d_loss": 3e38, "row_weights": np.array([2, INF, 1e-38, 0], np.float32),
    }  # fmt: skip
    actual = hopwell.lightning_indexer_backward(**arguments, backend=backend)
    expected = reference.lightning_indexer_backward(**arguments)
    assert np.isnan(expected[1][:2]).all() and np.isfinite(expected[1][2:]).all()
    assert (actual[0] is None) == (given == "d_scores")
    bound = calls.bound_of("bfloat16")
    call = Call("lightning_indexer_backward", {}, (bound, 1e-4, 1e-4))
    assert_results(call, actual[1:], expected[1:])


@pytest.mark.parametrize("backend", ON_THE_HOST)
@pytest.mark.parametrize("target", [1e-41, -1e-41, -1.0])
def test_loss_of_the_smallest_targets(backend: str, target: float) -> None:
    """A negative target has no logarithm, however small it is."""
    arguments = {
        "target": np.array([[target, 1.0]], np.float32), "q_index": np.ones((1, 1, 16), DTYPES["bfloat16"]),
        "k_index": np.ones((2, 16), DTYPES["bfloat16"]), "weights": np.ones((1, 1), np.float32),
        "indices": np.array([[0, 1]], np.int32),
    }  # fmt: skip
    loss = hopwell.lightning_indexer_backward(**arguments, backend=backend)[0]
    with np.errstate(invalid="ignore"):
        expected = reference.lightning_indexer_backward(**arguments)[0]
    assert np.isnan(expected) == (target < 0)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def empty_calls() -> list[tuple[str, dict[str, Any]]]:
    """Calls with dimensions of size 0: names and arguments."""
    found: list[tuple[str, dict[str, Any]]] = []
    f32, bytes_of = np.float32, lambda *shape: np.zeros(shape, np.uint8)
    for rows, k, layout in itertools.product((0, 3), (0, 32), ("plain", "blocked")):
        codes = bytes_of(rows, k // 2)
        blocked = bytes_of(-(-rows // 128) * 128, -(-(k // 16) // 4) * 4)
        scales = blocked if layout == "blocked" else bytes_of(rows, k // 16)
        both = {"scale_layout": layout}
        found.append(("nvfp4_quantize", {"x": np.ones((rows, k), f32), **both}))
        found.append(("nvfp4_dequantize", {"codes": codes, "scales": scales, "global_scale": 1.0, **both}))
        for n in (0, 2):
            linear = {"x": np.ones((n, k), f32), "weight": codes, "weight_scale": scales, "weight_global": 1.0, **both}
            found.append(("nvfp4_linear", linear | {"bias": np.ones(rows, f32)}))
            del linear["x"]
            found.append(("nvfp4_linear_backward", {"d_out": np.ones((n, rows), f32), **linear}))
            rows_of_a = -(-n // 128) * 128 if layout == "blocked" else n
            both_codes = {"a": bytes_of(n, k // 2), "b": codes}
            sfa = bytes_of(rows_of_a, scales.shape[1])
            found.append(
                (
                    "nvfp4_matmul",
                    {
                        **both_codes,
                        "sfa": sfa,
                        "sfb": scales,
                        "bias": np.ones(rows, f32),
                        **both,
                        "out_dtype": "float32",
                    },
                )
            )
            if layout == "plain":
                gemv = {"a": (rows, k // 2), "b": (1, k // 2), "sfa": (rows, k // 16), "sfb": (1, k // 16)}
                found.append(
                    (
                        "nvfp4_gemv",
                        {name: np.zeros((n, *shape), np.uint8).transpose(1, 2, 0) for name, shape in gemv.items()},
                    )
                )
    for layout, b, pages, blocks, context in itertools.product(("nhd", "hnd", "vllm"), (0, 2), (0, 2), (0, 3), (0, 5)):
        shapes = {"nhd": (blocks, 8, 2, 32), "hnd": (blocks, 2, 8, 32), "vllm": (blocks, 2, 8, 8, 4)}
        paged = {
            "q": np.ones((b, 2, 4, 32), f32), "k_cache": np.ones(shapes[layout], f32),
            "v_cache": np.ones((blocks, 2, 32, 8) if layout == "vllm" else shapes[layout], f32),
            "block_tables": np.zeros((b, pages), np.int32), "context_lens": np.full(b, context, np.int32),
            "scale": 0.1, "layout": layout,
        }  # fmt: skip
        found.append(("paged_attention", paged))
        found.append(("paged_attention", paged | {"r": np.ones((1, 0, 32), f32)}))
        found.append(("paged_attention", paged | {"bias": np.ones((1, 4, 2, 0), f32), "out_of_range": "-inf"}))
    return found


@pytest.mark.parametrize(("operator", "arguments"), empty_calls())
def test_empty_work(operator: str, arguments: dict[str, Any]) -> None:
    actual, expected = getattr(hopwell, operator)(**arguments), getattr(reference, operator)(**arguments)
    for got, wanted in zip(results(actual), results(expected), strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(calls.as_numpy(got), calls.as_numpy(wanted), rtol=1e-6)


PAGED_BACKENDS = [name for name in ("cpu", "emu:sm80", "emu:sm90") if name in hopwell.backends("paged_attention")]


def _paged_call(layout: str, dtype: str, q: Any, keys: Any, values: Any) -> dict[str, Any]:
    """Of keys and values [blocks, block, h_kv, d]."""
    k, v = keys.astype(DTYPES[dtype]), values.astype(DTYPES[dtype])
    if layout == "vllm":
        x = 16 // k.itemsize
        k, v = k.reshape(*k.shape[:3], -1, x).transpose(0, 2, 3, 1, 4), v.transpose(0, 2, 3, 1)
    return {
        "q": q.astype(DTYPES[dtype]), "k_cache": np.ascontiguousarray(k), "v_cache": np.ascontiguousarray(v),
        "block_tables": np.array([[0, 1], [1, 0]], np.int32), "context_lens": np.array([20, 9], np.int32),
        "layout": layout, "scale": 1.0,
    }  # fmt: skip


@pytest.mark.usefixtures("numbers_only")
@pytest.mark.parametrize("backend", PAGED_BACKENDS)
@pytest.mark.parametrize(
    ("layout", "dtype", "h_q"),
    [("nhd", "float32", 2), ("nhd", "bfloat16", 4), ("vllm", "bfloat16", 2), ("vllm", "float32", 4)],
)
@pytest.mark.parametrize("bias", ["none", "u", "r before the scale", "r after it"])
def test_paged_attention_where_q_times_the_scale_is_infinite(
    rng: Rng, backend: str, layout: str, dtype: str, h_q: int, bias: str
) -> None:
    """In fp32; the logits are small numbers, since the keys are."""
    shape, d = (2, 16, 2, 64), 64
    q, keys = np.zeros((2, h_q, d)), np.zeros(shape)
    q[..., 3], keys[..., 3] = 2.0**106, 2.0**-126 * rng.uniform(1, 2, shape[:-1])
    arguments = _paged_call(layout, dtype, q, keys, rng.standard_normal(shape)) | {"scale": 2.0**22}
    if bias == "u":
        arguments["pos_bias_u"] = np.zeros((h_q, d), np.float32)
    if bias.startswith("r"):
        before = bias == "r before the scale"
        r = np.zeros((h_q, 20, d))
        r[..., 3] = 2.0 ** (-126 if before else -106) * rng.uniform(1, 2, r.shape[:-1])
        arguments |= {"r": r.astype(DTYPES[dtype]), "pre_scale": before}
    actual, expected = hopwell.paged_attention(**arguments, backend=backend), reference.paged_attention(**arguments)
    assert_same_places(actual, expected, 3e-2 if dtype == "bfloat16" else 1e-4)


@pytest.mark.usefixtures("numbers_only")
@pytest.mark.parametrize("backend", PAGED_BACKENDS)
@pytest.mark.parametrize(
    ("layout", "dtype", "h_q", "d"),
    [
        ("nhd", "float32", 2, 64), ("vllm", "float32", 4, 64), ("nhd", "bfloat16", 2, 64),
        ("nhd", "bfloat16", 4, 96), ("hnd", "float16", 4, 96),
    ],
)  # fmt: skip
def test_paged_attention_where_all_logits_are_minus_infinity(
    rng: Rng, backend: str, layout: str, dtype: str, h_q: int, d: int
) -> None:
    """Not by a bias of −inf, which hides its key: the products are. Values of such keys may be infinite."""
    shape = (2, 2, 16, d) if layout == "hnd" else (2, 16, 2, d)
    keys, values = np.full(shape, -INF), rng.standard_normal(shape)
    values[:, 0, :, 5] = INF
    arguments = _paged_call(layout, dtype, np.full((2, h_q, d), 1.0), keys, values)
    expected, expected_lse = reference.paged_attention(**arguments)
    out, lse = hopwell.paged_attention(**arguments, backend=backend)
    np.testing.assert_array_equal(out.astype(np.float64), expected)
    np.testing.assert_array_equal(lse, expected_lse)
    assert not expected.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("backend", PAGED_BACKENDS)
@pytest.mark.parametrize("scale", [2.3e38, 2.4e38, -3.4e38])
def test_paged_attention_of_the_largest_scales(rng: Rng, backend: str, scale: float) -> None:
    """GPUs take a scale whose product with log2(e) fp32 holds, and refuse others in words."""
    shape = (2, 16, 2, 64)
    keys = 2.0**-125 * rng.standard_normal(shape)
    arguments = _paged_call("nhd", "float32", np.full((2, 2, 64), 0.01), keys, rng.standard_normal(shape))
    arguments["scale"] = scale
    if backend != "cpu" and abs(scale) > 2.35e38:
        with pytest.raises(hopwell.Error, match=r"no backend runs this.*needs \|scale\| below 2\^128"):
            hopwell.paged_attention(**arguments, backend=backend)
        return
    assert_same_places(
        hopwell.paged_attention(**arguments, backend=backend), reference.paged_attention(**arguments), 1e-4
    )


@pytest.mark.parametrize("backend", hopwell.backends("mla_cache_append"))
@pytest.mark.parametrize(("value", "scale"), [(3e38, 0.3), (2.0**100, 2.0**-40), (-3e38, 2.0**-60), (3e38, 2.0**60)])
def test_a_quotient_beyond_fp32_is_saturated(backend: str, value: float, scale: float) -> None:
    kv = np.full((2, 576), value, ml_dtypes.bfloat16)
    cache = np.zeros((1, 2, 576), np.uint8)
    expected = np.float32(np.clip(float(kv[0, 0]) / scale, -448, 448)).astype(ml_dtypes.float8_e4m3fn)
    on_device = {"kv": kv, "cache": cache, "slots": np.arange(2)}
    if not backend.startswith(("cpu", "emu:")):
        torch = pytest.importorskip("torch")
        on_device = {
            "kv": torch.full((2, 576), value, dtype=torch.bfloat16, device="cuda"),
            "cache": torch.zeros((1, 2, 576), dtype=torch.uint8, device="cuda"),
            "slots": torch.arange(2, device="cuda"),
        }
    hopwell.mla_cache_append(**on_device, kv_scale=scale, backend=backend)
    codes = calls.as_numpy(on_device["cache"])
    assert (codes == expected.view(np.uint8)).all()
