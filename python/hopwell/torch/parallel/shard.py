"""How the ranks of `torch.distributed` share the tokens of sequences, and sums over ranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hopwell._checks import require
from hopwell.torch.ops._register import Gradients, refuse_second_derivative

Group = dist.ProcessGroup | None  # None: this rank alone


def place(group: Group) -> tuple[int, int]:
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def check_agreement(what: str, name: str, value: Iterable[int], group: Group, device: torch.device | None) -> None:
    """Raises ValueError on every rank where `value`, up to 8 numbers, is not the same on all. A collective."""
    given = tuple(value)
    _, ranks = place(group)
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
    `pieces` are the bounds [first, end) of all ranks' pieces: of 2 · ranks, rank r has the pieces r and −1 − r.
    """

    s: int
    group: Group
    positions: Tensor
    places: Tensor
    rows: int
    pieces: tuple[tuple[int, int], ...]

    @classmethod
    def zigzag(cls, s: int, group: Group = None, device: torch.device | None = None, multiple: int = 1) -> Self:
        """Of 2·ranks pieces as equal as can be, rank r has the pieces r and 2·ranks − 1 − r, an early and a late one:
        under a causal mask every rank has as many pairs of a query and a key. Pieces begin at multiples of `multiple`,
        as the blocks of a compressor need. Ranks may be left without tokens. A collective: an s or a multiple that
        differs between ranks is a ValueError on each.
        """
        check_agreement("ContextShard", "s and multiple", (s, multiple), group, device)
        require(s >= 0, "ContextShard", "s", "at least 0", s)
        require(multiple >= 1, "ContextShard", "multiple", "at least 1", multiple)
        count, blocks = 2 * place(group)[1], -(-s // multiple)
        sizes = [blocks // count + (i < blocks % count) for i in range(count)]
        bounds = [min(multiple * sum(sizes[:i]), s) for i in range(count + 1)]
        return cls.of_pieces(s, group, tuple(pairwise(bounds)), device)

    @classmethod
    def of_pieces(cls, s: int, group: Group, pieces: tuple[tuple[int, int], ...], device: torch.device | None) -> Self:
        """The shard of given pieces, which lie one after another."""
        rank, ranks = place(group)
        every = [torch.arange(first, end, device=device) for first, end in pieces]
        shards = [torch.cat([every[r], every[-1 - r]]) for r in range(ranks)]
        rows = max(map(len, shards))
        places = torch.empty(s, dtype=torch.int64, device=device)
        for r, shard in enumerate(shards):
            places[shard] = r * rows + torch.arange(len(shard), device=device)
        return cls(s, group, shards[rank], places, rows, pieces)

    def blocks(self, ratio: int) -> "ContextShard":
        """The shard of the whole blocks of `ratio` tokens, one row each. Every block has one owner."""
        for first, end in self.pieces:
            aligned = first % ratio == 0 or end == first
            require(aligned, "ContextShard", "multiple", f"a multiple of ratio = {ratio}", f"a piece at {first}")
        whole = tuple((first // ratio, end // ratio) for first, end in self.pieces)
        return ContextShard.of_pieces(self.s // ratio, self.group, whole, self.positions.device)

    def own_pieces(self, rank: int | None = None) -> tuple[tuple[int, int], tuple[int, int]]:
        """Bounds of the two pieces of a rank; of this one, if none is named."""
        rank = place(self.group)[0] if rank is None else rank
        return self.pieces[rank], self.pieces[-1 - rank]

    def halo_sizes(self, rows: int, rank: int | None = None) -> tuple[int, int]:
        """How many rows `halo` gives before each of a rank's pieces."""
        early, late = ((min(rows, first) if end > first else 0) for first, end in self.own_pieces(rank))
        return early, late

    def halo(self, x: Tensor, rows: int) -> Tensor:
        """This rank's x [b, s_local, …] → the `rows` rows before its early piece, then those before its late piece:
        [b, halo, …]. At the beginning of the sequence there are fewer (`halo_sizes`). They come from the ranks that own
        them, which may be several. Differentiable: the gradients go back to the owners, where they are added in
        float32. A collective.
        """
        halo: Tensor = _Halo.apply(x, self, rows)  # type: ignore[no-untyped-call]
        return halo

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
        _, ranks = place(self.group)
        if ranks == 1:
            return x.detach()
        mine = x.new_zeros(self.rows, x.shape[0], x.shape[2])
        mine[: x.shape[1]] = x.detach().transpose(0, 1)
        every = x.new_empty(ranks * self.rows, *mine.shape[1:])
        dist.all_gather_into_tensor(every, mine, group=self.group)
        return every[self.places].transpose(0, 1).contiguous()

    def reduce(self, x: Tensor) -> Tensor:
        """The adjoint of `gather`: x [b, s, d] summed over ranks in its own dtype → this rank's [b, s_local, d]."""
        _, ranks = place(self.group)
        if ranks == 1:
            return x
        every = x.new_zeros(ranks * self.rows, x.shape[0], x.shape[2])
        every[self.places] = x.transpose(0, 1)
        mine = x.new_empty(self.rows, *every.shape[1:])
        dist.reduce_scatter_tensor(mine, every, group=self.group)
        return mine[: len(self.positions)].transpose(0, 1)


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    if place(group)[1] == 1:
        return x
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


class SumOverRanks(torch.autograd.Function):
    """The sum over ranks; every rank goes on with it, so its gradient is each one's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> Gradients:
        refuse_second_derivative("hopwell.torch.parallel")
        return d_total, None


class SumOfGradients(torch.autograd.Function):
    """x itself. Every rank computes a part of the next result from x, so the gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> Gradients:
        refuse_second_derivative("hopwell.torch.parallel")
        return sum_over_ranks(d_x, ctx.group), None


@dataclass(frozen=True)
class Route:
    """How rows come to the ranks that need them as a halo: the same rows of every sequence of a batch."""

    sent: Tensor  # int64, local rows to send, rank by rank
    sent_sizes: list[int]  # to each rank
    received_sizes: list[int]  # from each rank
    order: Tensor  # int64 [halo], the received row of each row of the halo

    @classmethod
    def of(cls, shard: ContextShard, rows: int) -> Self:
        rank, ranks = place(shard.group)
        ends = np.array([end for _, end in shard.pieces])

        def owners(positions: Any) -> tuple[Any, Any]:
            """Rank and local row of each position."""
            piece = np.searchsorted(ends, positions, side="right")
            owner = np.minimum(piece, 2 * ranks - 1 - piece)
            firsts = np.array([first for first, _ in shard.pieces])[piece]
            early = np.array([end - first for first, end in shard.pieces[:ranks]])[owner]
            return owner, positions - firsts + np.where(piece < ranks, 0, early)

        def wanted(of: int) -> Any:
            pieces, sizes = shard.own_pieces(of), shard.halo_sizes(rows, of)
            return np.concatenate([np.arange(p[0] - n, p[0]) for p, n in zip(pieces, sizes, strict=True)])

        sent, sizes = [], []
        for other in range(ranks):
            owner, local = owners(wanted(other))
            sent.append(local[owner == rank])
            sizes.append(len(sent[-1]))
        owner, _ = owners(wanted(rank))
        arrival = np.argsort(owner, kind="stable")
        order = np.empty_like(arrival)
        order[arrival] = np.arange(len(arrival))

        def on_device(numbers: Any) -> Tensor:
            tensor, device = torch.from_numpy(numbers.astype(np.int64)), shard.positions.device
            if device.type == "cuda":
                tensor = tensor.pin_memory()  # so that the host does not wait
            return tensor.to(device, non_blocking=True)

        received = np.bincount(owner, minlength=ranks).tolist()
        return cls(on_device(np.concatenate(sent)), sizes, received, on_device(order))

    def exchange(self, x: Tensor, out_sizes: list[int], in_sizes: list[int], group: Group) -> Tensor:
        """Rows [sum(in_sizes), …] to the ranks → rows [sum(out_sizes), …] from them."""
        if place(group)[1] == 1:
            return x
        out = x.new_empty(sum(out_sizes), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), out_sizes, in_sizes, group=group)
        return out


class _Halo(torch.autograd.Function):
    """`ContextShard.halo`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: ContextShard, rows: int) -> Tensor:
        ctx.shard, ctx.rows, ctx.s_local, ctx.dtype = shard, rows, x.shape[1], x.dtype
        route = ctx.route = Route.of(shard, rows)
        sent = x.transpose(0, 1)[route.sent]
        received = route.exchange(sent, route.received_sizes, route.sent_sizes, shard.group)
        return received[route.order].transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, d_halo: Tensor) -> Gradients:
        refuse_second_derivative("hopwell.torch.parallel")
        return add_halo(d_halo, ctx.route, ctx.shard, ctx.s_local).to(ctx.dtype), None, None


def add_halo(d_halo: Tensor, route: Route, shard: ContextShard, s_local: int) -> Tensor:
    """The adjoint of `ContextShard.halo`: d_halo [b, halo, …] → float32 [b, s_local, …] on the owners."""
    rows = d_halo.transpose(0, 1).float()
    arrived = torch.empty_like(rows)
    arrived[route.order] = rows
    back = route.exchange(arrived, route.sent_sizes, route.received_sizes, shard.group)
    total = back.new_zeros(s_local, *back.shape[1:])
    return total.index_add_(0, route.sent, back).transpose(0, 1)


def every_visible(s: int, visible: dict[str, Any]) -> Tensor:
    """A selection of every key that a query sees, int32 [queries, s], -1 after the last."""
    every = torch.arange(s, device=visible["k_start"].device, dtype=torch.int32) + visible["k_start"][:, None]
    return torch.where(every < visible["k_end"][:, None], every, -1)


def sum_gradients(parameters: Iterable[torch.nn.Parameter], group: Group) -> None:
    """Adds up the gradients of replicated parameters over the context's ranks, for training without FSDP."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = sum_over_ranks(parameter.grad, group)
