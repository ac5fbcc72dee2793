"""The records of benchmarks that PyTorch times on a GPU."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import hopwell
import torch


def write(path: Path | None, results: list[dict[str, object]]) -> None:
    """Writes the results, and what they were measured with; nothing where there is no path."""
    if path is None:
        return
    record = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "hopwell": hopwell.__version__,
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
