"""Multi-query MLA over selected keys."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hopwell.torch import ops
from hopwell.torch._packing import key_ranges
from hopwell.torch.nn._module import KeepsDtypes, check_tokens, check_type
from hopwell.torch.nn.rope import rotate


class SparseMLA(KeepsDtypes):
    """Multi-head latent attention in its multi-query form, over the keys that `indices` names.

    A token's key is its latent, d_v numbers, and a rotary part of d_rope; the value is the latent. Queries come per
    head with d_nope position-free numbers, lifted into the latent space by `up_key`, and d_rope rotary ones; `up_value`
    takes each head's result out of the latent space to d_head numbers. `attn_sink` stays float32 in a module of another
    dtype.

    `share_keys`, the hint of `sparse_mla`, pays on Hopper with up to 32 heads on a GPU, such as a
    tensor-parallel rank has, where neighbouring tokens select mostly the same keys, as a trained indexer makes them.
    """

    kept = ("attn_sink",)

    def __init__(
        self,
        d_model: int,
        h_q: int,
        *,
        d_v: int = 512,
        d_rope: int = 64,
        d_nope: int = 128,
        d_head: int = 128,
        attn_sink: bool = False,
        rope_theta: float = 10_000.0,
        share_keys: bool = False,
    ) -> None:
        super().__init__()
        self.d_model, self.share_keys = d_model, share_keys
        self.h_q, self.d_v, self.d_rope, self.d_nope, self.rope_theta = h_q, d_v, d_rope, d_nope, rope_theta
        self.sm_scale = 1.0 / math.sqrt(d_nope + d_rope)
        self.query = nn.Linear(d_model, h_q * (d_nope + d_rope), bias=False)
        self.latent = nn.Linear(d_model, d_v + d_rope, bias=False)
        self.latent_norm = nn.RMSNorm(d_v)
        self.up_key = nn.Parameter(torch.randn(h_q, d_nope, d_v) / math.sqrt(d_v))
        self.up_value = nn.Parameter(torch.randn(h_q, d_v, d_head) / math.sqrt(d_v))
        self.output = nn.Linear(h_q * d_head, d_model, bias=False)
        self.attn_sink = nn.Parameter(torch.zeros(h_q, dtype=torch.float32)) if attn_sink else None

    def project(self, x: Tensor, start: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """x [b, s, d_model] at the positions from `start` on → q [b, s, h_q, d_v + d_rope], kv [b, s, d_v + d_rope]."""
        q = self.query(x).unflatten(-1, (self.h_q, -1))
        nope, rope = q.split([self.d_nope, self.d_rope], dim=-1)
        absorbed = torch.einsum("bshn,hnv->bshv", nope, self.up_key.to(nope.dtype))
        latent, k_rope = self.latent(x).split([self.d_v, self.d_rope], dim=-1)
        q = torch.cat([absorbed, rotate(rope, start, self.rope_theta)], dim=-1)
        kv = torch.cat([self.latent_norm(latent).to(q.dtype), rotate(k_rope, start, self.rope_theta)], dim=-1)
        return q, kv

    def combine(self, out: Tensor) -> Tensor:
        """The heads' results in the latent space [b, s, h_q, d_v] → [b, s, d_model]."""
        heads = torch.einsum("bshv,hvd->bshd", out, self.up_value.to(out.dtype))
        y: Tensor = self.output(heads.flatten(-2))
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

    def dense(self, x: Tensor) -> Tensor:
        """Causal attention over every key, by PyTorch: x [b, s, d_model] → [b, s, d_model]. The latents are lifted to
        keys and values of every head, which over all keys is less work than queries in the latent space.
        """
        if self.attn_sink is not None:
            raise ValueError("SparseMLA.dense: expected no attention sink, which PyTorch's attention does not have")
        nope, rope = self.query(x).unflatten(-1, (self.h_q, -1)).split([self.d_nope, self.d_rope], dim=-1)
        latent, k_rope = self.latent(x).split([self.d_v, self.d_rope], dim=-1)
        latent, k_rope = self.latent_norm(latent).to(nope.dtype), rotate(k_rope, 0, self.rope_theta).to(nope.dtype)
        k_nope = torch.einsum("bsv,hnv->bshn", latent, self.up_key.to(nope.dtype))
        v = torch.einsum("bsv,hvd->bshd", latent, self.up_value.to(nope.dtype))
        q = torch.cat([nope, rotate(rope, 0, self.rope_theta)], dim=-1).transpose(1, 2)
        k = torch.cat([k_nope, k_rope[:, :, None].expand(-1, -1, self.h_q, -1)], dim=-1).transpose(1, 2)
        heads = functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, scale=self.sm_scale)
        y: Tensor = self.output(heads.transpose(1, 2).flatten(-2))
        return y

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        """x [b, s, d_model], indices int32 [b, s, topk] within each sequence (others: none) → [b, s, d_model]."""
        check_tokens("SparseMLA", x, self.d_model)
        check_type("SparseMLA", "indices", indices, Tensor)
        if indices.ndim != 3 or indices.shape[:2] != x.shape[:2]:
            raise ValueError(
                f"SparseMLA: indices must be int32 [b, s, topk] with [b, s] = {list(x.shape[:2])} as x has;"
                f" got {list(indices.shape)}"
            )
        q, kv = self.project(x)
        out, _ = self.attend(q.flatten(0, 1), kv.flatten(0, 1), pack_indices(indices, x.shape[1]))
        return self.combine(out.view(*x.shape[:2], self.h_q, self.d_v))


def pack_indices(indices: Tensor, s_kv: int) -> Tensor:
    """Key indices within each of b sequences of s_kv keys, [b, s, topk], to indices into their pack, [b·s, topk]; those
    that name no key of their sequence become −1.
    """
    shift = torch.arange(indices.shape[0], device=indices.device, dtype=indices.dtype)[:, None, None] * s_kv
    return torch.where((indices < 0) | (indices >= s_kv), -1, indices + shift).flatten(0, 1)


def sequence_ranges(b: int, s: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The keys that each token sees in a pack of b sequences of s tokens: k_start, k_end int32 [b·s]."""
    return key_ranges(torch.arange(b + 1, device=device) * s, s_q=b * s)
