"""Operators in forked processes: os.fork(), a pool of processes, the workers of a DataLoader."""

import os
import subprocess
import sys

import pytest

# Each test runs in a process of its own, so that earlier imports and threads of other tests have no effect.
PREAMBLE = """
import multiprocessing, os, signal, sys, threading, warnings
{imports}
import numpy as np
import hopwell

warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process of several threads: that is what is tested
rng = np.random.default_rng(0)
q = rng.standard_normal((6, 5, 40), np.float32)
kv = rng.standard_normal((90, 40), np.float32)
indices = rng.integers(0, 90, (6, 33)).astype(np.int32)

def call(_=None):
    return b"".join(x.tobytes() for x in hopwell.sparse_mla_forward(q, kv, indices, 0.3, 24))

def in_a_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if work() else 1)
    assert os.waitpid(child, 0)[1] == 0

expected = call()
"""
BODIES = {
    "fork": "in_a_child(lambda: call() == expected)",
    "child of a child": """
def grandchild():
    in_a_child(lambda: call() == expected)
    return call() == expected
in_a_child(grandchild)
in_a_child(grandchild)
""",
    "threads of a child": """
def threads():
    results = []
    workers = [threading.Thread(target=lambda: results.extend(map(call, range(5)))) for _ in range(3)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    return results == 15 * [expected]
in_a_child(threads)
""",
    "pool": """
with multiprocessing.get_context("fork").Pool(3) as pool:
    assert pool.map_async(call, range(12), chunksize=1).get(30) == 12 * [expected]
""",
    "fork in a thread while others call": """
done = threading.Event()
def busy():
    while not done.is_set():
        call()
workers = [threading.Thread(target=busy) for _ in range(3)]
for worker in workers: worker.start()
try:
    for _ in range(60): in_a_child(lambda: call() == expected)
finally:
    done.set()
""",
}
DATA_LOADER = """
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, item):
        if item > 3: torch.set_num_threads(3)  # a worker begins with one
        return torch.frombuffer(bytearray(call()), dtype=torch.uint8)
loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context="fork", timeout=30)
assert all(bytes(row[0].numpy()) == expected for row in loader)
"""


def run(body: str, imports: str = "") -> None:
    script = PREAMBLE.format(imports=imports) + body
    several = {**os.environ, "HOPWELL_NUM_THREADS": "3"}  # with one thread, the fork loses no thread
    done = subprocess.run(
        [sys.executable, "-c", script], env=several, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("body", BODIES)
def test_calls_in_forked_processes(body: str) -> None:
    run(BODIES[body])


def test_calls_in_forked_processes_with_torch() -> None:
    run("\n".join([*BODIES.values(), DATA_LOADER]), "import torch; torch.ones(400, 400) @ torch.ones(400, 400)")


def test_calls_on_the_host_do_not_ask_the_cuda_driver() -> None:
    # A process that has asked the CUDA library for devices cannot use CUDA in its forks.
    def libraries_looked_for(body: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", PREAMBLE.format(imports="") + body],
            env={**os.environ, "LD_DEBUG": "libs"}, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return done.stderr

    assert "libcuda.so.1" not in libraries_looked_for("")
    assert "libcuda.so.1" in libraries_looked_for("hopwell.backends()")
