"""Attention without indices, and the indexer's loss over all visible keys, in addition to the cases.

A query's results have the same bits wherever it stands in a call, and the same as with a list of all keys. Other tests
cover empty indices and PyTorch's gradients.
"""

import itertools
from typing import Any

import hopwell
import hopwell.torch as hw
import numpy as np
import pytest
import torch
from support import norm_error
from torch import Tensor

BACKENDS = [name for name in ("cpu", "emu:sm80", "emu:sm90") if name in hopwell.backends("indexer_dense_loss")]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = pytest.mark.usefixtures("numbers_only")


def problem(
    rng: np.random.Generator, s_q: int = 12, s_kv: int = 130, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Queries in three documents, with a d_qk that GPU backends support."""
    normal = {"q": (s_q, 3, 576), "kv": (s_kv, 576), "q_index": (s_q, 2, 16), "k_index": (s_kv, 16)}
    tensors = {name: torch.tensor(rng.standard_normal(shape), dtype=dtype) for name, shape in normal.items()}
    tensors["weights"] = torch.tensor(rng.standard_normal((s_q, 2)), dtype=torch.float32)
    document = np.sort(rng.integers(0, 3, s_q))
    start, past = np.array([0, 41, 47])[document], np.array([41, 47, s_kv])[document]
    end = start + 1 + (rng.random(s_q) * (past - start)).astype(int)
    masks = {"k_start": start, "k_end": end}
    return tensors | {name: torch.tensor(values, dtype=torch.int32) for name, values in masks.items()}


def results_of(p: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """The results that belong to one query."""
    masks: dict[str, Any] = {"k_start": p["k_start"], "k_end": p["k_end"], "backend": backend}
    out, peak, lse = hopwell.sparse_mla_forward(p["q"], p["kv"], None, 0.05, **masks)
    attn = hopwell.attention_distribution(p["q"], p["kv"], None, lse, 0.05, **masks)
    row_loss = torch.empty(len(lse))
    index = p["q_index"], p["k_index"], p["weights"]
    _, d_q, _, d_w = hopwell.indexer_dense_loss(p["q"], p["kv"], lse, *index, 0.05, row_loss=row_loss, **masks)
    return {"out": out, "max": peak, "lse": lse, "attn": attn, "row_loss": row_loss, "d_q_index": d_q, "d_weights": d_w}


QUERIES = ("q", "q_index", "weights", "k_start", "k_end")


@every_backend
def test_the_bits_of_a_query_do_not_depend_on_the_others(rng: np.random.Generator, backend: str) -> None:
    p = problem(rng)
    together = results_of(p, backend)
    cuts = [0, *np.sort(rng.choice(np.arange(1, 12), 2, replace=False)), 12]
    parts = [
        results_of(p | {name: p[name][first:past] for name in QUERIES}, backend)
        for first, past in itertools.pairwise(cuts)
    ]
    for name, whole in together.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), whole), name


@every_backend
def test_the_bits_of_a_query_do_not_depend_on_where_its_keys_lie(rng: np.random.Generator, backend: str) -> None:
    p = problem(rng)
    here = results_of(p, backend)
    keys = {
        name: torch.cat([torch.full((37, p[name].shape[1]), torch.nan, dtype=p[name].dtype), p[name]])
        for name in ("kv", "k_index")
    }
    there = results_of(p | keys | {name: p[name] + 37 for name in ("k_start", "k_end")}, backend)
    there["attn"] = there["attn"][:, 37:]
    for name, expected in here.items():
        assert torch.equal(there[name], expected), name


# Hopper processes as many queries together as fit into 128 rows, with their heads padded to 16, 32 or 64. Other
# backends process one query at a time, some of its heads at a time.
HEADS = {"emu:sm90": (1, 16, 17, 32, 33, 64)}


@pytest.mark.parametrize(
    ("backend", "heads"), [(backend, heads) for backend in BACKENDS for heads in HEADS.get(backend, (1, 17, 64))]
)
@pytest.mark.parametrize("special", [0.0, float("inf"), float("nan")])
def test_the_bits_of_a_query_do_not_depend_on_those_beside_it(
    rng: np.random.Generator, backend: str, heads: int, special: float
) -> None:
    """Neighbours have the same first key, another one, or none; a later one sees a key that is not finite."""
    s_q, s_kv = 29, 90
    token = np.arange(s_q)
    start, end = np.where(token < 22, 3, 40 + token % 3), 60 + token
    end[5], end[-2:] = 0, 41
    p = problem(rng, s_q, s_kv) | {
        "q_index": torch.tensor(rng.standard_normal((s_q, heads, 16)), dtype=torch.bfloat16),
        "weights": torch.tensor(rng.standard_normal((s_q, heads)), dtype=torch.float32),
        "k_start": torch.tensor(start, dtype=torch.int32),
        "k_end": torch.tensor(end, dtype=torch.int32),
    }
    p["k_index"][70, 7] += special  # an infinite score, or −inf in every head, which relu changes to 0
    p["q_index"][24] += special
    _, _, lse = hopwell.sparse_mla_forward(
        p["q"], p["kv"], None, 0.05, k_start=p["k_start"], k_end=p["k_end"], backend=backend
    )

    def run(queries: slice) -> dict[str, Tensor]:
        mine = {name: p[name][queries] for name in QUERIES}
        row_loss = torch.empty(len(mine["q"]))
        _, d_q, _, d_w = hopwell.indexer_dense_loss(
            mine["q"], p["kv"], lse[queries], mine["q_index"], p["k_index"], mine["weights"], 0.05, row_loss=row_loss,
            k_start=mine["k_start"], k_end=mine["k_end"], backend=backend,
        )  # fmt: skip
        return {"row_loss": row_loss, "d_q_index": d_q, "d_weights": d_w}

    together = run(slice(None))
    for first, past in ((0, 1), (3, 9), (11, 12), (12, 13), (20, 29)):
        for name, part in run(slice(first, past)).items():
            assert torch.equal(part.view(torch.uint8), together[name][first:past].view(torch.uint8)), (name, first)


@pytest.mark.parametrize("deterministic", [False, True])
@every_backend
def test_a_query_that_is_not_a_number_adds_nothing_to_keys(
    rng: np.random.Generator, backend: str, deterministic: bool
) -> None:
    """A backend may process its neighbours together with it; they add the same as without it."""
    p = problem(rng, s_q=19) | {"q_index": torch.tensor(rng.standard_normal((19, 32, 16)), dtype=torch.bfloat16)}
    p["weights"] = torch.tensor(rng.standard_normal((19, 32)), dtype=torch.float32)
    p["q_index"][6, 3] = torch.nan
    others = [query for query in range(19) if query != 6]

    def d_k(queries: list[int]) -> Tensor:
        mine = {name: p[name][queries] for name in QUERIES}
        masks: dict[str, Any] = {"k_start": mine["k_start"], "k_end": mine["k_end"], "backend": backend}
        _, _, lse = hopwell.sparse_mla_forward(mine["q"], p["kv"], None, 0.05, **masks)
        return hopwell.indexer_dense_loss(
            mine["q"], p["kv"], lse, mine["q_index"], p["k_index"], mine["weights"], 0.05,
            deterministic=deterministic, **masks,
        )[2]  # fmt: skip

    torch.testing.assert_close(d_k(list(range(19))), d_k(others), rtol=1e-5, atol=1e-6)


@every_backend
def test_a_list_of_every_key_gives_as_much(rng: np.random.Generator, backend: str) -> None:
    p = problem(rng, s_q=5)
    masks: dict[str, Any] = {"k_start": p["k_start"], "k_end": p["k_end"], "backend": backend}
    all_keys = torch.arange(130, dtype=torch.int32).expand(5, 130).contiguous()
    out, _, lse = hopwell.sparse_mla_forward(p["q"], p["kv"], all_keys, 0.05, **masks)
    here = results_of(p, backend)
    torch.testing.assert_close(here["out"].float(), out.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(here["lse"], lse, rtol=1e-5, atol=1e-5)
    target = hopwell.attention_distribution(p["q"], p["kv"], all_keys, lse, 0.05, normalize="l1", **masks)
    index = p["q_index"], p["k_index"], p["weights"]
    loss, d_q, d_k, d_w = hopwell.lightning_indexer_backward(target, *index, all_keys, **masks)
    dense, *gradients = hopwell.indexer_dense_loss(p["q"], p["kv"], here["lse"], *index, 0.05, **masks)
    torch.testing.assert_close(dense, loss, rtol=1e-4, atol=1e-5)
    for got, wanted in zip(gradients, (d_q, d_k, d_w), strict=True):
        assert norm_error(got, wanted) <= (4e-3 if got.dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("backend", ["cpu", "emu:sm80", "emu:sm90", "emu:sm100"])
def test_indices_without_entries_are_not_absent(rng: np.random.Generator, backend: str) -> None:
    """A tensor without elements has no memory."""
    if backend not in hopwell.backends("sparse_mla_forward"):
        pytest.skip("no such backend")
    p = problem(rng, s_q=3)
    none = torch.empty(3, 0, dtype=torch.int32)
    out, _, lse = hopwell.sparse_mla_forward(p["q"], p["kv"], none, 0.05, backend=backend)
    assert not out.any() and torch.isposinf(lse).all()
    assert hopwell.attention_distribution(p["q"], p["kv"], none, lse, 0.05, backend=backend).shape == (3, 0)
    dq, dkv, _ = hopwell.sparse_mla_backward(out, p["q"], p["kv"], none, out, lse, 0.05, backend=backend)
    assert not dq.any() and not dkv.any()
    if backend in hopwell.backends("lightning_indexer_backward"):
        index = p["q_index"], p["k_index"], p["weights"]
        target = torch.empty(3, 0)
        for result in hopwell.lightning_indexer_backward(target, *index, none, deterministic=True, backend=backend):
            assert not result.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_dense_attention_and_of_the_loss(rng: np.random.Generator, dtype: torch.dtype) -> None:
    p = problem(rng, dtype=dtype)
    masks: dict[str, Any] = {"k_start": p["k_start"], "k_end": p["k_end"]}
    q, kv, *index = (p[name].requires_grad_() for name in ("q", "kv", "q_index", "k_index", "weights"))
    out, _, lse = hw.sparse_mla(q, kv, None, 0.05, **masks)
    row_weights = torch.rand(12) * (torch.arange(12) % 3)
    loss = hw.indexer_dense_loss(q, kv, lse, *index, 0.05, **masks, row_weights=row_weights)
    gradients = torch.autograd.grad(out.float().square().sum() + 3.0 * loss, [q, kv, *index])

    exact = [x.detach().double().requires_grad_() for x in (q, kv, *index)]
    keys = torch.arange(130)
    seen = (keys >= p["k_start"][:, None]) & (keys < p["k_end"][:, None])
    attention = (
        (torch.einsum("shd,td->sht", exact[0], exact[1]) * 0.05).masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    )
    expected_out = torch.einsum("sht,tv->shv", attention, exact[1][:, :512])
    scores = (torch.einsum("sjd,td->sjt", exact[2], exact[3]).relu() * exact[4][:, :, None]).sum(1)
    log_p = scores.masked_fill(~seen, -torch.inf).log_softmax(-1)
    target = attention.detach().mean(1)
    rows = torch.where(seen, torch.xlogy(target, target) - target * log_p, 0.0).sum(1)
    expected = (row_weights * rows).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-6)
    wanted = torch.autograd.grad(expected_out.square().sum() + 3.0 * expected, exact)
    for gradient, other, leaf in zip(gradients, wanted, (q, kv, *index), strict=True):
        assert gradient.dtype == leaf.dtype
        assert norm_error(gradient, other) <= (1e-3 if dtype == torch.float32 else 1e-2)


def test_compiled_in_one_graph(rng: np.random.Generator) -> None:
    p = problem(rng, dtype=torch.float32)
    masks: dict[str, Any] = {"k_start": p["k_start"], "k_end": p["k_end"]}
    leaves = [p[name].requires_grad_() for name in ("q_index", "k_index", "weights")]

    def loss(*leaves: Tensor) -> Tensor:
        _, _, lse = hw.sparse_mla(p["q"], p["kv"], None, 0.05, **masks)
        attn = hw.normalize_l1(hw.attention_distribution(p["q"], p["kv"], None, lse, 0.05, **masks))
        return hw.indexer_dense_loss(p["q"], p["kv"], lse, *leaves, 0.05, **masks) + 0.0 * attn.sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves)
    for gradient, wanted in zip(torch.autograd.grad(compiled, leaves), expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
