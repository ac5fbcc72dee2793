"""Modules on packed documents: the bits of the documents one by one."""

import itertools
from typing import Any

import pytest
import torch
from hopwell.torch import key_ranges, nn
from hopwell.torch.parallel import ContextShard, ParallelDSA
from torch import Tensor
from torch.nn import functional

D_MODEL = 48
LENGTHS = [5, 0, 1, 24, 9]
PADDING = 3  # tokens behind the last document
CUTS = [0, *itertools.accumulate(LENGTHS)]
S = CUTS[-1] + PADDING

pytestmark = pytest.mark.usefixtures("torch_seed")


def make_dsa(kind: type[nn.DSA] = nn.DSA) -> nn.DSA:
    mla = nn.SparseMLA(D_MODEL, 4, d_v=24, d_rope=8, d_nope=12, d_head=10, q_lora_rank=20)
    return kind(mla, nn.LightningIndexer(D_MODEL, topk=6, h_index=3, d_index=16, d_rope=8, q_lora_rank=20))


@pytest.fixture
def products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's products have other bits for another number of rows. Here each row is a product of its own."""
    linear, einsum = functional.linear, torch.einsum
    monkeypatch.setattr(functional, "linear", lambda x, w, b=None: torch.stack([linear(r, w, b) for r in x[0]])[None])
    monkeypatch.setattr(torch, "einsum", lambda f, x, w: torch.cat([einsum(f, r, w) for r in x.split(1, 1)], 1))


@pytest.fixture
def cu_seqlens() -> Tensor:
    return torch.tensor(CUTS, dtype=torch.int32)


def documents(x: Tensor) -> list[Tensor]:
    return [x[:, first:past] for first, past in itertools.pairwise(CUTS)]


@pytest.mark.usefixtures("products_by_row")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["sparse", "warm-up"])
def test_documents_have_the_bits_that_they_have_alone(cu_seqlens: Tensor, mode: nn.Mode, dtype: torch.dtype) -> None:
    dsa, x = make_dsa().to(dtype), torch.randn(1, S, D_MODEL, dtype=dtype)
    y, loss = dsa(x, mode, cu_seqlens=cu_seqlens)
    selected, total = dsa.selected, torch.zeros(())
    for first, document in zip(CUTS, documents(x), strict=False):
        if document.shape[1] == 0:
            continue
        here = slice(first, first + document.shape[1])
        alone, of_document = dsa(document, mode)
        assert torch.equal(y[:, here], alone)
        total += of_document * document.shape[1]
        if selected is not None:
            assert torch.equal(selected[:, here], torch.where(dsa.selected < 0, -1, dsa.selected + first))
    torch.testing.assert_close(loss, total / S, rtol=1e-5, atol=1e-6)
    assert (y[:, CUTS[-1] :] == 0).all()  # padding sees no key


@pytest.mark.usefixtures("products_by_row")
def test_the_parts_alone(cu_seqlens: Tensor) -> None:
    """The indexer, and the attention over keys that the caller names. It skips keys of other documents."""
    dsa, x = make_dsa(), torch.randn(1, S, D_MODEL)
    indices = dsa.indexer(x, dsa.query_latent(x), cu_seqlens=cu_seqlens)
    y = dsa(x, cu_seqlens=cu_seqlens)[0]
    assert torch.equal(indices, dsa.selected)
    attend = nn.SparseMLA.forward
    assert torch.equal(attend(dsa, x, indices, cu_seqlens=cu_seqlens), y)
    parallel = ParallelDSA(dsa, dsa.indexer)
    assert torch.equal(parallel(x, ContextShard.zigzag(S), cu_seqlens=cu_seqlens)[0], y)
    every = torch.arange(S, dtype=torch.int32).expand(1, S, S)
    torch.testing.assert_close(
        attend(dsa, x, every, cu_seqlens=cu_seqlens), dsa(x, "warm-up", cu_seqlens=cu_seqlens)[0]
    )


