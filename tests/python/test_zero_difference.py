"""What belongs to one query has the same bits whatever else is in the call: other queries, padding, other heads, and
options that ask for other outputs.

On every backend that runs here (zero_difference.py). The operators of decode are in test_zero_difference_decode.py.
"""

from typing import Any

import hopwell
import numpy as np
import pytest
import torch
from zero_difference import PADDING, SCALE, check_parts, device_of, padded, random, same_bits, some_heads

DKV_DTYPES = ("float32", "bfloat16")
pytestmark = pytest.mark.usefixtures("numbers_only")


class SparseMla:
    """A problem of sparse MLA, and calls for some of its queries and heads."""

    def __init__(self, rng: np.random.Generator, backend: str, **sizes: Any) -> None:
        self.rng, self.backend, self.device = rng, backend, device_of(backend)
        self.h_q = int(sizes.get("h_q", rng.choice((20, 64, 80, 128))))
        # Few queries, or more than the CPU shares out by tiles of 512 keys, of which there are up to three.
        small = rng.integers(2) or backend != "cpu"
        self.s_q, self.topk, self.s_kv = sizes.get("shape", (5, 80, 150) if small else (20, 1100, 1200))
        self.q, self.kv = random(rng, self.s_q, self.h_q, 576), random(rng, self.s_kv, 576)
        self.d_out = random(rng, self.s_q, self.h_q, 512)
        chosen = np.stack([rng.permutation(self.s_kv)[: self.topk] for _ in range(self.s_q)]).astype(np.int32)
        self.ascending = bool(rng.integers(2))
        self.indices = torch.from_numpy(np.sort(chosen) if self.ascending else chosen)
        self.sink = random(rng, self.h_q).float()
        self.masks = self.some_masks()
        everything = slice(None)
        self.whole = self.run(everything, everything, self.indices, {"attn": True})

    def some_masks(self) -> dict[str, torch.Tensor]:
        """Lengths, key ranges or positions, int32 [s_q]; or none."""

        def between(low: int, high: int) -> torch.Tensor:
            return torch.from_numpy(self.rng.integers(low, high, self.s_q).astype(np.int32))

        kinds: list[dict[str, torch.Tensor]] = [
            {},
            {"topk_length": between(self.topk // 2, self.topk + 1)},
            {"k_start": between(-3, self.s_kv // 3), "k_end": between(self.s_kv // 2, self.s_kv + 5)},
            {"q_positions": between(self.s_kv // 2, self.s_kv)},
        ]
        return kinds[int(self.rng.integers(len(kinds)))]

    def some_options(self) -> dict[str, Any]:
        """Options of a backward call that ask for other outputs, or for the same in another way."""
        coins = [bool(coin) for coin in self.rng.integers(2, size=5)]
        accumulate = {"accumulate": coins[3], "dkv_dtype": "float32" if coins[3] else str(self.rng.choice(DKV_DTYPES))}
        return {
            "need_dkv": coins[0],
            "attn": coins[1],
            "share_keys": coins[2],
            "indices_ascending": self.ascending and coins[4],
            **(accumulate if coins[0] else {}),
        }

    def run(self, queries: slice, heads: slice, indices: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
        """What these queries and heads get, and the distributions over these heads."""
        q, d_out, sink = (
            x.to(self.device) for x in (self.q[queries, heads], self.d_out[queries, heads], self.sink[heads])
        )
        kv, indices = self.kv.to(self.device), indices.to(self.device)
        masks = {name: mask[queries].to(self.device) for name, mask in self.masks.items()}
        given: dict[str, Any] = {**masks, "backend": self.backend}
        results: dict[str, Any] = {}
        out, results["max_logits"], lse = hopwell.sparse_mla_forward(q, kv, indices, SCALE, attn_sink=sink, **given)
        results |= {"out": out, "lse": lse}
        options = dict(options)
        if options.pop("attn", False):
            options["attn"] = results["attn"] = torch.empty(indices.shape, device=self.device)
        if options.get("accumulate"):
            options["dkv"] = random(self.rng, self.s_kv, 576).float().to(self.device)
        results["dq"], dkv, _ = hopwell.sparse_mla_backward(
            d_out, q, kv, indices, out, lse, SCALE, attn_sink=sink, deterministic=True, **given, **options
        )
        assert (dkv is None) == (options.get("need_dkv") is False)
        for norm in ("none", "l1"):
            results[f"attn, {norm},"] = hopwell.attention_distribution(
                q, kv, indices, lse, SCALE, normalize=norm, **given
            )
        return results

    def check_part(self, rng: np.random.Generator) -> None:
        """Compares one random part."""
        first = int(rng.integers(self.s_q))
        queries = slice(first, int(rng.integers(first, self.s_q)) + 1)
        heads = some_heads(rng, self.backend, self.h_q) if rng.random() < 0.7 else slice(0, self.h_q)
        options = self.some_options()
        part = self.run(queries, heads, padded(rng, self.indices[queries], -1), options)
        for name, mine in part.items():
            what = f"{name} of queries {queries}, heads {heads}, {options}"
            if not name.startswith("attn"):
                assert same_bits(self.whole[name][queries, heads], mine), what
            elif heads == slice(0, self.h_q):
                assert same_bits(self.whole[name][queries], mine[:, : self.topk]), what


class Window:
    """A problem with window keys, and calls for some of its queries and heads, in which window_kv begins elsewhere."""

    def __init__(self, rng: np.random.Generator, backend: str) -> None:
        self.rng, self.backend, self.device = rng, backend, device_of(backend)
        self.h_q = int(rng.choice((20, 64, 80, 128)))
        small = rng.integers(2) or backend != "cpu"
        self.s_q, self.topk, s_kv = (7, 60, 150) if small else (20, 600, 700)
        self.window = int(rng.choice((3, 40, 70, 128)))
        self.dense = bool(rng.integers(2))
        if self.dense:
            s_kv = self.topk
        self.s_w = self.s_q + int(rng.integers(100))
        self.q, self.kv = random(rng, self.s_q, self.h_q, 512), random(rng, s_kv, 512)
        self.window_kv, self.d_out = random(rng, self.s_w, 512), random(rng, self.s_q, self.h_q, 512)
        chosen = rng.integers(-9, s_kv, (self.s_q, self.topk)).astype(np.int32)
        self.indices = None if self.dense else torch.from_numpy(chosen)
        self.sink = random(rng, self.h_q).float()
        self.k_end = torch.from_numpy(rng.integers(0, s_kv + 1, self.s_q).astype(np.int32))
        # Documents of window keys, whose queries are the last rows, as without w_start and w_end.
        end = np.arange(self.s_w - self.s_q, self.s_w) + 1
        start = np.maximum(end - rng.integers(1, 150, self.s_q), 0) if rng.integers(2) else np.zeros_like(end)
        self.start, self.end = start.astype(np.int32), end.astype(np.int32)
        self.whole = self.run(slice(None), slice(None), 0)

    def run(self, queries: slice, heads: slice, begin: int) -> dict[str, Any]:
        """The results of these queries and heads. Row `begin` is the first of window_kv."""
        end = int(self.end[queries][-1])
        rows = slice(begin, int(self.rng.integers(end, self.s_w + 1)))
        masks = {
            "k_start": torch.zeros_like(self.k_end[queries]),
            "k_end": self.k_end[queries],
            "w_start": torch.from_numpy(self.start[queries] - np.int32(begin)),
            "w_end": torch.from_numpy(self.end[queries] - np.int32(begin)),
        }
        if not self.start.any() and self.rng.integers(2):  # the queries are the last rows
            rows = slice(begin, end)
            del masks["w_start"], masks["w_end"]
        given: dict[str, Any] = {name: x.to(self.device) for name, x in masks.items()}
        given |= {"window_kv": self.window_kv[rows].to(self.device), "window": self.window, "backend": self.backend}
        given["attn_sink"] = self.sink[heads].to(self.device)
        q, d_out = (x[queries, heads].to(self.device) for x in (self.q, self.d_out))
        kv = self.kv.to(self.device)
        indices = None if self.indices is None else self.indices[queries].to(self.device)
        out, max_logits, lse = hopwell.sparse_mla_forward(q, kv, indices, SCALE, **given)
        results = {"out": out, "max_logits": max_logits, "lse": lse}
        needed = {f"need_{name}": bool(self.rng.integers(2)) for name in ("dkv", "d_window_kv")}
        attn = torch.empty(len(q), self.topk, device=self.device)
        options = {"attn": attn, "attn_with_sink": True} if self.rng.integers(2) else {}
        results["dq"] = hopwell.sparse_mla_backward(
            d_out, q, kv, indices, out, lse, SCALE, deterministic=True, **given, **needed, **options
        )[0]
        return results

    def check_part(self, rng: np.random.Generator) -> None:
        """Compares one random part."""
        first = int(rng.integers(self.s_q))
        queries = slice(first, int(rng.integers(first, self.s_q)) + 1)
        heads = some_heads(rng, self.backend, self.h_q) if rng.random() < 0.7 else slice(0, self.h_q)
        seen = np.maximum(self.start, self.end - self.window)[queries].min()  # the first row that a query sees
        begin = int(rng.integers(0, max(int(seen), 0) + 1))
        for name, mine in self.run(queries, heads, begin).items():
            what = f"{name} of queries {queries}, heads {heads}, window_kv from row {begin}"
            assert same_bits(self.whole[name][queries, heads], mine), what


class Indexer:
    """A problem of the lightning indexer, and calls for some of its queries."""

    s_q, s_kv, heads, topk = 5, 700, 8, 90

    def __init__(self, rng: np.random.Generator, backend: str) -> None:
        self.backend, self.device = backend, device_of(backend)
        self.q, self.k = random(rng, self.s_q, self.heads, 128), random(rng, self.s_kv, 128)
        self.relu = bool(rng.integers(2))
        self.weights, self.target = (
            random(rng, self.s_q, self.heads).float(),
            random(rng, self.s_q, self.topk).float().abs(),
        )
        self.whole = self.run(slice(None), rng, pad=False)

    def run(self, queries: slice, rng: np.random.Generator, pad: bool = True) -> tuple[torch.Tensor, ...]:
        """Indices, scores, d_q_index, d_weights and row losses of these queries."""
        q, weights, target = (x[queries].to(self.device) for x in (self.q, self.weights, self.target))
        k = self.k.to(self.device)
        indices, scores = hopwell.lightning_indexer(q, k, weights, self.topk, relu=self.relu, backend=self.backend)
        row_loss = torch.empty(len(q), device=self.device)
        wide = pad and rng.random() < 0.5
        fill = (0, PADDING if wide else 0)
        _, d_q, _, d_weights = hopwell.lightning_indexer_backward(
            torch.nn.functional.pad(target, fill), q, k, weights, torch.nn.functional.pad(indices, fill, value=-1),
            relu=self.relu, deterministic=bool(rng.integers(2)), row_loss=row_loss, backend=self.backend,
        )  # fmt: skip
        return indices, scores, d_q, d_weights, row_loss

    def check_part(self, rng: np.random.Generator) -> None:
        """Compares one random part."""
        first = int(rng.integers(self.s_q))
        queries = slice(first, int(rng.integers(first, self.s_q)) + 1)
        names = ("indices", "scores", "d_q_index", "d_weights", "row_loss")
        for name, whole, mine in zip(names, self.whole, self.run(queries, rng), strict=True):
            assert same_bits(whole[queries], mine), f"{name} of queries {queries}"


class DenseLoss:
    """A problem of the indexer's dense loss, with key ranges, and calls for some of its queries."""

    s_q, s_kv, h_q, heads = 9, 150, 20, 8

    def __init__(self, rng: np.random.Generator, backend: str) -> None:
        self.backend, self.device = backend, device_of(backend)
        self.q, self.kv = random(rng, self.s_q, self.h_q, 576), random(rng, self.s_kv, 576)
        self.q_index, self.k_index = random(rng, self.s_q, self.heads, 128), random(rng, self.s_kv, 128)
        self.weights = random(rng, self.s_q, self.heads).float()
        # Some queries see the same first key: those a GPU may take together.
        starts, ends = rng.integers(0, 3, self.s_q) * 20, rng.integers(60, self.s_kv + 1, self.s_q)
        self.masks = {
            "k_start": torch.from_numpy(starts.astype(np.int32)),
            "k_end": torch.from_numpy(ends.astype(np.int32)),
        }
        self.whole = self.run(slice(None), rng)

    def run(self, queries: slice, rng: np.random.Generator) -> tuple[torch.Tensor, ...]:
        """d_q_index, d_weights and row losses of these queries."""
        q, q_index, weights = (x[queries].to(self.device) for x in (self.q, self.q_index, self.weights))
        kv, k_index = self.kv.to(self.device), self.k_index.to(self.device)
        masks = {name: mask[queries].to(self.device) for name, mask in self.masks.items()}
        given: dict[str, Any] = {**masks, "backend": self.backend}
        lse = hopwell.sparse_mla_forward(q, kv, None, SCALE, **given)[2]
        row_loss = torch.empty(len(q), device=self.device)
        _, d_q, _, d_weights = hopwell.indexer_dense_loss(
            q, kv, lse, q_index, k_index, weights, SCALE,
            row_loss=row_loss, deterministic=bool(rng.integers(2)), **given,
        )  # fmt: skip
        return d_q, d_weights, row_loss

    def check_part(self, rng: np.random.Generator) -> None:
        """Compares one random part."""
        first = int(rng.integers(self.s_q))
        queries = slice(first, int(rng.integers(first, self.s_q)) + 1)
        for name, whole, mine in zip(
            ("d_q_index", "d_weights", "row_loss"), self.whole, self.run(queries, rng), strict=True
        ):
            assert same_bits(whole[queries], mine), f"{name} of queries {queries}"


class LinearBackward:
    """A problem of the gradient over NVFP4 weights, and calls for some of its rows.

    The second half of a sum cancels the first. So the rounding errors of the sum remain, which depend on its order.
    """

    def __init__(self, rng: np.random.Generator, backend: str) -> None:
        self.backend, self.device = backend, "cuda" if backend.startswith("sm") else "cpu"
        long = 2500 if backend.startswith("sm") else 650
        n, half, k = (int(rng.choice(sizes)) for sizes in ((20, 70, 300), (150, long), (64, 272)))
        d_out = random(rng, n, half).to(torch.bfloat16 if rng.integers(2) else torch.float16)
        codes, scales, factor = hopwell.nvfp4_quantize(random(rng, half, k))
        weights = torch.cat([codes, codes]), torch.cat([scales, scales]), factor
        self.d_out, *self.weights = (x.to(self.device) for x in (torch.cat([d_out, -d_out], dim=1), *weights))
        self.whole = self.run(slice(None))

    def run(self, rows: slice) -> torch.Tensor:
        d_x: torch.Tensor = hopwell.nvfp4_linear_backward(self.d_out[rows], *self.weights, backend=self.backend)
        return d_x

    def check_part(self, rng: np.random.Generator) -> None:
        """Compares one random part: few rows, or any number of them."""
        first = int(rng.integers(len(self.d_out)))
        most = first + 20 if rng.integers(2) else len(self.d_out)
        rows = slice(first, int(rng.integers(first, most)) + 1)
        assert same_bits(self.whole[rows], self.run(rows)), f"d_x of rows {rows}"


class Pooling:
    """A problem of the gated pooling, and calls for some of its documents in a packing of their own."""

    def __init__(self, rng: np.random.Generator, backend: str) -> None:
        self.rng, self.backend, self.device = rng, backend, device_of(backend)
        self.ratio, self.overlap = ((2, True), (3, True), (4, True), (4, False), (128, False))[int(rng.integers(5))]
        d = int(rng.choice((8, 64, 136)))
        lengths = rng.integers(0, 4 * self.ratio, 6)
        self.ends = np.concatenate([[0], np.cumsum(lengths)])
        s, w = int(self.ends[-1]), 2 * d if self.overlap else d
        self.kv, self.gate, self.bias = random(rng, s, w), random(rng, s, w) * 4, random(rng, self.ratio, w).float()
        self.d_out = random(rng, sum(int(n) // self.ratio for n in lengths), d)
        self.whole = self.run(0, len(lengths))

    def keys(self, documents: int) -> int:
        """Number of compressed keys of the first documents."""
        return int((np.diff(self.ends[: documents + 1]) // self.ratio).sum())

    def run(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """out, d_kv and d_gate of documents first … end − 1, behind some rows of other tokens."""
        begin = int(self.rng.integers(5))
        tokens, keys = slice(int(self.ends[first]), int(self.ends[end])), slice(self.keys(first), self.keys(end))

        def moved(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([random(self.rng, begin, rows.shape[1]), rows]).to(self.device)

        cu_seqlens = torch.from_numpy((self.ends[first : end + 1] - self.ends[first] + begin).astype(np.int32))
        packing = {
            "cu_seqlens": cu_seqlens.to(self.device),
            "cu_compressed": hopwell.torch.compressed_lengths(cu_seqlens, self.ratio).to(self.device),
            "position_bias": self.bias.to(self.device),
            "overlap": self.overlap,
            "backend": self.backend,
        }
        kv, gate, d_out = moved(self.kv[tokens]), moved(self.gate[tokens]), self.d_out[keys].to(self.device)
        out = hopwell.kv_compress(kv, gate, self.ratio, **packing)
        d_kv, d_gate, _ = hopwell.kv_compress_backward(d_out, kv, gate, self.ratio, **packing)
        return out[: keys.stop - keys.start], d_kv[begin:], d_gate[begin:]

    def check_part(self, rng: np.random.Generator) -> None:
        """Compares some neighbouring documents."""
        first = int(rng.integers(len(self.ends) - 1))
        end = int(rng.integers(first, len(self.ends) - 1)) + 1
        tokens, keys = slice(int(self.ends[first]), int(self.ends[end])), slice(self.keys(first), self.keys(end))
        out, d_kv, d_gate = self.run(first, end)
        what = f"of documents {first} to {end}, ratio {self.ratio}, overlap {self.overlap}"
        assert same_bits(self.whole[0][keys], out), f"out {what}"
        assert same_bits(self.whole[1][tokens], d_kv), f"d_kv {what}"
        assert same_bits(self.whole[2][tokens], d_gate), f"d_gate {what}"


BACKENDS = [name for name in hopwell.backends("sparse_mla_backward") if name in hopwell.backends("sparse_mla_forward")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_mla(backend: str, rng: np.random.Generator) -> None:
    check_parts(SparseMla, backend, rng)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.endswith("sm100")])
def test_window_keys(backend: str, rng: np.random.Generator) -> None:
    check_parts(Window, backend, rng)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.endswith("sm100")])
def test_heads_of_ranks(backend: str, rng: np.random.Generator) -> None:
    """Ranks with 1 to 128 heads, all queries or a few: 11 tiles of keys, masked entries, and references that move."""
    device = "cuda" if backend.startswith("sm") else "cpu"
    s_q, s_kv, heads, topk = 9 if device == "cpu" else 300, 900, 128, 680
    indices = torch.from_numpy(rng.integers(-s_kv // 10, s_kv, (s_q, topk)).astype(np.int32))
    indices[:, 256:384] = indices[:, 256:384].abs()  # whole tiles that count
    lengths = torch.from_numpy(rng.integers(topk // 2, topk + 1, s_q).astype(np.int32))
    q, kv, sink = random(rng, s_q, heads, 576), random(rng, s_kv, 576), random(rng, heads).float()

    def run(queries: slice, some: slice) -> tuple[torch.Tensor, ...]:
        given = {"topk_length": lengths[queries].to(device), "attn_sink": sink[some].to(device), "backend": backend}
        return hopwell.sparse_mla_forward(
            q[queries, some].contiguous().to(device), kv.to(device), indices[queries].to(device), 6 * SCALE, **given
        )

    whole = run(slice(None), slice(None))
    for count in (1, 8, 16, 20, 32, 40, 64, 80, 96):
        first = int(rng.integers(heads - count + 1))
        some = slice(first, first + count)
        for queries in (slice(None), slice(2, 4)):
            for name, expected, mine in zip(("out", "max_logits", "lse"), whole, run(queries, some), strict=True):
                assert same_bits(expected[queries, some], mine), f"{name} of queries {queries}, heads {some}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_deterministic_gradients_of_keys(backend: str, rng: np.random.Generator) -> None:
    """Which attn is asked for does not matter, though on GPUs a distribution sets the units of the sums."""
    device, s_q, s_kv, h_q, topk = device_of(backend), 5, 60, 20, 40
    q, kv, d_out = (random(rng, *shape).to(device) for shape in ((s_q, h_q, 512), (s_kv, 512), (s_q, h_q, 512)))
    indices = torch.from_numpy(rng.integers(-5, s_kv, (s_q, topk)).astype(np.int32)).to(device)
    given: dict[str, Any] = {"attn_sink": torch.tensor([0.0, 9.0, 40.0, np.inf, 1e38] * 4).to(device)}
    given |= {"backend": backend}
    if not backend.endswith("sm100"):
        given |= {"window_kv": random(rng, 9, 512).to(device), "window": 4}
    out, _, lse = hopwell.sparse_mla_forward(q, kv, indices, SCALE, **given)

    def gradients(**options: Any) -> tuple[torch.Tensor, ...]:
        if options:
            options["attn"] = torch.empty(indices.shape, device=device)
        _, dkv, _, *of_window = hopwell.sparse_mla_backward(
            d_out, q, kv, indices, out, lse, SCALE, deterministic=True, **given, **options
        )
        return dkv, *of_window

    alone = gradients()
    for attn_with_sink in (False, True):
        for expected, mine in zip(alone, gradients(attn_with_sink=attn_with_sink), strict=True):
            assert same_bits(expected, mine), f"with attn, attn_with_sink {attn_with_sink}"


@pytest.mark.parametrize("h_q", [20, 128])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.startswith("emu:")])
def test_deterministic_dq_on_cards(
    backend: str, h_q: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator plans for a card whose L2 does not hold the sums. Without `deterministic` the call's size decides
    there whether rows are ordered and tiles sliced. With it dq has the bits that the emulator's own profile gives.
    """
    s_q, s_kv, topk = 5, 2000, 260
    q, kv, d_out = random(rng, s_q, h_q, 576), random(rng, s_kv, 576), random(rng, s_q, h_q, 512)
    indices = torch.from_numpy(rng.integers(0, s_kv, (s_q, topk)).astype(np.int32))
    out, lse = d_out / 16, torch.full((s_q, h_q), 6.0)  # as large as a forward's

    def dq(queries: slice, need_dkv: bool) -> torch.Tensor:
        of_queries = (x[queries] for x in (indices, out, lse))
        options: dict[str, Any] = {"deterministic": True, "need_dkv": need_dkv, "backend": backend}
        return hopwell.sparse_mla_backward(d_out[queries], q[queries], kv, *of_queries, SCALE, **options)[0]

    whole = dq(slice(0, s_q), False)
    monkeypatch.setenv("HOPWELL_EMULATOR_DEVICE", "h100-mig")
    monkeypatch.setenv("HOPWELL_EMULATOR_SMS", "4")
    for queries, need_dkv in ((slice(0, s_q), False), (slice(0, 4), True), (slice(0, 1), False), (slice(2, 3), True)):
        assert same_bits(whole[queries], dq(queries, need_dkv)), f"queries {queries}, dkv {need_dkv}"


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.startswith("emu:")])
def test_devices_of_all_sizes(backend: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What belongs to a query does not depend on the number of multiprocessors, nor on the chip that is planned for."""
    mla, whole = SparseMla(rng, backend, h_q=20), slice(None)
    of_index: list[Any] = [
        problem(rng, backend)
        for problem, operator in ((Indexer, "lightning_indexer_backward"), (DenseLoss, "indexer_dense_loss"))
        if backend in hopwell.backends(operator)
    ]
    for device, multiprocessors in (("", "1"), ("", "132"), ("h100", "7")):
        monkeypatch.setenv("HOPWELL_EMULATOR_SMS", multiprocessors)
        if device:
            monkeypatch.setenv("HOPWELL_EMULATOR_DEVICE", device)
        for name, mine in mla.run(whole, whole, mla.indices, {"attn": True}).items():
            assert same_bits(mla.whole[name], mine), f"{name} on {device} with {multiprocessors}"
        for problem in of_index:
            for expected, mine in zip(problem.whole, problem.run(whole, rng), strict=True):
                assert same_bits(expected, mine), f"{type(problem).__name__} on {device} with {multiprocessors}"


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.startswith("emu:")])
def test_deterministic_dq_of_packed_documents(backend: str, rng: np.random.Generator) -> None:
    """Keys of other documents before and behind a query's own, which are the same keys at other places."""
    problem = SparseMla(rng, backend, h_q=20, shape=(2, 130, 300))
    problem.masks, problem.indices = {}, problem.indices.flip(1)  # not in ascending order
    whole = slice(None)
    alone = problem.run(whole, whole, problem.indices, {})
    problem.kv = torch.cat([random(rng, 130, 576), problem.kv, random(rng, 50, 576)])
    packed = problem.run(whole, whole, problem.indices + 130, {})
    for name in ("out", "lse", "dq"):
        assert same_bits(alone[name], packed[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_keeps_negative_zeros(backend: str, rng: np.random.Generator) -> None:
    """Products of numbers of 1e-30 are zeros of both signs in dq. The CPU takes 512 entries at a time."""
    device = device_of(backend)
    q, d_out = random(rng, 2, 8, 576).to(device), random(rng, 2, 8, 512).to(device)
    kv = (1e-30 * random(rng, 100, 576).float()).bfloat16().to(device)
    indices = torch.from_numpy(rng.integers(0, 100, (2, 60)).astype(np.int32)).to(device)
    given: dict[str, Any] = {"sm_scale": SCALE, "backend": backend}
    out, _, lse = hopwell.sparse_mla_forward(q, kv, indices, **given)
    dq, padded_dq = (
        hopwell.sparse_mla_backward(d_out, q, kv, rows, out, lse, deterministic=True, need_dkv=False, **given)[0]
        for rows in (indices, torch.nn.functional.pad(indices, (0, 540), value=-1))
    )
    assert (dq == 0).all()
    assert backend != "cpu" or torch.signbit(dq).float().mean() > 0.1
    assert same_bits(dq, padded_dq)


@pytest.mark.parametrize("backend", hopwell.backends("indexer_dense_loss"))
def test_indexer_dense_loss(backend: str, rng: np.random.Generator) -> None:
    check_parts(DenseLoss, backend, rng)


@pytest.mark.parametrize("backend", hopwell.backends("lightning_indexer_backward"))
def test_lightning_indexer(backend: str, rng: np.random.Generator) -> None:
    check_parts(Indexer, backend, rng)


@pytest.mark.parametrize("backend", hopwell.backends("nvfp4_linear_backward"))
def test_nvfp4_linear_backward(backend: str, rng: np.random.Generator) -> None:
    check_parts(LinearBackward, backend, rng)


@pytest.mark.parametrize("backend", hopwell.backends("kv_compress_backward"))
def test_kv_compress(backend: str, rng: np.random.Generator) -> None:
    check_parts(Pooling, backend, rng)
