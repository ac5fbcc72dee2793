"""What is compared: one shape of an operator on random inputs, Hopwell's call, and those of the peers.

A peer's package is imported when its call is prepared, so that it may be missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .scale import DEVICE

AT_ONCE = 128  # queries, in plain PyTorch, so that the gathered keys fit

Call = Callable[[int], Any]  # runs on the i-th copy of the inputs
Read = Callable[[Any], list[Tensor]]  # what is compared of its results
Shape = dict[str, int]


def first(n: int) -> Read:
    """The first n results."""
    return lambda results: list(results)[:n]


@dataclass
class Peer:
    """Another package's call. `package`: what to install, in words; "torch" runs without --peers too."""

    name: str
    package: str
    prepare: Callable[[], Call]  # imports the package
    read: Read
    note: str = ""  # what it does otherwise than Hopwell


@dataclass
class Problem:
    """One shape of one operator, on random inputs."""

    ours: Call
    read: Read
    peers: list[Peer]
    copies: int = 1
    operations: float = 0  # of matrix products: the ceiling is a matrix product
    bytes: float = 0  # read and written by a call, without operations: the ceiling is reading as many
    tolerance: float = 1e-2  # of the norm of the difference over the larger of both; both sides round to bf16


def torch_peer(name: str, prepare: Callable[[], Call], read: Read, note: str = "") -> Peer:
    """The plain PyTorch way."""
    return Peer(name, "torch", prepare, read, note)


def randn(*shape: int) -> Tensor:
    """Random bf16."""
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def distinct(rows: int, n: int, topk: int) -> Tensor:
    """Each row: topk of 0 … n − 1 in random order."""
    chunks = [torch.rand(min(256, rows - i), n, device=DEVICE).topk(topk).indices.int() for i in range(0, rows, 256)]
    return torch.cat(chunks)


def chunks(s_q: int) -> list[slice]:
    """Queries that plain PyTorch takes together."""
    return [slice(i, min(i + AT_ONCE, s_q)) for i in range(0, s_q, AT_ONCE)]


def flash_mla() -> Any:
    """The module, and whether it keeps Hopper's kernels apart, as sgl-flash-mla does."""
    try:
        module = import_module("flash_mla")
    except ImportError:  # vLLM brings the same kernels
        module = import_module("vllm.third_party.flashmla.flash_mla_interface")
    legacy = hasattr(module, "has_legacy") and DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
    return module, {"use_legacy": True} if legacy else {}


def cudnn_dsa() -> Any:
    """The sparse-attention part of cuDNN's front end."""
    return import_module("cudnn.deepseek_sparse_attention")


FLASH_MLA, CUDNN, DEEP_GEMM = (
    "flash-mla (sgl-flash-mla or vllm)",
    "nvidia-cudnn-frontend[cutedsl]",
    "deep-gemm (sgl-deep-gemm)",
)
