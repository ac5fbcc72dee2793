"""Sparse attention over several ranks, of `torch.distributed` collectives and key ranges.

Context parallel: a rank has some tokens of every sequence. Its queries attend over the latent keys of all ranks, which
are gathered in the order of the sequence, so that what belongs to a query has the bits that it has on one rank; the
gradients of keys are summed in float32 and go back to the ranks that own them.

Tensor parallel: a rank has some of the heads, every token and the whole indexer. The attention distribution is summed
over ranks before it is normalised.

>>> shard = ContextShard.zigzag(s, mesh["context"].get_group(), device)
>>> shard_heads(attention, mesh["heads"].get_group())
>>> attention = ParallelDSA(attention, attention.indexer, heads=mesh["heads"].get_group())
>>> y, indexer_loss = attention(shard.split(x), shard)

Losses are this rank's part of a sum over the context's ranks: `sum_gradients` adds the parameters' gradients up, or
FSDP2 does, with `set_gradient_divide_factor(1.0)` and `set_force_sum_reduction_for_comms(True)`. Without the second,
FSDP2 asks for a scaled sum, which gloo does not have.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from hopwell._checks import require
from hopwell.torch import nn, ops
from hopwell.torch.nn._module import check_tokens
from hopwell.torch.nn.dsa import check_mode, has_loss
from hopwell.torch.nn.pack import Pack
from hopwell.torch.ops._indexer_dense_loss import indexer_dense_loss_and_gradients
from hopwell.torch.ops._register import Gradients, refuse_second_derivative, scaled

__all__ = ["ContextShard", "ParallelDSA", "check_agreement", "shard_heads", "sum_gradients"]

Group = dist.ProcessGroup | None  # None: this rank alone


def _place(group: Group) -> tuple[int, int]:
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def check_agreement(what: str, name: str, value: Iterable[int], group: Group, device: torch.device | None) -> None:
    """Raises ValueError on every rank where `value`, up to 8 numbers, is not the same on all. A collective."""
    given = tuple(value)
    _, ranks = _place(group)
    if ranks == 1:
        return
    mine = torch.tensor([*given, *(-1,) * (8 - len(given))], device=device)
    every = mine.new_empty(ranks * 8)
    dist.all_gather_into_tensor(every, mine, group=group)
    rows = every.view(ranks, 8).tolist()
    if any(row != rows[0] for row in rows):
        got = ", ".join(str([n for n in row if n >= 0]) for row in rows)
        raise ValueError(f"{what}: {name} must be the same on every rank; got {got} on ranks 0 … {ranks - 1}")


@dataclass(frozen=True)
class ContextShard:
    """Which tokens of sequences of s tokens this rank has. `positions` int64 [s_local] are theirs, ascending.

    Gathered rows are padded to the `rows` of the largest shard; `places` int64 [s] says where each token's row is then.
    """

    s: int
    group: Group
    positions: Tensor
    places: Tensor
    rows: int

    @classmethod
    def zigzag(cls, s: int, group: Group = None, device: torch.device | None = None) -> Self:
        """Of 2·ranks pieces as equal as can be, rank r has the pieces r and 2·ranks − 1 − r, an early and a late one:
        under a causal mask every rank has as many pairs of a query and a key. Ranks may be left without tokens. A
        collective: an s that differs between ranks is a ValueError on each.
        """
        check_agreement("ContextShard", "s", (s,), group, device)
        require(s >= 0, "ContextShard", "s", "at least 0", s)
        rank, ranks = _place(group)
        pieces = torch.arange(s, device=device).tensor_split(2 * ranks)
        shards = [torch.cat([pieces[r], pieces[-1 - r]]) for r in range(ranks)]
        rows = max(map(len, shards))
        places = torch.empty(s, dtype=torch.int64, device=device)
        for r, shard in enumerate(shards):
            places[shard] = r * rows + torch.arange(len(shard), device=device)
        return cls(s, group, shards[rank], places, rows)

    def split(self, x: Tensor) -> Tensor:
        """x [b, s, ...] → this rank's [b, s_local, ...]. A collective: where ranks have x of several shapes each raises
        a ValueError, so that none waits for another in a later gather.
        """
        check_agreement("ContextShard.split", "x's shape", x.shape, self.group, x.device)
        if x.ndim < 2 or x.shape[1] != self.s:
            raise ValueError(f"ContextShard.split: x must be [b, s, ...] with s = {self.s}; got {list(x.shape)}")
        return x.index_select(1, self.positions)

    def gather(self, x: Tensor) -> Tensor:
        """This rank's x [b, s_local, d] → every token's, [b, s, d]. Without gradient."""
        _, ranks = _place(self.group)
        if ranks == 1:
            return x.detach()
        mine = x.new_zeros(self.rows, x.shape[0], x.shape[2])
        mine[: x.shape[1]] = x.detach().transpose(0, 1)
        every = x.new_empty(ranks * self.rows, *mine.shape[1:])
        dist.all_gather_into_tensor(every, mine, group=self.group)
        return every[self.places].transpose(0, 1).contiguous()

    def reduce(self, x: Tensor) -> Tensor:
        """The adjoint of `gather`: x [b, s, d] summed over ranks in its own dtype → this rank's [b, s_local, d]."""
        _, ranks = _place(self.group)
        if ranks == 1:
            return x
        every = x.new_zeros(ranks * self.rows, x.shape[0], x.shape[2])
        every[self.places] = x.transpose(0, 1)
        mine = x.new_empty(self.rows, *every.shape[1:])
        dist.reduce_scatter_tensor(mine, every, group=self.group)
        return mine[: len(self.positions)].transpose(0, 1)


