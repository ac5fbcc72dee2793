"""Fixtures of all Python tests."""

import os

import numpy as np
import pytest

# Several processes test at the same time: PyTorch's threads that spin while they wait would keep the others' from
# working. Read when PyTorch is imported, which is after this.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random data in every run; pytest shows the seed of a test that fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def torch_seed(rng: np.random.Generator) -> None:
    """Fresh random tensors in every run."""
    import torch

    torch.manual_seed(int(rng.integers(2**31)))
