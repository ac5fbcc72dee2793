"""What benchmarks/peers.py compares: every operator, and the calls that do the same in other packages.

A function here makes random inputs of one shape and gives Hopwell's call and those of the peers. A peer's package is
imported when its call is prepared, so that it may be missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import hopwell
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLD_BYTES = 200e6  # what the calls of a graph read together, at least; larger than any L2

Call = Callable[[int], Any]  # runs on the i-th copy of the inputs
Read = Callable[[Any], list[Tensor]]  # what is compared of its results


def first(n: int) -> Read:
    return lambda results: list(results)[:n]


@dataclass
class Peer:
    name: str
    prepare: Callable[[], Call]  # imports the package
    read: Read
    note: str = ""  # what it does otherwise than Hopwell


@dataclass
class Problem:
    ours: Call
    read: Read
    peers: list[Peer]
    copies: int = 1
    operations: float = 0
    bound: float = 1e-2  # of the error's norm over the result's; both sides round to bf16


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def distinct(rows: int, n: int, topk: int) -> Tensor:
    """Each row: topk of 0 … n − 1 in random order."""
    chunks = [torch.rand(min(256, rows - i), n, device=DEVICE).topk(topk).indices.int() for i in range(0, rows, 256)]
    return torch.cat(chunks)


def flash_mla() -> Any:
    try:
        return import_module("flash_mla")
    except ImportError:  # vLLM brings the same kernels
        return import_module("vllm.third_party.flashmla.flash_mla_interface")


def cudnn_dsa() -> Any:
    return import_module("cudnn.deepseek_sparse_attention")


def sparse_inputs(s_q: int, h_q: int, s_kv: int, topk: int, d: int) -> SimpleNamespace:
    q, kv = randn(s_q, h_q, d), randn(s_kv, 1, d)
    return SimpleNamespace(q=q, kv=kv, indices=distinct(s_q, s_kv, topk), scale=d**-0.5)


def sparse_mla_forward(s_q: int = 4096, h_q: int = 128, s_kv: int = 8192, topk: int = 2048, d: int = 576) -> Problem:
    x = sparse_inputs(s_q, h_q, s_kv, topk, d)

    def flashmla() -> Call:
        function, indices = flash_mla().flash_mla_sparse_fwd, x.indices[:, None]
        return lambda _: function(x.q, x.kv, indices, x.scale, 512)

    def pytorch() -> Call:
        def sdpa(_: int) -> list[Tensor]:
            out = torch.empty(s_q, h_q, 512, dtype=x.q.dtype, device=DEVICE)
            for i in range(0, s_q, 128):
                k = x.kv[:, 0][x.indices[i : i + 128].long()][:, None]
                q = x.q[i : i + 128, None]
                out[i : i + 128] = torch.nn.functional.scaled_dot_product_attention(q, k, k[..., :512])[:, 0]
            return [out]

        return sdpa

    return Problem(
        lambda _: hopwell.sparse_mla_forward(x.q, x.kv, x.indices, x.scale),
        first(1),
        [
            Peer("FlashMLA", flashmla, first(1)),
            Peer("torch gather + SDPA", pytorch, first(1), "128 queries at a time"),
        ],
        operations=2 * s_q * h_q * topk * (d + 512),
    )


def sparse_mla_backward(s_q: int = 4096, h_q: int = 128, s_kv: int = 8192, topk: int = 2048, d: int = 576) -> Problem:
    x = sparse_inputs(s_q, h_q, s_kv, topk, d)
    out, _, lse = hopwell.sparse_mla_forward(x.q, x.kv, x.indices, x.scale)
    d_out = randn(s_q, h_q, 512)

    def cudnn() -> Call:
        dsa = cudnn_dsa()
        kv, sink = x.kv[:, 0], torch.full((h_q,), -1e30, device=DEVICE)
        return lambda _: dsa.sparse_attention_backward_wrapper(
            x.q, kv, out, d_out, lse, sink, x.indices, softmax_scale=x.scale
        )

    return Problem(
        lambda _: hopwell.sparse_mla_backward(d_out, x.q, x.kv, x.indices, out, lse, x.scale),
        first(2),
        [
            Peer(
                "cuDNN front end",
                cudnn,
                lambda r: [r["dq"], r["dkv"][:, None]],
                "writes dKV in bf16, always has a sink",
            )
        ],
        operations=2 * s_q * h_q * topk * (3 * d + 2 * 512),
        bound=2e-2,
    )


def attention_distribution(
    s_q: int = 4096, h_q: int = 128, s_kv: int = 8192, topk: int = 2048, d: int = 576
) -> Problem:
    x = sparse_inputs(s_q, h_q, s_kv, topk, d)
    lse = hopwell.sparse_mla_forward(x.q, x.kv, x.indices, x.scale)[2]

    def cudnn() -> Call:
        dsa = cudnn_dsa()
        q, kv, lse_, indices = x.q[None], x.kv[:, 0][None], lse[None], x.indices[None]
        return lambda _: dsa.sparse_attn_score_recompute_wrapper(q, kv, lse_, indices, x.scale, qhead_per_kv_head=h_q)

    return Problem(
        lambda _: [hopwell.attention_distribution(x.q, x.kv, x.indices, lse, x.scale, normalize="l1")],
        first(1),
        [Peer("cuDNN front end", cudnn, lambda r: [r["target"]])],
        operations=2 * s_q * h_q * topk * d,
    )


def index_inputs(s_q: int, s_kv: int, h: int, d: int) -> SimpleNamespace:
    return SimpleNamespace(q=randn(s_q, h, d), k=randn(s_kv, d), w=randn(s_q, h) * (h * d) ** -0.5)


def selected(indices: Tensor, scores: Tensor) -> list[Tensor]:
    """In an order that does not depend on the package."""
    return [scores.flatten(0, -2).float().sort().values, indices.flatten(0, -2).sort().values]


def lightning_indexer(s_q: int = 512, s_kv: int = 8192, h: int = 64, topk: int = 2048, d: int = 128) -> Problem:
    x = index_inputs(s_q, s_kv, h, d)

    def pytorch() -> Call:
        def scores_and_topk(_: int) -> Any:
            dots = (x.q.flatten(0, 1) @ x.k.T).view(s_q, h, s_kv).relu_()
            return torch.bmm(x.w[:, None], dots)[:, 0].topk(topk, sorted=False)

        return scores_and_topk

    def cudnn() -> Call:
        dsa = cudnn_dsa()
        q, k, w = x.q[None], x.k[None, :, None], x.w[None]
        all_keys = torch.full((1,), s_kv, dtype=torch.int32, device=DEVICE)  # its causal mask hides none
        lengths = all_keys.expand(s_q).contiguous()

        def scores_and_topk(_: int) -> Any:
            scores = dsa.indexer_forward_wrapper(q, k, w, ratio=1, q_causal_offsets=all_keys)["scores"]
            return dsa.indexer_top_k_wrapper(scores.view(s_q, s_kv), lengths, topk)

        return scores_and_topk

    return Problem(
        lambda _: hopwell.lightning_indexer(x.q, x.k, x.w, topk),
        lambda r: selected(*r),
        [
            Peer("cuDNN front end", cudnn, lambda r: selected(r["indices"], r["values"]), "stores all scores"),
            Peer("torch", pytorch, lambda r: selected(r[1], r[0]), "stores all products, rounded to bf16"),
        ],
        operations=2 * s_q * s_kv * h * d,
        bound=2e-2,
    )


def lightning_indexer_backward(
    s_q: int = 512, s_kv: int = 8192, h: int = 64, topk: int = 2048, d: int = 128
) -> Problem:
    x = index_inputs(s_q, s_kv, h, d)
    indices, target = distinct(s_q, s_kv, topk), torch.randn(s_q, topk, device=DEVICE).softmax(-1)

    def cudnn() -> Call:
        dsa = cudnn_dsa()
        q, k, w, entries, one = x.q[None], x.k[None], x.w[None], indices[None], torch.ones(1, device=DEVICE)
        signal, d_k = torch.empty_like(target)[None], torch.empty(1, s_kv, d, device=DEVICE)

        def predict_and_backward(_: int) -> Any:
            predicted = dsa.sparse_indexer_score_recompute_wrapper(q, k, w, entries, qhead_per_kv_head=h)["predict"]
            signal.copy_(target)  # it is overwritten
            return dsa.indexer_backward_wrapper(
                q, w, k, signal, predicted, entries, one, loss_coeff=float(s_q), d_index_k=d_k
            )

        return predict_and_backward

    return Problem(
        lambda _: hopwell.lightning_indexer_backward(target, x.q, x.k, x.w, indices),
        lambda r: list(r)[1:],
        [
            Peer(
                "cuDNN front end",
                cudnn,
                lambda r: [r["d_index_q"], r["d_index_k"], r["d_weights"]],
                "recompute of the scores, copy of the target, backward; no loss",
            )
        ],
        operations=3 * 2 * s_q * topk * h * d,
        bound=2e-2,
    )


def paged_attention(
    b: int = 64, context: int = 4096, h_q: int = 32, h_kv: int = 32, d: int = 128, longest: int = 0, shortest: int = 0
) -> Problem:
    """No bias. `shortest`: lengths from there to `context`; `longest`: the length of the first sequence."""
    block = 16
    lengths = [context] * b
    if shortest:
        lengths = [shortest + (context - shortest) * (i * 37 % b) // max(1, b - 1) for i in range(b)]
    lengths[0] = longest or lengths[0]
    pages = [-(-n // block) for n in lengths]
    total, widest = sum(pages), max(pages)
    copies = max(1, round(COLD_BYTES / (4 * total * block * h_kv * d)))
    q, caches = randn(b, h_q, d), [randn(2, total, block, h_kv, d).unbind() for _ in range(copies)]
    order = torch.randperm(total, device=DEVICE).int()
    ends = torch.tensor(pages).cumsum(0).tolist()
    rows = [order[end - n : end] for end, n in zip(ends, pages, strict=True)]
    tables = torch.stack([torch.nn.functional.pad(row, (0, widest - len(row))) for row in rows])
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)

    def flashinfer() -> Call:
        wrapper_class = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
        workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = wrapper_class(workspace, "NHD", use_tensor_cores=h_q >= 4 * h_kv)
        begins = torch.tensor([0, *ends], dtype=torch.int32)
        last = torch.tensor([(n - 1) % block + 1 for n in lengths], dtype=torch.int32)
        wrapper.plan(
            begins.to(DEVICE), order, last.to(DEVICE), h_q, h_kv, d, block,
            q_data_type=q.dtype, kv_data_type=q.dtype, sm_scale=d**-0.5,
        )  # fmt: skip
        return lambda i: [wrapper.run(q, caches[i])]

    def pytorch() -> Call:
        if len(set(lengths)) > 1:
            raise ValueError("not for sequences of several lengths")
        index, x = tables.long(), q[:, :, None]
        k, v = (
            [pair[j][index].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for pair in caches] for j in (0, 1)
        )
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return lambda i: [sdpa(x, k[i], v[i], enable_gqa=h_q > h_kv)[:, :, 0]]

    return Problem(
        lambda i: hopwell.paged_attention(q, caches[i][0], caches[i][1], tables, context_lens, d**-0.5),
        first(1),
        [
            Peer("FlashInfer", flashinfer, first(1), "planned beforehand for these lengths"),
            Peer("torch SDPA", pytorch, first(1), "contiguous K and V, no pages"),
        ],
        copies=copies,
    )


def nvfp4_linear(rows: int = 28672, k: int = 4096, n: int = 1) -> Problem:
    copies = max(1, round(COLD_BYTES / (rows * k * 9 / 16)))
    weights = [hopwell.nvfp4_quantize(randn(rows, k)) for _ in range(copies)]
    x = randn(n, k)

    def pytorch() -> Call:
        dense = [hopwell.nvfp4_dequantize(*w, dtype="bfloat16") for w in weights]
        return lambda i: [torch.nn.functional.linear(x, dense[i])]

    def marlin() -> Call:
        utilities = "vllm.model_executor.layers.quantization.utils.marlin_utils"
        marlin_utils, marlin_utils_fp4 = import_module(utilities), import_module(f"{utilities}_fp4")
        layers = []
        for codes, scales, factor in weights:
            layer: Any = torch.nn.Module()
            layer.output_size_per_partition, layer.input_size_per_partition = rows, k
            layer.params_dtype = x.dtype
            for name, value in (("", codes), ("_scale", scales.view(torch.float8_e4m3fn)), ("_global_scale", factor)):
                setattr(layer, f"weight{name}", torch.nn.Parameter(value, requires_grad=False))
            marlin_utils_fp4.prepare_fp4_layer_for_marlin(layer)
            layers.append((layer.weight, layer.weight_scale, layer.weight_global_scale))
        workspace = marlin_utils.marlin_make_workspace_new(x.device)
        return lambda i: [marlin_utils_fp4.apply_fp4_marlin_linear(x, *layers[i], workspace, rows, k)]

    return Problem(
        lambda i: [hopwell.nvfp4_linear(x, *weights[i])],
        first(1),
        [
            Peer("torch F.linear, bf16", pytorch, first(1), "weights of 16 bits: 3.6 times as many bytes"),
            Peer("vLLM Marlin", marlin, first(1)),
        ],
        copies=copies,
    )


Shape = dict[str, int]


@dataclass
class Operator:
    problem: Callable[..., Problem]
    shapes: list[Shape]
    tiny: Shape = field(default_factory=dict)  # of --dry-run


KEYS = [8192, 32768, 65536, 131072]
BY_KEYS = [{"h_q": h_q, "s_kv": s_kv} for h_q in (128, 64) for s_kv in KEYS]
LAYERS = [(28672, 4096), (7168, 16384), (8192, 8192), (4096, 7168), (7168, 2048), (1536, 7168)]
TINY = {"s_q": 16, "h_q": 16, "s_kv": 256, "topk": 64}
TINY_INDEX = {"s_q": 16, "s_kv": 256, "h": 4, "topk": 64, "d": 32}
OPERATORS = {
    "sparse_mla_forward": Operator(sparse_mla_forward, [*BY_KEYS, {"h_q": 32}, {"h_q": 16}], TINY),
    "sparse_mla_backward": Operator(sparse_mla_backward, BY_KEYS, TINY),
    "attention_distribution": Operator(attention_distribution, BY_KEYS, TINY),
    "lightning_indexer": Operator(
        lightning_indexer, [{}, {"s_q": 16, "s_kv": 32768}, {"s_q": 1, "s_kv": 65536}], TINY_INDEX
    ),
    "lightning_indexer_backward": Operator(lightning_indexer_backward, [{}], TINY_INDEX),
    "paged_attention": Operator(
        paged_attention,
        [
            {},
            {"b": 32, "h_q": 16, "h_kv": 16, "d": 64},
            {"context": 8192, "shortest": 128, "h_q": 16, "h_kv": 16, "d": 64},
            {"context": 512, "longest": 65536, "h_q": 16, "h_kv": 16, "d": 64},
            {"context": 512, "longest": 65536},
            {"b": 1, "context": 32768, "h_q": 16, "h_kv": 16, "d": 64},
            {"b": 1, "context": 1000, "h_q": 16, "h_kv": 16, "d": 64},
            {"b": 16, "context": 8192, "h_kv": 8},
        ],
        {"b": 2, "context": 64, "h_q": 4, "h_kv": 4, "d": 64},
    ),
    "nvfp4_linear": Operator(
        nvfp4_linear,
        [{"rows": rows, "k": k, "n": n} for rows, k in LAYERS for n in (1, 8, 16)]
        + [{"rows": 28672, "k": 4096, "n": n} for n in (32, 64, 128)],
        {"rows": 64, "k": 128, "n": 2},
    ),
}
