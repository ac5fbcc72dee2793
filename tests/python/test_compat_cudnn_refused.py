"""Invalid arguments of `hopwell.compat.cudnn`: each wrapper names the argument, before anything is overwritten."""

from typing import Any

import pytest
import torch
from cudnn_inputs import strided
from hopwell.compat.cudnn import DSA, TupleDict
from torch import Tensor
from torch_inputs import RESTRIDES, Restride, restrided

Q, K, W, E = torch.zeros(2, 4, 3, 16), torch.zeros(2, 5, 1, 16), torch.zeros(2, 4, 3), torch.zeros(2, 4, 6)
ENTRIES, F8 = torch.zeros(2, 4, 6, dtype=torch.int32), Q.to(torch.float8_e4m3fn)
CALLS: dict[str, dict[str, Any]] = {
    "indexer_forward_wrapper": {"q": Q, "k": K, "w": W},
    "dense_indexer_score_recompute_wrapper": {"q": Q, "k": K, "weights": W},
    "dense_attn_score_recompute_wrapper": {"q": Q, "k": K, "lse": W, "softmax_scale": 1.0},
    "indexer_top_k_wrapper": {
        "input_values": torch.zeros(4, 9),
        "seq_lens": torch.zeros(4, dtype=torch.int32),
        "top_k": 2,
    },
    "sparse_attn_score_recompute_wrapper": {
        "q_attn": Q,
        "k_attn": K[:, :, 0],
        "lse": W,
        "topk_indices": ENTRIES,
        "softmax_scale": 1.0,
    },
    "sparse_indexer_score_recompute_wrapper": {
        "q_indexer": Q,
        "k_indexer": K[:, :, 0],
        "weights": W,
        "topk_indices": ENTRIES,
    },
    "indexer_backward_wrapper": {
        "index_q": Q,
        "weights": W,
        "index_k": K[:, :, 0],
        "attn_score": E,
        "index_score": E.clone(),
        "topk_indices": ENTRIES,
        "grad_loss": 1.0,
    },
    "dense_indexer_backward_wrapper": {
        "index_q": Q,
        "weights": W,
        "index_k": K[:, :, 0],
        "attn_score": torch.zeros(2, 4, 5),
        "attn_l1norm": torch.zeros(2, 4),
        "index_score": torch.zeros(2, 4, 5),
        "index_lse": torch.zeros(2, 4),
        "grad_loss": 1.0,
    },
    "sparse_attention_backward_wrapper": {
        "q": Q[0],
        "kv": K[0, :, 0],
        "out": Q[0],
        "dout": Q[0],
        "lse": W[0],
        "attn_sink": torch.zeros(3),
        "topk_idxs": ENTRIES[0],
    },
    "sparse_attention_score_recompute": {"q": Q[0], "kv": K[0, :, 0], "lse": W[0], "indices": ENTRIES[0]},
    "sparse_attention_forward_wrapper": {"q": Q[0], "kv": K[0, :, 0], "topk_idxs": ENTRIES[0]},
    "indexer_forward_top_k_wrapper": {"q": Q, "k": K, "w": W, "top_k": 2},
    "local_to_global_wrapper": {"local_indices": ENTRIES, "seqlen_k": 5},
    "compactify_wrapper": {"indices": ENTRIES},
}
CU = torch.tensor([0, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    ("wrapper", "change", "message"),
    [
        ("indexer_forward_wrapper", {"q": Q[0]}, r"q must be \[B, S_q, heads, d\]; got \[4, 3, 16\]"),
        ("indexer_forward_wrapper", {"k": K[:1]}, r"k must be \[B=2, S_k, heads, d\]; got \[1, 5, 1, 16\]"),
        ("indexer_forward_wrapper", {"k": Q}, r"k must be \[…, S_k, 1, d\]: one head of index keys; got \[2, 4, 3, 16"),
        ("indexer_forward_wrapper", {"w": W[:, :, :2]}, r"w must be \[2, 4, 3\]; got \[2, 4, 2\]"),
        ("indexer_forward_wrapper", {"ratio": 0}, "ratio must be at least 1; got 0"),
        ("indexer_forward_wrapper", {"qhead_per_kv_head": 2}, "qhead_per_kv_head must be 3 or None; got 2"),
        ("indexer_forward_wrapper", {"precision": "mxfp8"}, r"precision must be bf16 \(no block scales\); got mxfp8"),
        ("indexer_forward_wrapper", {"k_scale": W}, "q_scale and k_scale must be None with precision bf16"),
        ("indexer_forward_wrapper", {"precision": "fp8"}, r"q_scale must be float32 \[2, 4, 3\] with precision fp8"),
        ("indexer_forward_wrapper", {"out": torch.zeros(2, 4, 4)}, r"out must be \[2, 4, 5\]; got \[2, 4, 4\]"),
        ("indexer_forward_wrapper", {"lse_out": torch.zeros(2, 5)}, r"lse_out must be \[2, 4\]; got \[2, 5\]"),
        ("indexer_forward_wrapper", {"cu_seqlens_q": CU}, "cu_seqlens_k must be given with cu_seqlens_q; got None"),
        (
            "indexer_forward_wrapper",
            {"q_causal_offsets": torch.zeros(3, dtype=torch.int32)},
            r"q_causal_offsets must be \[B=2\]; got \[3\]",
        ),
        ("indexer_forward_wrapper", {"q_causal_offsets": torch.zeros(2)}, "q_causal_offsets must be int32"),
        (
            "indexer_forward_wrapper",
            {"q": Q[0], "k": K[0], "w": W[0], "cu_seqlens_q": CU, "cu_seqlens_k": CU.long()},
            "cu_seqlens_k must be int32; got torch.int64",
        ),
        (
            "indexer_forward_wrapper",
            {"q": Q[0], "k": K[0], "w": W[0], "cu_seqlens_q": CU, "cu_seqlens_k": CU[:1]},
            r"cu_seqlens_k must be \[offsets=2\]; got \[1\]",
        ),
        (
            "indexer_forward_wrapper",
            {"cu_seqlens_k": CU},
            r"cu_seqlens_k must be given with cu_seqlens_q; got torch.int32",
        ),
        ("indexer_forward_wrapper", {"q": Q.double()}, "q must be torch.bfloat16 or torch.float32; got torch.float64"),
        ("indexer_forward_wrapper", {"q": F8, "k": F8[:, :, :1]}, "q must be torch.bfloat16 or torch.float32; got"),
        ("indexer_forward_wrapper", {"k": K.bfloat16()}, "k must be torch.float32 as q is; got torch.bfloat16"),
        ("indexer_forward_wrapper", {"out": torch.zeros(2, 4, 5).int()}, "out must be torch.float32; got torch.int32"),
        (
            "indexer_forward_wrapper",
            {"lse_out": torch.zeros(2, 4).int()},
            "lse_out must be torch.float32; got torch.int",
        ),
        (
            "indexer_forward_wrapper",
            {"precision": "fp8", "q_scale": W, "k_scale": K[..., 0]},
            "q must be torch.float8_e4m3fn; got torch.float32",
        ),
        (
            "indexer_forward_wrapper",
            {"precision": "fp8", "q_scale": W.double(), "k_scale": K[..., 0]},
            r"q_scale must be float32 \[2, 4, 3\] with precision fp8; got torch.float64 \[2, 4, 3\]",
        ),
        (
            "indexer_forward_wrapper",
            {"q": Q[0], "k": K[0], "w": W[0], "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_k": -1},
            "max_seqlen_k must be at least 0; got -1",
        ),
        (
            "dense_indexer_score_recompute_wrapper",
            {"denom_out": torch.zeros(2, 4).int()},
            "denom_out must be torch.float",
        ),
        ("dense_attn_score_recompute_wrapper", {"out": torch.zeros(2, 4, 5).half()}, "out must be torch.float32; got"),
        ("sparse_attn_score_recompute_wrapper", {"out": E[None]}, r"out must be \[2, 4, 6\]; got \[1, 2, 4, 6\]"),
        ("sparse_attn_score_recompute_wrapper", {"out": ENTRIES}, "out must be torch.float32; got torch.int32"),
        (
            "sparse_attn_score_recompute_wrapper",
            {"topk_indices": E},
            "topk_indices must be int32 or int64; got torch.fl",
        ),
        ("sparse_attn_score_recompute_wrapper", {"topk_length": W[..., 0]}, "topk_length must be int32 or int64; got"),
        ("sparse_indexer_score_recompute_wrapper", {"out": E[None]}, r"out must be \[2, 4, 6\]; got \[1, 2, 4, 6\]"),
        ("indexer_backward_wrapper", {"topk_indices": E}, "topk_indices must be int32 or int64; got torch.float32"),
        ("indexer_backward_wrapper", {"index_q": Q.half()}, "index_q must be torch.bfloat16 or torch.float32; got"),
        ("dense_indexer_backward_wrapper", {"index_k": K}, r"index_k must be \[…, S_k, D=16\]; got \[2, 5, 1, 16\]"),
        ("indexer_forward_top_k_wrapper", {"out_indices": ENTRIES}, r"out_indices must be \[2, 4, 2\]; got \[2, 4, 6"),
        ("indexer_forward_top_k_wrapper", {"out_indices": E[..., :2]}, "out_indices must be torch.int32; got torch.fl"),
        ("indexer_forward_top_k_wrapper", {"out_logits": E[..., :2].int()}, "out_logits must be torch.float32; got"),
        (
            "indexer_forward_top_k_wrapper",
            {"softmax_out": E[..., :3]},
            r"softmax_out must be \[2, 4, 2\]; got \[2, 4, 3",
        ),
        ("indexer_forward_top_k_wrapper", {"lse_out": E[..., 0].half()}, "lse_out must be torch.float32; got"),
        (
            "indexer_forward_top_k_wrapper",
            {"q": F8, "k": F8[:, :, :1]},
            "q must be torch.bfloat16 or torch.float32; got",
        ),
        (
            "local_to_global_wrapper",
            {"local_indices": ENTRIES[0], "cu_seqlens_q": CU, "cu_seqlens_k": CU[:1]},
            r"cu_seqlens_k must be \[offsets=2\]; got \[1\]",
        ),
        ("sparse_attention_backward_wrapper", {"dq": Q}, r"dq must be \[4, 3, 16\]; got \[2, 4, 3, 16\]"),
        ("sparse_attention_backward_wrapper", {"dq": Q[0].int()}, "dq must be torch.float32; got torch.int32"),
        ("sparse_attention_backward_wrapper", {"dkv": K[0]}, r"dkv must be \[5, 16\]; got \[5, 1, 16\]"),
        (
            "sparse_attention_backward_wrapper",
            {"dkv": K[0, :, 0].half()},
            "dkv must be torch.float32; got torch.float16",
        ),
        ("sparse_attention_score_recompute", {"topk_length": CU[:1]}, r"topk_length must be \[S_q=4\]; got \[1\]"),
        (
            "sparse_attention_score_recompute",
            {"topk_length": W[0, :, 0]},
            "topk_length must be int32; got torch.float32",
        ),
        ("dense_indexer_score_recompute_wrapper", {"precision": "mxfp4"}, "precision must be bf16"),
        ("dense_indexer_score_recompute_wrapper", {"denom_out": torch.zeros(4)}, r"denom_out must be \[2, 4\]"),
        ("dense_attn_score_recompute_wrapper", {"precision": "mxfp8"}, "precision must be bf16"),
        ("dense_attn_score_recompute_wrapper", {"lse": W[:, :3]}, r"lse must be \[2, 4, 3\]; got \[2, 3, 3\]"),
        ("dense_attn_score_recompute_wrapper", {"k": K[..., :8]}, r"k must be \[…, S_k, H_kv, D\]"),
        ("dense_attn_score_recompute_wrapper", {"k": K.expand(-1, -1, 2, -1)}, "k must be of heads that divide 3; got"),
        ("dense_attn_score_recompute_wrapper", {"qhead_per_kv_head": 1}, "qhead_per_kv_head must be 3 or None; got 1"),
        ("indexer_top_k_wrapper", {"input_values": torch.zeros(4, 9).double()}, "input_values must be float32, bfloat"),
        ("indexer_top_k_wrapper", {"input_values": torch.zeros(9)}, r"input_values must be \[n_rows, num_cols\]"),
        ("indexer_top_k_wrapper", {"top_k": 0}, "top_k must be at least 1; got 0"),
        ("indexer_top_k_wrapper", {"next_n": 0}, "next_n must be at least 1; got 0"),
        ("indexer_top_k_wrapper", {"next_n": 3}, "input_values must be of a multiple of next_n = 3 rows; got 4"),
        ("indexer_top_k_wrapper", {"next_n": 2}, r"seq_lens must be \[n_rows_by_next_n=2\]; got \[4\]"),
        ("indexer_top_k_wrapper", {"seq_lens": torch.zeros(4)}, "seq_lens must be int32; got torch.float32"),
        ("indexer_top_k_wrapper", {"tie_break": 3}, "tie_break must be 0, 1 or 2; got 3"),
        ("sparse_attn_score_recompute_wrapper", {"k_attn": K}, r"k must be \[B=2, S_k, D=16\]; got \[2, 5, 1, 16\]"),
        ("sparse_attn_score_recompute_wrapper", {"lse": W[:1]}, r"lse must be \[2, 4, 3\]; got \[1, 4, 3\]"),
        (
            "sparse_attn_score_recompute_wrapper",
            {"topk_indices": ENTRIES[0]},
            r"topk_indices must be \[B=2, S_q=4, topk\]; got \[4, 6\]",
        ),
        (
            "sparse_attn_score_recompute_wrapper",
            {"topk_length": torch.zeros(8, dtype=torch.int32)},
            r"topk_length must be \[B=2, S_q=4\]; got \[8\]",
        ),
        ("sparse_indexer_score_recompute_wrapper", {"weights": W[0]}, r"weights must be \[B=2, S_q=4, H=3\]"),
        ("indexer_backward_wrapper", {"backend": "sm90"}, "backend must be default or sm100_v2; got sm90"),
        ("indexer_backward_wrapper", {"weights": W[..., :1]}, r"weights must be \[B=2, S_q=4, H=3\]; got \[2, 4, 1\]"),
        ("indexer_backward_wrapper", {"attn_score": E.double()}, "attn_score must be float32; got torch.float64"),
        ("indexer_backward_wrapper", {"index_score": E[..., :5]}, r"index_score must be \[B=2, S_q=4, topk=6\]"),
        (
            "indexer_backward_wrapper",
            {"weights": W.bfloat16(), "d_weights": W},
            "d_weights must be torch.bfloat16; got torch.float32",
        ),
        (
            "indexer_backward_wrapper",
            {"weights": W.bfloat16(), "d_weights": W.half(), "backend": "sm100_v2"},
            "d_weights must be torch.bfloat16 or torch.float32; got torch.float16",
        ),
        (
            "indexer_backward_wrapper",
            {"attn_score": strided(2, 4, 6)},
            r"attn_score must be contiguous; got strides \[48, 12, 2\]",
        ),
        (
            "indexer_backward_wrapper",
            {"index_score": E.mT.contiguous().mT},
            r"index_score must be contiguous; got strides \[24, 1, 4\]",
        ),
        (
            "dense_indexer_backward_wrapper",
            {"weights": W.bfloat16(), "d_weights": W},
            "d_weights must be torch.bfloat16; got torch.float32",
        ),
        (
            "indexer_backward_wrapper",
            {"d_index_q": Q.double()},
            "d_index_q must be torch.float32; got torch.float64",
        ),
        ("indexer_backward_wrapper", {"d_index_k": K}, r"d_index_k must be \[2, 5, 16\]; got \[2, 5, 1, 16\]"),
        (
            "dense_indexer_backward_wrapper",
            {"d_weights": W.half()},
            "d_weights must be torch.float32; got torch.float16",
        ),
        ("indexer_forward_top_k_wrapper", {"top_k": 0}, "top_k must be at least 1; got 0"),
        ("indexer_forward_top_k_wrapper", {"w": W[0]}, r"w must be \[2, 4, 3\]; got \[4, 3\]"),
        ("indexer_forward_top_k_wrapper", {"precision": "fp8"}, r"precision must be bf16 \(no block scales\); got fp8"),
        ("local_to_global_wrapper", {"local_indices": E}, "local_indices must be int32 or int64; got torch.float32"),
        ("local_to_global_wrapper", {"local_indices": ENTRIES[0]}, r"local_indices must be \[B, S_q, topk\]; got"),
        ("local_to_global_wrapper", {"cu_seqlens_q": CU}, "cu_seqlens_k must be given with cu_seqlens_q; got None"),
        ("compactify_wrapper", {"indices": ENTRIES.long()}, "indices must be int32; got torch.int64"),
        ("compactify_wrapper", {"indices": ENTRIES[0, 0]}, r"indices must be \[M, topk\] or \[B, S, topk\]; got \[6\]"),
        ("dense_indexer_backward_wrapper", {"index_lse": W}, r"index_lse must be float32 \[2, 4\]"),
        ("dense_indexer_backward_wrapper", {"attn_score": E}, r"attn_score must be float32 \[2, 4, 5\]"),
        ("dense_indexer_backward_wrapper", {"weights": W[0]}, r"weights must be \[2, 4, 3\]; got \[4, 3\]"),
        ("sparse_attention_backward_wrapper", {"q_cluster_mode": "on"}, "q_cluster_mode must be off or adaptive_pair"),
        ("sparse_attention_backward_wrapper", {"out": Q}, r"out must be \[S_q=4, H=3, D_v\]; got \[2, 4, 3, 16\]"),
        ("sparse_attention_forward_wrapper", {"indexer_topk": 512}, "indexer_topk must be 0; got 512"),
    ],
)
def test_wrong_arguments(wrapper: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{wrapper}: {message}"):
        getattr(DSA, wrapper)(**{**CALLS[wrapper], **change})


@pytest.mark.parametrize("wrapper", sorted(CALLS.keys() - {"sparse_attention_forward_wrapper"}))  # it needs 512 columns
def test_what_is_changed_there_is_right_otherwise(wrapper: str) -> None:
    call = {name: x.clone() if isinstance(x, Tensor) else x for name, x in CALLS[wrapper].items()}
    assert isinstance(getattr(DSA, wrapper)(**call), TupleDict)


@pytest.mark.parametrize("restride", RESTRIDES)
@pytest.mark.parametrize("wrapper", sorted(CALLS.keys() - {"sparse_attention_forward_wrapper"}))
def test_arguments_of_any_strides(wrapper: str, restride: Restride) -> None:
    """Results have the bits of contiguous tensors. Only the scores of one wrapper must be contiguous."""
    call = {
        name: (torch.rand(x.shape) if x.is_floating_point() else torch.randint(0, 5, x.shape, dtype=x.dtype))
        if isinstance(x, Tensor)
        else x
        for name, x in CALLS[wrapper].items()
    }
    if wrapper == "sparse_attention_backward_wrapper":
        call["topk_length"] = torch.tensor([6, 0, 3, 2], dtype=torch.int32)
    changed = dict(zip(call, restrided(restride, *call.values()), strict=True))
    if wrapper == "indexer_backward_wrapper":
        changed |= {name: call[name].clone() for name in ("attn_score", "index_score")}
    results = [getattr(DSA, wrapper)(**given) for given in (call, changed)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("restride", RESTRIDES)
def test_sparse_attention_of_any_strides(restride: Restride) -> None:
    """It has gradients, and needs 512 columns."""
    given = [torch.randn(*shape).requires_grad_() for shape in ((4, 3, 512), (5, 512), (3,))]
    given += [torch.randint(-1, 5, (4, 6), dtype=torch.int32), torch.tensor([6, 0, 3, 2], dtype=torch.int32)]
    results = []
    for q, kv, sink, entries, lengths in (given, restrided(restride, *given)):
        made = DSA.sparse_attention(q, kv, entries, sink, topk_length=lengths)
        results.append([*made, *torch.autograd.grad(made["out"].square().sum(), (q, kv, sink))])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_refused_argument_leaves_the_scores_as_they_are() -> None:
    for wrapper, overwritten in (
        ("indexer_backward_wrapper", "attn_score"),
        ("dense_indexer_backward_wrapper", "index_score"),
    ):
        scores = torch.rand(CALLS[wrapper][overwritten].shape)
        changes = [{"d_weights": W.double()}, {"index_q": Q.double()}, {"index_k": K[:, :, 0].bfloat16()}]
        if wrapper == "indexer_backward_wrapper":
            changes.append({"index_score": strided(2, 4, 6)})
        for change in changes:
            call = {**CALLS[wrapper], overwritten: scores.clone(), **change}
            with pytest.raises(ValueError, match=f"^{wrapper}: {next(iter(change))} must be"):
                getattr(DSA, wrapper)(**call)
            assert torch.equal(call[overwritten], scores)
