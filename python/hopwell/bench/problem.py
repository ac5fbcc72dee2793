"""A comparison: an operator's shapes; one shape on random inputs, Hopwell's call, and the calls of the peers.

A peer's package is imported only when its call is prepared, because it may be missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .scale import DEVICE

AT_ONCE = 128  # queries per step of plain PyTorch: limits the memory for gathered keys

Call = Callable[[int], Any]  # runs on the i-th copy of the inputs
Read = Callable[[Any], list[Tensor]]  # selects the results to compare
Shape = dict[str, int]


def first(n: int) -> Read:
    """Selects the first n results."""
    return lambda results: list(results)[:n]


@dataclass
class Peer:
    """Another package's call. `package`: name of the package to install; "torch" runs without --peers too."""

    name: str
    package: str
    prepare: Callable[[], Call]  # imports the package
    read: Read
    note: str = ""  # how it differs from Hopwell


@dataclass
class Problem:
    """One shape of one operator, on random inputs."""

    ours: Call
    read: Read
    peers: list[Peer]
    copies: int = 1
    operations: float = 0  # of the matrix products; if not 0, the ceiling is a matrix product
    bytes: float = 0  # read and written by a call; if there are no operations, the ceiling is reading this many bytes
    tolerance: float = 1e-2  # limit of the relative difference (`relative`); both sides round to bf16


@dataclass
class Operator:
    """The shapes that are measured on GPUs, on the CPU and by --dry-run. They leave out defaults of the function."""

    problem: Callable[..., Problem]
    shapes: list[Shape]
    on_cpu: list[Shape]
    tiny: Shape  # of --dry-run

    def settings(self, shape: Shape) -> Shape:
        """The whole shape."""
        defaults = {name: p.default for name, p in inspect.signature(self.problem).parameters.items()}
        return {**defaults, **shape}


MEASURED: dict[str, Operator] = {}


def measured(
    shapes: list[Shape], on_cpu: list[Shape], tiny: Shape
) -> Callable[[Callable[..., Problem]], Callable[..., Problem]]:
    """Says at which shapes the operator of a function's name is measured."""

    def add(problem: Callable[..., Problem]) -> Callable[..., Problem]:
        MEASURED[problem.__name__] = Operator(problem, shapes, on_cpu, tiny)
        return problem

    return add


def torch_peer(name: str, prepare: Callable[[], Call], read: Read, note: str = "") -> Peer:
    """A peer that is written in plain PyTorch."""
    return Peer(name, "torch", prepare, read, note)


def randn(*shape: int) -> Tensor:
    """Random bf16 numbers."""
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def distinct(rows: int, n: int, topk: int) -> Tensor:
    """In each row, topk distinct numbers of 0 … n − 1 in random order."""
    chunks = [torch.rand(min(256, rows - i), n, device=DEVICE).topk(topk).indices.int() for i in range(0, rows, 256)]
    return torch.cat(chunks)


def chunks(s_q: int) -> list[slice]:
    """Slices of queries that plain PyTorch handles in one step."""
    return [slice(i, min(i + AT_ONCE, s_q)) for i in range(0, s_q, AT_ONCE)]


def flash_mla() -> Any:
    """Returns the module, and True if its kernels for Hopper are separate, as in sgl-flash-mla."""
    try:
        module = import_module("flash_mla")
    except ImportError:  # vLLM ships the same kernels
        module = import_module("vllm.third_party.flashmla.flash_mla_interface")
    legacy = hasattr(module, "has_legacy") and DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
    return module, {"use_legacy": True} if legacy else {}


def cudnn_dsa() -> Any:
    """Returns the sparse-attention part of cuDNN's front end."""
    return import_module("cudnn.deepseek_sparse_attention")


FLASH_MLA, CUDNN, DEEP_GEMM = (
    "flash-mla (sgl-flash-mla or vllm)",
    "nvidia-cudnn-frontend[cutedsl]",
    "deep-gemm (sgl-deep-gemm)",
)
