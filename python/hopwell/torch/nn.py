"""Modules made of the operators: multi-query MLA over selected keys, the lightning indexer, both together, NVFP4
linear.

Shapes: b sequences, s tokens a sequence, d_model the width of the residual stream; the operators take one packed
sequence, so the modules flatten [b, s] and shift each sequence's key indices by its place in the pack. The attention is
the one of DeepSeek-V2 with the up-projections absorbed (the latent is key and value of every head), the indexer and its
training the ones of the DeepSeek-V3.2 report.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from hopwell._checks import INTEGERS, integer, require, require_one_device, require_shape
from hopwell.torch import ops
from hopwell.torch._packing import key_ranges
from hopwell.torch.ops._nvfp4 import nvfp4_linear_any_rows
from hopwell.torch.ops._register import contiguous_rows

Mode = Literal["dense", "warm-up", "sparse"]


def check_type(module: str, argument: str, value: object, expected: type) -> None:
    """TypeError, which names the module, the argument, what was expected and what came, unless it is of that type."""
    if not isinstance(value, expected):
        name = f"torch.{expected.__name__}" if expected is Tensor else f"torch.nn.{expected.__name__}"
        raise TypeError(f"{module}: {argument} must be a {name}; got {type(value).__name__}")


def rotate(x: Tensor, start: int | Tensor = 0, theta: float = 10_000.0) -> Tensor:
    """Rotary position embedding of x [b, s, d] or [b, s, h, d], d even, for the positions start … start + s − 1."""
    if x.ndim not in (3, 4) or x.shape[-1] % 2:
        raise ValueError(f"rotate: x must be [b, s, d] or [b, s, h, d] with d even; got {list(x.shape)}")
    s, d = x.shape[1], x.shape[-1]
    positions = torch.arange(s, device=x.device, dtype=torch.float32) + start
    frequencies = theta ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = positions[:, None] * frequencies
    if x.ndim == 4:
        angle = angle[:, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x.chunk(2, dim=-1)
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


def check_tokens(module: str, x: Tensor, d_model: int) -> None:
    """The input of a module here is a batch of sequences."""
    check_type(module, "x", x, Tensor)
    if x.ndim != 3 or x.shape[-1] != d_model:
        raise ValueError(f"{module}: x must be [b, s, d_model={d_model}]; got {list(x.shape)}")


def backward_may_follow(training: bool = True) -> bool:
    """True where gradients are on, and in the forward of an `autograd.Function`, where PyTorch turns them off.

    Reentrant activation checkpointing is such a function: its backward runs the module again with gradients on, and
    passes gradients only to results that the first run returned as well. PyTorch turns forward mode off there too,
    which `no_grad` does not. Compiled code cannot ask for that: there `training` decides.
    """
    if torch.is_grad_enabled():
        return True
    if torch.compiler.is_compiling():
        return training
    return not (torch.is_inference_mode_enabled() or torch._C._is_fwd_grad_enabled())


def has_loss(module: nn.Module, mode: "Mode", with_loss: bool | None) -> bool:
    """Whether a `DSA` returns its loss: as `with_loss` says. The default, None, asks if a backward may follow."""
    if mode == "dense":
        name = type(module).__name__
        require(not with_loss, name, "with_loss", "None or False in mode 'dense', which has no loss", with_loss)
        return False
    return backward_may_follow(module.training) if with_loss is None else bool(with_loss)


def check_mode(module: str, mode: str) -> None:
    """A mode of `DSA`."""
    if mode not in get_args(Mode):
        raise ValueError(f"{module}: mode must be {' or '.join(map(repr, get_args(Mode)))}; got {mode!r}")


@dataclass
class KeyCache:
    """What generation keeps of one sequence: latent keys [max_tokens, d_qk] and index keys [max_tokens, d_index].

    `length` counts the tokens. Once there are any it may be made a 0-d int64 tensor, which the caller counts on: then
    steps differ in nothing but its value, and one that was captured in a CUDA graph serves for all that follow.
    """

    max_tokens: int
    length: int | Tensor = 0
    kv: Tensor | None = None
    k_index: Tensor | None = None

    def append(self, kv: Tensor, k_index: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys of new tokens, [s, d_qk] and [s, d_index]; returns all; with a counting tensor, all the room
        there is. A call that is refused adds none.
        """
        count = self.count()
        self._check("kv", kv, self.kv, None)
        self._check("k_index", k_index, self.k_index, len(kv))
        require_one_device("KeyCache", cache=self.kv, kv=kv, k_index=k_index)
        if isinstance(count, Tensor):
            if self.kv is None or self.k_index is None:
                raise ValueError("KeyCache: length must be a number until there are tokens; got a tensor")
            places = count + torch.arange(len(kv), device=count.device)
            return self.kv.index_copy_(0, places, kv), self.k_index.index_copy_(0, places, k_index)
        end = count + len(kv)
        if end > self.max_tokens:
            raise ValueError(f"KeyCache: it holds {self.max_tokens} tokens; got {end}")
        if self.kv is None or self.k_index is None:
            require(count == 0, "KeyCache", "length", "0 until there are tokens", count)
            self.kv, self.k_index = (x.new_zeros(self.max_tokens, x.shape[1]) for x in (kv, k_index))
        self.kv[count:end], self.k_index[count:end] = kv, k_index
        self.length = end
        return self.kv[:end], self.k_index[:end]

    def count(self) -> int | Tensor:
        """`length`, checked; a number as Python's own."""
        if isinstance(self.length, Tensor):
            fits = self.length.ndim == 0 and self.length.dtype in INTEGERS
            require(fits, "KeyCache", "length", "a number or a 0-d int64 tensor", self.length)
            return self.length
        count = integer("KeyCache", "length", self.length)
        require(count >= 0, "KeyCache", "length", "at least 0", count)
        return count

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """If the code within raises, the cache has its tokens of before. Memory behind them may have changed. A model
        of several layers enters this for each layer's cache.
        """
        before = self.length, self.kv, self.k_index
        try:
            yield
        except BaseException:
            self.length, self.kv, self.k_index = before
            raise

    @staticmethod
    def _check(argument: str, new: Tensor, kept: Tensor | None, s: int | None) -> None:
        check_type("KeyCache", argument, new, Tensor)
        require_shape("KeyCache", argument, new, s=s, d=None if kept is None else kept.shape[1])
        if kept is not None:
            require(new.dtype == kept.dtype, "KeyCache", argument, f"{kept.dtype} as the cache's is", new.dtype)


