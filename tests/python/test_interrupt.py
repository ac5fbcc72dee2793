"""Signals during a long call on the CPU, and daemon threads that are in one while Python ends."""

import os
import subprocess
import sys

import pytest

# Sends the signal DELAY seconds after a call began, and checks how long after the signal the exception came.
LONG_CALL = """
import os, signal, threading, time
import hopwell, numpy as np

def interrupted(number, error, call):
    sent = []
    def send():
        time.sleep(DELAY)
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        call()
    except error:
        late = time.monotonic() - sent[0]
    else:
        raise AssertionError("the call was not interrupted")
    sender.join()
    assert late < 1, late  # 0.1 on an idle machine

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
DELAY = 0.3
rng = np.random.default_rng(0)
"""
CALLS = {
    # Each takes several seconds on two cores.
    "sparse_mla_forward": """
q, kv = rng.standard_normal((64, 128, 576), np.float32), rng.standard_normal((60_000, 576), np.float32)
def long(): hopwell.sparse_mla_forward(q, kv, None, 0.05)
def short(): return hopwell.sparse_mla_forward(q[:2, :4], kv[:700], None, 0.05)[0].tobytes()
""",
    "sparse_mla_backward": """
q = np.tile(rng.standard_normal((8, 128, 576), np.float32), (32, 1, 1))
kv = rng.standard_normal((4096, 576), np.float32)
indices = rng.integers(0, 4096, (256, 2048)).astype(np.int32)
out, lse = q[:, :, :512] * 0.1, np.full(q.shape[:2], 8, np.float32)
def call(s): return hopwell.sparse_mla_backward(out[:s], q[:s], kv, indices[:s], out[:s], lse[:s], 0.05)
def long(): call(256)
def short(): return call(2)[1].tobytes()
""",
    "lightning_indexer": """
q, k = rng.standard_normal((512, 64, 128), np.float32), rng.standard_normal((150_000, 128), np.float32)
weights = rng.standard_normal((512, 64), np.float32)
def call(s, keys): return hopwell.lightning_indexer(q[:s], k[:keys], weights[:s], 512)[0]
def long(): call(512, 150_000)
def short(): return call(5, 3000).tobytes()
""",
    "nvfp4_linear": """
x = np.tile(rng.standard_normal((64, 8192), np.float32), (64, 1))
weight, scales = rng.integers(0, 256, (16384, 4096), np.uint8), np.full((16384, 512), 0x38, np.uint8)
def call(n, rows): return hopwell.nvfp4_linear(x[:n], weight[:rows], scales[:rows], 0.01)
def long(): call(4096, 16384)
def short(): return call(40, 300).tobytes()
""",
}
CALLS["emu:sm90"] = """
import torch, hopwell.torch
q, kv = torch.randn(512, 64, 576).bfloat16(), torch.randn(4096, 576).bfloat16()
indices = torch.randint(0, 4096, (512, 2048), dtype=torch.int32)
def call(s): return hopwell.sparse_mla_forward(q[:s], kv, indices[:s, : 64 * s], 0.05, backend="emu:sm90")[0]
def long(): call(512)
def short(): return call(1).float().numpy().tobytes()
"""
INTERRUPTS = """
expected = short()
interrupted(signal.SIGINT, KeyboardInterrupt, long)
assert short() == expected

class Late(Exception): ...
def handler(number, frame): raise Late
signal.signal(signal.SIGUSR1, handler)
interrupted(signal.SIGUSR1, Late, long)

seen = []
signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))  # raises nothing: the call goes on
timer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGUSR1))
timer.start()
for _ in range(20): assert short() == expected
timer.join()
assert seen == [signal.SIGUSR1]
"""
DAEMONS = """
import threading, time
import hopwell, numpy as np
rng = np.random.default_rng(0)
q, kv = rng.standard_normal((8, 16, 64), np.float32), rng.standard_normal((500, 64), np.float32)
def calls():
    while True: hopwell.sparse_mla_forward(q, kv, None, 0.1, 64)
for _ in range(4): threading.Thread(target=calls, daemon=True).start()
time.sleep(0.1)
"""


def run(program: str, threads: int = 2) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOPWELL_NUM_THREADS": str(threads)}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("operator", CALLS)
def test_a_signal_ends_a_long_call(operator: str) -> None:
    done = run(LONG_CALL + CALLS[operator] + INTERRUPTS)
    assert done.returncode == 0, done.stderr


def test_python_ends_while_daemon_threads_call() -> None:
    for _ in range(3):  # without a remedy nearly every one aborts
        done = run(DAEMONS, threads=1)
        assert (done.returncode, done.stderr) == (0, "")
