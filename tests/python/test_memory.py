"""Scratch memory does not grow with the number of queries: nothing of size s_q × topk × d is ever stored."""

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "cpu.py"
D_QK, TOPK = 576, 2048


def growth(s_q: int) -> int:
    """Bytes a forward and a backward of s_q queries need beyond inputs and outputs, in a process of their own."""
    command = [sys.executable, str(BENCHMARK), "--peak-growth", str(s_q)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_scratch_does_not_grow_with_queries() -> None:
    few, many = 4, 64
    gathered = (many - few) * TOPK * D_QK * 4
    assert growth(many) - growth(few) < 0.05 * gathered
