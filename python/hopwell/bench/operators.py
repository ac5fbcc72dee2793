"""What `python -m hopwell.bench` compares: every operator, and the calls that do the same in other packages.

A function here makes random inputs of one shape and gives Hopwell's call and those of the peers. Its arguments are the
shape; their defaults are GPUs'. A peer's package is imported when its call is prepared, so that it may be missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import hopwell

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLD_BYTES = 200e6  # what the calls of a graph read together; larger than any L2
PRODUCT = 8192 if DEVICE == "cuda" else 2048  # rows and columns of the matrix product that is the ceiling
MOST_COPIES = 256  # of the inputs, however small they are
AT_ONCE = 128  # queries, in plain PyTorch, so that the gathered keys fit

Call = Callable[[int], Any]  # runs on the i-th copy of the inputs
Read = Callable[[Any], list[Tensor]]  # what is compared of its results
Shape = dict[str, int]


def shrink() -> None:
    """For a dry run: caches stay warm and the ceiling is small, so that times mean nothing."""
    global COLD_BYTES, PRODUCT
    COLD_BYTES, PRODUCT = 1e5, 64


def cold_copies(nbytes: float) -> int:
    """So many copies of inputs of nbytes do not stay in a cache; one on a CPU, where no graph wants several calls."""
    return 1 if DEVICE == "cpu" else min(MOST_COPIES, max(1, round(COLD_BYTES / nbytes)))


def first(n: int) -> Read:
    """The first n results."""
    return lambda results: list(results)[:n]


@dataclass
class Peer:
    """Another package's call. `package`: what to install, in words; "torch" runs without --peers too."""

    name: str
    package: str
    prepare: Callable[[], Call]  # imports the package
    read: Read
    note: str = ""  # what it does otherwise than Hopwell


@dataclass
class Problem:
    """One shape of one operator, on random inputs."""

    ours: Call
    read: Read
    peers: list[Peer]
    copies: int = 1
    operations: float = 0  # of matrix products: the ceiling is a matrix product
    bytes: float = 0  # read and written by a call, without operations: the ceiling is reading as many
    tolerance: float = 1e-2  # of the norm of the difference over the larger of both; both sides round to bf16


def torch_peer(name: str, prepare: Callable[[], Call], read: Read, note: str = "") -> Peer:
    """The plain PyTorch way."""
    return Peer(name, "torch", prepare, read, note)


def randn(*shape: int) -> Tensor:
    """Random bf16."""
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def distinct(rows: int, n: int, topk: int) -> Tensor:
    """Each row: topk of 0 … n − 1 in random order."""
    chunks = [torch.rand(min(256, rows - i), n, device=DEVICE).topk(topk).indices.int() for i in range(0, rows, 256)]
    return torch.cat(chunks)


def flash_mla() -> Any:
    """The module, and whether it keeps Hopper's kernels apart, as sgl-flash-mla does."""
    try:
        module = import_module("flash_mla")
    except ImportError:  # vLLM brings the same kernels
        module = import_module("vllm.third_party.flashmla.flash_mla_interface")
    legacy = hasattr(module, "has_legacy") and DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
    return module, {"use_legacy": True} if legacy else {}


def cudnn_dsa() -> Any:
    """The sparse-attention part of cuDNN's front end."""
    return import_module("cudnn.deepseek_sparse_attention")


FLASH_MLA, CUDNN, DEEP_GEMM = (
    "flash-mla (sgl-flash-mla or vllm)",
    "nvidia-cudnn-frontend[cutedsl]",
    "deep-gemm (sgl-deep-gemm)",
)


# ---- sparse attention ------------------------------------------------------------------------------------------------


def sparse_inputs(s_q: int, h_q: int, s_kv: int, topk: int, d: int) -> SimpleNamespace:
    """Queries, keys and for each query distinct keys in random order."""
    q, kv = randn(s_q, h_q, d), randn(s_kv, 1, d)
    return SimpleNamespace(q=q, kv=kv, indices=distinct(s_q, s_kv, topk), scale=d**-0.5)


def chunks(s_q: int) -> list[slice]:
    """Queries that plain PyTorch takes together."""
    return [slice(i, min(i + AT_ONCE, s_q)) for i in range(0, s_q, AT_ONCE)]


