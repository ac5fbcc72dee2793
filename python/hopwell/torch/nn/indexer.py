"""The lightning indexer."""

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from hopwell._checks import require
from hopwell.torch import ops
from hopwell.torch.nn._module import check_tokens, check_type
from hopwell.torch.nn.config import indexer_options
from hopwell.torch.nn.pack import Pack
from hopwell.torch.nn.rope import Rope, rotate


def loss_over_tokens(
    attention: tuple[Tensor, Tensor, Tensor],
    index: tuple[Tensor, Tensor, Tensor],
    indices: Tensor | None,
    sm_scale: float,
    sink: Tensor | None = None,
    **visible: Any,
) -> Tensor:
    """The sum over tokens of an indexer's loss. `attention` has queries, keys and lse, `index` the indexer's queries,
    keys and weights. Without indices the loss is over every visible key. `sink`: the target is the attention's part of
    each key under a softmax with sink and window, divided by the row's sum.
    """
    q, kv, lse = (t.detach() for t in attention)
    if indices is None:
        normalize = "heads" if sink is None else "l1"
        return ops.indexer_dense_loss(*(q, kv, lse, *index, sm_scale), attn_sink=sink, normalize=normalize, **visible)
    target = ops.attention_distribution(
        *(q, kv, indices, lse, sm_scale), attn_sink=sink, normalize="l1", indices_ascending=True
    )
    return ops.indexer_loss(*index, indices, target)


class LightningIndexer(nn.Module):
    """Chooses the `topk` keys each query attends: index_score[s, t] = Σ_j weights[s, j] · relu(q_index[s, j] ·
    k_index[t]).

    With `q_lora_rank` its queries come from the latent that the attention makes its queries of. Parameters have the
    names of the published checkpoints of DeepSeek-V3.2 and GLM-5. DeepSeek's inference code turns q_index and k_index
    by a Hadamard matrix before it rounds them to fp8. That matrix is orthogonal: without rounding the scores are the
    same, and the module does neither.
    """

    def __init__(
        self,
        d_model: int,
        *,
        topk: int = 2048,
        h_index: int = 64,
        d_index: int = 128,
        d_rope: int = 64,
        q_lora_rank: int | None = None,
        rope: Rope = Rope(),  # noqa: B008, a frozen value
    ) -> None:
        super().__init__()
        self.d_model, self.q_lora_rank, self.rope = d_model, q_lora_rank, rope
        self.topk, self.h_index, self.d_index, self.d_rope = topk, h_index, d_index, d_rope
        self.wq_b = nn.Linear(d_model if q_lora_rank is None else q_lora_rank, h_index * d_index, bias=False)
        self.wk = nn.Linear(d_model, d_index, bias=False)
        self.k_norm = nn.LayerNorm(d_index, eps=1e-6)
        self.weights_proj = nn.Linear(d_model, h_index, bias=False)

    @classmethod
    def from_config(cls, config: object) -> Self:
        """An indexer with the sizes of a Hugging Face configuration, an object or a dict, of DeepSeek-V3.2 or GLM-5."""
        return cls(**indexer_options(f"{cls.__name__}.from_config", config))

    def project(
        self, x: Tensor, start: int | Tensor = 0, latent: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [b, s, d_model] → q_index [b, s, h_index, d_index], k_index [b, s, d_index], weights float32 [b, s,
        h_index]. latent: the attention's `query_latent(x)`, needed with q_lora_rank.
        """
        if self.q_lora_rank is None:
            latent = x
        check_type("LightningIndexer", "latent", latent, Tensor)
        assert latent is not None
        if latent.shape[:2] != x.shape[:2] or latent.shape[2] != self.wq_b.in_features:
            expected = f"[b, s, {self.wq_b.in_features}] with [b, s] = {list(x.shape[:2])} as x has"
            require(False, "LightningIndexer", "latent", expected, list(latent.shape))
        q = self.wq_b(latent).unflatten(-1, (self.h_index, self.d_index))
        k = self.k_norm(self.wk(x)).to(q.dtype)
        weights = self.weights_proj(x).float() / math.sqrt(self.h_index * self.d_index)
        return self._rotate(q, start), self._rotate(k, start), weights

    def _rotate(self, x: Tensor, start: int | Tensor) -> Tensor:
        return torch.cat([rotate(x[..., : self.d_rope], start, self.rope), x[..., self.d_rope :]], dim=-1)

    def select(self, q_index: Tensor, k_index: Tensor, weights: Tensor, pack: Pack | None = None) -> Tensor:
        """The visible keys of largest score: int32 [b, s, topk], counted from the first of their sequence (of packed
        documents: of the pack), ascending, −1 where there are fewer. One call: sequences are documents of a pack.
        Without a pack each sequence is causal.
        """
        b, s = q_index.shape[:2]
        pack = pack or Pack.of("LightningIndexer", q_index, s)
        q_index, k_index, weights = (t.flatten(0, 1) for t in (q_index, k_index, weights))
        of_pack, _ = ops.lightning_indexer(q_index, k_index, weights, self.topk, **pack.ranges())
        of_pack = of_pack.view(b, s, self.topk)
        first = torch.arange(b, device=of_pack.device, dtype=of_pack.dtype)[:, None, None] * s
        return torch.where(of_pack < 0, of_pack, of_pack - first)

    def forward(
        self,
        x: Tensor,
        latent: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        k_start: Tensor | None = None,
        k_end: Tensor | None = None,
    ) -> Tensor:
        """x [b, s, d_model] → indices int32 [b, s, topk]. latent as in `project`, packed documents as in SparseMLA."""
        check_tokens("LightningIndexer", x, self.d_model, self.wk)
        pack = Pack.of("LightningIndexer", x, x.shape[1], cu_seqlens, k_start, k_end)
        return self.select(*self.project(x, pack.start, latent), pack)

    def extra_repr(self) -> str:
        text = f"d_model={self.d_model}, topk={self.topk}, h_index={self.h_index}, d_index={self.d_index}"
        return f"{text}, d_rope={self.d_rope}, q_lora_rank={self.q_lora_rank}, rope={self.rope}"
