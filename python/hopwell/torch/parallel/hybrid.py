"""DeepSeek-V4's hybrid attention over several ranks.

A rank's queries see the window keys of its own tokens and of a halo, the tokens before them. The ranks that own the
halo send its projected keys. Each rank computes the compressed keys of its own blocks, and all ranks gather them.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from hopwell._checks import require
from hopwell.torch import nn, ops
from hopwell.torch.nn._module import backward_may_follow, check_tokens, take_parts
from hopwell.torch.nn.compressor import KVCompressor
from hopwell.torch.nn.hybrid import HybridMode, selected_in_document
from hopwell.torch.nn.rope import rotate_last
from hopwell.torch.ops._register import Gradients, refuse_second_derivative
from hopwell.torch.parallel.dsa import part_of_loss
from hopwell.torch.parallel.shard import ContextShard, Group, Route, add_halo, sum_over_ranks


@dataclass(frozen=True)
class _Segments:
    """A rank's rows with a halo of up to `rows` rows before each of its two pieces: b sequences of `length` rows each,
    halo, early piece, halo, late piece.
    """

    shard: ContextShard
    rows: int
    sizes: tuple[int, int, int, int]

    @classmethod
    def of(cls, shard: ContextShard, rows: int) -> Self:
        (before_early, before_late), pieces = shard.halo_sizes(rows), shard.own_pieces()
        early, late = (end - first for first, end in pieces)
        return cls(shard, rows, (before_early, early, before_late, late))

    @property
    def length(self) -> int:
        return sum(self.sizes)

    def join(self, x: Tensor, halo: Tensor) -> Tensor:
        """x [b, s_local, …] and its halo [b, halo, …] → [b, length, …]."""
        before_early, early, before_late, late = self.sizes
        halos, pieces = torch.split(halo, [before_early, before_late], 1), torch.split(x, [early, late], 1)
        return torch.cat([halos[0], pieces[0], halos[1], pieces[1]], 1)

    def part(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The reverse of `join`: [b, length, …] → x [b, s_local, …], halo [b, halo, …]."""
        before_early, early, before_late, late = torch.split(x, list(self.sizes), 1)
        return torch.cat([early, late], 1), torch.cat([before_early, before_late], 1)

    def windows(self, b: int, device: torch.device) -> dict[str, Tensor]:
        """The rows that each token may see, up to its own, among the flattened rows: int32 [b · s_local] each."""
        before_early, early, before_late, _ = self.sizes
        token = torch.arange(len(self.shard.positions), device=device)
        late = token >= early
        shift = torch.arange(b, device=device)[:, None] * self.length
        start = torch.where(late, before_early + early, 0) + shift
        end = token + 1 + torch.where(late, before_early + before_late, before_early) + shift
        return {"w_start": start.int().flatten(), "w_end": end.int().flatten()}


