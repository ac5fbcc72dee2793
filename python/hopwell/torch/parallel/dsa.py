"""DeepSeek Sparse Attention over several ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hopwell._checks import require
from hopwell.torch import nn, ops
from hopwell.torch.nn._module import check_tokens
from hopwell.torch.nn.dsa import check_mode, has_loss
from hopwell.torch.nn.pack import Pack
from hopwell.torch.ops._indexer_dense_loss import indexer_dense_loss_and_gradients
from hopwell.torch.ops._register import Gradients, refuse_second_derivative, scaled
from hopwell.torch.parallel.shard import (
    ContextShard,
    Group,
    SumOfGradients,
    SumOverRanks,
    every_visible,
    place,
    sum_over_ranks,
)


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
        mine = options["shard"].reduce(sum_over_ranks(dkv, options["heads"]).view(ctx.shape))
        return dq, mine.to(ctx.kv_dtype), None, d_sink, None


class IndexerLoss(torch.autograd.Function):
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


def part_of_loss(
    attention: tuple[Tensor, Tensor, Tensor],
    index: tuple[Tensor, Tensor, Tensor, Tensor],
    indices: Tensor | None,
    shard: ContextShard,
    masks: dict[str, Any],
    sm_scale: float,
    heads: Group,
    sink: Tensor | None = None,
) -> Tensor:
    """The sum over this rank's tokens of an indexer's loss, as `nn.indexer.loss_over_tokens` has it for all tokens.
    `attention` is queries, gathered keys and lse, `index` the indexer's queries, own keys, weights and gathered keys.
    """

    def loss_of_target(q_index: Tensor, index_keys: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        q, keys, lse = attention
        entries = every_visible(shard.s, masks) if indices is None else indices
        attn = ops.attention_distribution(
            *(q, keys, entries, lse, sm_scale), attn_sink=sink, indices_ascending=True, **masks
        )
        target = ops.normalize_l1(sum_over_ranks(attn, heads))
        return ops.lightning_indexer_backward(target, q_index, index_keys, weights, entries, **masks)

    def dense_loss(q_index: Tensor, index_keys: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        normalize = "heads" if sink is None else "l1"
        return indexer_dense_loss_and_gradients(
            *attention, q_index, index_keys, weights, sm_scale, attn_sink=sink, normalize=normalize, **masks
        )

    loss_of = dense_loss if indices is None and place(heads)[1] == 1 else loss_of_target
    loss: Tensor = IndexerLoss.apply(*index, loss_of, shard)  # type: ignore[no-untyped-call]
    return loss


class ParallelDSA(nn.DSA):
    """`nn.DSA` over the tokens of a `ContextShard` and, after `shard_heads(mla)`, over some of the heads.

    The parameters have the names of `nn.DSA`. "dense" and "warm-up" store nothing of size s × s, with one exception: if
    ranks share the heads, "warm-up" stores its target, because the ranks add it.
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
            attention = q.detach(), keys.flatten(0, 1), lse
            loss = part_of_loss(attention, index, indices, shard, masks, self.sm_scale, self.heads)
            loss = loss / max(b * shard.s, 1)
        self.selected = selected
        return y, loss


def shard_heads(attention: nn.SparseMLA | nn.HCA, group: Group) -> None:
    """Keeps this rank's heads, the same number on every rank; of an `nn.HCA` or `nn.CSA` whole groups of heads. The
    ranks' results are summed behind the last projection, the gradients of the input before the projection to the heads'
    queries.
    """
    rank, ranks = place(group)
    count = "h_q" if isinstance(attention, nn.SparseMLA) else "o_groups"
    require(
        getattr(attention, count) % ranks == 0,
        "shard_heads",
        count,
        f"a multiple of the {ranks} ranks",
        getattr(attention, count),
    )

    def part(tensor: Tensor, dim: int = 0) -> torch.nn.Parameter:
        return torch.nn.Parameter(tensor.detach().chunk(ranks, dim)[rank].clone())

    middle: nn.UpProjection | torch.nn.Linear
    if isinstance(attention, nn.SparseMLA):
        queries, middle, output = attention.heads_proj, attention.kv_b_proj, attention.o_proj
    else:
        queries, middle, output = attention.wq_b, attention.wo_a, attention.wo_b
    parts = part(queries.weight), part(middle.weight), part(output.weight, 1)
    sink = None if attention.attn_sink is None else part(attention.attn_sink)
    queries.weight, middle.weight, output.weight = parts  # nothing fails from here on
    attention.attn_sink = sink
    attention.h_q //= ranks
    if isinstance(attention, nn.HCA):
        attention.o_groups //= ranks
    queries.register_forward_pre_hook(lambda _, x: (SumOfGradients.apply(x[0], group),))  # type: ignore[no-untyped-call]
    output.register_forward_hook(lambda _, x, y: SumOverRanks.apply(y, group))  # type: ignore[no-untyped-call]
