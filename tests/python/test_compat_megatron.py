"""`hopwell.compat.megatron` against plain PyTorch in float64, called as Megatron-LM's dispatcher calls a backend."""

import math
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hopwell.compat import megatron
from support import norm_error
from torch import Tensor
from torch_inputs import RESTRIDES, Restride, restrided

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
RELU = pytest.mark.parametrize("use_relu", [True, False])
AttnMaskType = Enum("AttnMaskType", ["padding", "causal"])
SCALE, LATENT = 0.3, 12


class Case:
    """Indexer and absorbed attention of s_q queries and s_kv keys in [s, b, …], and the same as float64 leaves."""

    def __init__(self, dtype: torch.dtype = torch.float32, s_q: int = 9, s_kv: int = 9, b: int = 2) -> None:
        h, d, h_index, d_index = 4, 16, 3, 8
        quarters = lambda *shape: ((torch.randn(*shape) * 4).round() / 4).to(dtype)  # noqa: E731
        self.leaves = {
            "q": quarters(s_q, b, h_index, d_index),
            "k": quarters(s_kv, b, d_index),
            "weights": quarters(s_q, b, h_index),
            "query": quarters(s_q, b, h, d),
            "key": quarters(s_kv, b, 1, d),
            "up_v_weight": quarters(h, 5, LATENT),
        }
        self.exact = {name: x.double().requires_grad_() for name, x in self.leaves.items()}
        for x in self.leaves.values():
            x.requires_grad_()
        self.dtype, self.b, self.s_q, self.s_kv = dtype, b, s_q, s_kv
        self.starts = torch.zeros(s_q, dtype=torch.int32)
        self.ends = torch.arange(s_kv - s_q + 1, s_kv + 1, dtype=torch.int32)

    def packed(self) -> "Case":
        """Two documents, and a query that sees no key."""
        self.starts = torch.tensor([0, 0, 0, 0, 4, 4, 4, 4, 0], dtype=torch.int32)
        self.ends = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 0], dtype=torch.int32)
        return self

    @property
    def visible(self) -> Tensor:
        key = torch.arange(self.s_kv)
        return (key >= self.starts[:, None]) & (key < self.ends[:, None])

    def index_scores(self, use_relu: bool) -> Tensor:
        """Scores [b, s_q, s_kv] in float64, −inf if a query does not see a key."""
        x = self.exact
        dots = torch.einsum("sbhd,tbd->sbht", x["q"], x["k"])
        scores = torch.einsum("sbht,sbh->bst", dots.relu() if use_relu else dots, x["weights"])
        return scores.masked_fill(~self.visible, -math.inf)

    def attention_scores(self) -> Tensor:
        return SCALE * torch.einsum("sbhd,tbd->bhst", self.exact["query"], self.exact["key"][:, :, 0])

    def loss(self, keys: Tensor, use_relu: bool, coeff: float, rows: Tensor | None, is_sum: bool) -> Tensor:
        """Computes the loss of `compute_dsa_indexer_loss` over the keys of a mask [b, s_q, s_kv]."""
        logs = self.index_scores(use_relu).masked_fill(~keys, -1e30).log_softmax(-1)
        target = self.attention_scores().detach().masked_fill(~keys[:, None], -math.inf).softmax(-1)
        target = target.nan_to_num(0.0).sum(1)
        target = target / target.sum(-1, keepdim=True).clamp(min=1e-10)
        row_loss = (target * (target.clamp(min=1e-10).log() - logs)).masked_fill(~keys, 0.0).sum(-1)
        valid = torch.ones(self.b, self.s_q) if rows is None else rows.double().expand(self.b, self.s_q)
        return coeff * (row_loss * valid).sum() / (1 if is_sum else valid.sum().clamp(min=1))

    def attention(self, keys: Tensor, up: bool = False) -> Tensor:
        probabilities = self.attention_scores().masked_fill(~keys[:, None], -math.inf).softmax(-1).nan_to_num(0.0)
        out = torch.einsum("bhst,tbc->sbhc", probabilities, self.exact["key"][:, :, 0, :LATENT])
        return torch.einsum("sbhc,hdc->sbhd", out, self.exact["up_v_weight"]).flatten(2) if up else out

    def assert_gradients(self, actual: Tensor, expected: Tensor, names: str, grads: Any = (None, None)) -> None:
        leaves, exact = ([x[name] for name in names.split()] for x in (self.leaves, self.exact))
        given, wanted = (None, None) if grads[0] is None else grads
        found = torch.autograd.grad(actual, leaves, given, retain_graph=True)
        for gradient, other in zip(found, torch.autograd.grad(expected, exact, wanted), strict=True):
            assert gradient.dtype == self.dtype
            assert norm_error(gradient, other) <= 3 * TOLERANCES[self.dtype]

    def top_k(self, **changes: Any) -> Any:
        call = {name: self.leaves[name] for name in ("q", "k", "weights")}
        call |= {"index_topk": 4, "starts": self.starts, "ends": self.ends, "block_size": 8192}
        call |= dispatcher_s()
        return megatron.run_fused_qk_topk(**{**call, **changes})

    def top_k_with_loss(self, **changes: Any) -> Any:
        call = {name: self.leaves[name] for name in ("q", "k", "weights")}
        call |= {"index_topk": 4, "starts": self.starts, "ends": self.ends, "block_size": 8192}
        call |= {"query": self.leaves["query"].detach(), "key": self.leaves["key"].detach(), "softmax_scale": SCALE}
        call |= {"loss_coeff": 0.7, "pg_collection": SimpleNamespace(tp=ranks(1)), "query_valid_rows": None}
        call |= {"calculate_per_token_loss": False, "config": SimpleNamespace(kv_lora_rank=LATENT), **dispatcher_s()}
        return megatron.run_fused_qk_topk_with_loss(**{**call, **changes})

    def whole(self, **changes: Any) -> Any:
        x = self.leaves
        call = {"query": x["query"], "key": x["key"], "value": None, "up_v_weight": x["up_v_weight"]}
        call |= {"q_indexer": x["q"], "k_indexer": x["k"], "indexer_weights": x["weights"], "indexer_topk": 4}
        call |= {"config": SimpleNamespace(kv_lora_rank=LATENT), "softmax_scale": SCALE, "loss_coeff": 0.7}
        call |= {"sparse_loss": True, "calculate_per_token_loss": False, "absorbed_mla": True}
        call |= {"attn_mask_type": AttnMaskType.causal, "key_positions": None, "query_valid_rows": None}
        call |= {"varlen_starts": self.starts.long(), "varlen_ends": self.ends.long(), "varlen_is_plain_causal": True}
        call |= {"pg_collection": SimpleNamespace(tp=ranks(1)), **dispatcher_s()}
        return megatron.run_fused_dsa_attention(**{**call, **changes})


