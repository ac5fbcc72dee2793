"""The network with the numbers of a server's caches, and a server of it: continuous batching over pages.

A server may select other keys than its trainer for two reasons besides ties. It quantises keys, which the trainer does
not. And products of PyTorch have other bits for another number of rows. So `CachedDecoder` reads its keys as the caches
have them, also in training. With `exact` every product has one row.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hopwell.torch import (
    lightning_indexer,
    mla_cache_append,
    paged_lightning_indexer,
    read_mla_cache,
    sparse_mla_decode,
)
from hopwell.torch.nn import DSA, LightningIndexer, SparseMLA
from hopwell.torch.nn.pack import Pack
from torch import Tensor

from dsa_lm.model import Block, Decoder, Size

Q_LEN = 3  # tokens of a request in one step: the last one and two drafts, or three of the prompt
NAN_CODE = 0x7F  # fills pages; as e4m3 and as bf16 it is NaN


def rows_of_bytes(size: Size) -> bool:
    """True if latents are kept in rows of 656 bytes, DeepSeek-V3.2's. Other sizes have rows of bf16."""
    return (size.d_v, size.d_rope) == (512, 64)


def empty_latents(size: Size, blocks: int, block: int) -> Tensor:
    if rows_of_bytes(size):
        return torch.full((blocks, block, 656), NAN_CODE, dtype=torch.uint8)
    return torch.full((blocks, block, size.d_v + size.d_rope), torch.nan, dtype=torch.bfloat16)


def index_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Index keys [n, d] as the server's cache has them: codes e4m3 [n, d] and scales float32 [n]."""
    n, d = x.shape
    cache = torch.empty(1, max(n, 1), d + 4, dtype=torch.uint8)
    mla_cache_append(x, cache, torch.arange(n))
    data = cache.flatten()
    codes, scales = data[: max(n, 1) * d], data[max(n, 1) * d :]
    return codes.view(torch.float8_e4m3fn).view(-1, d)[:n], scales.view(torch.float32)[:n]


class _AsCached(torch.autograd.Function):
    """Gives latents the values that their cache has. The gradient passes as if they were the same."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, as_bytes: bool) -> Tensor:
        if not as_bytes:
            return kv.bfloat16()
        cache = torch.empty(1, len(kv), 656, dtype=torch.uint8)
        slots = torch.arange(len(kv))
        return read_mla_cache(mla_cache_append(kv, cache, slots), slots, kv.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.float(), None


class CachedIndexer(LightningIndexer):
    """Selects with queries and keys of e4m3. Its loss has the unquantised ones."""

    def select(self, q_index: Tensor, k_index: Tensor, weights: Tensor, pack: Pack | None = None) -> Tensor:
        b, s = q_index.shape[:2]
        pack = pack or Pack.of("CachedIndexer", q_index, s)
        q, q_scale = index_codes(q_index.detach().flatten(0, 2))
        k, k_scale = index_codes(k_index.detach().flatten(0, 1))
        q, q_scale = q.view(b * s, self.h_index, -1), q_scale.view(b * s, self.h_index)
        scales = {"q_scale": q_scale, "k_scale": k_scale}
        of_pack, _ = lightning_indexer(q, k, weights.detach().flatten(0, 1), self.topk, **pack.ranges(), **scales)
        of_pack = of_pack.view(b, s, self.topk)
        first = torch.arange(b, dtype=of_pack.dtype)[:, None, None] * s
        return torch.where(of_pack < 0, of_pack, of_pack - first)


def each_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for x [1, s, …], one row at a time. A row has the same bits whatever the other rows are."""
    return torch.cat([function(row) for row in x.split(1, dim=1)], dim=1)


