"""Writes records: results with the machine, the day, the commit, the packages, and the command."""

from __future__ import annotations

import datetime
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import hopwell
from hopwell import _hopwell

PEERS = [
    "flash-mla",
    "sgl-flash-mla",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "tilelang",
    "flashinfer-python",
    "vllm",
    "deep-gemm",
    "sgl-deep-gemm",
]


def device() -> str:
    """Returns the name of the GPU, or the name of the processor with the number of Hopwell's threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return f"{found[1] if found else 'CPU'}, {hopwell.num_threads()} threads"


def driver() -> str:
    """Returns the version of NVIDIA's driver, or "" without a driver."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.exists() else None
    return found[0] if found else ""


def commit() -> str:
    """Returns the commit that the package was built from, or "" if it was built outside a git repository."""
    path = Path(_hopwell.__file__).with_name("commit.txt")
    return path.read_text().strip() if path.exists() else ""


def command() -> str:
    """Returns the command line of this process without this machine's folders."""
    program, *arguments = sys.argv
    name = Path(program).name
    called = "python -m hopwell.bench" if name == "__main__.py" else f"python benchmarks/{name}"
    return " ".join([called, *(re.sub(r"(^|=)/.*/", r"\1", word) for word in arguments)])


def versions() -> tuple[dict[str, str], list[str]]:
    """Returns the versions of PyTorch and of the installed peers, and the names of the missing peers."""
    found, missing = {"torch": str(torch.__version__)}, []
    for package in PEERS:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(package)
    return found, missing


def of(results: list[dict[str, Any]], **more: object) -> dict[str, Any]:
    """Returns a record of these results."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": device(),
        "driver": driver(),
        "commit": commit(),
        "torch": str(torch.__version__),
        "hopwell": hopwell.__version__,
        "command": command(),
        **{name: value for name, value in more.items() if value},
        "results": results,
    }


def write(path: Path | None, results: list[dict[str, Any]], **more: object) -> None:
    """Writes a record of these results, if there is a path."""
    if path is not None:
        path.write_text(json.dumps(of(results, **more), indent=1) + "\n")
