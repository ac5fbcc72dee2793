"""Fixtures for all Python tests."""

import os

import numpy as np
import pytest

# Several test processes run at the same time, and PyTorch threads that spin while they wait would take their processor
# time. PyTorch reads this variable at import, which comes later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `nightly` are long, and shorter ones reach the same code. `make nightly` runs them."""
    if "HOPWELL_NIGHTLY" in os.environ:
        return
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.skip(reason="make nightly runs it"))


@pytest.fixture
def rng() -> np.random.Generator:
    """New random data in every run; pytest shows the seed of a failed test."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def numbers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator without its search for races, which takes more than half of the time. The cases have it."""
    monkeypatch.setenv("HOPWELL_EMULATOR_CHECKER", "off")


@pytest.fixture
def torch_seed(rng: np.random.Generator) -> None:
    """New random tensors in every run."""
    import torch

    torch.manual_seed(int(rng.integers(2**31)))