def _sum(x: Tensor, group: Group) -> Tensor:
    if _place(group)[1] == 1:
        return x
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks; every rank goes on with it, so its gradient is each one's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> Gradients:
        refuse_second_derivative("hopwell.torch.parallel")
        return d_total, None


class _SumOfGradients(torch.autograd.Function):
    """x itself, of which every rank makes a part of what follows: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> Gradients:
        refuse_second_derivative("hopwell.torch.parallel")
        return _sum(d_x, ctx.group), None


class _SparseMLA(torch.autograd.Function):
    """`sparse_mla` over gathered keys. dKV stays float32 until it has been summed over heads and context."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, gathered: Tensor, sink: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        keys, masks = gathered.flatten(0, 1), options["masks"]
        out, _, lse = ops.sparse_mla_forward(
            *(q, keys, options["indices"], options["sm_scale"], options["d_v"]),
            attn_sink=sink,
            share_keys=options["share_keys"],
            **masks,
        )
        ctx.options, ctx.shape, ctx.kv_dtype = options, gathered.shape, kv.dtype
        ctx.save_for_backward(q, keys, out, lse, sink)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _d_lse: Tensor) -> Gradients:
        refuse_second_derivative("hopwell.torch.parallel")
        q, keys, out, lse, sink = ctx.saved_tensors
        options, masks = ctx.options, ctx.options["masks"]
        dq, dkv, d_sink = ops.sparse_mla_backward(
            *(d_out.contiguous(), q, keys, options["indices"], out, lse, options["sm_scale"], options["d_v"]),
            attn_sink=sink,
            share_keys=options["share_keys"],
            **masks,
        )
        assert dkv is not None
        mine = options["shard"].reduce(_sum(dkv, options["heads"]).view(ctx.shape))
        return dq, mine.to(ctx.kv_dtype), None, d_sink, None


