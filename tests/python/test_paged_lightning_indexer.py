"""paged_lightning_indexer has the bits of lightning_indexer over the same keys in one tensor, in any batch."""

from typing import Any

import hopwell
import numpy as np
import pytest
import torch
import zero_difference
from bad_calls import make, run
from hopwell.torch import mla_cache_append

D = 128


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


def random(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


class Paged:
    """Sequences of n keys behind block tables, and the same keys in tensors."""

    def __init__(self, rng: np.random.Generator, b: int, n: int, block: int, form: str, device: str) -> None:
        pages = -(-n // block)
        blocks = b * pages + 1
        self.tables = torch.from_numpy(rng.permutation(blocks)[: b * pages].reshape(b, pages).astype(np.int32))
        positions = torch.arange(n)
        slots = (self.tables.long()[:, positions // block] * block + positions % block).flatten()
        kind = torch.float32 if form == "fp32" else torch.bfloat16
        keys = random(rng, b, n, D).to(kind)
        keys[:, n // 2 :: 3] = keys[:, :1]  # equal scores
        self.scales: list[torch.Tensor | None] = [None] * b
        self.keys = list(keys.to(device))
        if form == "fp8":
            self.cache = torch.full((blocks, block, D + 4), 255, dtype=torch.uint8)
            mla_cache_append(keys.flatten(0, 1), self.cache, slots, scale_format="fp32", backend="cpu")
            flat = self.cache.view(blocks, -1)
            of, row = slots // block, slots % block
            codes = flat[:, : block * D].reshape(blocks, block, D)[of, row].view(b, n, D)
            scales = flat[:, block * D :].contiguous().view(torch.float32)[of, row].view(b, n)
            self.keys, self.scales = list(codes.to(device).view(torch.float8_e4m3fn)), list(scales.to(device))
        else:
            self.cache = torch.full((blocks, block, D), float("nan"), dtype=kind)
            mla_cache_append(keys.flatten(0, 1), self.cache, slots, backend="cpu")
        self.cache, self.tables = self.cache.to(device), self.tables.to(device)


FORMS = ("bf16", "fp8", "fp32")
BACKENDS = hopwell.backends("paged_lightning_indexer")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("block", "q_len", "h_index", "relu"), [(64, 1, 64, True), (16, 3, 32, True), (7, 2, 5, False)]
)
def test_bits_of_the_indexer(
    backend: str, form: str, block: int, q_len: int, h_index: int, relu: bool, rng: np.random.Generator
) -> None:
    b, n, topk = 3, 300, 70
    device = "cuda" if backend.startswith("sm") else "cpu"
    paged = Paged(rng, b, n, block, form, device)
    q = random(rng, b, q_len, h_index, D).to(device)
    kinds = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}
    q, weights = q.to(kinds[form]), random(rng, b, q_len, h_index).to(device)
    lens = torch.tensor([n, 150, 40], dtype=torch.int32, device=device)
    options: dict[str, Any] = {"relu": relu, "backend": backend}
    of_query: dict[str, Any] = {}
    if form == "fp8":
        options["q_scale"] = random(rng, b, q_len, h_index).to(device)
    try:
        indices, scores = hopwell.paged_lightning_indexer(q, paged.cache, weights, topk, paged.tables, lens, **options)
    except (hopwell.Error, RuntimeError) as error:
        assert "needs" in str(error)  # noqa: PT017
        pytest.skip(str(error))
    for s in range(b):
        seen = torch.arange(q_len, device=device).int() + (lens[s] - q_len + 1)
        if form == "fp8":
            of_query = {"q_scale": options["q_scale"][s], "k_scale": paged.scales[s]}
        expected = hopwell.lightning_indexer(
            *(q[s], paged.keys[s], weights[s], topk),
            **{"k_start": torch.zeros_like(seen), "k_end": seen, "relu": relu, "backend": backend} | of_query,
        )
        assert same_bits(indices[s], expected[0])
        assert same_bits(scores[s], expected[1])


@pytest.mark.parametrize("form", FORMS)
def test_without_scores_the_indices_are_the_same(form: str, rng: np.random.Generator) -> None:
    paged = Paged(rng, 4, 90, 16, form, "cpu")
    kinds = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}
    q, weights = random(rng, 4, 2, 8, D).to(kinds[form]), random(rng, 4, 2, 8)
    lens = torch.tensor([90, 41, 40, 3], dtype=torch.int32)
    lengths = torch.empty(4, 2, dtype=torch.int32)
    arguments = q, paged.cache, weights, 40, paged.tables, lens
    indices, _ = hopwell.paged_lightning_indexer(*arguments)
    alone, none = hopwell.paged_lightning_indexer(*arguments, scores=False, lengths=lengths)
    assert none is None
    assert same_bits(alone, indices)
    assert lengths.tolist() == [[40, 40], [40, 40], [39, 40], [2, 3]]
    slots, _ = hopwell.paged_lightning_indexer(*arguments, slots=True)
    expected = paged.tables.gather(1, indices.clamp(min=0).flatten(1).long() // 16).view(indices.shape) * 16
    assert torch.equal(slots, torch.where(indices < 0, -1, expected + indices % 16))
    in_torch = hopwell.torch.paged_lightning_indexer(*arguments, scores=False)
    assert in_torch[1] is None
    assert same_bits(in_torch[0], indices)


# ---- in any batch and on any pages, as in test_zero_difference_decode.py


class PagedIndexer:
    """A problem of the paged indexer, and calls for some of its sequences and queries on other pages."""

    def __init__(self, rng: np.random.Generator, backend: str) -> None:
        self.rng, self.backend, self.device = rng, backend, zero_difference.device_of(backend)
        self.b, self.q_len, self.heads = [(3, 3, 8), (9, 2, 32), (2, 1, 64)][int(rng.integers(3))]
        self.tokens, self.topk = int(rng.choice((90, 700))), int(rng.choice((40, 90, 300)))
        on_hopper = backend.endswith("sm90")  # whose file has kernels for fp8 alone
        self.is_fp8, self.relu = on_hopper or bool(rng.integers(2)), bool(rng.integers(2))
        self.blocks = (8, 16, 64) if on_hopper else (1, 7, 16, 64)
        self.keys = zero_difference.random(rng, self.b, self.tokens, 128)
        self.q = zero_difference.random(rng, self.b, self.q_len, self.heads, 128)
        self.weights = zero_difference.random(rng, self.b, self.q_len, self.heads).float()
        if self.is_fp8:
            self.q = self.q.to(torch.float8_e4m3fn)
        self.lens = torch.from_numpy(rng.integers(0, self.tokens + 1, (self.b, self.q_len)).astype(np.int32))
        self.whole = self.run(slice(None), slice(0, self.q_len))

    def run(self, sequences: slice, queries: slice) -> tuple[torch.Tensor, ...]:
        """Indices, scores and lengths of these queries."""
        row, spare = 132 if self.is_fp8 else 128, int(self.rng.integers(9))
        cache, tables = (
            x.to(self.device) for x in zero_difference.on_pages(self.rng, self.keys[sequences], row, self.blocks, spare)
        )
        q, weights, lens = (x[sequences, queries].to(self.device) for x in (self.q, self.weights, self.lens))
        lengths = torch.empty(lens.shape, dtype=torch.int32, device=self.device)
        options = {"relu": self.relu, "lengths": lengths, "backend": self.backend}
        return *hopwell.paged_lightning_indexer(q, cache, weights, self.topk, tables, lens, **options), lengths

    def check_part(self, rng: np.random.Generator) -> None:
        """Compares one random part."""
        first, query = int(rng.integers(self.b)), int(rng.integers(self.q_len))
        sequences = slice(first, int(rng.integers(first, self.b)) + 1)
        queries = slice(query, int(rng.integers(query, self.q_len)) + 1)
        names = ("indices", "scores", "lengths")
        for name, whole, mine in zip(names, self.whole, self.run(sequences, queries), strict=True):
            assert same_bits(whole[sequences, queries], mine), f"{name} of sequences {sequences}, queries {queries}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_difference(backend: str, rng: np.random.Generator) -> None:
    zero_difference.check_parts(PagedIndexer, backend, rng)


def test_outputs_lie_in_memory_of_their_own() -> None:
    call = make("paged_lightning_indexer")
    memory = np.zeros(2 * 4 * 2 * 17, np.int32)
    indices = memory[: 4 * 2 * 17].reshape(4, 2, 17)
    lens = memory[100:104]
    for wrong in (
        {"indices": indices, "context_lens": lens},
        {"indices": indices, "lengths": memory[4:12].reshape(4, 2)},
        {"indices": indices, "scores": memory[17 : 17 + 4 * 2 * 17].view(np.float32).reshape(4, 2, 17)},
    ):
        with pytest.raises(ValueError, match=r"paged_lightning_indexer: \w+ must be an output in memory of its own"):
            run(call, **wrong)
    assert not memory.any()