class KeepsDtypes(nn.Module):
    """A module of which some tensors have their dtype whatever that of the rest: `bfloat16()` and its like, which cast
    all that is floating, only move those named in `kept`.
    """

    kept: ClassVar[tuple[str, ...]]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        tensors = [t for t in (getattr(self, name) for name in self.kept) if t is not None]
        kept = {id(t) for t in (*tensors, *(t.grad for t in tensors if t.grad is not None))}

        def convert(tensor: Tensor) -> Tensor:
            if id(tensor) not in kept:
                return fn(tensor)
            given = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # float4 can't even be cast
            moved = fn(given)
            if moved is given:
                return tensor
            return (moved if moved.dtype == given.dtype else given.to(moved.device)).view(tensor.dtype)

        module: Self = super()._apply(convert, recurse)  # type: ignore[no-untyped-call]
        return module


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


class DSA(nn.Module):
    """DeepSeek Sparse Attention: `mla` over the keys that `indexer` selects, and the loss the indexer learns from.

    Three ways to run it, the stages of the report:
      "dense"    attention over every visible key, by PyTorch; the indexer rests
      "warm-up"  attention over every visible key and the indexer's loss over all of them; the caller keeps
                 the rest fixed
      "sparse"   attention over the selected keys and the indexer's loss over these

    The loss is the mean over tokens (without any, 0) of KL(attention distribution ‖ softmax of the index scores). The
    indexer's input is detached and the target carries no gradient, so the indexer learns from this loss only and
    nothing else learns from it. `selected` holds the last selection, int32 [b, s, topk]: the keys
    that were read; None if all were.
    """

    def __init__(self, mla: SparseMLA, indexer: LightningIndexer) -> None:
        check_type("DSA", "mla", mla, nn.Module)  # a SparseMLA, perhaps compiled or wrapped
        check_type("DSA", "indexer", indexer, nn.Module)
        super().__init__()
        self.mla, self.indexer = mla, indexer
        self.selected: Tensor | None = None

    def forward(self, x: Tensor, mode: Mode = "sparse", with_loss: bool | None = None) -> tuple[Tensor, Tensor | None]:
        """x [b, s, d_model] → y [b, s, d_model] and the indexer's loss, or None.

        with_loss: whether the loss is made. None: if a backward may follow, that is with gradients on, and under
        activation checkpointing also in the reentrant kind's first run. Mode "dense" has no loss.
        """
        check_mode("DSA", mode)
        check_tokens("DSA", x, self.mla.d_model)
        with_loss = has_loss(self, mode, with_loss)
        if mode == "dense":
            y, self.selected = self.mla.dense(x), None
            return y, None
        b, s, _ = x.shape
        q, kv = self.mla.project(x)
        q_index, k_index, weights = self.indexer.project(x.detach())
        q, kv = q.flatten(0, 1), kv.flatten(0, 1)
        masks: dict[str, Any] = {}
        selected = indices = None
        if mode == "sparse":
            selected = self.indexer.select(q_index, k_index, weights)
            indices = pack_indices(selected, s)
        else:
            masks = dict(zip(("k_start", "k_end"), sequence_ranges(b, s, x.device), strict=True))
        out, lse = self.mla.attend(q, kv, indices, ascending=True, **masks)
        y, loss = self.mla.combine(out.view(b, s, self.mla.h_q, self.mla.d_v)), None
        if with_loss:
            index = q_index.flatten(0, 1), k_index.flatten(0, 1), weights.flatten(0, 1)
            loss = self._loss((q, kv, lse), index, indices, masks) / max(b * s, 1)
        self.selected = selected
        return y, loss

    def _loss(
        self,
        attention: tuple[Tensor, Tensor, Tensor],
        index: tuple[Tensor, Tensor, Tensor],
        indices: Tensor | None,
        masks: dict[str, Any],
    ) -> Tensor:
        """The sum over tokens. `attention` has queries, keys and lse, `index` what `indexer.project` makes."""
        if indices is None:
            return ops.indexer_dense_loss(*attention, *index, self.mla.sm_scale, **masks)
        q, kv, lse = attention
        target = ops.attention_distribution(
            q, kv, indices, lse, self.mla.sm_scale, normalize="l1", indices_ascending=True
        )
        return ops.indexer_loss(*index, indices, target)

    def extend(self, x: Tensor, cache: KeyCache) -> Tensor:
        """The tokens x [1, s, d_model] that follow those in the cache: adds their keys to it and attends sparsely. If
        this raises, the cache has the tokens of before.
        """
        check_tokens("DSA.extend", x, self.mla.d_model)
        if len(x) != 1:
            raise ValueError(
                f"DSA.extend: x must be [1, s, d_model], one sequence as the cache is; got {list(x.shape)}"
            )
        if not isinstance(cache, KeyCache):
            raise TypeError(f"DSA.extend: cache must be a KeyCache; got {type(cache).__name__}")
        start = cache.count()
        q, kv = self.mla.project(x, start)
        q_index, k_index, weights = self.indexer.project(x, start)
        mask: dict[str, Any] = {"q_start": start}
        if isinstance(start, Tensor):
            mask = {"q_positions": (start + torch.arange(x.shape[1], device=start.device)).int()}
        with cache.unchanged_on_error():
            keys, index_keys = cache.append(kv[0], k_index[0])
            indices, _ = ops.lightning_indexer(q_index[0], index_keys, weights[0], self.indexer.topk, **mask)
            out, _ = self.mla.attend(q[0], keys, indices, ascending=True)
            return self.mla.combine(out[None])


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))


