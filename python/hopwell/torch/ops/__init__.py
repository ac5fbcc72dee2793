"""The operators as `torch.library` custom ops in the namespace `hopwell`.

Every op has a fake kernel, so `torch.compile` traces through it without a graph break; `sparse_mla`, `indexer_loss`,
`indexer_dense_loss`, `indexer_scores`, `kv_compress` and the scores of `lightning_indexer` are differentiable, and
`nvfp4_linear` for x and bias. The functions here take tensors and return fresh tensors (an op that wrote into its
arguments could not be differentiated); for `out=`-style arguments call `hopwell` itself, which takes tensors too.
`mla_cache_append` is the exception: it writes into its cache, and returns it.
Custom ops have no keyword-only tensors, so arguments that are keyword-only in `hopwell` are positional too here.

`torch.use_deterministic_algorithms(True)` makes the backward operators repeat bit for bit.
"""

from ... import _torch_ops
from ..._torch_ops import *  # noqa: F403
from ._indexer_scores import indexer_scores
from ._lightning_indexer import indexer_loss
from ._mla_cache import read_mla_cache
from ._sparse_mla import sparse_mla

__all__ = ["indexer_loss", "indexer_scores", "read_mla_cache", "sparse_mla"]
__all__ += _torch_ops.__all__
