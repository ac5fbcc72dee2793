"""Tries a wheel with the installed PyTorch: gradients, PyTorch's compiler, and the forked processes of a DataLoader.

Prints the duration of calls in this process and in the workers, while PyTorch's own threads are awake.
"""

import platform
import time
from collections.abc import Callable
from statistics import median

import hopwell
import numpy as np
import torch
from hopwell import torch as hw

QUERIES, HEADS, KEYS, WIDTH, TOPK = 16, 8, 512, 64, 64


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(QUERIES, HEADS, WIDTH, generator=generator)
    kv = torch.randn(KEYS, WIDTH, generator=generator)
    return q, kv, torch.randint(0, KEYS, (QUERIES, TOPK), dtype=torch.int32, generator=generator)


def attention(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return hw.sparse_mla(q, kv, indices, WIDTH**-0.5, 48)[0]


def plain(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Computes the same in PyTorch, in float64."""
    keys = kv[indices.long()]
    p = torch.einsum("shd,sid->shi", q, keys).mul(WIDTH**-0.5).softmax(-1)
    return torch.einsum("shi,siv->shv", p, keys[..., :48])


def milliseconds(*functions: Callable[[], object]) -> float:
    """Calls all functions one after another; returns the median of 100 times."""
    times = []
    for _ in range(100):
        began = time.perf_counter()
        for function in functions:
            function()
        times.append(time.perf_counter() - began)
    return 1e3 * median(times)


def step(seed: int) -> tuple[bytes, list[float]]:
    """Returns the operator's bits, and the milliseconds of the operator, of a product of PyTorch, and of both in turns.

    On a busy machine spinning threads delay others. For comparison it also times numpy's product in place of PyTorch's.
    """
    arguments, x, y = inputs(seed), torch.ones(256, 256), np.ones((256, 256), np.float32)

    def ours() -> torch.Tensor:
        return attention(*arguments)

    def theirs() -> torch.Tensor:
        return x @ x

    def numpys() -> np.ndarray:
        return y @ y

    several = (ours,), (theirs,), (ours, theirs), (numpys, theirs)
    return ours().numpy().tobytes(), [milliseconds(*functions) for functions in several]


class Steps(torch.utils.data.Dataset):
    """Item i is the result of `step(i)`, in any process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, item: int) -> tuple[bytes, list[float]]:
        return step(item)


def report(where: str, steps: list[tuple[bytes, list[float]]]) -> None:
    ours, theirs, both, others = (median(times) for times in zip(*(times for _, times in steps), strict=True))
    print(f"  {where}, ms: operator {ours:.2f}, PyTorch's product {theirs:.2f}, in turns {both:.2f}", end="")
    print(f", numpy's and PyTorch's in turns {others:.2f}")


def gradients_are_right() -> None:
    q, kv, indices = inputs(0)
    d_out = torch.randn(QUERIES, HEADS, 48)
    leaves = q.requires_grad_(), kv.requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = torch.autograd.grad(plain(*exact, indices), exact, d_out.double())
    for function in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        for gradient, wanted in zip(
            torch.autograd.grad(function(*leaves, indices), leaves, d_out), expected, strict=True
        ):
            assert (gradient - wanted).norm() <= 1e-4 * wanted.norm()


def workers_do_as_this_process() -> None:
    here = [step(item) for item in range(len(Steps()))]  # the threads of both libraries have run before the fork
    report("this process", here)
    for workers in (1, 2):
        loader = torch.utils.data.DataLoader(
            Steps(), batch_size=None, num_workers=workers, multiprocessing_context="fork", timeout=120
        )
        there = list(loader)
        assert [bits for bits, _ in there] == [bits for bits, _ in here]
        report(f"{workers} forked worker(s)", there)


if __name__ == "__main__":
    print(f"PyTorch {torch.__version__}, Python {platform.python_version()}, hopwell {hopwell.__version__}")
    gradients_are_right()
    workers_do_as_this_process()