@pytest.mark.parametrize("mode", ["sparse", "warm-up", "dense"])
def test_gradients_and_other_ways_to_say_it(cu_seqlens: Tensor, mode: nn.Mode) -> None:
    """Also key ranges, whose positions count through the pack: a rotation is relative. And a shard of one rank."""
    dsa, x, d_y = make_dsa(), torch.randn(1, S, D_MODEL), torch.randn(1, S, D_MODEL)
    d_y[:, CUTS[-1] :] = 0
    k_start, k_end = key_ranges(cu_seqlens, s_q=S)
    parallel = ParallelDSA(dsa, dsa.indexer)
    ways: list[Any] = [
        lambda x: torch.cat([*(dsa(part, mode)[0] for part in documents(x)), x[:, CUTS[-1] :] * 0], 1),
        lambda x: dsa(x, mode, cu_seqlens=cu_seqlens.long())[0],
        lambda x: dsa(x, mode, k_start=k_start, k_end=k_end)[0],
        lambda x: parallel(x, ContextShard.zigzag(S), mode, cu_seqlens=cu_seqlens)[0],
    ]
    results = []
    for way in ways:
        dsa.zero_grad()
        leaf = x.clone().requires_grad_()
        y = way(leaf)
        y.backward(d_y)
        results.append([y.detach(), leaf.grad, dsa.kv_b_proj.weight.grad, dsa.q_a_proj.weight.grad])
    for other in results[1:]:
        for expected, got in zip(results[0], other, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two sequences": (
        {"x": torch.ones(2, 3, D_MODEL), "cu_seqlens": torch.tensor([0, 3])},
        r"x must be \[1, s, d_model\] with documents or key ranges: one pack; got \[2, 3, 48\]",
    ),
    "both": (
        {"cu_seqlens": torch.tensor([0, 3]), "k_start": torch.zeros(3, dtype=torch.int32)},
        "k_start and k_end must be None with cu_seqlens; got both",
    ),
    "one bound": ({"k_start": torch.zeros(3, dtype=torch.int32)}, r"k_end must be int32 \[s\].*; got None"),
    "length": (
        {"k_start": torch.zeros(3, dtype=torch.int32), "k_end": torch.zeros(4, dtype=torch.int32)},
        r"k_end must be int32 \[s\].*; got torch.int32 \[4\]",
    ),
    "dtype": (
        {"k_start": torch.zeros(3), "k_end": torch.zeros(3, dtype=torch.int32)},
        r"k_start must be int32 \[s\].*; got torch.float32 \[3\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_packs_are_named(name: str) -> None:
    given, words = WRONG[name]
    given = {"x": torch.ones(1, 3, D_MODEL)} | given
    dsa = make_dsa()
    x = given.pop("x")
    calls = {
        "DSA": lambda: dsa(x, **given),
        "SparseMLA": lambda: nn.SparseMLA.forward(dsa, x, torch.zeros(*x.shape[:2], 1, dtype=torch.int32), **given),
        "LightningIndexer": lambda: dsa.indexer(x, dsa.query_latent(x), **given),
        "ParallelDSA": lambda: ParallelDSA(dsa, dsa.indexer)(x, ContextShard.zigzag(3), **given),
    }
    for module, call in calls.items():
        with pytest.raises(ValueError, match=f"^{module}: {words}$"):
            call()
    with pytest.raises(TypeError, match=r"DSA: cu_seqlens must be a torch.Tensor; got list"):
        dsa(torch.ones(1, 3, D_MODEL), cu_seqlens=[0, 3])


@pytest.mark.parametrize("kind", [nn.DSA, ParallelDSA])
def test_a_dtype_unlike_the_weights_is_named(kind: type[nn.DSA]) -> None:
    dsa, x = make_dsa(kind), torch.randn(1, 3, D_MODEL)
    latent, more = dsa.query_latent(x), (ContextShard.zigzag(3),) if kind is ParallelDSA else ()
    calls = {
        kind.__name__: lambda: dsa(x, *more),
        "SparseMLA": lambda: nn.SparseMLA.forward(dsa, x, torch.zeros(1, 3, 1, dtype=torch.int32)),
        "LightningIndexer": lambda: dsa.indexer(x, latent),
        "DSA.extend": lambda: dsa.extend(x, nn.KeyCache(3)),
    }
    dsa.bfloat16()
    for module, call in calls.items():
        with pytest.raises(
            ValueError, match=f"^{module}: x must be torch.bfloat16 like its weights; got torch.float32$"
        ):
            call()
    with torch.autocast("cpu", torch.bfloat16):
        assert dsa.extend(x, nn.KeyCache(3)).dtype == torch.bfloat16


def test_every_module_says_its_sizes() -> None:
    dsa = make_dsa(ParallelDSA)
    text = repr(dsa)
    assert text.startswith("ParallelDSA(\n  d_model=48, h_q=4, d_v=24, d_rope=8, d_nope=12, d_head=10, q_lora_rank=20")
    assert "(kv_b_proj): UpProjection(heads=4, d_v=24, d_nope=12, d_head=10)" in text
    assert (
        "(indexer): LightningIndexer(\n    d_model=48, topk=6, h_index=3, d_index=16, d_rope=8, q_lora_rank=20" in text
    )
    cache = nn.KeyCache(40)
    dsa.extend(torch.randn(1, 9, D_MODEL), cache)
    assert repr(cache) == "KeyCache(max_tokens=40, length=9)"