def ranks(n: int) -> Any:
    return SimpleNamespace(size=lambda: n)


def dispatcher_s() -> dict[str, Any]:
    """The dispatcher's other arguments."""
    return {
        "use_relu": True,
        "use_local_indexer_varlen": False,
        "single_packed_thd_sequence": False,
        "local_packed_cp_rank": 0,
        "local_packed_cp_query_start": 0,
        "local_packed_cp_query_len": None,
        "packed_seq_params": None,
        "cp_size": 1,
    }


def chosen(indices: Tensor, s_kv: int) -> Tensor:
    """Returns the mask [b, s_q, s_kv] of index rows, which must be in ascending order without repeated keys."""
    mask = torch.zeros(*indices.shape[:2], s_kv + 1, dtype=torch.bool)
    mask.scatter_(2, torch.where(indices < 0, s_kv, indices).long(), value=True)
    mask = mask[..., :s_kv]
    assert torch.equal(mask.sum(-1), (indices >= 0).sum(-1))
    last = indices[..., 1:].eq(-1)
    assert (last | (indices[..., 1:] > indices[..., :-1])).all()
    return mask


def assert_best(mask: Tensor, scores: Tensor, topk: int) -> None:
    """Checks that the keys of the mask have the largest scores."""
    best = scores.detach().topk(min(topk, scores.shape[-1])).values
    taken = scores.detach().masked_fill(~mask, -math.inf).topk(best.shape[-1]).values
    torch.testing.assert_close(taken, best, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("topk", [4, 20])
@RELU
@DTYPES
def test_selection(dtype: torch.dtype, use_relu: bool, topk: int) -> None:
    for case in (Case(dtype), Case(dtype).packed(), Case(dtype, s_q=5, s_kv=14, b=1)):
        indices, lengths = case.top_k(index_topk=topk, use_relu=use_relu)
        assert indices.dtype == lengths.dtype == torch.int32
        assert indices.shape == (case.b, case.s_q, min(topk, case.s_kv)) and lengths.shape == indices.shape[:2]
        mask = chosen(indices, case.s_kv)
        assert not (mask & ~case.visible).any()
        assert torch.equal(lengths, case.visible.sum(-1).clamp(max=topk).expand(case.b, -1).int())
        assert torch.equal(mask.sum(-1), lengths)
        assert_best(mask, case.index_scores(use_relu), topk)


def test_a_selection_without_the_relu_has_all_the_digits() -> None:
    """Sums over heads that differ by less than bf16, or two bf16 terms, can represent: the order is still right."""
    q = torch.tensor([[1.0, 1.0], [2**-9, 2**-9], [2**-20, 0.0]]).bfloat16()[None, None]
    weights, k = torch.ones(1, 1, 3).bfloat16(), torch.eye(2).flip(0).bfloat16()[:, None]
    bounds = torch.tensor([0], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    indices, _ = megatron.run_fused_qk_topk(q, k, weights, 1, *bounds, 1, use_relu=False)
    assert indices.tolist() == [[[1]]]


def test_keys_of_score_minus_infinity_are_none() -> None:
    case = Case(b=1)
    weights = case.leaves["weights"].detach().clone()
    weights[3] = -math.inf
    q = case.leaves["q"].detach().abs() + 1
    k = case.leaves["k"].detach().abs() + 1
    indices, _ = case.top_k(q=q, k=k, weights=weights)
    assert indices[0, 3].eq(-1).all() and indices[0, 4].ge(0).all()


@pytest.mark.parametrize("is_sum", [False, True])
@RELU
@DTYPES
def test_selection_with_the_sparse_loss(dtype: torch.dtype, use_relu: bool, is_sum: bool) -> None:
    for case, rows in (
        (Case(dtype), None),
        (Case(dtype).packed(), torch.arange(9) % 3 > 0),
        (Case(dtype, s_q=5, s_kv=14, b=1), torch.zeros(1, 5, dtype=torch.bool)),
        (Case(dtype), torch.rand(2, 9) > 0.5),
    ):
        indices, lengths, loss = case.top_k_with_loss(
            use_relu=use_relu, query_valid_rows=rows, calculate_per_token_loss=is_sum
        )
        plain = case.top_k(use_relu=use_relu)
        assert torch.equal(indices, plain[0]) and torch.equal(lengths, plain[1])
        assert loss.dtype == torch.float32 and loss.shape == ()
        expected = case.loss(chosen(indices, case.s_kv), use_relu, 0.7, rows, is_sum)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)
        case.assert_gradients(3 * loss, 3 * expected, "q k weights")


@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@DTYPES
def test_attention_over_given_entries(dtype: torch.dtype, index_dtype: torch.dtype, with_lengths: bool) -> None:
    for case in (Case(dtype), Case(dtype, s_q=5, s_kv=14, b=1)):
        order = torch.rand(case.b, case.s_q, case.s_kv).argsort(-1)[..., :6]
        indices = order.masked_fill(torch.rand(order.shape) < 0.2, -1).to(index_dtype)
        indices[:, 0], indices[:, 1] = order[:, 0], -1
        lengths = torch.randint(0, 7, indices.shape[:2], dtype=torch.int32) if with_lengths else None
        if lengths is not None:
            lengths[:, 0] = 6  # gradients of queries that see one key are 0
        kept = indices if lengths is None else indices.masked_fill(torch.arange(6) >= lengths[..., None], -1)
        mask = torch.zeros(*indices.shape[:2], case.s_kv + 1, dtype=torch.bool)
        mask.scatter_(2, torch.where(kept < 0, case.s_kv, kept).long(), value=True)
        x = case.leaves
        call = x["query"], x["key"], indices, SCALE, LATENT
        out = megatron.run_fused_absorbed_sparse_attention(*call, lengths)
        expected = case.attention(mask[..., : case.s_kv])
        assert out.dtype == dtype and out.shape == (case.s_q, case.b, 4, LATENT) and out[1].eq(0).all()
        assert norm_error(out.detach(), expected.detach()) <= TOLERANCES[dtype]
        d_out = torch.randn(out.shape).to(dtype)
        case.assert_gradients(out, expected, "query key", (d_out, d_out.double()))


@pytest.mark.parametrize("sparse_loss", [True, False])
@RELU
@DTYPES
def test_everything_in_one(dtype: torch.dtype, use_relu: bool, sparse_loss: bool) -> None:
    shard = {"use_local_indexer_varlen": True, "cp_size": 2, "packed_seq_params": object(), "local_packed_cp_rank": 1}
    no_bounds = {"varlen_starts": None, "varlen_ends": None}
    for case, changes in (
        (Case(dtype), no_bounds),
        (Case(dtype), {"calculate_per_token_loss": True}),
        (Case(dtype).packed(), {"packed_seq_params": object(), "query_valid_rows": torch.arange(9) % 4 > 0}),
        (Case(dtype, s_q=5, s_kv=14, b=1), shard),
    ):
        output, loss = case.whole(use_relu=use_relu, sparse_loss=sparse_loss, **changes)
        mask = chosen(case.top_k(use_relu=use_relu)[0], case.s_kv)
        expected = case.attention(mask, up=True)
        assert output.dtype == dtype and output.shape == (case.s_q, case.b, 20) and output.is_contiguous()
        assert norm_error(output.detach(), expected.detach()) <= 2 * TOLERANCES[dtype]
        keys = mask if sparse_loss else case.visible.expand_as(mask)
        rows, is_sum = changes.get("query_valid_rows"), changes.get("calculate_per_token_loss", False)
        wanted = case.loss(keys, use_relu, 0.7, rows, is_sum)
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-6)
        case.assert_gradients(loss, wanted, "q k weights")
        d_out = torch.randn(output.shape).to(dtype)
        case.assert_gradients(output, expected, "query key up_v_weight", (d_out, d_out.double()))
        grads = torch.autograd.grad(loss, [case.leaves["query"], case.leaves["key"]], allow_unused=True)
        assert grads == (None, None)


