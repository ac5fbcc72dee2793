"""Hopwell in PyTorch: the operators as `torch.library` custom ops, autograd, and `nn` modules made of them.

>>> from hopwell.torch import nn, sparse_mla, indexer_loss
"""

from hopwell.torch import nn, ops
from hopwell.torch._load_nvfp4 import load_nvfp4
from hopwell.torch._packing import compressed_lengths, key_ranges
from hopwell.torch._partials import merge_partials
from hopwell.torch.ops import *  # noqa: F403

__all__ = ["compressed_lengths", "key_ranges", "load_nvfp4", "merge_partials", "nn"]
__all__ += ops.__all__
