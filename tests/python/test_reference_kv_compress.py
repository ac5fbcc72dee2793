"""The reference of the gated pooling and of its gradients, against torch.autograd."""

from typing import Any

import numpy as np
import pytest
import torch
from hopwell import reference
from support import assert_close

Generator = np.random.Generator


def pooled(
    kv: torch.Tensor, gate: torch.Tensor, ratio: int, overlap: bool, documents: list[tuple[int, int]]
) -> torch.Tensor:
    """The compressed keys of documents [first, end), one after another: one row at a time, by torch's softmax."""
    d = kv.shape[1] // 2 if overlap else kv.shape[1]
    rows = []
    for first, end in documents:
        for block in range((end - first) // ratio):
            own = slice(first + block * ratio, first + (block + 1) * ratio)
            values, gates = kv[own, -d:], gate[own, -d:]
            if overlap and block > 0:
                before = slice(own.start - ratio, own.start)
                values = torch.cat([kv[before, :d], values])
                gates = torch.cat([gate[before, :d], gates])
            rows.append((gates.softmax(0) * values).sum(0))
    return torch.stack(rows) if rows else kv.new_zeros(0, d)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_output_and_gradients_equal_autograd(rng: Generator, ratio: int, overlap: bool) -> None:
    s, w = 23, 6
    documents = [(2, 2), (2, 2 + ratio), (2 + ratio, 13), (13, 20)]  # one empty, tails, and rows outside of all
    leaves = [rng.standard_normal(shape) * 3 for shape in ((s, w), (s, w), (ratio, w))]
    kv, gate, bias = (torch.from_numpy(x).requires_grad_() for x in leaves)
    rows = np.arange(s)
    place = np.zeros(s, int)
    for first, end in documents:
        place[first:end] = (rows[first:end] - first) % ratio
    expected = pooled(kv, gate + bias[torch.from_numpy(place)], ratio, overlap, documents)
    d_out = rng.standard_normal(expected.shape)
    gradients = torch.autograd.grad(expected, (kv, gate, bias), torch.from_numpy(d_out))

    cu_seqlens = np.array([2, 2, 2 + ratio, 13, 20], np.int32)
    counts = [(end - first) // ratio for first, end in documents]
    packing: dict[str, Any] = {
        "position_bias": leaves[2],
        "overlap": overlap,
        "cu_seqlens": cu_seqlens,
        "cu_compressed": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
    }
    out = reference.kv_compress(*leaves[:2], ratio, **packing)
    assert_close(out[: len(expected)], expected.detach().numpy(), 1e-12)
    assert not np.asarray(out[len(expected) :]).any()
    given = np.zeros(np.shape(out))
    given[: len(expected)] = d_out
    for mine, theirs in zip(
        reference.kv_compress_backward(given, *leaves[:2], ratio, **packing), gradients, strict=True
    ):
        assert_close(mine, theirs.numpy(), 1e-12)


def test_a_gate_of_minus_infinity_takes_an_entry_away(rng: Generator) -> None:
    kv, gate = rng.standard_normal((8, 4)), rng.standard_normal((8, 4))
    kv[1, 2] = np.nan
    gate[1, 2] = gate[4:, 3] = -np.inf
    out = np.asarray(reference.kv_compress(kv, gate, 4))
    weights = np.exp(gate[[0, 2, 3], 2])
    assert_close(out[0, 2], (weights * kv[[0, 2, 3], 2]).sum() / weights.sum(), 1e-12)
    assert out[1, 3] == 0
    assert np.isfinite(out).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gate_that_is_no_number_stays_in_its_column(rng: Generator, value: float) -> None:
    kv, gate = rng.standard_normal((8, 4)), rng.standard_normal((8, 4))
    gate[5, 1] = value
    out = np.asarray(reference.kv_compress(kv, gate, 4))
    assert np.isnan(out[1, 1])
    assert np.isnan(out).sum() == 1


def test_rows_that_out_does_not_have_are_left_out(rng: Generator) -> None:
    kv, gate = rng.standard_normal((8, 4)), rng.standard_normal((8, 4))
    whole = np.asarray(reference.kv_compress(kv, gate, 2))
    assert_close(reference.kv_compress(kv, gate, 2, out=np.zeros((3, 4))), whole[:3], 0)


@pytest.mark.parametrize(("end", "made"), [(6, 2), (2, 1)], ids=["more rows than blocks", "fewer rows than blocks"])
def test_a_document_writes_its_own_rows(rng: Generator, end: int, made: int) -> None:
    """The second document has two whole blocks and a tail. Rows that it does not make are 0."""
    kv, gate = (torch.from_numpy(rng.standard_normal((11, 4))) for _ in range(2))
    packing = {"cu_seqlens": np.array([0, 5, 10], np.int32), "cu_compressed": np.array([0, 1, end], np.int32)}
    out = np.asarray(reference.kv_compress(kv.numpy(), gate.numpy(), 2, **packing))
    expected = np.zeros((5, 4))
    expected[:1] = pooled(kv, gate, 2, False, [(0, 2)]).numpy()
    expected[1 : 1 + made] = pooled(kv, gate, 2, False, [(5, 10)]).numpy()[:made]
    assert_close(out, expected, 1e-12)


# Bugs that these tests must notice, by module of the reference: a piece of it, its replacement, and the meaning.
# mutations.py plants them.
BUGS = {
    "kv_compress": [
        ("and j > 0:", "and first + j > 0:", "the previous block across a document's border"),
        ("tokens - self.ratio]", "tokens]", "the own block taken for the previous one"),
        ("self.d if self.overlap else 0", "0", "columns of the next block taken for the own ones"),
        ("np.concatenate([r, r])", "np.concatenate([r, r[::-1]])", "bias of the previous block backwards"),
        ("max(end - first, 0) // self.ratio", "-(-max(end - first, 0) // self.ratio)", "a tail makes a key"),
        ("min(key_end, n)", "n", "keys beyond their document's rows"),
        ("absent, 0.0, self.kv", "False, 0.0, self.kv", "values of absent entries"),
        ("(values - out))\n    return", "values)\n    return", "out dropped from d_position_bias"),
        ("= weighted * (values - out)", "= weighted * values", "out dropped from d_gate"),
        (
            "np.add.at(of_bias, (window.places[:, None], at), ",
            "of_bias.__setitem__((window.places[:, None], at), ",
            "d_position_bias of the last window alone",
        ),
    ],
}
