"""The records of benchmarks that PyTorch times on a GPU."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from pathlib import Path

import hopwell
import torch


def driver() -> str:
    """The version of NVIDIA's driver; "" where there is none."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.exists() else None
    return found[0] if found else ""


def commit() -> str:
    """The commit of the source tree; "" outside a git repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def write(path: Path | None, results: list[dict[str, object]], **more: object) -> None:
    """Writes the results, and what they were measured with; nothing where there is no path."""
    if path is None:
        return
    record = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "driver": driver(),
        "commit": commit(),
        "torch": torch.__version__,
        "hopwell": hopwell.__version__,
        **{name: value for name, value in more.items() if value},
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
