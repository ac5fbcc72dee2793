"""DeepSeek-V4's hybrid attention: window keys, compressed keys and a sink under one softmax."""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from hopwell._checks import require
from hopwell.torch import ops
from hopwell.torch.nn._module import KeepsDtypes, RMSNorm, backward_may_follow, check_tokens, refuse_scaled_tensors
from hopwell.torch.nn.compressor import Documents, KVCompressor, rope_of
from hopwell.torch.nn.config import hybrid_indexer_options, hybrid_options
from hopwell.torch.nn.indexer import loss_over_tokens
from hopwell.torch.nn.rope import rotate_last

HybridMode = Literal["sparse", "warm-up"]

# A tensor's name in `DeepseekV4Attention` of transformers 5.24, and its published name, which the module has. Files of
# `save_pretrained` have published names, but `norm.weight` for the norm of window keys.
PUBLISHED_NAMES = {
    "q_a_proj.weight": "wq_a.weight",
    "q_a_norm.weight": "q_norm.weight",
    "q_b_proj.weight": "wq_b.weight",
    "kv_proj.weight": "wkv.weight",
    "norm.weight": "kv_norm.weight",
    "o_a_proj.weight": "wo_a.weight",
    "o_b_proj.weight": "wo_b.weight",
    "sinks": "attn_sink",
    "compressor.kv_proj.weight": "compressor.wkv.weight",
    "compressor.gate_proj.weight": "compressor.wgate.weight",
    "compressor.position_bias": "compressor.ape",
    "compressor.kv_norm.weight": "compressor.norm.weight",
    "compressor.indexer.q_b_proj.weight": "indexer.wq_b.weight",
    "compressor.indexer.scorer.weights_proj.weight": "indexer.weights_proj.weight",
    "compressor.indexer.kv_proj.weight": "indexer.compressor.wkv.weight",
    "compressor.indexer.gate_proj.weight": "indexer.compressor.wgate.weight",
    "compressor.indexer.position_bias": "indexer.compressor.ape",
    "compressor.indexer.kv_norm.weight": "indexer.compressor.norm.weight",
}