class _IndexerLoss(torch.autograd.Function):
    """The indexer's loss over gathered keys; `loss_of` makes it, and its gradients, of q, every key and weights."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        gathered: Tensor,
        loss_of: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]],
        shard: ContextShard,
    ) -> Tensor:
        loss, *gradients = loss_of(q, gathered.flatten(0, 1), weights)[:4]
        ctx.shard, ctx.shape, ctx.k_dtype = shard, gathered.shape, k.dtype
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> Gradients:
        refuse_second_derivative("hopwell.torch.parallel")
        d_q, d_k, d_weights = (scaled(g, d_loss) for g in ctx.saved_tensors)
        return d_q, ctx.shard.reduce(d_k.view(ctx.shape)).to(ctx.k_dtype), d_weights, None, None, None


def _every_key(s: int, k_start: Tensor, k_end: Tensor) -> Tensor:
    """A selection of every key that a query sees, int32 [queries, s], -1 after the last."""
    every = torch.arange(s, device=k_start.device, dtype=torch.int32) + k_start[:, None]
    return torch.where(every < k_end[:, None], every, -1)


class ParallelDSA(nn.DSA):
    """`nn.DSA` over the tokens of a `ContextShard` and, where `mla` has been through `shard_heads`, some of the heads.

    Its parameters are named as those of `nn.DSA`. "dense" and "warm-up" store nothing of size s × s, but
    that the warm-up's target has to be stored, to be added, where ranks share the heads.
    """

    def __init__(self, mla: nn.SparseMLA, indexer: nn.LightningIndexer, heads: Group = None) -> None:
        super().__init__(mla, indexer)
        self.heads = heads

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        shard: ContextShard,
        mode: nn.Mode = "sparse",
        with_loss: bool | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        k_start: Tensor | None = None,
        k_end: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x [b, s_local, d_model] → y alike and this rank's part of the indexer's loss, the mean over all tokens.
        with_loss as in `nn.DSA`, the same on every rank; so are cu_seqlens, k_start and k_end, which are of the whole
        pack: [1, s, d_model] before it was split.
        """
        check_mode("ParallelDSA", mode)
        check_tokens("ParallelDSA", x, self.d_model, self.kv_a_proj_with_mqa)
        with_loss = has_loss(self, mode, with_loss)
        b, s_local, _ = x.shape
        if s_local != len(shard.positions):
            raise ValueError(
                f"ParallelDSA: x must be [b, s_local, d_model] with s_local = {len(shard.positions)};"
                f" got {list(x.shape)}"
            )
        pack = Pack.of("ParallelDSA", x, shard.s, cu_seqlens, k_start, k_end).take(shard.s, shard.positions)
        (q, kv), (q_index, k_index, weights) = self.project_all(x, pack.start)
        keys, index_keys = shard.gather(kv), shard.gather(k_index)
        q, q_index, weights = (t.flatten(0, 1) for t in (q, q_index, weights))
        masks: dict[str, Any] = dict(pack.ranges())
        indices = selected = None
        if mode == "sparse":
            indices, _ = ops.lightning_indexer(q_index, index_keys.flatten(0, 1), weights, self.indexer.topk, **masks)
            first = torch.arange(b, device=x.device, dtype=torch.int32)[:, None, None] * shard.s
            selected = indices.view(b, s_local, indices.shape[1])
            selected = torch.where(selected < 0, -1, selected - first)
        options: dict[str, Any] = {"indices": indices, "masks": masks, "shard": shard, "heads": self.heads}
        options |= {"sm_scale": self.sm_scale, "d_v": self.d_v, "share_keys": self.share_keys}
        sink = None if self.attn_sink is None else self.attn_sink.float()
        out, lse = _SparseMLA.apply(q, kv, keys, sink, options)  # type: ignore[no-untyped-call]
        y = self.combine(out.view(b, s_local, self.h_q, self.d_v))
        loss = None
        if with_loss:
            index = q_index, k_index, weights, index_keys
            loss = self._part_of_loss((q.detach(), keys.flatten(0, 1), lse), index, indices, shard, masks)
            loss = loss / max(b * shard.s, 1)
        self.selected = selected
        return y, loss

    def _part_of_loss(
        self,
        attention: tuple[Tensor, Tensor, Tensor],
        index: tuple[Tensor, Tensor, Tensor, Tensor],
        indices: Tensor | None,
        shard: ContextShard,
        masks: dict[str, Any],
    ) -> Tensor:
        """The sum over this rank's tokens. `attention` is queries, gathered keys and lse, `index` the indexer's
        queries, own keys, weights and gathered keys.
        """

        def loss_of_target(q_index: Tensor, index_keys: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
            q, keys, lse = attention
            entries = _every_key(shard.s, masks["k_start"], masks["k_end"]) if indices is None else indices
            attn = ops.attention_distribution(q, keys, entries, lse, self.sm_scale, indices_ascending=True, **masks)
            target = ops.normalize_l1(_sum(attn, self.heads))
            return ops.lightning_indexer_backward(target, q_index, index_keys, weights, entries, **masks)

        def dense_loss(q_index: Tensor, index_keys: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
            return indexer_dense_loss_and_gradients(*attention, q_index, index_keys, weights, self.sm_scale, **masks)

        loss_of = dense_loss if indices is None and _place(self.heads)[1] == 1 else loss_of_target
        loss: Tensor = _IndexerLoss.apply(*index, loss_of, shard)  # type: ignore[no-untyped-call]
        return loss


def shard_heads(mla: nn.SparseMLA, group: Group) -> None:
    """Keeps this rank's heads of `mla`, the same number on every rank. The ranks' results are summed behind
    `o_proj`, the gradients of the input before the projection to the heads' queries.
    """
    rank, ranks = _place(group)
    if mla.h_q % ranks:
        raise ValueError(f"shard_heads: h_q must be a multiple of the {ranks} ranks; got {mla.h_q}")

    def part(tensor: Tensor, dim: int = 0) -> torch.nn.Parameter:
        return torch.nn.Parameter(tensor.detach().chunk(ranks, dim)[rank].clone())

    queries, up, output = mla.heads_proj, mla.kv_b_proj, mla.o_proj
    parts = part(queries.weight), part(up.weight), part(output.weight, 1)
    sink = None if mla.attn_sink is None else part(mla.attn_sink)
    queries.weight, up.weight, output.weight = parts  # nothing fails from here on
    mla.attn_sink = sink
    mla.h_q //= ranks
    queries.register_forward_pre_hook(lambda _, x: (_SumOfGradients.apply(x[0], group),))  # type: ignore[no-untyped-call]
    output.register_forward_hook(lambda _, x, y: _SumOverRanks.apply(y, group))  # type: ignore[no-untyped-call]


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: Group) -> None:
    """Adds up the gradients of replicated parameters over the context's ranks, for training without FSDP."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = _sum(parameter.grad, group)
