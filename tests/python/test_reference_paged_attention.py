"""The paged-attention reference against torch's attention, a key-by-key brute force and Transformer-XL's shift."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hopwell import reference
from support import assert_close

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
INF = math.inf
Generator = np.random.Generator


def pack_cache(
    rng: Generator, k: np.ndarray, v: np.ndarray, lengths: list[int], block: int, layout: str, dtype: Any = np.float32
) -> dict[str, Any]:
    """k, v [b, max_len, h_kv, d] scattered over permuted pages; whatever no context holds is NaN."""
    b, max_len, h_kv, d = k.shape
    max_blocks = max(1, -(-max_len // block))
    blocks = b * max_blocks + 2
    pages = rng.permutation(blocks)[: b * max_blocks].reshape(b, max_blocks)
    tables = rng.choice(np.array([INT_MIN, -1, blocks, INT_MAX], np.int32), (b, max_blocks))
    caches = [np.full((blocks, block, h_kv, d), np.nan, dtype=dtype) for _ in "kv"]
    for n, length in enumerate(lengths):
        for t in range(length):
            tables[n, t // block] = pages[n, t // block]
            caches[0][pages[n, t // block], t % block] = k[n, t]
            caches[1][pages[n, t // block], t % block] = v[n, t]
    k_cache, v_cache = caches
    if layout == "hnd":
        k_cache, v_cache = k_cache.swapaxes(1, 2), v_cache.swapaxes(1, 2)
    if layout == "vllm":
        x = 16 // k_cache.itemsize
        k_cache = k_cache.reshape(blocks, block, h_kv, d // x, x).transpose(0, 2, 3, 1, 4)
        v_cache = v_cache.transpose(0, 2, 3, 1)
    return {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": tables,
        "context_lens": np.array(lengths, dtype=np.int32),
        "layout": layout,
    }


@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("h_q", "h_kv", "q_len"), [(4, 4, 1), (6, 2, 3), (4, 1, 2)])
def test_paged_plain_equals_torch_attention(
    rng: Generator, layout: str, dtype: Any, h_q: int, h_kv: int, q_len: int
) -> None:
    lengths, block, d = [q_len, 4, 5, 3, 11, 8], 4, 16
    k, v = (rng.standard_normal((6, 11, h_kv, d)).astype(dtype) for _ in "kv")
    q = rng.standard_normal((6, q_len, h_q, d)).astype(dtype)
    out, lse = reference.paged_attention(q, scale=0.3, **pack_cache(rng, k, v, lengths, block, layout, dtype))
    for n, length in enumerate(lengths):
        tensors = (torch.from_numpy(x[n].astype(np.float64)).transpose(0, 1) for x in (q, k[:, :length], v[:, :length]))
        query, key, value = tensors
        mask = torch.ones(q_len, length, dtype=torch.bool).tril(length - q_len)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
        )
        assert_close(out[n], expected.transpose(0, 1))
        score = 0.3 * query @ key.repeat_interleave(h_q // h_kv, 0).transpose(1, 2)
        assert_close(lse[n], torch.logsumexp(score.masked_fill(~mask, -INF), -1).T)
    if q_len == 1:
        cache = pack_cache(rng, k, v, lengths, block, layout, dtype)
        flat_out, flat_lse = reference.paged_attention(q[:, 0], scale=0.3, **cache)
        np.testing.assert_array_equal(flat_out, out[:, 0])
        np.testing.assert_array_equal(flat_lse, lse[:, 0])


def brute_force_row(
    logit_of: Any, keys: np.ndarray, values: np.ndarray, position: int, window: int | None
) -> tuple[np.ndarray, float]:
    """One row, key by key with Python floats; logit_of(j, delta) is None where the key is hidden."""
    pairs = []
    for j in range(len(keys)):
        delta = position - j
        if delta >= 0 and (not window or delta < window):
            logit = logit_of(j, delta)
            if logit is not None:
                pairs.append((logit, values[j]))
    if not pairs:
        return np.zeros(values.shape[1]), -INF
    peak = max(logit for logit, _ in pairs)
    total = math.fsum(math.exp(logit - peak) for logit, _ in pairs)
    rows = [math.exp(logit - peak) / total * value for logit, value in pairs]
    return np.sum(rows, axis=0), peak + math.log(total)


@pytest.mark.parametrize("out_of_range", ["zero", "clamp", "-inf"])
@pytest.mark.parametrize("pre_scale", [True, False])
@pytest.mark.parametrize("form", ["key", "distance", "fused", "fused_no_v", "fused_shared"])
@pytest.mark.parametrize("window", [None, 0, 1, 4])
def test_paged_bias_equals_brute_force(
    rng: Generator, form: str, pre_scale: bool, out_of_range: str, window: int | None
) -> None:
    b, q_len, h_q, h_kv, d, extent, scale = 5, 2, 4, 2, 8, 6, -0.7
    lengths = [0, 1, 2, 9, 5]
    k, v = rng.standard_normal((2, b, 9, h_kv, d))
    q, u, vee = rng.standard_normal((b, q_len, h_q, d)), rng.standard_normal((h_q, d)), rng.standard_normal((h_q, d))
    slopes = rng.random(h_q)
    options: dict[str, Any] = {"out_of_range": out_of_range, "pre_scale": pre_scale, "window": window}
    if form == "key":
        options["bias"] = table = rng.standard_normal((b, h_q, q_len, extent))
        table[3, 1] = -INF
        table[rng.random(table.shape) < 0.2] = -INF
    elif form == "distance":
        options |= {"bias": rng.standard_normal((1, h_q, extent)), "bias_kind": "distance"}
        table = options["bias"]
    else:
        r = rng.standard_normal((1 if form == "fused_shared" else h_q, extent, d))
        options |= {"r": r} if form == "fused_no_v" else {"r": r, "pos_bias_v": vee}

    def bias_at(n: int, i: int, h: int, j: int, delta: int) -> float:
        index = j if form == "key" else delta
        if index >= extent:
            if out_of_range == "zero":
                return 0.0
            if out_of_range == "-inf":
                return -INF
            index = extent - 1
        if form == "key":
            return float(table[n, h, i, index])
        if form == "distance":
            return float(table[0, h, index])
        query = q[n, i, h] if form == "fused_no_v" else q[n, i, h] + vee[h]
        return float(query @ r[0 if form == "fused_shared" else h, index])

    cache = pack_cache(rng, k, v, lengths, 4, "hnd", np.float64)
    out, lse = reference.paged_attention(q, scale=scale, pos_bias_u=u, alibi_slopes=slopes, **cache, **options)
    for n, i, h in np.ndindex(b, q_len, h_q):
        key, value = k[n, : lengths[n], h // 2], v[n, : lengths[n], h // 2]

        def logit_of(j: int, delta: int, n: int = n, i: int = i, h: int = h, key: np.ndarray = key) -> float | None:
            bias = bias_at(n, i, h, j, delta)
            if bias == -INF:
                return None
            content = float((q[n, i, h] + u[h]) @ key[j])
            logit = scale * (content + bias) if pre_scale else scale * content + bias
            return logit - float(slopes[h]) * delta

        expected, expected_lse = brute_force_row(logit_of, key, value, lengths[n] - q_len + i, window)
        assert_close(out[n, i, h], expected)
        assert_close(lse[n, i, h], expected_lse)
    assert np.all(lse[0] == -INF) and np.all(lse[1, 0] == -INF)


def test_paged_relative_positions_equal_the_shifted_matrix(rng: Generator) -> None:
    """Transformer-XL in its own words: all of (q + v)·Rᵀ, rows shifted so that column j holds distance position − j."""
    length, h, d = 7, 2, 8
    q, (k, v) = rng.standard_normal((length, h, d)), rng.standard_normal((2, 1, length, h, d))
    u, vee, r = rng.standard_normal((h, d)), rng.standard_normal((h, d)), rng.standard_normal((h, length, d))
    content = np.einsum("ihd,jhd->hij", q + u, k[0])
    position = np.einsum("ihd,hed->hie", q + vee, r[:, ::-1])  # column e is distance length − 1 − e
    padded = np.concatenate([np.zeros((h, length, 1)), position], axis=2)
    shifted = padded.reshape(h, length + 1, length)[:, 1:].reshape(h, length, length)
    logits = np.where(np.tri(length, dtype=bool), 0.25 * (content + shifted), -INF)
    expected = np.einsum("hij,jhd->ihd", torch.softmax(torch.from_numpy(logits), -1).numpy(), v[0])

    cache = pack_cache(rng, k, v, [length], 3, "nhd", np.float64)
    out, _ = reference.paged_attention(q[None], scale=0.25, pos_bias_u=u, pos_bias_v=vee, r=r, **cache)
    assert_close(out[0], expected)


def test_paged_masks_bad_pages_and_clamps_lengths(rng: Generator) -> None:
    k, v = rng.standard_normal((2, 4, 8, 1, 8))
    q = rng.standard_normal((4, 1, 8))
    cache = pack_cache(rng, k, v, [8, 8, 8, 8], 4, "nhd", np.float64)
    cache["block_tables"][0, 0] = -1  # the first four keys of sequence 0
    cache["block_tables"][1] = [len(cache["k_cache"]), INT_MAX]
    cache["context_lens"] = np.array([8, 8, INT_MAX, INT_MIN], dtype=np.int32)
    out, lse = reference.paged_attention(q, scale=1.0, **cache)
    for n, seen in [(0, slice(4, 8)), (2, slice(0, 8))]:
        logits = k[n, seen, 0] @ q[n, 0]
        assert_close(lse[n, 0], np.log(np.exp(logits).sum()))
        assert_close(out[n, 0], np.exp(logits) @ v[n, seen, 0] / np.exp(logits).sum())
    for n in (1, 3):
        assert not out[n].any() and np.all(lse[n] == -INF)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_paged_without_a_visible_key(rng: Generator, layout: str, q_len: int) -> None:
    k, v = rng.standard_normal((2, 3, 8, 2, 8))
    cache = pack_cache(rng, k, v, [8, 8, 8], 4, layout)
    cache["block_tables"][1] = -1
    cache["context_lens"] = np.array([0, 8, 8], dtype=np.int32)
    q = rng.standard_normal((3, q_len, 2, 8))
    bias = np.full((3, 2, 8), -INF)
    bias[0] = 0.0
    for options in ({}, {"bias": bias, "bias_kind": "distance"}):
        out, lse = reference.paged_attention(q, scale=1.0, **cache, **options)
        rows = 3 if options else 2
        assert not out[:rows].any() and np.all(lse[:rows] == -INF)
        assert options or np.isfinite(lse[2]).all()
    for shape, max_blocks in (((0, q_len, 2, 8), 2), ((3, q_len, 2, 8), 0)):
        cache["block_tables"] = np.zeros((shape[0], max_blocks), np.int32)
        cache["context_lens"] = np.full(shape[0], 5, np.int32)
        out, lse = reference.paged_attention(np.ones(shape), scale=1.0, **cache)
        assert out.shape == shape and not out.any() and lse.shape == shape[:3] and np.all(lse == -INF)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm"])
def test_paged_values_that_are_not_finite_count_whole(rng: Generator, layout: str) -> None:
    k, v = rng.standard_normal((2, 1, 6, 1, 8))
    v[0, 4, 0, :3] = INF, -INF, np.nan  # seen by both queries
    v[0, 5, 0, 2:5] = INF, INF, -INF  # by the second one
    v[0, 1, 0, 5], v[0, 2, 0, 5] = INF, -INF
    k[0, 1:3] *= 1e4  # weights that round to 0, one way or the other
    cache = pack_cache(rng, k, v, [6], 4, layout, np.float64)
    q = np.ones((1, 2, 1, 8))
    out, _ = reference.paged_attention(q, scale=1.0, **cache)
    v_finite = np.where(np.isfinite(v), v, 0.0)
    expected, _ = reference.paged_attention(q, scale=1.0, **pack_cache(rng, k, v_finite, [6], 4, layout, np.float64))
    expected[0, :, 0, :3] = INF, -INF, np.nan
    expected[0, 1, 0, 3:5] = INF, -INF
    expected[0, :, 0, 5] = np.nan
    assert_close(out, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pos_bias_v": np.zeros((2, 8))}, "pos_bias_v must be given together with r"),
        ({"r": np.zeros((2, 3, 8)), "bias": np.zeros((1, 2, 1, 9))}, "r must be absent beside bias"),
        ({"window": -1}, "window must be at least 1"),
        ({"scale": INF}, "scale must be finite"),
        ({"bias": np.zeros((1, 2, 0)), "bias_kind": "distance", "out_of_range": "clamp"}, "bias must be of extent 1"),
        ({"layout": "nhdx"}, "layout must be nhd, hnd or vllm"),
        ({"q": np.zeros((3, 3, 8))}, "q must be with h_q a multiple of h_kv = 2"),
        ({"context_lens": np.zeros(2, np.int32)}, r"context_lens must be \[b\] = \[3\]"),
    ],
)
def test_paged_bad_arguments(rng: Generator, change: dict[str, Any], message: str) -> None:
    k, v = rng.standard_normal((2, 3, 8, 2, 8))
    arguments = {"q": np.zeros((3, 2, 8)), "scale": 1.0, **pack_cache(rng, k, v, [1, 2, 3], 4, "nhd")}
    with pytest.raises(ValueError, match="paged_attention: " + message):
        reference.paged_attention(**{**arguments, **change})


@pytest.mark.parametrize("logit", [1e17, -1e17, 1e300])
def test_paged_equal_keys_share_any_logit(logit: float) -> None:
    """log 2 is lost in an lse of 1e17, and must not be in the weights."""
    q, caches = np.zeros((1, 1, 8)), np.ones((1, 2, 1, 8))
    q[..., 0] = logit
    tables, lengths = np.zeros((1, 1), np.int32), np.array([2], np.int32)
    out, lse = reference.paged_attention(q, caches, 3 * caches, tables, lengths, 1.0)
    assert_close(out, np.full((1, 1, 8), 3.0))
    assert_close(lse, [[logit]])


# Bugs that these tests must notice, by module of the reference: a piece of it, its replacement, and the meaning.
# mutations.py plants them.
BUGS = {
    "paged_attention": [
        ("- q_len + i", "- q_len + i + 1", "a query sees the token after it"),
        ("position - window + 1", "position - window", "window off by one"),
        ("+ u[h])", ")", "pos_bias_u dropped"),
        ("q + _per_head", "q * 0 + _per_head", "q dropped from the fused term"),
        ("h // (h_q // h_kv)", "h % h_kv", "GQA heads interleaved"),
        ("scale * (content + bias_of) if pre_scale", "scale * content + bias_of if pre_scale", "pre_scale ignored"),
        ("position - keys if by_distance else keys", "keys", "distance taken for key"),
        ("len(table) - 1)", "len(table) - 2)", "clamp off by one"),
        ("logits - slopes", "logits + slopes", "sign of ALiBi"),
        ("(pages < blocks)", "(pages < blocks - 1)", "the last page masked"),
        (" + np.where(finite, 0.0, values).sum(axis=0)", "", "infinite values dropped"),
        ("cache.shape[2] * cache.shape[4]", "-1", "no keys in layout vllm"),
    ],
}
