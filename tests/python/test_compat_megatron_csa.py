"""Megatron-LM's hooks for DeepSeek-V4's attention, against float64 formulas of one query and their autograd."""

import functools
import math
from typing import Any

import pytest
import torch
from hopwell.compat import megatron
from support import norm_error
from torch import Tensor
from torch_inputs import RESTRIDES, Restride, restrided

pytestmark = pytest.mark.usefixtures("torch_seed")

S, B, HEADS, D, RATIO, TOPK, WINDOW, SCALE, INDEX_SCALE = 14, 2, 3, 16, 4, 2, 3, 0.3, 0.37
H_INDEX, D_INDEX = 2, 8


def attention(q: Tensor, rows: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """One query [heads, d] over keys [n, d] → out [heads, d], and probabilities [heads, n] beside a sink."""
    logits = torch.cat([SCALE * (q @ rows.T), sink[:, None]], 1)
    share = logits.softmax(1)[:, :-1]
    return share @ rows, share


class Pack:
    """Segments of one pack: tokens and their compressed keys, as float64 leaves and as tensors of a dtype."""

    def __init__(self, lengths: list[int], dtype: torch.dtype = torch.float32, spare: int = 0) -> None:
        total, keys = sum(lengths) + spare, [n // RATIO for n in lengths]
        shapes = {
            "query": (total, HEADS, D),
            "tokens": (sum(lengths), D),
            "compressed": (sum(keys), D),
            "sink": (HEADS,),
            "q": (total, H_INDEX, D_INDEX),
            "k": (sum(keys), D_INDEX),
            "weights": (total, H_INDEX),
        }
        self.given = {name: torch.randn(*shape).to(dtype).requires_grad_() for name, shape in shapes.items()}
        self.given["sink"] = torch.randn(HEADS).requires_grad_()
        self.exact = {name: x.detach().double().requires_grad_() for name, x in self.given.items()}
        self.lengths, self.keys, self.total = lengths, keys, total
        self.cu = torch.tensor([0, *lengths]).cumsum(0).int()
        self.cu_keys = torch.tensor([0, *keys]).cumsum(0).int()

    def segments(self) -> list[tuple[int, int, int]]:
        """(first token, first key, tokens) of each."""
        return [(a, k, n) for a, k, n in zip(self.cu.tolist(), self.cu_keys.tolist(), self.lengths, strict=False) if n]

    def scores(self, x: dict[str, Tensor], row: int, keys: Tensor) -> Tensor:
        dots = torch.einsum("hd,td->ht", x["q"][row], x["k"][keys]).relu()
        return INDEX_SCALE * (x["weights"][row] @ dots)

    def selected(self, row: int, first: int, key: int) -> Tensor:
        """Rows of `compressed`, ascending."""
        seen = key + torch.arange((row - first + 1) // RATIO)
        with torch.no_grad():
            score = self.scores(self.exact, row, seen)
        return seen[score.argsort(descending=True, stable=True)[:TOPK].sort().values]

    def expected(self, coefficient: float, *, sparse: bool, is_sum: bool, real: list[int] | None = None) -> Any:
        """(out [total, heads · d], loss) of attention over window and selected keys. Only the first `real` tokens of
        each segment count in the loss, and have gradients.
        """
        x = self.exact
        outs, loss = [torch.zeros(HEADS * D).double()] * self.total, torch.zeros(()).double()
        for number, (first, key, n) in enumerate(self.segments()):
            for t in range(n):
                row = first + t
                window, chosen = x["tokens"][max(first, row - WINDOW + 1) : row + 1], self.selected(row, first, key)
                is_real = real is None or t < real[number]
                out, share = attention(x["query"][row], torch.cat([x["compressed"][chosen], window]), x["sink"])
                outs[row] = out.flatten() if is_real else out.detach().flatten()
                about = chosen
                if not sparse:
                    about = key + torch.arange((t + 1) // RATIO)
                    _, share = attention(x["query"][row], torch.cat([x["compressed"][about], window]), x["sink"])
                if len(about) and is_real:
                    target = share[:, : len(about)].sum(0).detach()
                    target = target / target.sum()
                    loss = loss + (target * (target.log() - self.scores(x, row, about).log_softmax(0))).sum()
        return torch.stack(outs), coefficient * loss / (1 if is_sum else self.total)

    def compare(self, made: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 1e-4) -> None:
        names = list(self.given)
        d_out = torch.randn_like(made[0])
        gradients = []
        for (out, loss), leaves in ((made, self.given), (expected, self.exact)):
            value = (out * d_out.to(out.dtype)).sum() + 3 * loss
            gradients.append(torch.autograd.grad(value, [leaves[name] for name in names], allow_unused=True))
        assert norm_error(made[0].detach(), expected[0].detach()) < tolerance
        torch.testing.assert_close(made[1].detach().double(), expected[1].detach(), rtol=tolerance, atol=1e-6)
        for name, mine, reference in zip(names, *gradients, strict=True):
            if mine is None or reference is None:
                assert (mine is None or mine.eq(0).all()) and (reference is None or reference.eq(0).all()), name
            else:
                assert norm_error(mine, reference) < tolerance, name


def window_entries(lengths: list[int], total: int) -> Tensor:
    """Entries in the segment, int32 [total, window], −1 for none, as Megatron-LM makes them."""
    table, first = torch.full((total, WINDOW), -1, dtype=torch.int32), 0
    for n in lengths:
        for t in range(n):
            for place, key in enumerate(range(t - WINDOW + 1, t + 1)):
                table[first + t, place] = max(key, -1)
        first += n
    return table


def full(pack: Pack) -> tuple[Tensor, Tensor]:
    """Each segment's tokens and then its compressed keys, in one tensor, and the segments' offsets."""
    tokens = pack.given["tokens"].split(pack.lengths)
    compressed = pack.given["compressed"].split(pack.keys)
    parts = [part for pair in zip(tokens, compressed, strict=True) for part in pair]
    sizes = torch.tensor([0, *(n + k for n, k in zip(pack.lengths, pack.keys, strict=True))])
    return torch.cat(parts), sizes.cumsum(0).int()


@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("coefficient", [0.0, 0.7])
def test_training_over_packed_segments(coefficient: float, sparse: bool, is_sum: bool) -> None:
    pack = Pack([S, 3, 0, 9], spare=2)
    kv_full, cu_full = full(pack)
    x = pack.given
    made = megatron.fused_csa_indexer_sparse_attn(
        *(x["query"], kv_full, x["sink"], window_entries(pack.lengths, pack.total), x["q"], x["k"], x["weights"]),
        *(TOPK, RATIO, SCALE, INDEX_SCALE, coefficient, sparse, 0, is_sum),
        cu_seqlens_q=pack.cu,
        cu_seqlens_kv=pack.cu,
        cu_seqlens_kv_full=cu_full,
        cu_seqlens_compressed_idx=pack.cu_keys,
        max_seqlen_q=S,
        max_seqlen_compressed_idx=S // RATIO,
        compressed_kv=x["compressed"],
    )
    if coefficient == 0:
        for result in (made[0].sum(), made[1]):
            gradients = torch.autograd.grad(result, [x["q"], x["k"], x["weights"]], retain_graph=True)
            assert not any(gradient.any() for gradient in gradients)
    pack.compare(made, pack.expected(coefficient, sparse=sparse, is_sum=is_sum))


@pytest.mark.parametrize("sparse", [False, True])
def test_padding_rows_have_no_loss_and_no_gradient(sparse: bool) -> None:
    pack, real = Pack([S, 8]), [10, 8]
    kv_full, cu_full = full(pack)
    x = pack.given
    made = megatron.fused_csa_indexer_sparse_attn(
        *(x["query"], kv_full, x["sink"], window_entries(pack.lengths, pack.total), x["q"], x["k"], x["weights"]),
        *(TOPK, RATIO, SCALE, INDEX_SCALE, 0.7, sparse),
        cu_seqlens_q=pack.cu,
        cu_seqlens_kv=pack.cu,
        cu_seqlens_kv_full=cu_full,
        cu_seqlens_compressed_idx=pack.cu_keys,
        compressed_kv=x["compressed"],
        cu_seqlens_q_unpadded=torch.tensor([0, *real]).cumsum(0).int(),
    )
    pack.compare(made, pack.expected(0.7, sparse=sparse, is_sum=False, real=real))


@pytest.mark.parametrize("sparse", [False, True])
def test_training_over_a_batch(sparse: bool) -> None:
    """Sequences of one length, [s, b, …]: the same as packed one after another."""
    pack = Pack([S] * B)
    x = {name: value if name == "sink" else value.unflatten(0, (B, -1)) for name, value in pack.given.items()}
    sbhd = {name: value if name == "sink" else value.transpose(0, 1) for name, value in x.items()}
    kv_full = torch.cat([sbhd["tokens"], sbhd["compressed"]])
    window = window_entries([S], S).expand(B, -1, -1)
    out, loss = megatron.fused_csa_indexer_sparse_attn(
        *(sbhd["query"], kv_full, sbhd["sink"], window, sbhd["q"], sbhd["k"], sbhd["weights"]),
        *(TOPK, RATIO, SCALE, INDEX_SCALE, 0.7, sparse),
        kv_offset=S,
    )
    assert out.shape == (S, B, HEADS * D)
    pack.compare((out.transpose(0, 1).flatten(0, 1), loss), pack.expected(0.7, sparse=sparse, is_sum=False))


@pytest.mark.parametrize("packed", [False, True])
def test_selection(packed: bool) -> None:
    lengths = [S, 3, 0, 9] if packed else [S] * B
    pack = Pack(lengths, spare=2 if packed else 0)
    index = [pack.given[name].detach() for name in ("q", "k", "weights")]
    options: dict[str, Any] = {}
    if packed:
        options = {"cu_seqlens_q": pack.cu, "cu_seqlens_kv": pack.cu_keys, "max_seqlen_q": S, "max_seqlen_kv": 3}
    else:
        index = [x.unflatten(0, (B, -1)).transpose(0, 1) for x in index]
    for topk in (TOPK, 5):
        indices, counts = megatron.indexer_topk(*index, topk, RATIO, INDEX_SCALE, **options)
        assert indices.shape == ((pack.total, topk) if packed else (B, S, topk)) and indices.dtype == torch.int32
        assert counts.shape == indices.shape[:-1] and counts.dtype == torch.int32
        rows, counted = indices.reshape(-1, topk), counts.reshape(-1)
        wanted = torch.full_like(rows, -1)
        for first, key, n in pack.segments():
            for t in range(n):
                chosen = pack.selected(first + t, first, key) - key if topk == TOPK else torch.arange((t + 1) // RATIO)
                wanted[first + t, : len(chosen)] = chosen.int()
        assert torch.equal(rows, wanted)
        assert torch.equal(counted, (wanted >= 0).sum(1).int())


def test_scaled_weights_are_rounded_as_megatron_rounds_them() -> None:
    """So both select the same keys. Exact products select others."""
    q, k, weights = (torch.randn(*shape).bfloat16() for shape in ((512, 1, 2, 8), (512, 1, 8), (512, 1, 2)))
    chosen, _ = megatron.indexer_topk(q, k, weights, 128, 1, INDEX_SCALE)
    rounded, _ = megatron.indexer_topk(q, k, (weights.float() * INDEX_SCALE).bfloat16(), 128, 1, 1.0)
    exact, _ = megatron.indexer_topk(q.float(), k.float(), weights.float(), 128, 1, INDEX_SCALE)
    assert torch.equal(chosen, rounded)
    assert not torch.equal(chosen, exact)


def test_selection_of_queries_that_begin_within_their_sequences() -> None:
    """The last queries of two sequences, as a context-parallel rank has them."""
    pack, offsets = Pack([S, 9]), [6, 4]
    rows = torch.cat([torch.arange(6, S), torch.arange(S + 4, S + 9)])
    q, weights, k = pack.given["q"][rows].detach(), pack.given["weights"][rows].detach(), pack.given["k"].detach()
    cu_q = torch.tensor([0, S - 6, S - 6 + 5]).int()
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": pack.cu_keys, "max_seqlen_q": S, "max_seqlen_kv": 3}
    indices, _ = megatron.indexer_topk(
        q, k, weights, TOPK, RATIO, INDEX_SCALE, q_causal_offsets=torch.tensor(offsets).int(), **options
    )
    whole, _ = megatron.indexer_topk(
        *(pack.given[name].detach() for name in ("q", "k", "weights")), TOPK, RATIO, INDEX_SCALE,
        **(options | {"cu_seqlens_q": pack.cu}),
    )  # fmt: skip
    assert torch.equal(indices, whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_thd", [False, True])
@pytest.mark.parametrize("with_length", [False, True])
def test_attention_over_given_entries(with_length: bool, is_thd: bool, dtype: torch.dtype) -> None:
    s_kv, entries = 11, 6
    rows, keys = ((S,), (s_kv,)) if is_thd else ((S, B), (s_kv, B))
    query, kv = torch.randn(*rows, HEADS, D).to(dtype), torch.randn(*keys, D).to(dtype)
    sink = torch.tensor([0.5, -1.0, 2.0])
    total = math.prod(keys)
    table = torch.randint(-2, total, (math.prod(rows), entries), dtype=torch.int32)
    table[1] = -1
    length = torch.randint(0, entries + 1, (len(table),), dtype=torch.int32) if with_length else None
    given = [x.requires_grad_() for x in (query, kv, sink)]
    out = megatron.csa_sparse_attn(*given, table, SCALE, length, indexer_topk=4, is_thd=is_thd)
    assert out.shape == (*rows, HEADS * D) and out.dtype == dtype
    exact = [x.detach().double().requires_grad_() for x in given]
    results = []
    for r, row in enumerate(table.tolist()):
        valid = [t for t in row[: None if length is None else int(length[r])] if t >= 0]
        results.append(attention(exact[0].flatten(0, -3)[r], exact[1].flatten(0, -2)[valid], exact[2])[0])
    expected = torch.stack(results).reshape(out.shape)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    assert norm_error(out.detach(), expected.detach()) < tolerance
    d_out = torch.randn_like(out)
    found, wanted = torch.autograd.grad(out, given, d_out), torch.autograd.grad(expected, exact, d_out.double())
    for mine, reference in zip(found[:2], wanted[:2], strict=True):
        assert norm_error(mine, reference) < tolerance
    assert norm_error(found[2], wanted[2]) < 3 * tolerance  # a sum of terms of either sign over all rows


@pytest.mark.parametrize("restride", RESTRIDES)
def test_tensors_of_any_strides(restride: Restride) -> None:
    """Results and gradients have the bits of contiguous tensors."""
    pack = Pack([S, 9])
    x, (kv_full, cu_full) = pack.given, full(pack)
    kv_full = kv_full.detach().requires_grad_()
    window = window_entries(pack.lengths, pack.total)
    offsets = {"cu_seqlens_q": pack.cu, "cu_seqlens_kv": pack.cu, "cu_seqlens_kv_full": cu_full}
    offsets |= {"cu_seqlens_compressed_idx": pack.cu_keys}
    batch = [torch.randn(*shape).requires_grad_() for shape in ((8, B, HEADS, D), (10, B, D), (HEADS,))]
    index_shapes = (8, B, H_INDEX, D_INDEX), (2, B, D_INDEX), (8, B, H_INDEX)
    index = [torch.randn(*shape).requires_grad_() for shape in index_shapes]
    entries = torch.randint(-1, 10 * B, (8 * B, 6), dtype=torch.int32)
    pooled = [torch.randn(*shape).requires_grad_() for shape in ((26, 1, 16), (26, 1, 16), (RATIO, 16))]
    pooled += [torch.tensor([0, 9, 24]).int(), torch.tensor([0, 2, 5]).int()]

    def packed(*given: Tensor, sparse: bool) -> Any:
        settings = TOPK, RATIO, SCALE, INDEX_SCALE, 0.7, sparse
        return megatron.fused_csa_indexer_sparse_attn(*given[:7], *settings, compressed_kv=given[7], **offsets)

    def in_batch(*given: Tensor) -> Any:
        return megatron.fused_csa_indexer_sparse_attn(*given, TOPK, RATIO, SCALE, INDEX_SCALE, 0.7, kv_offset=8)

    of_pack = [x["query"], kv_full, x["sink"], window, x["q"], x["k"], x["weights"], x["compressed"].detach()]
    calls: list[tuple[Any, list[Tensor]]] = [
        (functools.partial(packed, sparse=True), of_pack),
        (functools.partial(packed, sparse=False), of_pack),
        (in_batch, [*batch, window_entries([8], 8).expand(B, -1, -1), *index]),
        (lambda *x: megatron.indexer_topk(*x, TOPK, RATIO), index),
        (lambda *x: [megatron.csa_sparse_attn(*x[:4], SCALE, x[4])], [*batch, entries, torch.randint(0, 7, (16,))]),
        (lambda *x: [megatron.maybe_compress_thd_fused(*x, 5, RATIO, 8, 2)], pooled),
    ]
    for function, given in calls:
        results = []
        for tensors in (given, restrided(restride, *given)):
            made = list(function(*tensors))
            totals = [tensor.square().sum() for tensor in made if tensor.requires_grad]
            learned = [tensor for tensor in tensors if tensor.requires_grad]
            results.append(made + (list(torch.autograd.grad(sum(totals), learned)) if totals else []))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("coff", [1, 2])
@pytest.mark.parametrize("spare", [0, 30])
def test_compressor(spare: int, coff: int) -> None:
    lengths = [9, 0, 3, 12]
    kv, score = (torch.randn(26, 1, coff * 8).requires_grad_() for _ in range(2))
    ape = torch.randn(RATIO, coff * 8).requires_grad_()
    cu = torch.tensor([0, *lengths]).cumsum(0)
    cu_keys = torch.tensor([0, *(n // RATIO for n in lengths)]).cumsum(0)
    out = megatron.maybe_compress_thd_fused(kv, score, ape, cu, cu_keys, 5 + spare, RATIO, 8, coff)
    assert out is not None and out.shape == (5 + spare, 1, 8) and out[5:].eq(0).all()
    exact = [x.detach().double().requires_grad_() for x in (kv, score, ape)]
    keys = []
    for first, n in zip(cu.tolist(), lengths, strict=False):
        for block in range(n // RATIO):
            own = slice(first + block * RATIO, first + (block + 1) * RATIO)
            values, gates = exact[0][own, 0, -8:], (exact[1][own, 0] + exact[2])[:, -8:]
            if coff == 2 and block:
                before = slice(own.start - RATIO, own.start)
                values = torch.cat([values, exact[0][before, 0, :8]])
                gates = torch.cat([gates, (exact[1][before, 0] + exact[2])[:, :8]])
            keys.append((gates.softmax(0) * values).sum(0))
    expected = torch.stack(keys)
    assert norm_error(out[:5, 0].detach(), expected.detach()) < 1e-5
    d_out = torch.randn(5, 8)
    found = torch.autograd.grad(out[:5, 0], (kv, score, ape), d_out)
    for mine, reference in zip(found, torch.autograd.grad(expected, exact, d_out.double()), strict=True):
        assert norm_error(mine, reference) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"enabled": False},
        {"kv": torch.zeros(8, 1, 16).half(), "score": torch.zeros(8, 1, 16).half()},
        {"score": torch.zeros(8, 1, 16).bfloat16()},
        {"ape": torch.zeros(4, 16).bfloat16()},
        {"ape": torch.zeros(3, 16)},
        {"kv": torch.zeros(8, 16)},
        {"score": torch.zeros(7, 1, 16)},
        {"coff": 4, "head_dim": 4},
        {"head_dim": 16},
        {"total_comp": 0},
        {"ratio": 9, "ape": torch.zeros(9, 16)},
        {"ratio": 0},
    ],
)
def test_the_compressor_declines(changes: dict[str, Any]) -> None:
    given = {"kv": torch.zeros(8, 1, 16), "score": torch.zeros(8, 1, 16), "ape": torch.zeros(4, 16)}
    offsets = {"cu_seqlens": torch.tensor([0, 8]), "cu_seqlens_comp": torch.tensor([0, 2])}
    sizes = {"total_comp": 2, "ratio": 4, "head_dim": 8, "coff": 2}
    assert megatron.maybe_compress_thd_fused(**(given | offsets | sizes)) is not None
    assert megatron.maybe_compress_thd_fused(**(given | offsets | sizes | changes)) is None


QUERY, KV, SINK = torch.zeros(4, 1, 2, 8), torch.zeros(5, 1, 8), torch.zeros(2)
Q, K, W = torch.zeros(4, 1, 2, 8), torch.zeros(1, 1, 8), torch.zeros(4, 1, 2)
TABLE, CU = torch.zeros(4, 3).int(), torch.tensor([0, 4]).int()
TRAINING = {
    "query": QUERY,
    "kv_full": KV,
    "attn_sink": SINK,
    "window_idxs": TABLE[None],
    "q_indexer": Q,
    "k_indexer": K,
    "weights": W,
    "indexer_topk": 1,
    "ratio": 4,
    "softmax_scale": 0.3,
    "kv_offset": 4,
}
PACKED = {
    "query": QUERY[:, 0],
    "kv_full": KV[:, 0],
    "window_idxs": TABLE,
    "q_indexer": Q[:, 0],
    "k_indexer": K[:, 0],
    "weights": W[:, 0],
    "cu_seqlens_q": CU,
    "cu_seqlens_kv": CU,
    "cu_seqlens_kv_full": CU,
    "cu_seqlens_compressed_idx": CU,
    "compressed_kv": KV[:1, 0],
}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("csa_sparse_attn", {"query": QUERY[0]}, "query must be"),
        ("csa_sparse_attn", {"kv": KV[:, :, :4]}, "kv must be"),
        ("csa_sparse_attn", {"is_thd": True}, "query must be"),
        ("csa_sparse_attn", {"topk_idxs": TABLE[:3]}, "topk_idxs must be"),
        ("csa_sparse_attn", {"topk_idxs": TABLE.float()}, "topk_idxs must be"),
        ("csa_sparse_attn", {"indexer_topk": 0.5}, "indexer_topk must be an integer"),
        ("indexer_topk", {"topk": 0}, "topk must be at least 1"),
        ("indexer_topk", {"ratio": 0}, "ratio must be at least 1"),
        ("indexer_topk", {"q_indexer": Q.half()}, "q_indexer must be"),
        ("indexer_topk", {"k_indexer": K.bfloat16()}, "k_indexer must be"),
        ("indexer_topk", {"k_indexer": K[:0]}, "k_indexer must be at least one row"),
        ("indexer_topk", {"weights": W[:3]}, "weights must be"),
        ("indexer_topk", {"q_causal_offsets": CU}, "q_causal_offsets must be None"),
        ("indexer_topk", {"cu_seqlens_q": CU}, "q_indexer must be"),
        ("fused_csa_indexer_sparse_attn", {"query": QUERY[0]}, "query must be"),
        ("fused_csa_indexer_sparse_attn", {"kv_full": KV[:, :, :4]}, "kv_full must be"),
        ("fused_csa_indexer_sparse_attn", {"q_indexer": Q[:3], "weights": W[:3]}, "q_indexer must be"),
        ("fused_csa_indexer_sparse_attn", {"window_idxs": TABLE}, "window_idxs must be"),
        ("fused_csa_indexer_sparse_attn", {"kv_offset": 3}, "kv_offset must be 4; got 3"),
        ("fused_csa_indexer_sparse_attn", {"indexer_topk": 0}, "indexer_topk must be at least 1"),
        ("fused_csa_indexer_sparse_attn", PACKED | {"compressed_kv": None}, "compressed_kv must be"),
        ("fused_csa_indexer_sparse_attn", PACKED | {"cu_seqlens_kv": None}, "cu_seqlens_kv must be"),
        ("fused_csa_indexer_sparse_attn", PACKED | {"cu_seqlens_kv_full": CU[:1]}, "cu_seqlens_kv_full must be"),
        ("fused_csa_indexer_sparse_attn", PACKED | {"cu_seqlens_q_unpadded": CU[:1]}, "cu_seqlens_q_unpadded must be"),
    ],
)
def test_bad_input_names_the_argument(name: str, changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "csa_sparse_attn": {"query": QUERY, "kv": KV, "attn_sink": SINK, "topk_idxs": TABLE, "softmax_scale": 0.3},
        "indexer_topk": {"q_indexer": Q, "k_indexer": K, "weights": W, "topk": 1},
        "fused_csa_indexer_sparse_attn": TRAINING,
    }[name]
    getattr(megatron, name)(**given)
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        getattr(megatron, name)(**(given | changes))
