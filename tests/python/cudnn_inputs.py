"""Random inputs for the wrappers of cuDNN's front end, packed and in batches, and the expected scores."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from support import norm_error
from torch import Tensor

Offsets = Sequence[int] | None


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns multiples of 1/4, so that products are exact and the sign of their sums is certain."""
    return ((torch.randn(*shape) * 4).round() / 4).to(dtype)


def ints(values: Offsets) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.int32)


def strided(*shape: int) -> Tensor:
    return torch.empty(*shape, 2)[..., 0]


def visible(s_q: int, s_k: int, ratio: int, offset: int = 0) -> Tensor:
    return torch.arange(s_k) < (torch.arange(s_q)[:, None] + offset + 1) // ratio


def index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """q […, s_q, h, d], k […, s_k, d] and w […, s_q, h] → scores […, s_q, s_k]; tests pass float64."""
    return torch.einsum("...sht,...sh->...st", torch.einsum("...shd,...td->...sht", q, k).relu(), w)


def masked_scores(q: Tensor, k: Tensor, w: Tensor, ratio: int, offsets: Offsets = None) -> Tensor:
    """Scores of a batch, −inf if masked; k has no dimension of heads."""
    mask = torch.stack([visible(q.shape[1], k.shape[1], ratio, o) for o in offsets or [0] * len(q)])
    return index_scores(q.double(), k.double(), w.double()).masked_fill(~mask, -math.inf)


def assert_scores(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert actual.shape == expected.shape and not actual.isnan().any()
    assert torch.equal(actual.isinf(), expected.isinf())
    finite = ~expected.isinf()
    assert norm_error(actual[finite], expected[finite]) <= tolerance


class Pack:
    """Four sequences of 3, 0, 5 and 1 queries and 7, 4, 5 and 2 keys, and one query outside all sequences."""

    queries, keys = (3, 0, 5, 1), (7, 4, 5, 2)

    def __init__(self) -> None:
        self.cu_q, self.cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (self.queries, self.keys))
        self.total_q, self.total_k, self.widest = sum(self.queries) + 1, sum(self.keys), max(self.keys)
        self.arguments = {"cu_seqlens_q": self.cu_q, "cu_seqlens_k": self.cu_k}

    def parts(self, q: Sequence[Tensor], k: Sequence[Tensor]) -> Any:
        """Yields the tensors of each sequence: slices of `q` by its queries, and of `k` by its keys."""
        for i in range(len(self.queries)):
            of_q, of_k = slice(*self.cu_q[i : i + 2]), slice(*self.cu_k[i : i + 2])
            yield [x[of_q] for x in q], [x[of_k] for x in k], of_q, of_k

    def masked_scores(self, q: Tensor, k: Tensor, w: Tensor, ratio: int, offsets: Offsets = None) -> Tensor:
        """Scores [total_q, widest]; column 0 of a row is the first key of the row's sequence."""
        scores = torch.full((self.total_q, self.widest), -math.inf, dtype=torch.float64)
        for i, ((q_i, w_i), (k_i,), of_q, _) in enumerate(self.parts((q, w), (k,))):
            mine = masked_scores(q_i[None], k_i[None], w_i[None], ratio, [offsets[i] if offsets else 0])[0]
            scores[of_q, : len(k_i)] = mine
        return scores