def sparse_mla_forward(s_q: int = 4096, h_q: int = 128, s_kv: int = 8192, topk: int = 2048, d: int = 576) -> Problem:
    """MLA over selected keys."""
    x = sparse_inputs(s_q, h_q, s_kv, topk, d)

    def flashmla() -> Call:
        (module, options), indices = flash_mla(), x.indices[:, None]
        return lambda _: module.flash_mla_sparse_fwd(x.q, x.kv, indices, x.scale, 512, **options)

    def pytorch() -> Call:
        def sdpa(_: int) -> list[Tensor]:
            out = torch.empty(s_q, h_q, 512, dtype=x.q.dtype, device=DEVICE)
            for some in chunks(s_q):
                k = x.kv[:, 0][x.indices[some].long()][:, None]
                out[some] = functional.scaled_dot_product_attention(x.q[some, None], k, k[..., :512])[:, 0]
            return [out]

        return sdpa

    return Problem(
        lambda _: hopwell.sparse_mla_forward(x.q, x.kv, x.indices, x.scale),
        first(1),
        [
            Peer("FlashMLA", FLASH_MLA, flashmla, first(1)),
            torch_peer("torch gather + SDPA", pytorch, first(1), f"{AT_ONCE} queries at a time"),
        ],
        operations=2 * s_q * h_q * topk * (d + 512),
    )


def sparse_mla_backward(s_q: int = 4096, h_q: int = 128, s_kv: int = 8192, topk: int = 2048, d: int = 576) -> Problem:
    """Its gradients."""
    x = sparse_inputs(s_q, h_q, s_kv, topk, d)
    out, _, lse = hopwell.sparse_mla_forward(x.q, x.kv, x.indices, x.scale)
    d_out = randn(s_q, h_q, 512)

    def cudnn() -> Call:
        dsa = cudnn_dsa()
        kv, sink = x.kv[:, 0], torch.full((h_q,), -1e30, device=DEVICE)
        return lambda _: dsa.sparse_attention_backward_wrapper(
            x.q, kv, out, d_out, lse, sink, x.indices, softmax_scale=x.scale
        )

    def pytorch() -> Call:
        def gradients(_: int) -> list[Tensor]:
            dq, dkv = torch.empty_like(x.q), torch.zeros(s_kv, d, device=DEVICE)
            for some in chunks(s_q):
                rows, q, g = x.indices[some].long(), x.q[some], d_out[some]
                k = x.kv[:, 0][rows]
                p = torch.exp(torch.bmm(q, k.mT).float() * x.scale - lse[some, :, None])
                delta = (g.float() * out[some].float()).sum(-1, keepdim=True)
                ds = (p * (torch.bmm(g, k[..., :512].mT).float() - delta) * x.scale).to(q.dtype)
                dq[some] = torch.bmm(ds, k)
                dk = torch.bmm(ds.mT, q).float()
                dk[..., :512] += torch.bmm(p.to(q.dtype).mT, g)
                dkv.index_add_(0, rows.flatten(), dk.flatten(0, 1))
            return [dq, dkv[:, None]]

        return gradients

    return Problem(
        lambda _: hopwell.sparse_mla_backward(d_out, x.q, x.kv, x.indices, out, lse, x.scale),
        first(2),
        [
            Peer(
                "cuDNN front end",
                CUDNN,
                cudnn,
                lambda r: [r["dq"], r["dkv"][:, None]],
                "writes dKV in bf16, always has a sink",
            ),
            torch_peer(
                "torch gather + products", pytorch, first(2), f"{AT_ONCE} queries at a time; written out, no autograd"
            ),
        ],
        operations=2 * s_q * h_q * topk * (3 * d + 2 * 512),
        tolerance=2e-2,
    )


