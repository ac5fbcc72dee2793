"""Modules made of the operators: multi-query MLA over selected keys, the lightning indexer, both together,
DeepSeek-V4's hybrid attention, NVFP4 linear.

Shapes: b sequences, s tokens a sequence, d_model the width of the residual stream; the operators take one packed
sequence, so the modules flatten [b, s] and shift each sequence's key indices by its place in the pack. The attention is
the one of DeepSeek-V2 with the up-projections absorbed (the latent is key and value of every head), the indexer and its
training the ones of the DeepSeek-V3.2 report. Options and names of parameters are those of DeepSeek-V3.2 and GLM-5,
after `inference/model.py` of DeepSeek-V3.2-Exp and `deepseek_v32` and `glm_moe_dsa` of Hugging Face's transformers;
those of CSA and HCA are DeepSeek-V4's, after its `inference/model.py` and `deepseek_v4` of transformers.
"""

from hopwell.torch.nn._module import RMSNorm
from hopwell.torch.nn.attention import SparseMLA, UpProjection, pack_indices
from hopwell.torch.nn.cache import KeyCache
from hopwell.torch.nn.compressor import KVCompressor
from hopwell.torch.nn.dsa import DSA, Mode
from hopwell.torch.nn.hybrid import CSA, HCA, CompressedIndexer, HybridMode
from hopwell.torch.nn.indexer import LightningIndexer
from hopwell.torch.nn.nvfp4 import NVFP4Linear
from hopwell.torch.nn.rope import Rope, Yarn, rotate

__all__ = [
    "CSA",
    "DSA",
    "HCA",
    "CompressedIndexer",
    "HybridMode",
    "KVCompressor",
    "KeyCache",
    "LightningIndexer",
    "Mode",
    "NVFP4Linear",
    "RMSNorm",
    "Rope",
    "SparseMLA",
    "UpProjection",
    "Yarn",
    "pack_indices",
    "rotate",
]