@pytest.mark.parametrize("restride", RESTRIDES)
def test_tensors_of_any_strides(restride: Restride) -> None:
    """Results and gradients are the same as for contiguous tensors."""
    case, results = Case(), []
    entries, lengths = torch.randint(-1, 9, (2, 9, 6), dtype=torch.int32), torch.randint(0, 7, (2, 9)).int()
    rows, contiguous, bounds = torch.rand(2, 9) > 0.5, case.leaves, (case.starts, case.ends)
    for change in (lambda *x: list(x), lambda *x: restrided(restride, *x)):
        case.leaves = dict(zip(contiguous, change(*contiguous.values()), strict=True))
        case.starts, case.ends = change(*bounds)
        table, counts, valid = change(entries, lengths, rows)
        x, options = case.leaves, {"query_valid_rows": valid}
        made = [case.top_k()]
        loss = case.top_k_with_loss(query=x["query"].detach(), key=x["key"].detach(), **options)[2]
        made.append([loss, *torch.autograd.grad(loss, [x[name] for name in ("q", "k", "weights")])])
        out = megatron.run_fused_absorbed_sparse_attention(x["query"], x["key"], table, SCALE, LATENT, counts)
        made.append([out, *torch.autograd.grad(out.square().sum(), [x["query"], x["key"]])])
        for sparse_loss in (True, False):
            output, loss = case.whole(sparse_loss=sparse_loss, **options)
            made.append([output, loss, *torch.autograd.grad(output.square().sum() + loss, list(x.values()))])
        results.append([tensor for tensors in made for tensor in tensors])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # PyTorch computes the up-projection