class HCA(KeepsDtypes):
    """Heavily compressed attention: every visible compressed key, the last `window` tokens, and a sink.

        latent    = rms(x · wq_a) · q_norm;   q = rope(rms of each head(latent · wq_b))
        window_kv = rope(rms(x · wkv) · kv_norm);   kv = compressor(x)
        out       = rope⁻¹(sparse_mla(q, kv, window_kv, attn_sink));   y = (out of each group of heads · wo_a) · wo_b

    One latent of d columns is key and value of every head. RoPE turns its last d_rope columns, so that it turns `out`
    too, which is turned back by the query's position. `ratio` 0 is attention over the window alone. Parameters have the
    names of DeepSeek-V4's published inference code, whose arithmetic it is. `from_config` makes a layer for a
    configuration, and `load_state_dict` takes the tensors of a layer by their published names or by Hugging Face's.
    `attn_sink` stays float32 in a module of another dtype.

    rope_theta None is 160,000 with a compressor, else 10,000. rope_scaling (YaRN) applies with a compressor only.
    overlap: as in `KVCompressor`.
    """

    kept = ("attn_sink",)

    def __init__(
        self,
        d_model: int,
        h_q: int,
        *,
        ratio: int = 128,
        window: int = 128,
        d: int = 512,
        d_rope: int = 64,
        q_rank: int = 1024,
        o_groups: int = 8,
        o_rank: int = 1024,
        norm_eps: float = 1e-6,
        rope_theta: float | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        overlap: bool | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        require(ratio >= 0, name, "ratio", "at least 0", ratio)
        require(window >= 1, name, "window", "at least 1", window)
        require(o_groups >= 1 and h_q % o_groups == 0, name, "o_groups", f"a divisor of h_q = {h_q}", o_groups)
        require(0 <= d_rope <= d and d_rope % 2 == 0, name, "d_rope", f"even and between 0 and d = {d}", d_rope)
        self.d_model, self.h_q, self.ratio, self.window = d_model, h_q, ratio, window
        self.d, self.d_rope, self.o_groups, self.norm_eps = d, d_rope, o_groups, norm_eps
        self.sm_scale = 1.0 / math.sqrt(d)
        theta = rope_theta if rope_theta is not None else 160_000.0 if ratio else 10_000.0
        self._rope_options: dict[str, Any] = {"rope_theta": theta, "rope_scaling": rope_scaling if ratio else None}
        self.rope = rope_of(name, *self._rope_options.values())
        self.wq_a = nn.Linear(d_model, q_rank, bias=False)
        self.q_norm = RMSNorm(q_rank, eps=norm_eps)
        self.wq_b = nn.Linear(q_rank, h_q * d, bias=False)
        self.wkv = nn.Linear(d_model, d, bias=False)
        self.kv_norm = RMSNorm(d, eps=norm_eps)
        self.wo_a = nn.Linear(h_q * d // o_groups, o_groups * o_rank, bias=False)
        self.wo_b = nn.Linear(o_groups * o_rank, d_model, bias=False)
        self.attn_sink = nn.Parameter(torch.zeros(h_q, dtype=torch.float32))
        self._overlap = overlap
        self.compressor = self._compressor(d) if ratio else None

    @classmethod
    def from_config(cls, config: object, *, ratio: int | None = None) -> Self:
        """A layer with the sizes of a Hugging Face configuration of DeepSeek-V4, an object or a dict.

        ratio: an element of `compress_ratios`. 0 is a layer with the window alone. None: the one in `compress_rates`,
        else 128.
        """
        name = f"{cls.__name__}.from_config"
        return cls(**hybrid_options(name, config, "heavily_compressed_attention", ratio), overlap=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for theirs, published in PUBLISHED_NAMES.items():
            if prefix + theirs in state_dict and prefix + published not in state_dict:
                state_dict[prefix + published] = state_dict.pop(prefix + theirs)
        refuse_scaled_tensors(self, state_dict, prefix, rest[-1])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _compressor(self, d: int) -> KVCompressor:
        options = {"d_rope": self.d_rope, "norm_eps": self.norm_eps, "overlap": self._overlap, **self._rope_options}
        return KVCompressor(self.d_model, d, self.ratio, **options)

    def query_latent(self, x: Tensor) -> Tensor:
        """What queries are projected from: x [b, s, d_model] → [b, s, q_rank]."""
        latent: Tensor = self.q_norm(self.wq_a(x))
        return latent

    def queries(self, latent: Tensor, start: int | Tensor) -> Tensor:
        """Latents [1, s, q_rank] at positions 0 … s − 1 plus `start` → queries [s, h_q, d]."""
        q = self.wq_b(latent).unflatten(-1, (self.h_q, self.d))
        q = functional.rms_norm(q.float(), (self.d,), eps=self.norm_eps).to(q.dtype)
        return rotate_last(q, self.d_rope, start, self.rope)[0]

    def window_keys(self, x: Tensor, start: int | Tensor) -> Tensor:
        """x [1, s, d_model] at positions 0 … s − 1 plus `start` → window keys [s, d]."""
        return rotate_last(self.kv_norm(self.wkv(x)), self.d_rope, start, self.rope)[0]

    def attend(
        self, q: Tensor, kv: Tensor, indices: Tensor | None, window_kv: Tensor, **ranges: Any
    ) -> tuple[Tensor, Tensor]:
        """q [s_q, h_q, d], kv [n, d], indices int32 [s_q, topk] or None, window_kv [s_w, d] → out [s_q, h_q, d], lse
        [s_q, h_q]. `ranges` are the operator's.
        """
        out, _, lse = ops.sparse_mla(
            *(q, kv, indices, self.sm_scale, self.d),
            attn_sink=self.attn_sink.float(),  # FSDP's mixed precision casts it on the way
            window_kv=window_kv,
            window=self.window,
            indices_ascending=indices is not None,
            **ranges,
        )
        return out, lse

    def combine(self, out: Tensor, start: int | Tensor) -> Tensor:
        """Heads' results [s, h_q, d] of the queries at positions 0 … s − 1 plus `start` → [s, d_model]."""
        out = rotate_last(out[None], self.d_rope, start, self.rope, inverse=True)[0]
        groups = out.reshape(out.shape[0], self.o_groups, self.h_q * self.d // self.o_groups)
        lowered = torch.einsum("sgi,gri->sgr", groups, self.wo_a.weight.view(self.o_groups, -1, groups.shape[-1]))
        y: Tensor = self.wo_b(lowered.flatten(1))
        return y

    def _ranges(self, documents: Documents, cu_compressed: Tensor | None) -> dict[str, Any]:
        """Which window keys and which compressed keys each token sees, as the operator's arguments."""
        ranges: dict[str, Any] = {"w_start": documents.first, "w_end": documents.end}
        return ranges if cu_compressed is None else ranges | documents.visible(cu_compressed, self.ratio)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """x [b, s, d_model] → [b, s, d_model].

        cu_seqlens: int32 or int64 [documents + 1], packed documents in x [1, s, d_model]; positions and blocks start
        again in each, and tokens after the last document give 0. The host does not wait.
        """
        name = type(self).__name__
        check_tokens(name, x, self.d_model, self.wq_a)
        documents = Documents.of(name, x, cu_seqlens)
        tokens, start = x.reshape(1, -1, self.d_model), documents.start()
        q, window_kv = self.queries(self.query_latent(tokens), start), self.window_keys(tokens, start)
        if self.compressor is None:
            kv, cu_compressed = window_kv[:0], None
        else:
            kv, cu_compressed = self.compressor.pool(*self.compressor.project(tokens), documents)
        out, _ = self.attend(q, kv.to(q.dtype), None, window_kv.to(q.dtype), **self._ranges(documents, cu_compressed))
        return self.combine(out, start).view(x.shape)

    def extra_repr(self) -> str:
        text = f"d_model={self.d_model}, h_q={self.h_q}, ratio={self.ratio}, window={self.window}, d={self.d}"
        return f"{text}, d_rope={self.d_rope}, o_groups={self.o_groups}, rope={self.rope}"


class CompressedIndexer(nn.Module):
    """The lightning indexer over compressed keys: index_score[s, t] = Σ_j weights[s, j] · relu(q[s, j] · k[t]).

    Queries come from the attention's query latent, keys from a compressor of their own.
    """

    def __init__(self, d_model: int, compressor: KVCompressor, *, topk: int, h_index: int, q_rank: int) -> None:
        super().__init__()
        self.d_model, self.topk, self.h_index, self.d_index = d_model, topk, h_index, compressor.d
        self.wq_b = nn.Linear(q_rank, h_index * compressor.d, bias=False)
        self.weights_proj = nn.Linear(d_model, h_index, bias=False)
        self.compressor = compressor

    def project(self, x: Tensor, latent: Tensor, documents: Documents) -> tuple[Tensor, Tensor, Tensor]:
        """x [1, s, d_model] and its query latent → q_index [s, h_index, d_index], k_index [s // ratio, d_index],
        weights float32 [s, h_index].
        """
        compressor = self.compressor
        q = self.wq_b(latent).unflatten(-1, (self.h_index, self.d_index))
        q = rotate_last(q, compressor.d_rope, documents.start(), compressor.rope)[0]
        k, _ = compressor.pool(*compressor.project(x), documents)
        weights = self.weights_proj(x)[0].float() / math.sqrt(self.h_index * self.d_index)
        return q, k.to(q.dtype), weights

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, topk={self.topk}, h_index={self.h_index}, d_index={self.d_index}"


def selected_in_document(indices: Tensor | None, visible: dict[str, Any], x: Tensor) -> Tensor | None:
    """The selection of each token of x, counted in the compressed keys of the token's document."""
    if indices is None:
        return None
    inside = torch.where(indices < 0, -1, indices - visible["k_start"][:, None])
    return inside.view(*x.shape[:2], inside.shape[-1])


class CSA(HCA):
    """Compressed sparse attention: `HCA` over the compressed keys that an indexer selects, and the indexer's loss.

    Two ways to run it:
      "warm-up"  attention over every visible compressed key, and the indexer's loss over all of them
      "sparse"   attention over the selected keys, and the loss over these

    The target of the loss is the attention's share of each compressed key under the joint softmax, with window and
    sink, divided by the row's sum. The loss is the sum over tokens of KL(target ‖ softmax of the index scores), divided
    by b · s. The indexer's input is detached and the target carries no gradient, so only the indexer learns from the
    loss, and only from it. `selected` holds the last selection, int32 [b, s, topk], counted in the compressed keys of
    the token's document, ascending, then −1; None after a warm-up.
    """

    def __init__(
        self,
        d_model: int,
        h_q: int,
        *,
        ratio: int = 4,
        topk: int = 512,
        h_index: int = 64,
        d_index: int = 128,
        q_rank: int = 1024,
        **options: Any,
    ) -> None:
        require(ratio >= 1, type(self).__name__, "ratio", "at least 1", ratio)
        super().__init__(d_model, h_q, ratio=ratio, q_rank=q_rank, **options)
        require(topk >= 1, type(self).__name__, "topk", "at least 1", topk)
        require(d_index >= self.d_rope, type(self).__name__, "d_index", f"at least d_rope = {self.d_rope}", d_index)
        compressor = self._compressor(d_index)
        self.indexer = CompressedIndexer(d_model, compressor, topk=topk, h_index=h_index, q_rank=q_rank)
        self.selected: Tensor | None = None

    @classmethod
    def from_config(cls, config: object, *, ratio: int | None = None) -> Self:
        """A layer with the sizes of a Hugging Face configuration of DeepSeek-V4, an object or a dict.

        ratio: an element of `compress_ratios`. None: the one in `compress_rates`, else 4. Windows overlap.
        """
        name = f"{cls.__name__}.from_config"
        options = hybrid_options(name, config, "compressed_sparse_attention", ratio)
        return cls(**options, **hybrid_indexer_options(name, config), overlap=True)

    def forward(  # type: ignore[override]
        self, x: Tensor, mode: HybridMode = "sparse", *, cu_seqlens: Tensor | None = None, with_loss: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [b, s, d_model] → y [b, s, d_model] and the indexer's loss, or None.

        cu_seqlens: as in `HCA.forward`. with_loss: whether the loss is made. None: if a backward may follow, as in
        `DSA.forward`.
        """
        name = type(self).__name__
        require(mode in ("sparse", "warm-up"), name, "mode", "'sparse' or 'warm-up'", mode)
        check_tokens(name, x, self.d_model, self.wq_a)
        with_loss = backward_may_follow(self.training) if with_loss is None else with_loss
        documents = Documents.of(name, x, cu_seqlens)
        tokens, start = x.reshape(1, -1, self.d_model), documents.start()
        latent = self.query_latent(tokens)
        q, window_kv = self.queries(latent, start), self.window_keys(tokens, start)
        assert self.compressor is not None
        kv, cu_compressed = self.compressor.pool(*self.compressor.project(tokens), documents)
        kv, ranges = kv.to(q.dtype), self._ranges(documents, cu_compressed)
        visible = {bound: ranges[bound] for bound in ("k_start", "k_end")}
        index, indices = None, None
        if with_loss or mode == "sparse":
            index = self.indexer.project(tokens.detach(), latent.detach(), documents)
        if mode == "sparse":
            assert index is not None
            q_index, k_index, weights = (t.detach() for t in index)
            indices, _ = ops.lightning_indexer(q_index, k_index, weights, self.indexer.topk, **visible)
            del ranges["k_start"], ranges["k_end"]  # the selected keys are visible
        out, lse = self.attend(q, kv, indices, window_kv.to(q.dtype), **ranges)
        y, loss = self.combine(out, start).view(x.shape), None
        if with_loss:
            assert index is not None
            sink = self.attn_sink.detach().float()
            loss = loss_over_tokens((q, kv, lse), index, indices, self.sm_scale, sink, **visible)
            loss = loss / max(documents.first.shape[0], 1)
        self.selected = selected_in_document(indices, visible, x)
        return y, loss