class CachedDSA(DSA):
    """Attention over latents with the values of the cache, in bf16."""

    exact = False

    def project_all(
        self, x: Tensor, start: int | Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        if not self.exact:
            return super().project_all(x, start)
        parts = [super(CachedDSA, self).project_all(row, start + i) for i, row in enumerate(x.split(1, dim=1))]
        q, kv = (torch.cat([attention[i] for attention, _ in parts], 1) for i in range(2))
        q_index, k_index, weights = (torch.cat([index[i] for _, index in parts], 1) for i in range(3))
        return (q, kv), (q_index, k_index, weights)

    def combine(self, out: Tensor) -> Tensor:
        return each_row(super().combine, out) if self.exact else super().combine(out)

    def attend(
        self, q: Tensor, kv: Tensor, indices: Tensor | None, ascending: bool = False, **masks: Any
    ) -> tuple[Tensor, Tensor]:
        as_bytes = (self.d_v, self.d_rope) == (512, 64)
        rows = _AsCached.apply(kv, as_bytes)
        out, lse = super().attend(q.bfloat16(), rows, indices, ascending, **masks)
        return out.to(q.dtype), lse


class CachedBlock(Block):
    exact = False

    def forward(self, x: Tensor, *given: Any) -> tuple[Tensor, Tensor | None]:
        if not self.exact:
            return super().forward(x, *given)
        y, indexer_loss = self.attend(each_row(self.attention_norm, x), *given)
        return each_row(self.finish, x + y), indexer_loss

    def finish(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class CachedDecoder(Decoder):
    """`Decoder` that selects and attends keys as the server's caches have them. Parameters are the same.

    With `exact` its forward has the same bits for a token in any sequence of the same tokens before it.
    """

    exact = False

    def make_block(self, layer: int) -> Block:
        size = self.size
        mla = SparseMLA(
            size.d_model, size.h_q, d_v=size.d_v, d_rope=size.d_rope, d_nope=size.d_nope, d_head=size.d_head
        )
        indexer = CachedIndexer(
            size.d_model, topk=size.topk, h_index=size.h_index, d_index=size.d_index, d_rope=size.d_rope
        )
        return CachedBlock(size.d_model, size.d_ff, CachedDSA(mla, indexer))

    def set_exact(self) -> None:
        for module in self.modules():
            if isinstance(module, CachedDecoder | CachedBlock | CachedDSA):
                module.exact = True

    def forward(self, tokens: Tensor, mode: str = "sparse", *given: Any) -> tuple[Tensor, Tensor]:
        if not self.exact:
            return super().forward(tokens, mode, *given)
        x = self.embedding(tokens)
        for block in self.blocks:
            x, _ = block(x, mode, None)
        return self.read_out(x), x.new_zeros(())

    def read_out(self, x: Tensor) -> Tensor:
        return each_row(lambda row: self.head(self.norm(row)), x)

    def selections(self) -> Tensor:
        """The keys that the last sparse forward of one sequence selected: int32 [s, layers, topk]."""
        return torch.stack([block.attention.selected[0] for block in self.blocks], 1)


# ---- the server


@dataclass
class Request:
    """A prompt, the number of tokens to generate, and the state of the request while it runs."""

    prompt: list[int]
    wanted: int
    arrives: int = 0  # step of the server at which it arrives
    generated: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # tokens whose keys are in the caches
    logits: list[Tensor] = field(default_factory=list)  # [vocabulary] after each cached token
    selected: list[Tensor] = field(default_factory=list)  # int32 [layers, topk] of each cached token

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def done(self) -> bool:
        return len(self.generated) >= self.wanted

    def fresh(self) -> "Request":
        return Request(self.prompt, self.wanted, self.arrives)


def drafts(tokens: list[int], count: int) -> list[int]:
    """Guesses the next tokens: those that followed the last two tokens, or the last one, where they came before."""
    guess: list[int] = []
    while len(guess) < count:
        known = tokens + guess
        for width in (2, 1):
            tail = known[-width:]
            places = [i for i in range(len(known) - width) if known[i : i + width] == tail]
            if places:
                guess.append(known[places[-1] + width])
                break
        else:
            guess.append(known[-1])
    return guess


@dataclass
class Fed:
    """The tokens that a step feeds: row i of the flat lists is query `place[i]` of request `of[i]`."""

    tokens: list[int]
    positions: list[int]
    of: list[int]
    place: list[int]


class Server:
    """Serves requests greedily. They share caches whose pages are handed out and reused in random order.

    All layers have the same page tables. A released page is filled with NaN, so a read of a stale row would be noticed.
    """

    def __init__(self, model: CachedDecoder, blocks: int, block: int, running: int, seed: int) -> None:
        self.model, self.block, self.most_running = model, block, running
        size = model.size
        self.latents = [empty_latents(size, blocks, block) for _ in model.blocks]
        row = size.d_index + 4
        self.index_keys = [torch.full((blocks, block, row), NAN_CODE, dtype=torch.uint8) for _ in model.blocks]
        self.random = random.Random(seed)
        self.free = list(range(blocks))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps = self.taken = self.fed = self.drafted = self.accepted = self.batched = 0

    def pages_of(self, request: Request) -> int:
        return -(-(len(request.prompt) + request.wanted) // self.block)

    def step(self) -> None:
        """Admits requests if there are pages for all of their tokens, and advances all running ones."""
        while self.waiting and len(self.running) < self.most_running:
            count = self.pages_of(self.waiting[0])
            if count > len(self.free):
                break
            self.random.shuffle(self.free)
            request = self.waiting.popleft()
            request.pages, self.free = self.free[:count], self.free[count:]
            self.taken += count
            self.running.append(request)
        if self.running:
            self.advance()
        for request in [r for r in self.running if r.done]:
            self.release(request)
        self.steps += 1

    def release(self, request: Request) -> None:
        self.running.remove(request)
        for cache in (*self.latents, *self.index_keys):
            cache[request.pages] = torch.nan if cache.is_floating_point() else NAN_CODE
        self.free += request.pages

    def advance(self) -> None:
        """Feeds every running request up to Q_LEN tokens and keeps those that the model itself would have chosen."""
        fed, known = Fed([], [], [], []), []
        for r, request in enumerate(self.running):
            tokens, first = request.tokens, request.cached
            most = min(Q_LEN, len(request.prompt) + request.wanted - first)
            feed = tokens[first : first + most]
            known.append(len(feed))
            feed += drafts(tokens, most - len(feed))
            fed.tokens += feed
            fed.positions += range(first, first + most)
            fed.of += [r] * most
            fed.place += range(most)
        logits, selected = self.forward(fed)
        self.fed += len(fed.tokens)
        self.batched += len(self.running)
        row = 0
        for r, request in enumerate(self.running):
            count = fed.of.count(r)
            self.drafted += count - known[r]
            for i in range(count):
                request.cached += 1
                request.logits.append(logits[row + i])
                request.selected.append(selected[row + i])
                if i + 1 < known[r]:
                    continue
                if len(request.tokens) == request.cached and not request.done:
                    request.generated.append(int(logits[row + i].argmax()))
                if request.done or i + 1 == count or request.tokens[-1] != fed.tokens[row + i + 1]:
                    break  # the next token is a draft that the model would not have chosen
                self.accepted += 1
            row += count

    def forward(self, fed: Fed) -> tuple[Tensor, Tensor]:
        """Logits [rows, vocabulary] and selected positions [rows, layers, topk] of the fed tokens, which are cached."""
        n, width = len(self.running), max(len(r.pages) for r in self.running)
        tables = torch.tensor([r.pages + [-1] * (width - len(r.pages)) for r in self.running], dtype=torch.int32)
        of, place, positions = torch.tensor(fed.of), torch.tensor(fed.place), torch.tensor(fed.positions)
        slots = tables[of, positions // self.block] * self.block + positions % self.block
        lengths = torch.zeros(n, Q_LEN, dtype=torch.int32)  # a query that is padding sees nothing
        lengths[of, place] = positions.int() + 1

        def padded(rows: Tensor) -> Tensor:
            """[rows, …] → [requests, Q_LEN, …]"""
            dtype = torch.uint8 if rows.element_size() == 1 else rows.dtype
            whole = torch.zeros(n, Q_LEN, *rows.shape[1:], dtype=dtype)
            whole[of, place] = rows.view(dtype)
            return whole.view(rows.dtype)

        x, chosen = self.model.embedding(torch.tensor(fed.tokens))[None], []
        for block, latents, index_keys in zip(self.model.blocks, self.latents, self.index_keys, strict=True):
            layer = block.attention
            rows = each_row(block.attention_norm, x).split(1, dim=1)
            parts = [layer.project_all(row, p) for row, p in zip(rows, fed.positions, strict=True)]
            q, kv = (torch.cat([attention[i][0] for attention, _ in parts]) for i in range(2))
            q_index, k_index, weights = (torch.cat([index[i][0] for _, index in parts]) for i in range(3))
            mla_cache_append(kv if rows_of_bytes(self.model.size) else kv.bfloat16(), latents, slots)
            mla_cache_append(k_index, index_keys, slots)
            codes, scales = index_codes(q_index.flatten(0, 1))
            codes, scales = codes.view(q_index.shape), scales.view(weights.shape)
            indices, _ = paged_lightning_indexer(
                *(padded(codes), index_keys, padded(weights), layer.indexer.topk, tables, lengths),
                q_scale=padded(scales),
                scores=False,
            )
            out, _ = sparse_mla_decode(
                *(padded(q.bfloat16()), latents, indices, layer.sm_scale, layer.d_v),
                block_tables=tables,
                context_lens=lengths,
            )
            y = layer.combine(out[of, place].to(x.dtype)[None])
            x = each_row(block.finish, x + y)
            chosen.append(indices[of, place])
        return self.model.read_out(x)[0], torch.stack(chosen, 1)


@torch.no_grad()
def serve(server: Server, requests: list[Request]) -> None:
    """Serves all requests, each from the step at which it arrives."""
    coming = deque(sorted(requests, key=lambda r: r.arrives))
    while coming or server.waiting or server.running:
        while coming and coming[0].arrives <= server.steps:
            server.waiting.append(coming.popleft())
        server.step()