def test_no_loss_where_none_is_asked_for_or_gradients_are_off() -> None:
    case = Case()
    output, loss = case.whole(loss_coeff=0.0)
    assert loss.eq(0) and loss.shape == () and not loss.requires_grad and output.requires_grad
    with torch.no_grad():
        output, loss = case.whole()
    assert loss.eq(0) and not output.requires_grad


@pytest.mark.parametrize("sparse_loss", [True, False])
def test_targets_of_tensor_parallel_ranks_are_added(monkeypatch: pytest.MonkeyPatch, sparse_loss: bool) -> None:
    """Each of two ranks has half of the heads, and adds the other rank's target to its own."""
    case = Case()
    _, whole = case.whole(sparse_loss=sparse_loss)
    sent: list[Tensor] = []
    received: list[Tensor] = []

    def half(rank: int, reduce: Callable[[Tensor], object]) -> Tensor:
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: (reduce(x), group.size()))
        heads = slice(2 * rank, 2 * rank + 2)
        mine = {"query": case.leaves["query"][:, :, heads], "up_v_weight": case.leaves["up_v_weight"][heads]}
        loss: Tensor = case.whole(sparse_loss=sparse_loss, **mine, pg_collection=SimpleNamespace(tp=ranks(2)))[1]
        return loss

    half(0, lambda x: sent.append(x.clone()))
    received += sent
    loss = half(1, lambda x: x.add_(received.pop(0)))
    assert len(sent) == case.b and not received
    torch.testing.assert_close(loss, whole)


