"""Training over two processes with gloo: the results of one process, and errors instead of an endless wait."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hopwell.torch import lightning_indexer, sparse_mla
from hopwell.torch.parallel import ContextShard

WORKER = Path(__file__).with_name("parallel_worker.py")
Launch = Callable[[Path, str, int], list[tuple[int, str]]]


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    """Runs a task on some ranks. Returns each rank's exit code and standard error."""
    with subprocess.Popen(
        [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None

        def run(folder: Path, task: str, ranks: int) -> list[tuple[int, str]]:
            print(json.dumps([task, ranks, str(folder)]), file=worker.stdin, flush=True)
            return [(code, error) for code, error in json.loads(worker.stdout.readline())]

        yield run


def succeed(launch: Launch, folder: Path, task: str, ranks: int) -> None:
    for code, error in launch(folder, task, ranks):
        assert code == 0, error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def compared(launch: Launch, folder: Path) -> list[dict[Any, Any]]:
    succeed(launch, folder, "compare", 2)
    return [torch.load(folder / f"compare-{rank}.pt") for rank in range(2)]


def losses(result: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(result["losses"])


@pytest.mark.parametrize("s", [16, 13, 1])
@pytest.mark.parametrize("scenario", ["context", "heads", "fsdp"])
def test_two_ranks_learn_what_one_does(compared: list[dict[Any, Any]], scenario: str, s: int) -> None:
    """Losses differ only by the rounding of float32 sums in another order: at most 1e-4 of each within six steps."""
    for results in compared:
        torch.testing.assert_close(losses(results[scenario, s]), losses(results["alone", s]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("s", [16, 13, 1])
def test_same_call_gives_the_same_bits(compared: list[dict[Any, Any]], s: int) -> None:
    for results in compared:
        assert results["context", s]["losses"] == results["again", s]["losses"]
        assert torch.equal(results["context", s]["first_grad"], results["again", s]["first_grad"])


@pytest.mark.parametrize("s", [16, 13, 1])
@pytest.mark.parametrize("scenario", ["context", "heads"])
def test_tokens_come_out_as_on_one_rank(compared: list[dict[Any, Any]], scenario: str, s: int) -> None:
    """A token's result and the gradient of its input, which pass through heads and keys of both ranks."""
    for results in compared:
        mine, alone = results[scenario, s], results["alone", s]
        for name in ("first_y", "first_grad"):
            expected = alone[name][:, mine["positions"]]
            torch.testing.assert_close(mine[name], expected, rtol=1e-5, atol=1e-6)


def test_data_parallel_gradients_are_the_mean(compared: list[dict[Any, Any]]) -> None:
    for results in compared:
        gradients = results["data parallel"]
        torch.testing.assert_close(gradients["fsdp"], gradients["alone"], rtol=1e-4, atol=1e-6)


def test_packed_documents_come_out_as_on_one_rank(compared: list[dict[Any, Any]]) -> None:
    for results in compared:
        alone, mine = results["packed"]
        torch.testing.assert_close(mine["y"], alone["y"][:, mine["positions"]], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine["loss"], alone["loss"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("s", [48, 29, 7, "heads"])
@pytest.mark.parametrize("kind", ["window", "HCA", "CSA", "CSA warm-up"])
def test_hybrid_attention_is_that_of_one_rank(compared: list[dict[Any, Any]], kind: str, s: int | str) -> None:
    for results in compared:
        alone, mine = results[kind, s]
        positions = mine.pop("positions")
        for name in ("y", "x"):
            torch.testing.assert_close(mine.pop(name), alone[name][:, positions], rtol=1e-4, atol=1e-4, msg=name)
        assert set(mine) <= set(alone)
        assert "loss" in mine
        for name, value in mine.items():
            torch.testing.assert_close(value, alone[name], rtol=1e-4, atol=1e-4, msg=name)


def test_ranks_that_disagree_all_raise(compared: list[dict[Any, Any]]) -> None:
    for results in compared:
        ranks = "must be the same on every rank; got [8, 1], [9, 1] on ranks 0 … 1"
        assert results["s"] == f"ContextShard: s and multiple {ranks}"
        expected = "ContextShard: multiple must be a multiple of ratio = 4; got a piece at 5"
        assert results["multiple"] == expected
        assert results["shape"] == (
            "ContextShard.split: x's shape must be the same on every rank; got [2, 8, 32], [3, 8, 32] on ranks 0 … 1"
        )


def test_resumes_on_another_number_of_ranks(compared: list[dict[Any, Any]], launch: Launch, folder: Path) -> None:
    """One process resumes from the checkpoint of two, and two resume from the checkpoint of one."""
    for task, ranks in (("resume-by-one", 1), ("resume-by-two", 2)):
        succeed(launch, folder, task, ranks)
        resumed, whole = losses(torch.load(folder / f"{task}.pt")), losses(compared[0]["alone", 16])
        torch.testing.assert_close(resumed, whole[-len(resumed) :], rtol=1e-4, atol=1e-6)


def test_rank_that_dies_ends_the_others(launch: Launch, tmp_path: Path) -> None:
    began = time.monotonic()
    (code, error), (dead, _) = launch(tmp_path, "die", 2)
    assert dead == 3
    assert code == 1
    assert "RuntimeError" in error
    # The time-out is 5 s, PyTorch's default half an hour; the rest is for a busy machine.
    assert time.monotonic() - began < 150


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_query_has_the_same_bits_in_a_shard(dtype: torch.dtype) -> None:
    """out, lse, dq and the selection over global keys, for the pieces 0 and 3 of 4 and for the whole."""
    s, draw = 50, torch.Generator().manual_seed(0)
    q, kv, d_out = (torch.randn(*n, generator=draw).to(dtype) for n in ((s, 4, 48), (s, 48), (s, 4, 32)))
    q_index, k_index, weights = (torch.randn(*n, generator=draw) for n in ((s, 2, 16), (s, 16), (s, 2)))
    pieces = torch.arange(s).tensor_split(4)

    def run(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        masks: dict[str, Any] = {"k_start": torch.zeros(len(rows), dtype=torch.int32), "k_end": rows.int() + 1}
        indices, scores = lightning_indexer(q_index[rows], k_index, weights[rows], 9, **masks)
        mine = q[rows].requires_grad_()
        out, _, lse = sparse_mla(mine, kv, indices, 0.2, 32, **masks)
        (dq,) = torch.autograd.grad(out, mine, d_out[rows])
        return indices, scores, out.detach(), lse, dq

    rows = torch.cat([pieces[0], pieces[3]])
    for whole, shard in zip(run(torch.arange(s)), run(rows), strict=True):
        assert torch.equal(whole[rows], shard)


def test_fewer_than_no_tokens() -> None:
    with pytest.raises(ValueError, match="ContextShard: s must be at least 0; got -1"):
        ContextShard.zigzag(-1)