def attention_distribution(
    s_q: int = 4096, h_q: int = 128, s_kv: int = 8192, topk: int = 2048, d: int = 576
) -> Problem:
    """The indexer's target, normalised."""
    x = sparse_inputs(s_q, h_q, s_kv, topk, d)
    lse = hopwell.sparse_mla_forward(x.q, x.kv, x.indices, x.scale)[2]

    def cudnn() -> Call:
        dsa = cudnn_dsa()
        q, kv, lse_, indices = x.q[None], x.kv[:, 0][None], lse[None], x.indices[None]
        return lambda _: dsa.sparse_attn_score_recompute_wrapper(q, kv, lse_, indices, x.scale, qhead_per_kv_head=h_q)

    def pytorch() -> Call:
        def distribution(_: int) -> list[Tensor]:
            attn = torch.empty(s_q, topk, device=DEVICE)
            for some in chunks(s_q):
                scores = torch.bmm(x.q[some], x.kv[:, 0][x.indices[some].long()].mT).float()
                attn[some] = torch.exp(scores * x.scale - lse[some, :, None]).sum(1)
            return [functional.normalize(attn, p=1, dim=-1)]

        return distribution

    return Problem(
        lambda _: [hopwell.attention_distribution(x.q, x.kv, x.indices, lse, x.scale, normalize="l1")],
        first(1),
        [
            Peer("cuDNN front end", CUDNN, cudnn, lambda r: [r["target"]]),
            torch_peer("torch gather + product", pytorch, first(1), f"{AT_ONCE} queries at a time"),
        ],
        operations=2 * s_q * h_q * topk * d,
    )


# ---- the indexer -----------------------------------------------------------------------------------------------------


def index_inputs(s_q: int, s_kv: int, h: int, d: int) -> SimpleNamespace:
    """Queries, keys and weights of the indexer."""
    return SimpleNamespace(q=randn(s_q, h, d), k=randn(s_kv, d), w=randn(s_q, h) * (h * d) ** -0.5)


def selection(q: Tensor, k: Tensor, w: Tensor) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Reads indices and scores [s_q, topk] in an order that does not depend on the package: the scores, and what the
    chosen keys' scores are in fp32. Of keys whose scores are as good as equal either may be chosen.
    """
    exact: list[Tensor] = []

    def read(indices: Tensor, scores: Tensor) -> list[Tensor]:
        if not exact:
            keys = k.float().T
            for i in range(0, len(q), 16):
                dots = (q[i : i + 16].float() @ keys).relu_()
                exact.append((w[i : i + 16, None].float() @ dots)[:, 0])
        chosen = indices.flatten(0, -2).long().clamp(0, len(k) - 1)
        of_chosen = torch.cat(exact).gather(1, chosen)
        return [scores.flatten(0, -2).float().sort().values, of_chosen.sort().values]

    return read


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and a scale for each row of the last dimension."""
    scale = x.float().abs().amax(-1) / 448
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def lightning_indexer(
    s_q: int = 512, s_kv: int = 8192, h: int = 64, topk: int = 2048, d: int = 128, fp8: int = 0
) -> Problem:
    """Scores of all keys and the best topk. `fp8`: 1 for float8_e4m3fn queries and keys with scales."""
    x = index_inputs(s_q, s_kv, h, d)
    scales: dict[str, Any] = {}
    codes_q, codes_k = x.q, x.k
    if fp8:
        (codes_q, scales["q_scale"]), (codes_k, scales["k_scale"]) = to_float8(x.q), to_float8(x.k)
        x.w = x.w.float()
        x.q = (codes_q.float() * scales["q_scale"][..., None]).to(x.q.dtype)
        x.k = (codes_k.float() * scales["k_scale"][..., None]).to(x.k.dtype)

    selected = selection(x.q, x.k, x.w)

    def pytorch() -> Call:
        w = x.w.to(x.q.dtype)[:, None]

        def scores_and_topk(_: int) -> Any:
            dots = (x.q.flatten(0, 1) @ x.k.T).view(s_q, h, s_kv).relu_()
            return torch.bmm(w, dots)[:, 0].topk(topk, sorted=False)

        return scores_and_topk

    def cudnn() -> Call:
        dsa = cudnn_dsa()
        if fp8:
            raise ValueError("not called with float8 here")
        q, k, w = x.q[None], x.k[None, :, None], x.w[None]
        all_keys = torch.full((1,), s_kv, dtype=torch.int32, device=DEVICE)  # its causal mask hides none
        lengths = all_keys.expand(s_q).contiguous()

        def scores_and_topk(_: int) -> Any:
            scores = dsa.indexer_forward_wrapper(q, k, w, ratio=1, q_causal_offsets=all_keys)["scores"]
            return dsa.indexer_top_k_wrapper(scores.view(s_q, s_kv), lengths, topk)

        return scores_and_topk

    def deep_gemm() -> Call:
        module = import_module("deep_gemm")
        if not fp8:
            raise ValueError("takes float8 only: fp8=1")
        w, keys = x.w * scales["q_scale"], (codes_k, scales["k_scale"])
        begin, end = (torch.full((s_q,), n, dtype=torch.int32, device=DEVICE) for n in (0, s_kv))

        def scores_and_topk(_: int) -> Any:
            if hasattr(module, "fp8_mqa_logits"):
                logits = module.fp8_mqa_logits(codes_q, keys, w, begin, end)
            else:  # SGLang's fork
                logits = module.fp8_fp4_mqa_logits(codes_q, keys, w, begin, end, s_kv)
            return logits.topk(topk, sorted=False)

        return scores_and_topk

    peers = [
        torch_peer("torch", pytorch, lambda r: selected(r[1], r[0]), "stores all products, rounded to bf16"),
    ]
    if fp8:
        note = "stores all scores; torch.topk selects"
        peers.insert(0, Peer("DeepGEMM", DEEP_GEMM, deep_gemm, lambda r: selected(r[1], r[0]), note))
    else:
        read: Read = lambda r: selected(r["indices"], r["values"])  # noqa: E731
        peers.insert(0, Peer("cuDNN front end", CUDNN, cudnn, read, "stores all scores"))
    return Problem(
        lambda _: hopwell.lightning_indexer(codes_q, codes_k, x.w, topk, **scales),
        lambda r: selected(*r),
        peers,
        operations=2 * s_q * s_kv * h * d,
        tolerance=2e-2,
    )