X = torch.zeros
SHAPES: dict[str, Any] = {
    "q of three dimensions": {"q": X(9, 3, 8)},
    "k of another batch": {"k": X(9, 1, 8)},
    "k of another width": {"k": X(9, 2, 4)},
    "weights of other heads": {"weights": X(9, 2, 2)},
    "no starts": {"starts": None},
    "ends of another length": {"ends": X(8, dtype=torch.int32)},
    "fp16": {"q": X(9, 2, 3, 8).half(), "k": X(9, 2, 8).half()},
    "two dtypes": {"k": X(9, 2, 8).bfloat16()},
    "weights of float64": {"weights": X(9, 2, 3).double()},
    "another device": {"weights": X(9, 2, 3, device="meta")},
    "starts on another device": {"starts": X(9, dtype=torch.int32, device="meta")},
    "ends that are no integers": {"ends": X(9)},
    "no sequences": {"q": X(9, 0, 3, 8), "k": X(9, 0, 8), "weights": X(9, 0, 3)},
    "no index heads": {"q": X(9, 2, 0, 8), "weights": X(9, 2, 0)},
    "a device that is none of ours": {
        "q": X(9, 2, 3, 8, device="meta"),
        "k": X(9, 2, 8, device="meta"),
        "weights": X(9, 2, 3, device="meta"),
    },
}
ATTENTION: dict[str, Any] = {
    "query of three dimensions": {"query": X(9, 4, 16)},
    "key of several heads": {"key": X(9, 2, 4, 16)},
    "key of another batch": {"key": X(9, 1, 1, 16)},
    "key of another width": {"key": X(9, 2, 1, 8)},
    "no heads": {"query": X(9, 2, 0, 16)},
    "fp16": {"query": X(9, 2, 4, 16).half(), "key": X(9, 2, 1, 16).half()},
    "two dtypes": {"key": X(9, 2, 1, 16).bfloat16()},
    "another device": {"key": X(9, 2, 1, 16, device="meta")},
}
WHOLE: dict[str, Any] = {
    "attention that is not absorbed": {"absorbed_mla": False},
    "a value": {"value": X(9, 2, 4, 5)},
    "no up-projection": {"up_v_weight": None},
    "one head's up-projection": {"up_v_weight": X(1, 5, 12)},
    "an up-projection of other columns": {"up_v_weight": X(4, 5, 11)},
    "an up-projection of two dimensions": {"up_v_weight": X(20, 12)},
    "positions of keys": {"key_positions": torch.arange(9)},
    "no mask type": {"attn_mask_type": None},
    "another mask": {"attn_mask_type": AttnMaskType.padding},
    "no latent values": {"config": SimpleNamespace()},
    "more latent values than columns": {"config": SimpleNamespace(kv_lora_rank=17)},
    "one bound": {"varlen_ends": None},
    "no bounds of a shard": {"varlen_starts": None, "varlen_ends": None, "cp_size": 2},
    "no bounds of a pack": {"varlen_starts": None, "varlen_ends": None, "packed_seq_params": object()},
    "no bounds and fewer queries": {"varlen_starts": None, "varlen_ends": None, "key": X(10, 2, 1, 16)},
    "fewer index keys": {"k_indexer": X(8, 2, 8)},
    "fewer index queries": {"query": X(8, 2, 4, 16)},
    "fp16 indexer": {"q_indexer": X(9, 2, 3, 8).half(), "k_indexer": X(9, 2, 8).half()},
}


@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES.keys())
def test_declined_selections(change: dict[str, Any]) -> None:
    case = Case()
    assert case.top_k(**change) is None
    assert case.top_k_with_loss(**change) is None


