"""The network: a decoder of RMSNorm, DeepSeek Sparse Attention and SwiGLU, its sizes, and generation token by token."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hopwell.torch.nn import DSA, KeyCache, LightningIndexer, Mode, NVFP4Linear, SparseMLA
from hopwell.torch.parallel import ContextShard
from torch import Tensor, nn
from torch.nn import functional

from dsa_lm.parallel import Ranks


@dataclass(frozen=True)
class Size:
    """Sizes of the network. The CPU operators take any; the CUDA ones d_v 512 with d_rope 64 and bfloat16."""

    vocabulary: int = 2048
    context: int = 256
    layers: int = 3
    d_model: int = 128
    d_ff: int = 256
    h_q: int = 4
    d_v: int = 64
    d_rope: int = 16
    d_nope: int = 32
    d_head: int = 32
    topk: int = 32
    h_index: int = 4
    d_index: int = 32
    dtype: str = "float32"


CPU = Size()
QUICK = Size(vocabulary=320, context=128, layers=2, d_model=64, d_ff=128, topk=32)
GPU = Size(
    context=1024, layers=6, d_model=512, d_ff=1408, h_q=16, d_v=512, d_rope=64, d_nope=64, d_head=64, topk=256,
    h_index=16, d_index=128, dtype="bfloat16",
)  # fmt: skip
LARGE = Size(
    vocabulary=8192, context=8192, layers=6, d_model=768, d_ff=2048, h_q=32, d_v=512, d_rope=64, d_nope=64, d_head=128,
    topk=1024, h_index=16, d_index=128, dtype="bfloat16",
)  # fmt: skip


class Block(nn.Module):
    """Attention and SwiGLU, each after a norm, and each added to its input."""

    def __init__(self, d_model: int, d_ff: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(d_model)
        self.up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def mlp(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * value)

    def attend(self, x: Tensor, mode: str, shard: ContextShard | None) -> tuple[Tensor, Tensor | None]:
        """Returns the attention of normed x and the loss of its indexer."""
        return self.attention(x, *((mode,) if shard is None else (shard, mode)))

    def forward(self, x: Tensor, *given: Any) -> tuple[Tensor, Tensor | None]:
        y, indexer_loss = self.attend(self.attention_norm(x), *given)
        x = x + y
        return x + self.mlp(x), indexer_loss

    def extend(self, x: Tensor, cache: KeyCache) -> Tensor:
        x = x + self.attention.extend(self.attention_norm(x), cache)
        return x + self.mlp(x)


class LanguageModel(nn.Module):
    """An embedding, blocks, a norm and a head. A subclass makes the blocks.

    `attention_output` names the last layer of a block's attention.
    """

    attention_output: ClassVar[str]

    def __init__(self, size: Any) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.d_model)
        self.blocks = nn.ModuleList(self.make_block(layer) for layer in range(size.layers))
        self.norm = nn.RMSNorm(size.d_model)
        self.head = nn.Linear(size.d_model, size.vocabulary, bias=False)
        # The head starts at zero: every token equally likely, and no gradient wasted on unlearning chance.
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            for linear in (block.attention.get_submodule(self.attention_output), block.down):
                linear.weight.data *= (2 * size.layers) ** -0.5

    def make_block(self, layer: int) -> Block:
        """Returns a layer. Each kind of model has its own."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, mode: str = "sparse", *given: Any) -> tuple[Tensor, Tensor]:
        """tokens int64 [b, s] → logits [b, s, vocabulary] and the indexers' loss, summed over layers (0 where there is
        none). `given` goes to the blocks. With a shard, of its tokens, and this rank's part of the loss.
        """
        x = self.embedding(tokens)
        total = x.new_zeros(())
        with self.precision(x):
            for block in self.blocks:
                x, indexer_loss = block(x, mode, *(given or (None,)))
                total = total if indexer_loss is None else total + indexer_loss
            return self.head(self.norm(x)), total

    def precision(self, x: Tensor) -> torch.autocast:
        """float32 weights and optimizer, products in the size's dtype."""
        return torch.autocast(x.device.type, getattr(torch, self.size.dtype), enabled=self.size.dtype != "float32")

    def indexer_parameters(self) -> list[nn.Parameter]:
        indexers = [b.attention.indexer for b in self.blocks if hasattr(b.attention, "indexer")]
        return [p for indexer in indexers for p in indexer.parameters()]