def lightning_indexer_backward(
    s_q: int = 512, s_kv: int = 8192, h: int = 64, topk: int = 2048, d: int = 128
) -> Problem:
    """Loss and gradients over selected keys."""
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

    def pytorch() -> Call:
        def gradients(_: int) -> list[Tensor]:
            d_q, d_w = torch.empty_like(x.q), torch.empty_like(x.w)
            d_k = torch.zeros(s_kv, d, device=DEVICE)
            for some in chunks(s_q):
                rows, q, w = indices[some].long(), x.q[some], x.w[some]
                k = x.k[rows]
                dots = torch.bmm(q, k.mT)
                gated = dots.relu().float()
                prob = (w.float()[:, None] @ gated)[:, 0].softmax(-1)
                g = prob - target[some]
                d_w[some] = (gated @ g[:, :, None])[..., 0].to(w.dtype)
                d_dots = (g[:, None] * w.float()[:, :, None] * (dots > 0)).to(q.dtype)
                d_q[some] = torch.bmm(d_dots, k)
                d_k.index_add_(0, rows.flatten(), torch.bmm(d_dots.mT, q).float().flatten(0, 1))
            return [d_q, d_k, d_w]

        return gradients

    return Problem(
        lambda _: hopwell.lightning_indexer_backward(target, x.q, x.k, x.w, indices),
        lambda r: list(r)[1:],
        [
            Peer(
                "cuDNN front end",
                CUDNN,
                cudnn,
                lambda r: [r["d_index_q"], r["d_index_k"], r["d_weights"]],
                "recompute of the scores, copy of the target, backward; no loss",
            ),
            torch_peer(
                "torch gather + products", pytorch, first(3), f"{AT_ONCE} queries at a time; written out, no loss"
            ),
        ],
        operations=3 * 2 * s_q * topk * h * d,
        tolerance=2e-2,
    )


