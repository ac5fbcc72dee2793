"""Multi-query MLA over selected keys."""

import math
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from hopwell.torch import ops
from hopwell.torch.nn._module import KeepsDtypes, RMSNorm, check_tokens, check_type, refuse_scaled_tensors
from hopwell.torch.nn.config import attention_options
from hopwell.torch.nn.pack import Pack
from hopwell.torch.nn.rope import Rope, rotate


class UpProjection(nn.Module):
    """The up-projection of MLA, `kv_b_proj`, in its absorbed form.

    It lifts a latent to d_nope numbers of key and d_head numbers of value for each head. Absorbed, its first part takes
    queries into the latent space and its second part takes results out of it. The keys and values of the heads are then
    never made. It is no `nn.Linear`, because no product of it with the latents is needed.
    """

    def __init__(self, heads: int, d_v: int, d_nope: int, d_head: int) -> None:
        super().__init__()
        self.d_nope, self.d_head = d_nope, d_head
        self.weight = nn.Parameter(torch.randn(heads * (d_nope + d_head), d_v) / math.sqrt(d_v))

    def parts(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """For keys [heads, d_nope, d_v] and for values [heads, d_head, d_v]."""
        of_heads = self.weight.to(dtype).view(-1, self.d_nope + self.d_head, self.weight.shape[1])
        return of_heads[:, : self.d_nope], of_heads[:, self.d_nope :]

    def into_latent(self, q: Tensor) -> Tensor:
        """Queries [b, s, heads, d_nope] → [b, s, heads, d_v]."""
        return torch.einsum("bshn,hnv->bshv", q, self.parts(q.dtype)[0])

    def out_of_latent(self, out: Tensor) -> Tensor:
        """Results [b, s, heads, d_v] → [b, s, heads, d_head]."""
        return torch.einsum("bshv,hdv->bshd", out, self.parts(out.dtype)[1])

    def lift(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [b, s, d_v] → keys [b, s, heads, d_nope] and values [b, s, heads, d_head], not absorbed."""
        key, value = self.parts(latent.dtype)
        return torch.einsum("bsv,hnv->bshn", latent, key), torch.einsum("bsv,hdv->bshd", latent, value)

    def extra_repr(self) -> str:
        rows, d_v = self.weight.shape
        return f"heads={rows // (self.d_nope + self.d_head)}, d_v={d_v}, d_nope={self.d_nope}, d_head={self.d_head}"


class SparseMLA(KeepsDtypes):
    """Multi-head latent attention in its multi-query form, over the keys that `indices` names.

    A token's key is its latent, d_v numbers, and a rotary part of d_rope; the value is the latent. Queries come per
    head with d_nope position-free numbers, lifted into the latent space by `kv_b_proj`, and d_rope rotary ones;
    `kv_b_proj` takes each head's result out of the latent space to d_head numbers. With `q_lora_rank` the queries come
    from a latent of their own. Parameters have the names of the published checkpoints of DeepSeek-V3.2 and GLM-5.
    `attn_sink` stays float32 in a module of another dtype.

    `share_keys`, the hint of `sparse_mla`, pays on Hopper with up to 32 heads on a GPU, such as a
    tensor-parallel rank has, where neighbouring tokens select mostly the same keys, as a trained indexer makes them.
    """

    kept = ("attn_sink",)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        refuse_scaled_tensors(self, state_dict, prefix, rest[-1])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __init__(
        self,
        d_model: int,
        h_q: int,
        *,
        d_v: int = 512,
        d_rope: int = 64,
        d_nope: int = 128,
        d_head: int = 128,
        q_lora_rank: int | None = None,
        attn_sink: bool = False,
        norm_eps: float = 1e-6,
        rope: Rope = Rope(),  # noqa: B008, a frozen value
        share_keys: bool = False,
    ) -> None:
        super().__init__()
        self.d_model, self.h_q, self.q_lora_rank = d_model, h_q, q_lora_rank
        self.d_v, self.d_rope, self.d_nope, self.d_head = d_v, d_rope, d_nope, d_head
        self.rope, self.share_keys = rope, share_keys
        self.sm_scale = (1.0 if rope.yarn is None else rope.yarn.softmax_factor) / math.sqrt(d_nope + d_rope)
        if q_lora_rank is None:
            self.q_proj = nn.Linear(d_model, h_q * (d_nope + d_rope), bias=False)
        else:
            self.q_a_proj = nn.Linear(d_model, q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(q_lora_rank, eps=norm_eps)
            self.q_b_proj = nn.Linear(q_lora_rank, h_q * (d_nope + d_rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d_model, d_v + d_rope, bias=False)
        self.kv_a_layernorm = RMSNorm(d_v, eps=norm_eps)
        self.kv_b_proj = UpProjection(h_q, d_v, d_nope, d_head)
        self.o_proj = nn.Linear(h_q * d_head, d_model, bias=False)
        self.attn_sink = nn.Parameter(torch.zeros(h_q, dtype=torch.float32)) if attn_sink else None

    @classmethod
    def from_config(cls, config: object) -> Self:
        """A layer with the sizes of a Hugging Face configuration, an object or a dict, of DeepSeek-V3.2 or GLM-5."""
        return cls(**attention_options(f"{cls.__name__}.from_config", config))

    def query_latent(self, x: Tensor) -> Tensor:
        """What queries are projected from: x [b, s, d_model] itself, or its latent [b, s, q_lora_rank]."""
        return x if self.q_lora_rank is None else self.q_a_layernorm(self.q_a_proj(x))

    @property
    def heads_proj(self) -> nn.Linear:
        """The projection to the queries of the heads."""
        return self.q_proj if self.q_lora_rank is None else self.q_b_proj

    def _queries(self, latent: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor]:
        """Position-free [b, s, h_q, d_nope] and rotary [b, s, h_q, d_rope] parts of the queries."""
        q = self.heads_proj(latent).unflatten(-1, (self.h_q, -1))
        nope, rope = q.split([self.d_nope, self.d_rope], dim=-1)
        return nope, rotate(rope, start, self.rope)

    def _keys(self, x: Tensor, start: int | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Latents [b, s, d_v] and rotary parts [b, s, d_rope] of the keys."""
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.d_v, self.d_rope], dim=-1)
        return self.kv_a_layernorm(latent).to(dtype), rotate(k_rope, start, self.rope).to(dtype)

    def project(self, x: Tensor, start: int | Tensor = 0, latent: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [b, s, d_model] at the positions from `start` on → q [b, s, h_q, d_v + d_rope], kv [b, s, d_v + d_rope].
        latent: `query_latent(x)`, if the caller has it.
        """
        nope, rope = self._queries(self.query_latent(x) if latent is None else latent, start)
        q = torch.cat([self.kv_b_proj.into_latent(nope), rope], dim=-1)
        return q, torch.cat(self._keys(x, start, q.dtype), dim=-1)

    def combine(self, out: Tensor) -> Tensor:
        """The heads' results in the latent space [b, s, h_q, d_v] → [b, s, d_model]."""
        y: Tensor = self.o_proj(self.kv_b_proj.out_of_latent(out).flatten(-2))
        return y

    def attend(
        self, q: Tensor, kv: Tensor, indices: Tensor | None, ascending: bool = False, **masks: Any
    ) -> tuple[Tensor, Tensor]:
        """q [s_q, h_q, d_qk], kv [s_kv, d_qk], indices int32 [s_q, topk], `ascending` or not → out [s_q, h_q, d_v], lse
        [s_q, h_q]. indices None: every key that `masks`, those of `sparse_mla`, leave visible.
        """
        sink = None if self.attn_sink is None else self.attn_sink.float()  # FSDP's mixed precision casts it on the way
        masks |= {"indices_ascending": ascending, "share_keys": self.share_keys}
        out, _, lse = ops.sparse_mla(q, kv, indices, self.sm_scale, self.d_v, attn_sink=sink, **masks)
        return out, lse

    def dense(self, x: Tensor, pack: Pack) -> Tensor:
        """Attention over every key that `pack` lets a token see, by PyTorch: x [b, s, d_model] → [b, s, d_model]. The
        latents are lifted to keys and values of every head, which over all keys is less work than queries in the latent
        space. Packed documents need a mask of s² bytes.
        """
        if self.attn_sink is not None:
            raise ValueError("SparseMLA.dense: expected no attention sink, which PyTorch's attention does not have")
        nope, rope = self._queries(self.query_latent(x), pack.start)
        latent, k_rope = self._keys(x, pack.start, nope.dtype)
        k_nope, v = self.kv_b_proj.lift(latent)
        q = torch.cat([nope, rope], dim=-1).transpose(1, 2)
        k = torch.cat([k_nope, k_rope[:, :, None].expand(-1, -1, self.h_q, -1)], dim=-1).transpose(1, 2)
        mask = pack.mask() if pack.documents else None
        heads = functional.scaled_dot_product_attention(
            *(q, k, v.transpose(1, 2)), attn_mask=mask, is_causal=mask is None, scale=self.sm_scale
        )
        y: Tensor = self.o_proj(heads.transpose(1, 2).flatten(-2))
        return y

    def forward(
        self,
        x: Tensor,
        indices: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        k_start: Tensor | None = None,
        k_end: Tensor | None = None,
    ) -> Tensor:
        """x [b, s, d_model], indices int32 [b, s, topk] within each sequence (others: none) → [b, s, d_model].

        For packed documents x is [1, s, d_model]. Either cu_seqlens int32 or int64 [documents + 1] has their bounds, as
        in `key_ranges`, and each begins at position 0; or token i sees the keys k_start[i] … k_end[i] − 1, int32 [s].
        Indices count from the first token of the pack; those that a token does not see are skipped.
        """
        check_tokens("SparseMLA", x, self.d_model, self.kv_a_proj_with_mqa)
        check_type("SparseMLA", "indices", indices, Tensor)
        if indices.ndim != 3 or indices.shape[:2] != x.shape[:2]:
            raise ValueError(
                f"SparseMLA: indices must be int32 [b, s, topk] with [b, s] = {list(x.shape[:2])} as x has;"
                f" got {list(indices.shape)}"
            )
        pack = Pack.of("SparseMLA", x, x.shape[1], cu_seqlens, k_start, k_end)
        q, kv = self.project(x, pack.start)
        masks = pack.ranges() if pack.documents else {}
        out, _ = self.attend(q.flatten(0, 1), kv.flatten(0, 1), pack_indices(indices, x.shape[1]), **masks)
        return self.combine(out.view(*x.shape[:2], self.h_q, self.d_v))

    def extra_repr(self) -> str:
        text = f"d_model={self.d_model}, h_q={self.h_q}, d_v={self.d_v}, d_rope={self.d_rope}, d_nope={self.d_nope}"
        text += f", d_head={self.d_head}, q_lora_rank={self.q_lora_rank}, attn_sink={self.attn_sink is not None}"
        return f"{text}, rope={self.rope}"


def pack_indices(indices: Tensor, s_kv: int) -> Tensor:
    """Key indices within each of b sequences of s_kv keys, [b, s, topk], to indices into their pack, [b·s, topk]; those
    that name no key of their sequence become −1.
    """
    shift = torch.arange(indices.shape[0], device=indices.device, dtype=indices.dtype)[:, None, None] * s_kv
    return torch.where((indices < 0) | (indices >= s_kv), -1, indices + shift).flatten(0, 1)
