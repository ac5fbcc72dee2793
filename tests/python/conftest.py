"""Fixtures of all Python tests."""

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random data in every run; pytest shows the seed of a test that fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)
