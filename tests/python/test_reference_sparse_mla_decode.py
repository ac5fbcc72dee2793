"""The reference of decode over paged latents, against the reference of the forward over rows that are gathered here."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hopwell import reference

Generator = np.random.Generator
FORMATS = {
    "v32": (576, 656),
    "v32_without_rope": (512, 656),
    "v4": (512, 584),
    "v41": (512, 528),
    "one scale": (576, 576),
}


def filled(rng: Generator, blocks: int, block: int, form: str) -> Any:
    """A cache whose slots all hold random rows."""
    if form == "plain":
        return rng.standard_normal((blocks, block, 20)).astype(np.float32)
    d, row = FORMATS[form]
    cache = np.zeros((blocks, block, row), np.uint8)
    kv = rng.standard_normal((blocks * block, d)).astype(np.float32)
    return reference.mla_cache_append(kv, cache, np.arange(blocks * block))


def of_forward(q: Any, rows: list[list[Any]], d_v: int, sink: Any = None) -> tuple[Any, Any]:
    """out and lse of the forward for q [b, q_len, h, d], each query with rows [n, d] of its own."""
    outs, lses = [], []
    for s, queries in enumerate(q):
        for i, query in enumerate(queries):
            indices = np.arange(len(rows[s][i]), dtype=np.int32)[None]
            out, _, lse = reference.sparse_mla_forward(query[None], rows[s][i], indices, 0.3, d_v, attn_sink=sink)
            outs.append(out[0])
            lses.append(lse[0])
    return np.reshape(outs, (*q.shape[:-1], d_v)), np.reshape(lses, q.shape[:-1])


def same(results: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for mine, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["plain", *FORMATS])
def test_slots(form: str, rng: Generator) -> None:
    cache = filled(rng, 4, 5, form)
    d = 20 if form == "plain" else FORMATS[form][0]
    q = rng.standard_normal((2, 3, 2, d))
    entries = np.array([[[7, -1, 3, 19, 3], [20, 21, 2**31 - 1, -(2**31), 0], [-1] * 5]] * 2, np.int32)
    entries[1] = entries[0, ::-1]
    values = reference.read_mla_cache(cache, np.arange(20), d)
    valid = [[[e for e in row if 0 <= e < 20] for row in rows] for rows in entries.tolist()]
    expected = of_forward(q, [[values[row] for row in rows] for rows in valid], 13)
    same(reference.sparse_mla_decode(q, cache, entries, 0.3, 13), expected)
    assert np.isposinf(expected[1][0, 2]).all()
    assert not expected[0][0, 2].any()


def test_positions(rng: Generator) -> None:
    """Position p of a sequence is row p mod block of the page that its table names; [b] lengths count the queries."""
    blocks, block, q_len = 6, 4, 3
    cache, q = filled(rng, blocks, block, "plain"), rng.standard_normal((3, q_len, 2, 20))
    tables = np.array([[3, 0, 5], [2, 6, 1], [-1, 4, 4]], np.int32)
    entries = rng.integers(-2, 14, (3, q_len, 30)).astype(np.int32)
    lens = np.array([1, 10, 50], np.int32)

    def rows(visible: Any) -> list[list[Any]]:
        found = []
        for s in range(3):
            found.append([])
            for i in range(q_len):
                chosen = []
                for p in entries[s, i].tolist():
                    if 0 <= p < min(visible(s, i), 12) and 0 <= tables[s, p // block] < blocks:
                        chosen.append(cache[tables[s, p // block], p % block])
                found[s].append(np.array(chosen).reshape(-1, 20))
        return found

    given: dict[str, Any] = {"q": q, "cache": cache, "indices": entries, "sm_scale": 0.3, "d_v": 20}
    given["block_tables"] = tables
    same(reference.sparse_mla_decode(**given), of_forward(q, rows(lambda s, i: 12), 20))
    seen = rows(lambda s, i: lens[s] - (q_len - 1 - i))
    same(reference.sparse_mla_decode(**given, context_lens=lens), of_forward(q, seen, 20))
    of_queries = rng.integers(-3, 15, (3, q_len)).astype(np.int32)
    seen = rows(lambda s, i: of_queries[s, i])
    same(reference.sparse_mla_decode(**given, context_lens=of_queries), of_forward(q, seen, 20))


def test_two_caches_lengths_and_sinks(rng: Generator) -> None:
    first, second = filled(rng, 3, 5, "plain"), filled(rng, 2, 4, "plain")
    q, sink = rng.standard_normal((4, 2, 20)), np.array([0.5, -1.0])
    entries, others = (rng.integers(0, n, (4, 9)).astype(np.int32) for n in (15, 8))
    lengths, other_lengths = np.array([0, 9, 4, -3], np.int32), np.array([[2], [0], [20], [0]], np.int32)
    out, lse = reference.sparse_mla_decode(
        *(q, first, entries, 0.3, 20),
        topk_length=lengths,
        extra_cache=second,
        extra_indices=others,
        extra_topk_length=other_lengths,
        attn_sink=sink,
    )
    rows = [
        [np.concatenate([first.reshape(15, 20)[e[: max(n, 0)]], second.reshape(8, 20)[o[:m]]])]
        for e, n, o, m in zip(entries, lengths, others, other_lengths[:, 0], strict=True)
    ]
    expected = of_forward(q[:, None], rows, 20, sink)
    same((out, lse), (expected[0][:, 0], expected[1][:, 0]))


def test_context_lens_are_of_the_first_cache(rng: Generator) -> None:
    cache, q = filled(rng, 2, 4, "plain"), rng.standard_normal((1, 2, 20))
    entries, tables = np.array([[5]], np.int32), np.array([[0, 1]], np.int32)
    given: dict[str, Any] = {
        "block_tables": tables,
        "extra_block_tables": tables,
        "context_lens": np.array([1], np.int32),
    }
    out, _ = reference.sparse_mla_decode(q, cache, entries, 0.3, 20, extra_cache=cache, extra_indices=entries, **given)
    np.testing.assert_allclose(out, np.broadcast_to(cache[1, 1], (1, 2, 20)))


def test_one_scale_and_two_tensors(rng: Generator) -> None:
    codes = filled(rng, 2, 3, "one scale")
    q, entries = rng.standard_normal((1, 1, 2, 576)), np.array([[[4, 0]]], np.int32)
    scale = float(np.float32(0.37))
    values = scale * codes.reshape(6, 576).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    results = reference.sparse_mla_decode(q, codes, entries, 0.3, kv_scale=scale)
    same(results, of_forward(q, [[values[[4, 0]]]], 512))
    cache = filled(rng, 2, 3, "plain")
    whole = reference.sparse_mla_decode(q[..., :20], cache, entries, 0.3, 12)
    same(
        reference.sparse_mla_decode(
            q[..., :20], cache[..., :12].copy(), entries, 0.3, 12, rope_cache=cache[..., 12:].copy()
        ),
        whole,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_lens": np.ones(2, np.int32)}, "context_lens must be given with block_tables"),
        ({"extra_indices": np.zeros((2, 3), np.int32)}, "extra_indices must be given with extra_cache"),
        ({"keys_per_split": 100}, "keys_per_split must be a multiple of 64"),
        ({"d_v": 21}, "d_v must be between 1 and 20"),
        ({"kv_scale": 2.0}, "kv_scale must be left out"),
        ({"topk_length": np.ones(3, np.int32)}, "topk_length must be "),
        ({"sm_scale": np.inf}, "sm_scale must be finite"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {
        "q": np.zeros((2, 1, 20)),
        "cache": np.zeros((2, 3, 20), np.float32),
        "indices": np.zeros((2, 3), np.int32),
        "sm_scale": 0.3,
        "d_v": 20,
    }
    reference.sparse_mla_decode(**right)
    with pytest.raises(ValueError, match=f"^sparse_mla_decode: {message}"):
        reference.sparse_mla_decode(**right | change)


# Bugs that these tests must notice, by module of the reference: a piece of it, its replacement, and the meaning.
# mutations.py plants them.
BUGS = {
    "sparse_mla_decode": [
        ("visible - q_len + 1 +", "visible - q_len +", "a query does not see itself"),
        ("as_array(context_lens).ndim == 1", "True", "counts of queries taken for a sequence's"),
        ("min(visible, len(table) * block)", "len(table) * block", "context_lens ignored"),
        ("pages < blocks", "pages <= blocks", "one page too many"),
        ("entries < blocks * block", "entries <= blocks * block", "one slot too many"),
        ("(pages >= 0) &", "", "negative pages count from the end"),
        ("pages * block + entries % block", "pages * block + entries // block", "the wrong row of a page"),
        ("[: max(length, 0)]", "[: max(length, 1)]", "topk_length 0 taken for 1"),
        ("np.where(empty, np.inf, peak + log_sum)", "peak + log_sum", "lse of an empty row −inf"),
        (" * factor[:, None])", ")", "sink dropped from the output"),
        (
            "extra_topk_length, extra_block_tables, None, b",
            "topk_length, extra_block_tables, None, b",
            "the other cache's lengths",
        ),
        (
            "extra_block_tables, None, b, q_len",
            "extra_block_tables, visible, b, q_len",
            "context_lens applied to the second cache",
        ),
        ("if more is not None and extra_cache is not None:", "if False:", "the second cache dropped"),
        ("cache, slots, width, kv_scale", "cache, slots, width", "kv_scale dropped"),
    ],
}