class _HybridAttention(torch.autograd.Function):
    """`sparse_mla` over window keys with a halo, and gathered compressed keys. The gradients of both stay float32 until
    they are summed over heads and context.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, window_kv: Tensor, sink: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        segments, blocks = options["segments"], options["blocks"]
        halo = segments.shard.halo(window_kv.detach(), segments.rows)
        rows = segments.join(window_kv, halo).flatten(0, 1)
        gathered = blocks.gather(kv)
        keys = gathered.flatten(0, 1)
        out, _, lse = ops.sparse_mla_forward(
            *(q, keys, options["indices"], options["sm_scale"], q.shape[-1]),
            attn_sink=sink,
            window_kv=rows,
            window=options["window"],
            **options["ranges"],
        )
        ctx.options, ctx.shapes, ctx.kv_dtype = options, (gathered.shape, window_kv.shape), kv.dtype
        ctx.save_for_backward(q, keys, rows, out, lse, sink)
        ctx.mark_non_differentiable(lse, keys)
        return out, lse, keys

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, _d_lse: Tensor, _d_keys: Tensor) -> Gradients:
        refuse_second_derivative("hopwell.torch.parallel")
        q, keys, rows, out, lse, sink = ctx.saved_tensors
        options, (of_keys, of_window) = ctx.options, ctx.shapes
        segments, heads = options["segments"], options["heads"]
        dq, dkv, d_sink, d_rows = ops.sparse_mla_backward(
            *(d_out.contiguous(), q, keys, options["indices"], out, lse, options["sm_scale"], q.shape[-1]),
            attn_sink=sink,
            window_kv=rows,
            window=options["window"],
            **options["ranges"],
        )
        assert dkv is not None and d_rows is not None
        d_kv = options["blocks"].reduce(sum_over_ranks(dkv, heads).view(of_keys))
        d_rows = sum_over_ranks(d_rows, heads).view(of_window[0], segments.length, of_window[2])
        d_window, d_halo = segments.part(d_rows)
        route = Route.of(segments.shard, segments.rows)
        d_window = d_window + add_halo(d_halo, route, segments.shard, of_window[1])
        return dq, d_kv.to(ctx.kv_dtype), d_window.to(ctx.kv_dtype), d_sink, None


def own_keys(compressor: KVCompressor, x: Tensor, shard: ContextShard, blocks: ContextShard) -> Tensor:
    """The compressed keys of the rank's own blocks: x [b, s_local, d_model] → [b, blocks, d].

    With overlap, the block before each piece comes as a halo of projected rows. The result has no key for it, because
    the rank that owns the block computes that key.
    """
    b, ratio = x.shape[0], compressor.ratio
    rows = torch.cat([compressor.wkv(x), compressor.wgate(x)], -1)
    segments = _Segments.of(shard, ratio if compressor.overlap else 0)
    if compressor.overlap:
        rows = segments.join(rows, shard.halo(rows, ratio))
    before_early, early, before_late, _ = segments.sizes
    device, length = x.device, segments.length
    firsts = torch.arange(b, device=device)[:, None] * length
    starts = torch.cat([firsts, firsts + before_early + early], 1).flatten()
    cu_seqlens = torch.cat([starts, starts.new_full((1,), b * length)]).int()
    counts = [(n + piece) // ratio for n, piece in ((before_early, early), (before_late, segments.sizes[3]))]
    ends = torch.arange(1, b + 1, device=device)[:, None] * sum(counts)
    bounds = torch.cat([ends - counts[1], ends], 1).flatten()
    cu_compressed = torch.cat([bounds.new_zeros(1), bounds]).int()
    kv, gate = rows.flatten(0, 1).chunk(2, -1)
    keys = ops.kv_compress(
        *(kv, gate, ratio),
        position_bias=compressor.ape.float(),
        overlap=compressor.overlap,
        cu_seqlens=cu_seqlens,
        cu_compressed=cu_compressed,
    )
    of_pieces = torch.split(keys[: b * sum(counts)].view(b, sum(counts), -1), counts, 1)
    own = [of_piece[:, n // ratio :] for of_piece, n in zip(of_pieces, (before_early, before_late), strict=True)]
    positions = blocks.positions * ratio
    return compressor.finish(torch.cat(own, 1), positions - torch.arange(len(positions), device=device))


class ParallelHCA(nn.HCA):
    """`nn.HCA` over the tokens of a `ContextShard` and, after `shard_heads(hca)`, over some of the heads.

    The parameters have the names of `nn.HCA`. Pieces of the shard begin at multiples of `ratio`
    (`ContextShard.zigzag(…, multiple=ratio)`).
    """

    def __init__(self, hca: nn.HCA, heads: Group = None) -> None:
        torch.nn.Module.__init__(self)
        take_parts(self, hca)
        self.compressor = hca.compressor
        self.attn_sink = hca.attn_sink
        self.heads = heads

    @classmethod
    def from_config(cls, config: object, *, ratio: int | None = None) -> Self:
        """As `nn.HCA.from_config`."""
        return cls(nn.HCA.from_config(config, ratio=ratio))

    def _check(self, x: Tensor, shard: ContextShard) -> None:
        name = type(self).__name__
        check_tokens(name, x, self.d_model, self.wq_a)
        expected = f"[b, s_local, d_model] with s_local = {len(shard.positions)}"
        require(x.shape[1] == len(shard.positions), name, "x", expected, list(x.shape))

    def _visible(self, b: int, shard: ContextShard, blocks: ContextShard) -> dict[str, Any]:
        """The compressed keys that each token sees, in the flattened keys of all ranks."""
        first = (torch.arange(b, device=shard.positions.device)[:, None] * blocks.s).expand(-1, len(shard.positions))
        end = first + (shard.positions + 1) // max(self.ratio, 1)
        return {"k_start": first.int().flatten(), "k_end": end.int().flatten()}

    def _start(self, b: int, shard: ContextShard) -> Tensor:
        """Position minus row number of each of the b · s_local tokens, for `rotate`."""
        positions = shard.positions.repeat(b)
        return positions - torch.arange(len(positions), device=positions.device)

    def _attend(
        self,
        x: Tensor,
        latent: Tensor,
        shard: ContextShard,
        blocks: ContextShard,
        indices: Tensor | None,
        visible: dict[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y [b, s_local, d_model], and queries, gathered compressed keys and lse for the indexer's loss."""
        b, start = x.shape[0], self._start(x.shape[0], shard)
        q = self.queries(latent.reshape(1, -1, latent.shape[-1]), start)
        window_kv = self.window_keys(x.reshape(1, -1, self.d_model), start).to(q.dtype).view(b, -1, self.d)
        compressor = self.compressor
        kv = window_kv[:, :0] if compressor is None else own_keys(compressor, x, shard, blocks).to(q.dtype)
        segments = _Segments.of(shard, self.window - 1)
        ranges = segments.windows(b, x.device) | (visible if indices is None and compressor is not None else {})
        options: dict[str, Any] = {"indices": indices, "ranges": ranges, "window": self.window, "segments": segments}
        options |= {"blocks": blocks, "heads": self.heads, "sm_scale": self.sm_scale}
        sink = self.attn_sink.float()
        out, lse, keys = _HybridAttention.apply(q, kv, window_kv, sink, options)  # type: ignore[no-untyped-call]
        return self.combine(out, start).view(x.shape), q, keys, lse

    def _blocks(self, shard: ContextShard) -> ContextShard:
        """The shard of compressed keys; empty without a compressor."""
        if self.ratio:
            return shard.blocks(self.ratio)
        return ContextShard.of_pieces(0, shard.group, ((0, 0),) * len(shard.pieces), shard.positions.device)

    def forward(self, x: Tensor, shard: ContextShard) -> Tensor:  # type: ignore[override]
        """x [b, s_local, d_model] → y, like x."""
        self._check(x, shard)
        blocks = self._blocks(shard)
        visible = self._visible(x.shape[0], shard, blocks)
        return self._attend(x, self.query_latent(x), shard, blocks, None, visible)[0]


