"""benchmarks/selection_overlap.py: the overlap of neighbours, counted with sets."""

from importlib import util
from pathlib import Path

import numpy as np
import pytest
import torch

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "selection_overlap.py"


@pytest.mark.parametrize("group", [2, 4, 8])
def test_union_over_sum_of_selections(rng: np.random.Generator, group: int) -> None:
    """Causal selections of 5 keys, fewer in the first rows; groups that see fewer than ten keys are omitted."""
    spec = util.spec_from_file_location("selection_overlap", PROGRAM)
    assert spec is not None and spec.loader is not None
    program = util.module_from_spec(spec)
    spec.loader.exec_module(program)
    s, topk = 40, 5
    rows = [rng.permutation(query + 1)[:topk].tolist() for query in range(s)]
    selected = torch.tensor([row + [-1] * (topk - len(row)) for row in rows], dtype=torch.int32)
    groups = [rows[i : i + group] for i in range(0, s, group)]
    shares = [len(set().union(*some)) / sum(map(len, some)) for some in groups]
    found = program.union_shares(selected, group, topk)
    assert found.tolist() == pytest.approx(shares[-(-2 * topk // group) :])
