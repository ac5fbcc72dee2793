"""The network: blocks with window attention alone, CSA and HCA in turn, their sizes, and the recall of the indexer."""

from dataclasses import dataclass, replace

import torch
from dsa_lm.model import Block, LanguageModel
from hopwell.torch import attention_distribution, compressed_lengths, key_ranges
from hopwell.torch.nn import CSA, HCA
from hopwell.torch.parallel import ContextShard, ParallelCSA, ParallelHCA
from torch import Tensor

KINDS = ("window", "CSA", "HCA")  # the layers, in turn


@dataclass(frozen=True)
class Size:
    """Sizes of the network. DeepSeek-V4 has window 128, ratios 4 and 128, d 512 with d_rope 64."""

    vocabulary: int = 1024
    context: int = 256
    layers: int = 3
    d_model: int = 128
    d_ff: int = 256
    h_q: int = 4
    d: int = 64
    d_rope: int = 16
    q_rank: int = 64
    o_groups: int = 2
    o_rank: int = 64
    window: int = 4
    csa_ratio: int = 4
    hca_ratio: int = 16
    topk: int = 16
    h_index: int = 4
    d_index: int = 32
    dtype: str = "float32"
    compressed: bool = True  # False: window attention alone in every layer

    def kind(self, layer: int) -> str:
        return KINDS[layer % 3] if self.compressed else "window"

    def windows_alone(self) -> "Size":
        return replace(self, compressed=False)


CPU = Size()
QUICK = Size(vocabulary=320, context=128, d_model=64, d_ff=128, d=32, q_rank=32, o_rank=32, topk=8)


class HybridBlock(Block):
    """A block whose attention is nn.CSA or nn.HCA. With ratio 0 the latter is window attention alone."""

    def attend(
        self, x: Tensor, mode: str, shard: ContextShard | None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        modes = (mode,) if isinstance(self.attention, CSA | ParallelCSA) else ()
        whole = shard is None
        result = self.attention(x, *modes, cu_seqlens=cu_seqlens) if whole else self.attention(x, shard, *modes)
        return result if modes else (result, None)


class HybridDecoder(LanguageModel):
    """The language model. `forward(tokens, mode, shard, cu_seqlens)`: nn.CSA defines the modes."""

    attention_output = "wo_b"

    def make_block(self, layer: int) -> Block:
        size, kind = self.size, self.size.kind(layer)
        options = {name: getattr(size, name) for name in ("window", "d", "d_rope", "q_rank", "o_groups", "o_rank")}
        if kind == "CSA":
            indexer = {name: getattr(size, name) for name in ("topk", "h_index", "d_index")}
            attention = CSA(size.d_model, size.h_q, ratio=size.csa_ratio, **indexer, **options)
        else:
            attention = HCA(size.d_model, size.h_q, ratio=size.hca_ratio if kind == "HCA" else 0, **options)
        return HybridBlock(size.d_model, size.d_ff, attention)

    def share_context(self) -> None:
        """Replaces the attention by the attention over shards, with the same parameters."""
        for block in self.blocks:
            attention = block.attention
            block.attention = ParallelCSA(attention) if isinstance(attention, CSA) else ParallelHCA(attention)


@torch.no_grad()
def recall(model: HybridDecoder, tokens: Tensor) -> tuple[float, float]:
    """Recall of the indexers' selections, and of the newest compressed keys as a selection, over tokens [b, s].

    The relevant keys of a query are the topk compressed keys of most attention, if the attention is over every visible
    key. Only queries that see more than topk compressed keys count.
    """
    found, newest, relevant = 0, 0, 0
    for block in model.blocks:
        if not isinstance(block.attention, CSA):
            continue
        inputs: list[Tensor] = []
        hook = block.attention.register_forward_pre_hook(lambda _, given, to=inputs: to.append(given[0]))
        model(tokens)
        hook.remove()
        csa = block.attention
        selected = csa.selected.flatten(0, 1).long()
        best, seen = most_attended(csa, inputs[0])
        counted = seen > csa.indexer.topk
        best, selected, seen = best[counted], selected[counted], seen[counted]
        found += int((best[:, :, None] == selected[:, None]).any(-1).sum())
        newest += int((best >= (seen - csa.indexer.topk)[:, None]).sum())
        relevant += best.numel()
    return found / max(relevant, 1), newest / max(relevant, 1)


def most_attended(csa: CSA, x: Tensor) -> tuple[Tensor, Tensor]:
    """The topk compressed keys of most attention under the joint softmax, int64 [b · s, topk], counted in the sequence,
    and the number of compressed keys that each query sees [b · s]. x [b, s, d_model] is the layer's input.
    """
    b, s, _ = x.shape
    cu_seqlens = torch.arange(b + 1, dtype=torch.int32) * s
    cu_compressed = compressed_lengths(cu_seqlens, csa.ratio)
    first, end = key_ranges(cu_seqlens, s_q=b * s)
    k_start, k_end = key_ranges(cu_seqlens, cu_compressed, s_q=b * s, kv_stride=csa.ratio)
    rows, kv = x.reshape(1, b * s, -1), csa.compressor(x)
    q, window_kv = csa.queries(csa.query_latent(rows), -first), csa.window_keys(rows, -first)
    visible = {"k_start": k_start, "k_end": k_end}
    _, lse = csa.attend(q, kv, None, window_kv, w_start=first, w_end=end, **visible)
    every = torch.arange(s // csa.ratio, dtype=torch.int32) + k_start[:, None]
    attention = attention_distribution(
        *(q, kv, every.contiguous(), lse, csa.sm_scale), attn_sink=csa.attn_sink, **visible
    )
    return attention.topk(csa.indexer.topk).indices, (k_end - k_start).long()
