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

from hopwell.torch.parallel.dsa import ParallelDSA, shard_heads
from hopwell.torch.parallel.hybrid import ParallelCSA, ParallelHCA
from hopwell.torch.parallel.shard import ContextShard, sum_gradients

__all__ = ["ContextShard", "ParallelCSA", "ParallelDSA", "ParallelHCA", "shard_heads", "sum_gradients"]