@pytest.mark.parametrize("change", ATTENTION.values(), ids=ATTENTION.keys())
def test_declined_attention(change: dict[str, Any]) -> None:
    case = Case()
    assert case.top_k_with_loss(**change) is None
    assert case.whole(**change) is None
    call = {name: case.leaves[name] for name in ("query", "key")} | change
    indices = torch.zeros(2, 9, 4, dtype=torch.int32)
    assert (
        megatron.run_fused_absorbed_sparse_attention(**call, topk_indices=indices, softmax_scale=1.0, v_channels=12)
        is None
    )


@pytest.mark.parametrize("change", WHOLE.values(), ids=WHOLE.keys())
def test_what_else_the_whole_declines(change: dict[str, Any]) -> None:
    assert Case().whole(**change) is None


def test_declined_entries() -> None:
    case = Case()
    call = case.leaves["query"], case.leaves["key"]
    indices = torch.zeros(2, 9, 4, dtype=torch.int32)
    attend = megatron.run_fused_absorbed_sparse_attention
    assert attend(*call, indices, 1.0, 12) is not None
    assert attend(*call, indices[0], 1.0, 12) is None
    assert attend(*call, indices[:, :8], 1.0, 12) is None
    assert attend(*call, indices.to("meta"), 1.0, 12) is None
    assert attend(*call, indices, 1.0, 0) is None
    assert attend(*call, indices, 1.0, 17) is None
    assert attend(*call, indices, 1.0, 12, torch.zeros(9, 2, dtype=torch.int32)) is None
    assert attend(*call, indices.float(), 1.0, 12) is None
    assert attend(*call, indices, 1.0, 12, torch.zeros(2, 9)) is None
    no_sequences = call[0][:, :0], call[1][:, :0], indices[:0]
    assert attend(*no_sequences, 1.0, 12) is None


def test_entries_of_int64_do_not_wrap() -> None:
    """2³² + 1 is no key, and must not become key 1."""
    case, beyond = Case(), 2**32 + 1
    call = case.leaves["query"], case.leaves["key"]
    indices = torch.randint(-1, 9, (2, 9, 4))
    indices[:, :, 0] = beyond
    lengths = torch.tensor([beyond, 3]).repeat_interleave(9).view(2, 9)
    expected = megatron.run_fused_absorbed_sparse_attention(
        *call, indices.masked_fill(indices == beyond, -1).int(), 1.0, 12, lengths.clamp(max=4).int()
    )
    assert torch.equal(megatron.run_fused_absorbed_sparse_attention(*call, indices, 1.0, 12, lengths), expected)


@pytest.mark.parametrize("use_relu", [True, False])
@pytest.mark.parametrize("rows", [None, torch.arange(9) % 4 > 0])
def test_the_default_dtype_does_not_matter(rows: Tensor | None, use_relu: bool) -> None:
    """Megatron-LM builds models with the parameters' dtype as the default dtype."""
    case = Case()
    results = []
    for default in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            results.append(case.whole(query_valid_rows=rows, use_relu=use_relu))
            assert case.whole(loss_coeff=0.0)[1].dtype == torch.float32
        finally:
            torch.set_default_dtype(torch.float32)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_rows_that_do_not_fit_are_an_error_as_there() -> None:
    with pytest.raises(
        ValueError, match=r"hopwell.compat.megatron: query_valid_rows must be \[9\], \[1, 9\] or \[2, 9\]; got \[8\]"
    ):
        Case().top_k_with_loss(query_valid_rows=torch.ones(8, dtype=torch.bool))


def test_a_negative_choice_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"hopwell.compat.megatron: index_topk must be at least 0; got -1"):
        Case().top_k(index_topk=-1)


@pytest.mark.parametrize("sparse_loss", [True, False])
def test_bounds_of_int64_do_not_wrap(sparse_loss: bool) -> None:
    """2³² as a bound means all keys, and must not become 0."""
    case = Case()
    case.starts, case.ends = torch.zeros(9, dtype=torch.int64), torch.full((9,), 9)
    expected = case.whole(sparse_loss=sparse_loss)
    case.ends = torch.full((9,), 2**32)
    for one, other in zip(case.whole(sparse_loss=sparse_loss), expected, strict=True):
        assert torch.equal(one, other)


def test_the_hooks_are_those_that_the_dispatcher_looks_for() -> None:
    assert [name for name in megatron.__all__ if name.startswith("run_fused_")] == [
        "run_fused_absorbed_sparse_attention",
        "run_fused_dsa_attention",
        "run_fused_qk_topk",
        "run_fused_qk_topk_with_loss",
    ]
