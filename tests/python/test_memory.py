"""Scratch memory does not grow with the number of queries: nothing of size s_q × topk × d is ever stored.

A call that finds too little address space ends in an error.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


# Each call has room for a few KiB or MiB and gives the right bits or an error. The next call with more room is right.
SHORT_OF_MEMORY = """
import resource
import hopwell, numpy as np

rng = np.random.default_rng(0)
x = rng.standard_normal((300, 1024), np.float32)
codes, scales, factor = hopwell.nvfp4_quantize(x)
q, kv = rng.standard_normal((4, 128, 576), np.float32), rng.standard_normal((1000, 576), np.float32)
indices = np.tile(np.arange(1000, dtype=np.int32), (4, 1))
d_out = rng.standard_normal((4, 128, 512), np.float32)
lse = np.full((4, 128), 9, np.float32)
calls = {
    "nvfp4_linear": lambda: hopwell.nvfp4_linear(x, codes, scales, 0.01),
    "nvfp4_matmul": lambda: hopwell.nvfp4_matmul(codes, codes, scales, scales, alpha=0.01),
    "sparse_mla_forward": lambda: hopwell.sparse_mla_forward(q, kv, indices, 0.05)[0],
    "sparse_mla_backward": lambda: hopwell.sparse_mla_backward(d_out, q, kv, indices, d_out, lse, 0.05)[1],
    "attention_distribution": lambda: hopwell.attention_distribution(q, kv, indices, lse, 0.05),
    "lightning_indexer": lambda: hopwell.lightning_indexer(q[:, :, :128], kv[:, :128], lse, 500)[0],
}

def size():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()

def bits(call, room):
    if room is None:
        return call().tobytes()
    resource.setrlimit(resource.RLIMIT_AS, (size() + room * 1024, resource.RLIM_INFINITY))
    try:
        return call().tobytes()
    except MemoryError:  # of numpy, for outputs, or of Python
        return None
    except hopwell.Error as error:
        assert "out of memory" in str(error), error
        return None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def holds(got, expected):
    return got is None or got == expected

# First, while the process has no freed memory that a call could use again.
short = {name: [bits(call, room) for room in ROOMS] for name, call in calls.items()}
assert None in short["nvfp4_linear"]
for name, call in calls.items():
    expected = bits(call, None)
    assert all(holds(got, expected) for got in short[name]), name
    assert all(holds(bits(call, room), expected) for room in ROOMS), name
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_a_call_without_room_is_an_error(threads: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "ROOMS = [0, 256, 1024, 3000, 8000, 20_000, 60_000, 150_000]\n" + SHORT_OF_MEMORY],
        env={**os.environ, "HOPWELL_NUM_THREADS": str(threads)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
