"""The lightning indexer."""

import math

import torch
from torch import Tensor, nn

from hopwell.torch import ops
from hopwell.torch.nn._module import check_tokens
from hopwell.torch.nn.attention import sequence_ranges
from hopwell.torch.nn.rope import rotate


class LightningIndexer(nn.Module):
    """Chooses the `topk` keys each query attends: index_score[s, t] = Σ_j weights[s, j] · relu(q_index[s, j] ·
    k_index[t]).
    """

    def __init__(
        self,
        d_model: int,
        *,
        topk: int = 2048,
        h_index: int = 64,
        d_index: int = 128,
        d_rope: int = 64,
        rope_theta: float = 10_000.0,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.topk, self.h_index, self.d_index, self.d_rope, self.rope_theta = topk, h_index, d_index, d_rope, rope_theta
        self.query = nn.Linear(d_model, h_index * d_index, bias=False)
        self.key = nn.Linear(d_model, d_index, bias=False)
        self.key_norm = nn.LayerNorm(d_index)
        self.weights = nn.Linear(d_model, h_index, bias=False)

    def project(self, x: Tensor, start: int | Tensor = 0) -> tuple[Tensor, Tensor, Tensor]:
        """x [b, s, d_model] → q_index [b, s, h_index, d_index], k_index [b, s, d_index], weights float32 [b, s,
        h_index].
        """
        q = self.query(x).unflatten(-1, (self.h_index, self.d_index))
        k = self.key_norm(self.key(x)).to(q.dtype)
        weights = self.weights(x).float() / math.sqrt(self.h_index * self.d_index)
        return self._rotate(q, start), self._rotate(k, start), weights

    def _rotate(self, x: Tensor, start: int | Tensor) -> Tensor:
        return torch.cat([rotate(x[..., : self.d_rope], start, self.rope_theta), x[..., self.d_rope :]], dim=-1)

    def select(self, q_index: Tensor, k_index: Tensor, weights: Tensor) -> Tensor:
        """The visible keys of largest score: int32 [b, s, topk], counted from the first of their sequence, ascending,
        −1 where there are fewer. One call: the sequences are the documents of a pack.
        """
        b, s = q_index.shape[:2]
        k_start, k_end = sequence_ranges(b, s, q_index.device)
        q_index, k_index, weights = (t.flatten(0, 1) for t in (q_index, k_index, weights))
        of_pack, _ = ops.lightning_indexer(q_index, k_index, weights, self.topk, k_start=k_start, k_end=k_end)
        return torch.where(of_pack < 0, of_pack, of_pack - k_start[:, None]).view(b, s, self.topk)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, s, d_model] → indices int32 [b, s, topk]."""
        check_tokens("LightningIndexer", x, self.d_model)
        return self.select(*self.project(x))