class NVFP4Linear(KeepsDtypes):
    """A linear layer whose weight is NVFP4: 4-bit codes, an e4m3 scale per 16 of them, one float32 scale, which all
    stay as they are in a module of another dtype. The weight and the bias are buffers and are not trained; x has its
    gradient, so layers before it and adapters beside it (LoRA) are. Many rows of bf16 x on a GPU are multiplied by the
    dequantised weight where that is faster; it exists for the time of the call.
    """

    kept = ("weight", "weight_scale", "weight_global")
    _bytes: ClassVar[dict[str, tuple[torch.dtype, ...]]] = {
        "weight": (torch.uint8, torch.float4_e2m1fn_x2),
        "weight_scale": (torch.uint8, torch.float8_e4m3fn),
    }

    weight: Tensor
    weight_scale: Tensor
    weight_global: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        weight_global: Tensor,
        bias: Tensor | None = None,
        *,
        global_is_reciprocal: bool = False,
    ) -> None:
        """weight uint8 or float4_e2m1fn_x2 [out_features, in_features/2], weight_scale uint8 or float8_e4m3fn
        [out_features, in_features/16], weight_global float32 0-d. With global_is_reciprocal weight_global is
        1 / the factor, as compressed-tensors stores it (`weight_global_scale`).
        """
        super().__init__()
        for name, tensor in (("weight", weight), ("weight_scale", weight_scale), ("weight_global", weight_global)):
            check_type("NVFP4Linear", name, tensor, Tensor)
        if bias is not None:
            check_type("NVFP4Linear", "bias", bias, Tensor)
        if weight.ndim != 2 or weight.dtype not in self._bytes["weight"]:
            expected = f"{_names(self._bytes['weight'])} [out_features, in_features/2]"
            raise ValueError(f"NVFP4Linear: weight must be {expected}; got {weight.dtype} {list(weight.shape)}")
        self.out_features, self.in_features = weight.shape[0], weight.shape[1] * 2
        self.global_is_reciprocal = global_is_reciprocal
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("weight_global", weight_global)
        self.register_buffer("bias", bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "NVFP4Linear":
        """Rounds a linear layer's weight, of any strides, to NVFP4. Its in_features must be a multiple of 16."""
        check_type("NVFP4Linear.from_linear", "linear", linear, nn.Linear)
        if linear.in_features % 16:
            raise ValueError(f"NVFP4Linear: in_features must be a multiple of 16; got {linear.in_features}")
        weight = linear.weight.detach()
        if weight.dtype not in _FLOATS:
            raise ValueError(f"NVFP4Linear.from_linear: linear.weight must be {_names(_FLOATS)}; got {weight.dtype}")
        bias = None if linear.bias is None else linear.bias.detach().clone()
        return cls(*ops.nvfp4_quantize(contiguous_rows(weight)), bias)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Codes and scales are bytes, whichever of their types a checkpoint has them in: PyTorch would convert values
        of one to those of the other, which are other numbers.
        """
        for name, types in self._bytes.items():
            key, own = prefix + name, getattr(self, name)
            if key not in state_dict:
                continue
            given = state_dict[key]
            if given.dtype not in types:
                errors, expected = rest[-1], _names(types)
                errors.append(f"NVFP4Linear: {key} must be {expected}; got {given.dtype} {list(given.shape)}")
                given = own
            if given.dtype != own.dtype:
                given = given.view(own.dtype)
            state_dict[key] = given
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] of any strides → [..., out_features] in x's dtype, or in autocast's where that is on."""
        check_type("NVFP4Linear", "x", x, Tensor)
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"NVFP4Linear: x must be [..., in_features={self.in_features}]; got {list(x.shape)}")
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if x.dtype not in _FLOATS:
            raise ValueError(f"NVFP4Linear: x must be {_names(_FLOATS)}; got {x.dtype}")
        buffers = {name: getattr(self, name) for name in (*self.kept, "bias")}
        require_one_device("NVFP4Linear", x=x, **buffers)  # one that a checkpoint lacked may be on meta
        bias = None if self.bias is None else self.bias.to(x.dtype)
        rows = contiguous_rows(x.reshape(math.prod(x.shape[:-1]), self.in_features))
        y = nvfp4_linear_any_rows(
            *(rows, self.weight, self.weight_scale, self.weight_global, bias),
            global_is_reciprocal=self.global_is_reciprocal,
        )
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return text + (", global_is_reciprocal=True" if self.global_is_reciprocal else "")