class ParallelCSA(ParallelHCA):
    """`nn.CSA` over the tokens of a `ContextShard` and, after `shard_heads(csa)`, over some of the heads.

    The parameters have the names of `nn.CSA`. Pieces of the shard begin at multiples of `ratio`.
    """

    def __init__(self, csa: nn.CSA, heads: Group = None) -> None:
        super().__init__(csa, heads)
        self.indexer = csa.indexer

    @classmethod
    def from_config(cls, config: object, *, ratio: int | None = None) -> Self:
        """As `nn.CSA.from_config`."""
        return cls(nn.CSA.from_config(config, ratio=ratio))

    def forward(  # type: ignore[override]
        self, x: Tensor, shard: ContextShard, mode: HybridMode = "sparse", with_loss: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [b, s_local, d_model] → y, like x, and this rank's part of the indexer's loss, the mean over all tokens.
        `with_loss` is as in `nn.CSA` and must be the same on every rank.
        """
        self._check(x, shard)
        require(mode in ("sparse", "warm-up"), "ParallelCSA", "mode", "'sparse' or 'warm-up'", mode)
        with_loss = backward_may_follow(self.training) if with_loss is None else with_loss
        b, blocks = x.shape[0], self._blocks(shard)
        visible = self._visible(b, shard, blocks)
        latent = self.query_latent(x)
        index: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        indices = None
        if with_loss or mode == "sparse":
            q_index, k_index, weights = self._project_index(x.detach(), latent.detach(), shard, blocks)
            index = q_index, k_index, weights, blocks.gather(k_index)
        if mode == "sparse":
            assert index is not None
            q_index, _, weights, every = index
            indices, _ = ops.lightning_indexer(
                *(q_index.detach(), every.flatten(0, 1), weights.detach(), self.indexer.topk), **visible
            )
        y, q, keys, lse = self._attend(x, latent, shard, blocks, indices, visible)
        loss = None
        if with_loss:
            assert index is not None
            sink = self.attn_sink.detach().float()
            attention = q.detach(), keys, lse
            loss = part_of_loss(attention, index, indices, blocks, visible, self.sm_scale, self.heads, sink)
            loss = loss / max(b * shard.s, 1)
        self.selected = selected_in_document(indices, visible, x)
        return y, loss

    def _project_index(
        self, x: Tensor, latent: Tensor, shard: ContextShard, blocks: ContextShard
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q_index [b · s_local, h_index, d_index], k_index of the own blocks [b, blocks, d_index], weights."""
        indexer, compressor = self.indexer, self.indexer.compressor
        q = indexer.wq_b(latent).view(1, -1, indexer.h_index, indexer.d_index)
        q = rotate_last(q, compressor.d_rope, self._start(x.shape[0], shard), compressor.rope)[0]
        k = own_keys(compressor, x, shard, blocks).to(q.dtype)
        weights = indexer.weights_proj(x).flatten(0, 1).float() / (indexer.h_index * indexer.d_index) ** 0.5
        return q, k, weights