class Decoder(LanguageModel):
    """The language model with DeepSeek Sparse Attention in every block."""

    attention_output = "o_proj"

    def make_block(self, layer: int) -> Block:
        size = self.size
        mla = SparseMLA(
            size.d_model, size.h_q, d_v=size.d_v, d_rope=size.d_rope, d_nope=size.d_nope, d_head=size.d_head
        )
        indexer = LightningIndexer(
            size.d_model, topk=size.topk, h_index=size.h_index, d_index=size.d_index, d_rope=size.d_rope
        )
        return Block(size.d_model, size.d_ff, DSA(mla, indexer))

    def extend(self, tokens: Tensor, caches: list[KeyCache]) -> Tensor:
        """Logits [vocabulary] after the tokens [s] that follow those in the caches. If this raises, all caches have the
        tokens of before.
        """
        x = self.embedding(tokens[None])
        with self.precision(x), ExitStack() as stack:
            for cache in caches:
                stack.enter_context(cache.unchanged_on_error())
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block.extend(x, cache)
            return self.head(self.norm(x[0, -1:]))[0]

    def keys_read(self) -> int:
        """Keys the last sparse forward read, over layers and queries."""
        return sum(int((block.attention.selected >= 0).sum()) for block in self.blocks)


ALONE = Ranks()


@torch.no_grad()
def validation_loss(
    model: LanguageModel,
    windows: tuple[Tensor, Tensor],
    mode: str,
    ranks: Ranks = ALONE,
    size: int = 8,
    after: Callable[[], None] = lambda: None,
) -> float:
    """Mean loss in nats a token over the windows. `after` is called after every `size` windows."""
    total = 0.0
    for tokens, following in zip(*(ranks.part(part).split(size) for part in windows), strict=True):
        logits, _ = model(tokens, mode, ranks.shard)
        total += functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="sum").item()
        after()
    return ranks.sum(total)[0] / windows[1].numel()


def evaluate(
    model: Decoder, windows: tuple[Tensor, Tensor], mode: Mode, ranks: Ranks = ALONE, size: int = 8
) -> tuple[float, float]:
    """Mean loss in nats a token over the windows, and the fraction of the visible keys that attention read."""
    if mode != "sparse":
        return validation_loss(model, windows, mode, ranks, size), 1.0
    read: list[int] = []
    loss = validation_loss(model, windows, mode, ranks, size, lambda: read.append(model.keys_read()))
    count, s = windows[1].shape
    visible = len(model.blocks) * count * s * (s + 1) // 2
    return loss, ranks.sum(sum(read))[0] / visible


def quantize(model: Decoder) -> int:
    """Puts NVFP4 layers in the place of the linear ones; returns how many."""
    linear = [(m, n, c) for m in model.modules() for n, c in m.named_children() if isinstance(c, nn.Linear)]
    for parent, name, child in linear:
        setattr(parent, name, NVFP4Linear.from_linear(child))
    return len(linear)


class Step:
    """One token after the other through the model, after a prompt [s]: `logits` [vocabulary] are those of the last.

    On a GPU the step is a CUDA graph, for its kernels take less time than Python takes to start them.
    """

    def __init__(self, model: Decoder, prompt: Tensor) -> None:
        self.model, self.token, self.graph = model, prompt[-1:].clone(), None
        self.caches = [KeyCache(model.size.context) for _ in model.blocks]
        self.logits = model.extend(prompt, self.caches)
        if prompt.is_cuda:
            self.graph = self.capture(torch.tensor(len(prompt), device=prompt.device))

    def capture(self, length: Tensor) -> torch.cuda.CUDAGraph:
        for cache in self.caches:
            cache.length = length
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):  # what it leaves in the caches, the first token writes over
            self.model.extend(self.token, self.caches)
        torch.cuda.current_stream().wait_stream(warm)
        graph, before = torch.cuda.CUDAGraph(), self.logits
        with torch.cuda.graph(graph):
            self.logits = self.model.extend(self.token, self.caches)
            length += 1
        self.logits.copy_(before)
        return graph

    def __call__(self, token: Tensor) -> None:
        self.token.copy_(token)
        if self.graph is None:
            self.logits = self.model.extend(self.token, self.caches)
        else:
            self.graph.replay()


@torch.no_grad()
def generate(model: Decoder, prompt: Tensor, count: int, seed: int, temperature: float = 0.8) -> tuple[Tensor, float]:
    """`count` tokens that continue the prompt [s], drawn one by one, and how many came a second."""
    if len(prompt) + count > model.size.context:
        raise ValueError(f"generate: the model has {model.size.context} places; got {len(prompt)} + {count} tokens")
    step, generator, tokens = Step(model, prompt), torch.Generator().manual_seed(seed), []
    began = time.perf_counter()
    for _ in range(count):
        probabilities = torch.softmax(step.logits.float().cpu() / temperature, dim=-1)
        tokens.append(torch.multinomial(probabilities, 1, generator=generator))
        step(tokens[-1])
    return torch.cat(tokens), count / (time.perf_counter() - began)
