"""The reference of the paged indexer, against the reference of the indexer over keys that are gathered here."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hopwell import reference

Generator = np.random.Generator
E4M3 = ml_dtypes.float8_e4m3fn
D = 8


def integers(rng: Generator, *shape: int) -> Any:
    """Small ones, so that many scores are equal."""
    return rng.integers(-2, 3, shape)


def filled(rng: Generator, blocks: int, block: int, is_fp8: bool) -> tuple[Any, Any, Any]:
    """A cache, its keys [slots, D] and their scales."""
    keys = integers(rng, blocks * block, D).astype(E4M3 if is_fp8 else np.float32)
    scales = np.exp2(rng.integers(-2, 3, blocks * block)).astype(np.float32)
    if not is_fp8:
        return keys.reshape(blocks, block, D), keys, None
    codes = keys.view(np.uint8).reshape(blocks, -1)
    data = np.concatenate([codes, scales.reshape(blocks, block).view(np.uint8)], axis=1)
    return data.reshape(blocks, block, D + 4), keys, scales


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("of_queries", [False, True])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_the_selection_is_the_indexer_s(
    is_fp8: bool, of_queries: bool, slots: bool, relu: bool, rng: Generator
) -> None:
    b, q_len, h, blocks, block, pages, topk = 4, 3, 2, 7, 4, 5, 6
    cache, keys, scales = filled(rng, blocks, block, is_fp8)
    q = integers(rng, b, q_len, h, D).astype(E4M3 if is_fp8 else np.float32)
    weights = integers(rng, b, q_len, h).astype(np.float32)
    tables = rng.integers(-1, blocks + 1, (b, pages)).astype(np.int32)
    tables[0] = -1, blocks, 0, 1, 2  # pages that do not exist, then some that do
    lens = np.array([19, 2, 99, 0], np.int32)
    if of_queries:
        lens = rng.integers(-2, pages * block + 3, (b, q_len)).astype(np.int32)
        lens[0] = 20, 0, 9
    options: dict[str, Any] = {"relu": relu}
    if is_fp8:
        options["q_scale"] = np.exp2(rng.integers(-2, 3, weights.shape)).astype(np.float32)
    lengths = np.full((b, q_len), -7, np.int32)
    arguments = q, cache, weights, topk, tables, lens
    indices, scores = reference.paged_lightning_indexer(*arguments, **options, slots=slots, lengths=lengths)
    for s in range(b):
        for i in range(q_len):
            seen = int(lens[s, i]) if of_queries else int(lens[s]) - (q_len - 1) + i
            positions, named = [], []
            for p in range(max(seen, 0)):
                if p < pages * block and 0 <= tables[s, p // block] < blocks:
                    positions.append(p)
                    named.append(int(tables[s, p // block]) * block + p % block)
            one = {"relu": relu}
            if is_fp8:
                one |= {"q_scale": options["q_scale"][s, i][None], "k_scale": scales[named]}
            chosen, best = reference.lightning_indexer(q[s, i][None], keys[named], weights[s, i][None], topk, **one)
            names = np.array([*(named if slots else positions), -1])
            np.testing.assert_array_equal(indices[s, i], names[chosen[0]])
            np.testing.assert_array_equal(scores[s, i], best[0])
            assert lengths[s, i] == min(len(named), topk)


def test_nan_and_infinite_scores(rng: Generator) -> None:
    """NaN counts as −inf; a position of score −inf is chosen after all others, and shows that score."""
    cache = np.ones((1, 6, D), np.float32)
    cache[0, :, 0] = np.nan, 1, -np.inf, 2, np.inf, 3
    q, weights = np.ones((1, 1, D), np.float32), np.ones((1, 1), np.float32)
    tables, lens = np.zeros((1, 1), np.int32), np.array([6], np.int32)
    indices, scores = reference.paged_lightning_indexer(q, cache, weights, 4, tables, lens, relu=False)
    np.testing.assert_array_equal(indices, [[1, 3, 4, 5]])
    np.testing.assert_array_equal(scores, [[8, 9, np.inf, 10]])
    indices, scores = reference.paged_lightning_indexer(q, cache, weights, 7, tables, lens, relu=False)
    np.testing.assert_array_equal(indices, [[0, 1, 2, 3, 4, 5, -1]])
    np.testing.assert_array_equal(scores, [[-np.inf, 8, -np.inf, 9, np.inf, 10, -np.inf]])


def test_outputs_that_are_given(rng: Generator) -> None:
    cache, _, _ = filled(rng, 2, 3, False)
    q, weights = integers(rng, 2, 1, D).astype(np.float32), np.ones((2, 1), np.float32)
    arguments: Any = q, cache, weights, 4, np.array([[0, 1], [1, 0]], np.int32), np.array([6, 3], np.int32)
    expected = reference.paged_lightning_indexer(*arguments)
    given = np.zeros((2, 4), np.int32), np.zeros((2, 4), np.float32)
    lengths = np.zeros(2, np.int32)
    results = reference.paged_lightning_indexer(*arguments, indices=given[0], scores=given[1], lengths=lengths)
    for mine, array, other in zip(results, given, expected, strict=True):
        assert mine is array
        np.testing.assert_array_equal(array, other)
    np.testing.assert_array_equal(lengths, [4, 3])
    indices, scores = reference.paged_lightning_indexer(*arguments, scores=False)
    assert scores is None
    np.testing.assert_array_equal(indices, expected[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache": np.zeros((2, 3, D + 1), np.float32)}, "cache must be rows of 8 elements"),
        ({"cache": np.zeros((2, 3, D + 4), np.uint8)}, "cache must be of the dtype of q_index"),
        ({"cache": np.zeros((2, D), np.float32)}, r"cache must be \[blocks, block, row\]"),
        ({"weights": np.zeros((2, 2), np.float32)}, "weights must be "),
        ({"topk": -1}, "topk must be at least 0"),
        ({"q_scale": np.ones((2, 1), np.float32)}, "q_scale must be absent"),
        ({"block_tables": np.zeros((3, 2), np.int32)}, "block_tables must be "),
        ({"block_tables": np.zeros((2, 2), np.int64)}, "block_tables must be int32"),
        ({"context_lens": np.zeros(3, np.int32)}, "context_lens must be "),
        ({"context_lens": np.zeros((2, 2), np.int32)}, "context_lens must be "),
        ({"lengths": np.zeros(3, np.int32)}, "lengths must be "),
        ({"indices": np.zeros((2, 5), np.int32)}, "indices must be "),
    ],
)
def test_messages(change: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {
        "q_index": np.zeros((2, 1, D), np.float32),
        "cache": np.zeros((2, 3, D), np.float32),
        "weights": np.zeros((2, 1), np.float32),
        "topk": 4,
        "block_tables": np.zeros((2, 2), np.int32),
        "context_lens": np.zeros(2, np.int32),
    }
    reference.paged_lightning_indexer(**right)
    with pytest.raises(ValueError, match=f"^paged_lightning_indexer: {message}"):
        reference.paged_lightning_indexer(**right | change)


# Bugs that these tests must notice, by module of the reference: a piece of it, its replacement, and the meaning.
# mutations.py plants them.
BUGS = {
    "paged_lightning_indexer": [
        ("lens - (q_len - 1 - i)", "lens - (q_len - i)", "a query does not see itself"),
        ("0 <= page < keys.blocks", "0 <= page <= keys.blocks", "one page too many"),
        ("0 <= page <", "page <", "negative pages count from the end"),
        ("self.d * self.block + 4 * row", "self.d * row", "scales beside their codes"),
        ("-math.inf if math.isnan(score) else score", "score", "NaN scores kept"),
        ("0.0 if relu and product < 0.0 else product", "product", "relu left out"),
        ("slot if slots else position", "position", "slots ignored"),
        ("-one[2])[:topk]", "(-one[2], -one[0]))[:topk]", "larger positions of equal scores"),
        ("w = w * of_head", "w = w + 0 * of_head", "q_scale dropped"),
        ("float(np.float64(scale) * np.float64(total))", "total", "scales of keys dropped"),
        ("if lens.ndim == 2:", "if False:", "counts of queries taken for a sequence's"),
        ("lengths[...] = counts", "lengths[...] = seen", "positions counted, not selected"),
    ],
}