def indexer_dense_loss(s: int = 1024, h_q: int = 128, h: int = 64, d_qk: int = 576, d: int = 128) -> Problem:
    """The indexer's loss over every visible key of a causal sequence of s tokens, and its gradients."""
    q, kv, scale = randn(s, h_q, d_qk), randn(s, d_qk), d_qk**-0.5
    x = index_inputs(s, s, h, d)
    lse = hopwell.sparse_mla_forward(q, kv, None, scale, min(512, d_qk), q_start=0)[2]

    def pytorch() -> Call:
        tensors = [t.clone().requires_grad_() for t in (x.q, x.k, x.w)]
        hidden = torch.ones(s, s, dtype=torch.bool, device=DEVICE).triu(1)

        def loss_and_gradients(_: int) -> list[Tensor]:
            scores = (q.flatten(0, 1) @ kv.T).view(s, h_q, s).float() * scale - lse[:, :, None]
            target = scores.exp().mean(1).masked_fill(hidden, 0)
            q_index, k_index, weights = tensors
            dots = (q_index.flatten(0, 1) @ k_index.T).view(s, h, s).relu().float()
            index = (weights.float()[:, None] @ dots)[:, 0].masked_fill(hidden, -torch.inf)
            logs = torch.log_softmax(index, -1).masked_fill(hidden, 0)
            loss = (torch.special.xlogy(target, target) - target * logs).sum()
            return [loss.detach(), *torch.autograd.grad(loss, tensors)]

        return loss_and_gradients

    return Problem(
        lambda _: hopwell.indexer_dense_loss(q, kv, lse, x.q, x.k, x.w, scale, q_start=0),
        lambda r: [r[0].reshape(1), *list(r)[1:]],
        [
            torch_peer(
                "torch, autograd", pytorch, lambda r: [r[0].reshape(1), *r[1:]], "stores all scores, hidden ones too"
            )
        ],
        operations=s * (s + 1) / 2 * (2 * h_q * d_qk + 6 * h * d),
        tolerance=2e-2,
    )


def normalize_l1(rows: int = 4096, columns: int = 2048) -> Problem:
    """Rows over their sums."""
    copies = cold_copies(8 * rows * columns)
    attn = torch.rand(copies, rows, columns, device=DEVICE)

    def pytorch() -> Call:
        return lambda i: [functional.normalize(attn[i], p=1, dim=-1)]

    return Problem(
        lambda i: [hopwell.normalize_l1(attn[i])],
        first(1),
        [torch_peer("torch normalize", pytorch, first(1))],
        copies=copies,
        bytes=8 * rows * columns,
        tolerance=1e-5,
    )


# ---- decoding --------------------------------------------------------------------------------------------------------


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
    copies = cold_copies(4 * total * block * h_kv * d)
    q, caches = randn(b, h_q, d), [randn(2, total, block, h_kv, d).unbind() for _ in range(copies)]
    order = torch.randperm(total, device=DEVICE).int()
    ends = torch.tensor(pages).cumsum(0).tolist()
    rows = [order[end - n : end] for end, n in zip(ends, pages, strict=True)]
    tables = torch.stack([functional.pad(row, (0, widest - len(row))) for row in rows])
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
        sdpa = functional.scaled_dot_product_attention
        return lambda i: [sdpa(x, k[i], v[i], enable_gqa=h_q > h_kv)[:, :, 0]]

    return Problem(
        lambda i: hopwell.paged_attention(q, caches[i][0], caches[i][1], tables, context_lens, d**-0.5),
        first(1),
        [
            Peer("FlashInfer", "flashinfer-python", flashinfer, first(1), "planned beforehand for these lengths"),
            torch_peer("torch SDPA", pytorch, first(1), "contiguous K and V, no pages"),
        ],
        copies=copies,
        bytes=4 * sum(lengths) * h_kv * d,
    )


# ---- NVFP4 -----------------------------------------------------------------------------------------------------------

BYTES_OF_WEIGHT = 9 / 16  # four bits, and a byte of scale for sixteen


def packed(rows: int, k: int, copies: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Random matrices in NVFP4: codes, scales, global."""
    return [hopwell.nvfp4_quantize(randn(rows, k)) for _ in range(copies)]


def nvfp4_linear(rows: int = 28672, k: int = 4096, n: int = 1) -> Problem:
    """Four-bit weights on n rows of bf16."""
    copies = cold_copies(rows * k * BYTES_OF_WEIGHT)
    weights, x = packed(rows, k, copies), randn(n, k)

    def pytorch() -> Call:
        dense = [hopwell.nvfp4_dequantize(*w, dtype="bfloat16") for w in weights]
        return lambda i: [functional.linear(x, dense[i])]

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
            torch_peer("torch F.linear, bf16", pytorch, first(1), "weights of 16 bits: 3.6 times as many bytes"),
            Peer("vLLM Marlin", "vllm", marlin, first(1)),
        ],
        copies=copies,
        bytes=rows * k * BYTES_OF_WEIGHT,
    )


def nvfp4_gemv(rows: int = 7168, k: int = 16384) -> Problem:
    """Both sides of four bits, one column."""
    copies = cold_copies(rows * k * BYTES_OF_WEIGHT)
    a, (b, sfb, _) = packed(rows, k, copies), hopwell.nvfp4_quantize(randn(1, k))

    def pytorch() -> Call:
        dense = [hopwell.nvfp4_dequantize(codes, scales, 1.0, dtype="bfloat16") for codes, scales, _ in a]
        x = hopwell.nvfp4_dequantize(b, sfb, 1.0, dtype="bfloat16")
        return lambda i: [functional.linear(x, dense[i]).T[..., None]]

    return Problem(
        lambda i: [hopwell.nvfp4_gemv(a[i][0][..., None], b[..., None], a[i][1][..., None], sfb[..., None],
                                      out_dtype="bfloat16")],
        first(1),
        [torch_peer("torch F.linear, bf16", pytorch, first(1), "both sides of 16 bits")],
        copies=copies,
        bytes=rows * k * BYTES_OF_WEIGHT,
    )  # fmt: skip


def nvfp4_matmul(m: int = 128, n: int = 7168, k: int = 4096) -> Problem:
    """Both sides of four bits."""
    (a, sfa, _), (b, sfb, _) = hopwell.nvfp4_quantize(randn(m, k)), hopwell.nvfp4_quantize(randn(n, k))

    def pytorch() -> Call:
        x, weight = (hopwell.nvfp4_dequantize(c, s, 1.0, dtype="bfloat16") for c, s in ((a, sfa), (b, sfb)))
        return lambda _: [functional.linear(x, weight)]

    return Problem(
        lambda _: [hopwell.nvfp4_matmul(a, b, sfa, sfb)],
        first(1),
        [torch_peer("torch F.linear, bf16", pytorch, first(1), "both sides of 16 bits")],
        operations=2 * m * n * k,
    )


HALF_WAY = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]  # between the magnitudes of e2m1
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nvfp4_quantize(rows: int = 4096, k: int = 4096) -> Problem:
    """To NVFP4, its global factor found too."""
    copies = cold_copies(2 * rows * k)
    x = [randn(rows, k) for _ in range(copies)]

    def pytorch() -> Call:
        half_way = torch.tensor(HALF_WAY, device=DEVICE)
        to_even = torch.arange(7, device=DEVICE) % 2 == 1  # a tie goes to the even code, which is the one above
        boundaries = torch.where(to_even, torch.nextafter(half_way, torch.zeros_like(half_way)), half_way)

        def quantize(i: int) -> tuple[Tensor, Tensor, Tensor]:
            blocks = x[i].float().view(rows, k // 16, 16)
            amax = blocks.abs().amax(-1)
            factor = amax.amax() / 2688
            scales = (amax / (6 * factor)).to(torch.float8_e4m3fn)
            step = (scales.float() * factor)[..., None]
            rest = torch.where(step > 0, blocks / step, 0.0)
            codes = torch.bucketize(rest.abs(), boundaries) + 8 * (rest < 0)
            codes = codes.view(rows, k // 2, 2).to(torch.uint8)
            return codes[..., 0] | (codes[..., 1] << 4), scales.view(torch.uint8), factor

        return quantize

    def values(r: Any) -> list[Tensor]:
        return [hopwell.nvfp4_dequantize(*r)]

    return Problem(
        lambda i: hopwell.nvfp4_quantize(x[i]),
        values,
        [torch_peer("torch", pytorch, values, "a dozen operations; compared by the values of the codes")],
        copies=copies,
        bytes=rows * k * (2 + BYTES_OF_WEIGHT),
        tolerance=5e-2,  # PyTorch rounds the quotients, and many values of bf16 lie half way between two codes
    )


def nvfp4_dequantize(rows: int = 4096, k: int = 4096) -> Problem:
    """To bf16."""
    copies = cold_copies(rows * k * BYTES_OF_WEIGHT)
    matrices = packed(rows, k, copies)

    def pytorch() -> Call:
        table = torch.tensor(MAGNITUDES + [-m for m in MAGNITUDES], device=DEVICE)

        def dequantize(i: int) -> list[Tensor]:
            codes, scales, factor = matrices[i]
            halves = torch.stack((codes & 15, codes >> 4), -1).view(rows, k // 16, 16)
            steps = scales.view(torch.float8_e4m3fn).float() * factor
            return [(table[halves.int()] * steps[..., None]).view(rows, k).to(torch.bfloat16)]

        return dequantize

    return Problem(
        lambda i: [hopwell.nvfp4_dequantize(*matrices[i], dtype="bfloat16")],
        first(1),
        [torch_peer("torch", pytorch, first(1), "a table and a product")],
        copies=copies,
        bytes=rows * k * (2 + BYTES_OF_WEIGHT),
    )


# ---- all of them -----------------------------------------------------------------------------------------------------


@dataclass
class Operator:
    """Which shapes are measured where; what a shape does not name is the function's default."""

    problem: Callable[..., Problem]
    shapes: list[Shape]
    on_cpu: list[Shape]
    tiny: Shape = field(default_factory=dict)  # of --dry-run

    def settings(self, shape: Shape) -> Shape:
        """The whole shape."""
        defaults = {name: p.default for name, p in inspect.signature(self.problem).parameters.items()}
        return {**defaults, **shape}


KEYS = [8192, 32768, 65536, 131072]
BY_KEYS = [{"h_q": h_q, "s_kv": s_kv} for h_q in (128, 64) for s_kv in KEYS]
LAYERS = [(28672, 4096), (7168, 16384), (8192, 8192), (4096, 7168), (7168, 2048), (1536, 7168)]
TINY = {"s_q": 16, "h_q": 16, "s_kv": 256, "topk": 64}
TINY_INDEX = {"s_q": 16, "s_kv": 256, "h": 4, "topk": 64, "d": 32}
FEW_QUERIES = [{"s_q": 8}]
OPERATORS = {
    "sparse_mla_forward": Operator(sparse_mla_forward, [*BY_KEYS, {"h_q": 32}, {"h_q": 16}], FEW_QUERIES, TINY),
    "sparse_mla_backward": Operator(sparse_mla_backward, BY_KEYS, FEW_QUERIES, TINY),
    "attention_distribution": Operator(attention_distribution, BY_KEYS, FEW_QUERIES, TINY),
    "lightning_indexer": Operator(
        lightning_indexer,
        [
            {},
            {"s_q": 16, "s_kv": 32768},
            {"s_q": 1, "s_kv": 65536},
            {"s_q": 2048, "s_kv": 32768},
            {"s_q": 2048, "s_kv": 32768, "fp8": 1},
        ],
        [{"s_q": 8}],
        TINY_INDEX,
    ),
    "lightning_indexer_backward": Operator(lightning_indexer_backward, [{}], [{"s_q": 8}], TINY_INDEX),
    "indexer_dense_loss": Operator(
        indexer_dense_loss, [{}], [{"s": 64}], {"s": 32, "h_q": 4, "h": 4, "d_qk": 64, "d": 32}
    ),
    "normalize_l1": Operator(normalize_l1, [{}], [{"rows": 1024}], {"rows": 16, "columns": 64}),
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
        [{"b": 8, "h_q": 16, "h_kv": 16, "d": 64}],
        {"b": 2, "context": 64, "h_q": 4, "h_kv": 4, "d": 64},
    ),
    "nvfp4_linear": Operator(
        nvfp4_linear,
        [{"rows": rows, "k": k, "n": n} for rows, k in LAYERS for n in (1, 8, 16)]
        + [{"rows": 28672, "k": 4096, "n": n} for n in (32, 64, 128)],
        [{"rows": 7168, "k": 16384}, {"rows": 7168, "k": 2048, "n": 8}],
        {"rows": 64, "k": 128, "n": 2},
    ),
    "nvfp4_gemv": Operator(nvfp4_gemv, [{}], [{"rows": 7168, "k": 4096}], {"rows": 64, "k": 128}),
    "nvfp4_matmul": Operator(nvfp4_matmul, [{}], [{"m": 64, "n": 1024}], {"m": 16, "n": 32, "k": 128}),
    "nvfp4_quantize": Operator(nvfp4_quantize, [{}], [{"rows": 1024}], {"rows": 16, "k": 128}),
    "nvfp4_dequantize": Operator(nvfp4_dequantize, [{}], [{"rows": 1024}], {"rows": 16, "k": 128}),
}
