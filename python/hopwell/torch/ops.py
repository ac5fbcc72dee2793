"""The operators as `torch.library` custom ops in the namespace `hopwell`.

Every op has a fake kernel, so `torch.compile` traces through it without a graph break; `sparse_mla` and `indexer_loss`
are differentiable. The functions here take tensors and return fresh tensors (an op that wrote into its arguments could
not be differentiated); for `out=`-style arguments call `hopwell` itself, which takes tensors too. Custom ops know no
keyword-only tensors, so what is keyword-only in `hopwell` may be given by position here.

`torch.use_deterministic_algorithms(True)` makes the backward operators repeat bit for bit.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

import hopwell

P = ParamSpec("P")
R = TypeVar("R")
Gradients = tuple[Tensor | None, ...]


def _operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers a kernel and its fake as hopwell::<name>; the function that remains keeps the kernel's signature and
    docstring.
    """

    def register(kernel: Callable[P, R]) -> Callable[P, R]:
        op = torch.library.custom_op(f"hopwell::{name}", kernel, mutates_args=())
        op.register_fake(fake)

        @functools.wraps(kernel)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            result: R = op(*args, **kwargs)
            return result

        return call

    return register


def _run(operator: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Calls the operator; detached, because a tensor that requires gradients cannot be exported through DLPack."""
    plain = [a.detach() if isinstance(a, Tensor) else a for a in args]
    named = {k: a.detach() if isinstance(a, Tensor) else a for k, a in kwargs.items()}
    return operator(*plain, **named)


def _as_bytes(codes: Tensor) -> Tensor:
    """float4_e2m1fn_x2 and float8_e4m3fn tensors as the bytes they are."""
    return codes if codes.dtype == torch.uint8 else codes.view(torch.uint8)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a dtype such as 'float16'; got {name!r}")
    return dtype


def _scale_shape(rows: int, k: int, scale_layout: str) -> tuple[int, int]:
    """Shape of the scales of a [rows, k] matrix; the blocked layout pads to whole 128 × 4 blocks."""
    if scale_layout == "blocked":
        return -(-rows // 128) * 128, -(-k // 64) * 4
    return rows, k // 16


def _stop_gradient(name: str) -> None:
    """Declares that no gradient passes through hopwell::<name>."""

    def mark(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))

    torch.library.register_autograd(
        f"hopwell::{name}", lambda ctx, *_: (None,) * len(ctx.needs_input_grad), setup_context=mark
    )


# ---- sparse MLA ------------------------------------------------------------------------------------------------------


def _sparse_mla_forward_fake(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    s_q, h_q = q.shape[:2]
    row = q.new_empty((s_q, h_q), dtype=torch.float32)
    return q.new_empty((s_q, h_q, d_v)), row, torch.empty_like(row)


@_operator("sparse_mla_forward", _sparse_mla_forward_fake)
def sparse_mla_forward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    q_positions: Tensor | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op behind `sparse_mla`, with every argument positional, as custom ops require of tensors."""
    masks = {"topk_length": topk_length, "q_positions": q_positions, "q_start": q_start, "kv_stride": kv_stride}
    return _run(
        hopwell.sparse_mla_forward, q, kv, indices, sm_scale, d_v, attn_sink=attn_sink, backend=backend, **masks
    )


def _sparse_mla_backward_fake(
    d_out: Tensor,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    q_positions: Tensor | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    deterministic: bool = False,
    dkv_dtype: str = "float32",
    need_dq: bool = True,
    need_dkv: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dq = q.new_empty(q.shape if need_dq else (0,))
    dkv = kv.new_empty(kv.shape if need_dkv else (0,), dtype=_dtype(dkv_dtype))
    d_sink = q.new_empty((q.shape[1] if attn_sink is not None else 0,), dtype=torch.float32)
    return dq, dkv, d_sink


@_operator("sparse_mla_backward", _sparse_mla_backward_fake)
def _sparse_mla_backward(
    d_out: Tensor,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    q_positions: Tensor | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    deterministic: bool = False,
    dkv_dtype: str = "float32",
    need_dq: bool = True,
    need_dkv: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """An op cannot return None: a gradient that was not asked for is an empty tensor here."""
    gradients = _run(
        hopwell.sparse_mla_backward,
        *(d_out, q, kv, indices, out, lse, sm_scale, d_v),
        attn_sink=attn_sink,
        topk_length=topk_length,
        q_positions=q_positions,
        q_start=q_start,
        kv_stride=kv_stride,
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        dkv_dtype=dkv_dtype,
        need_dq=need_dq,
        need_dkv=need_dkv,
        backend=backend,
    )
    dtypes = (q.dtype, _dtype(dkv_dtype), torch.float32)
    dq, dkv, d_sink = (
        q.new_empty(0, dtype=dtype) if g is None else g for g, dtype in zip(gradients, dtypes, strict=True)
    )
    return dq, dkv, d_sink


def sparse_mla_backward(
    d_out: Tensor,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    sm_scale: float,
    d_v: int = 512,
    *,
    attn_sink: Tensor | None = None,
    need_dq: bool = True,
    need_dkv: bool = True,
    **options: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `sparse_mla`: (dq, dkv, d_sink), None where not needed or without a sink.

    d_out is [s_q, h_q, d_v]; `out` and `lse` are the forward's. dq has q's dtype, dkv the `dkv_dtype` named
    ("float32"), d_sink is float32 [h_q]. Options: the masks of `sparse_mla`, deterministic, dkv_dtype, backend.
    """
    options |= {"attn_sink": attn_sink, "need_dq": need_dq, "need_dkv": need_dkv}
    dq, dkv, d_sink = _sparse_mla_backward(d_out, q, kv, indices, out, lse, sm_scale, d_v, **options)
    return dq if need_dq else None, dkv if need_dkv else None, None if attn_sink is None else d_sink


def _save_sparse_mla(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    (
        q,
        kv,
        indices,
        ctx.sm_scale,
        ctx.d_v,
        attn_sink,
        topk_length,
        q_positions,
        ctx.q_start,
        ctx.kv_stride,
        ctx.backend,
    ) = inputs
    out, max_logits, lse = output
    ctx.save_for_backward(q, kv, indices, out, lse, attn_sink, topk_length, q_positions)
    ctx.mark_non_differentiable(max_logits, lse)


def _differentiate_sparse_mla(ctx: Any, d_out: Tensor, _d_max_logits: Tensor, _d_lse: Tensor) -> Gradients:
    q, kv, indices, out, lse, attn_sink, topk_length, q_positions = ctx.saved_tensors
    needed = [i for i, need in enumerate(ctx.needs_input_grad) if need]  # PyTorch leaves out trailing defaults
    if d_out.stride(-1) != 1:  # such as the gradient of a sum, one number expanded
        d_out = d_out.contiguous()
    dq, dkv, d_sink = sparse_mla_backward(
        *(d_out, q, kv, indices, out, lse, ctx.sm_scale, ctx.d_v),
        attn_sink=attn_sink,
        topk_length=topk_length,
        q_positions=q_positions,
        q_start=ctx.q_start,
        kv_stride=ctx.kv_stride,
        dkv_dtype=str(kv.dtype).removeprefix("torch."),
        need_dq=0 in needed,
        need_dkv=1 in needed,
        backend=ctx.backend,
    )
    return dq, dkv, None, None, None, d_sink if 5 in needed else None, None, None, None, None, None


torch.library.register_autograd(
    "hopwell::sparse_mla_forward", _differentiate_sparse_mla, setup_context=_save_sparse_mla
)


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    *,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    q_positions: Tensor | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of every query over the keys that its row of `indices` names: MLA in its multi-query form.

    Args:
        q: [s_q, h_q, d_qk], bfloat16 (on the CPU float32 too).
        kv: [s_kv, d_qk] or [s_kv, 1, d_qk], q's dtype; V is its first d_v columns.
        indices: int32 [s_q, topk] or [s_q, 1, topk]; entries outside 0 … s_kv − 1 are masked.
        attn_sink: float32 [h_q], a logit without a value.
        topk_length: int32 [s_q], how many entries of each row count.
        q_positions: int32 [s_q], or q_start for q_start + s: causal masking.
        kv_stride: tokens a key stands for.

    Returns:
        out [s_q, h_q, d_v] in q's dtype, max_logits and lse float32 [s_q, h_q]. Differentiable in q, kv and attn_sink;
        max_logits and lse carry no gradient.

    Raises:
        ValueError: an argument has the wrong dtype, shape or device.
    """
    return sparse_mla_forward(
        q, kv, indices, sm_scale, d_v, attn_sink, topk_length, q_positions, q_start, kv_stride, backend
    )


def _attention_distribution_fake(q: Tensor, kv: Tensor, indices: Tensor, *_: Any, **__: Any) -> Tensor:
    return q.new_empty((q.shape[0], indices.shape[-1]), dtype=torch.float32)


@_operator("attention_distribution", _attention_distribution_fake)
def attention_distribution(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    sm_scale: float,
    topk_length: Tensor | None = None,
    q_positions: Tensor | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    normalize: str = "none",
    backend: str | None = None,
) -> Tensor:
    """How much attention each selected key gets, summed over the heads: float32 [s_q, topk]. Carries no gradient."""
    masks = {"topk_length": topk_length, "q_positions": q_positions, "q_start": q_start, "kv_stride": kv_stride}
    result: Tensor = _run(
        hopwell.attention_distribution, q, kv, indices, lse, sm_scale, normalize=normalize, backend=backend, **masks
    )
    return result


_stop_gradient("attention_distribution")


# ---- lightning indexer -----------------------------------------------------------------------------------------------


def _lightning_indexer_fake(
    q_index: Tensor, k_index: Tensor, weights: Tensor, topk: int, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    shape = (q_index.shape[0], topk)
    return q_index.new_empty(shape, dtype=torch.int32), q_index.new_empty(shape, dtype=torch.float32)


@_operator("lightning_indexer", _lightning_indexer_fake)
def lightning_indexer(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    topk: int,
    q_positions: Tensor | None = None,
    q_start: int | None = None,
    kv_stride: int = 1,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The topk keys of largest index score for every query; carries no gradient.

    q_index [s_q, h_index, d_index], k_index [s_kv, d_index], weights [s_q, h_index]. Returns indices int32 [s_q, topk]
    in ascending order, padded with −1, and their scores float32 [s_q, topk], −inf where the index is −1.
    """
    masks = {"q_positions": q_positions, "q_start": q_start, "kv_stride": kv_stride}
    return _run(hopwell.lightning_indexer, q_index, k_index, weights, topk, backend=backend, **masks)


_stop_gradient("lightning_indexer")


def _lightning_indexer_backward_fake(
    target: Tensor, q_index: Tensor, k_index: Tensor, weights: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        target.new_empty((), dtype=torch.float32),
        q_index.new_empty(q_index.shape),
        k_index.new_empty(k_index.shape, dtype=torch.float32),
        weights.new_empty(weights.shape),
    )


@_operator("lightning_indexer_backward", _lightning_indexer_backward_fake)
def lightning_indexer_backward(
    target: Tensor,
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    d_loss: float = 1.0,
    deterministic: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ_s KL(target ‖ softmax of the selected index scores) and its gradients, which `d_loss` scales, in one pass.

    target float32 [s_q, topk] (`attention_distribution` with normalize="l1"), indices int32 [s_q, topk]. Returns the
    loss (float32, 0-d), d_q_index and d_weights in their inputs' dtypes and d_k_index in float32.
    """
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    loss, d_q_index, d_k_index, d_weights = _run(
        hopwell.lightning_indexer_backward,
        *(target, q_index, k_index, weights, indices),
        d_loss=d_loss,
        deterministic=deterministic,
        backend=backend,
    )
    return loss.reshape(()), d_q_index, d_k_index, d_weights


def _save_indexer_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *gradients = output
    ctx.save_for_backward(*gradients)
    ctx.mark_non_differentiable(*gradients)
    ctx.k_dtype, ctx.d_loss = inputs[2].dtype, inputs[5]


def _differentiate_indexer_loss(ctx: Any, d_loss: Tensor, *_: Tensor) -> Gradients:
    """The forward has the gradients already: only the factor is missing."""
    d_q_index, d_k_index, d_weights = (g * (d_loss / ctx.d_loss).to(g.dtype) for g in ctx.saved_tensors)
    return None, d_q_index, d_k_index.to(ctx.k_dtype), d_weights, None, None, None, None


torch.library.register_autograd(
    "hopwell::lightning_indexer_backward", _differentiate_indexer_loss, setup_context=_save_indexer_loss
)


def indexer_loss(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    indices: Tensor,
    target: Tensor,
    *,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Σ_s KL(target ‖ softmax over the selected entries of the index scores), a float32 scalar.

    Differentiable in q_index, k_index and weights; the gradient stops at the target. Shapes:
    `lightning_indexer_backward`.
    """
    return lightning_indexer_backward(target, q_index, k_index, weights, indices, 1.0, deterministic, backend)[0]


# ---- decode ----------------------------------------------------------------------------------------------------------


def _paged_attention_fake(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


@_operator("paged_attention", _paged_attention_fake)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    layout: str = "nhd",
    pos_bias_u: Tensor | None = None,
    bias: Tensor | None = None,
    bias_kind: str = "key",
    out_of_range: str = "zero",
    pre_scale: bool = True,
    pos_bias_v: Tensor | None = None,
    r: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    window: int | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one or a few new tokens a sequence over a paged cache, with relative-position bias.

    q [b, q_len, h_q, d] or [b, h_q, d]; the caches' shapes follow `layout` ("nhd": [blocks, block, h_kv, d]);
    block_tables int32 [b, max_blocks], context_lens int32 [b]. Returns out like q and lse float32 like q without its
    last dimension.
    """
    return _run(
        hopwell.paged_attention,
        *(q, k_cache, v_cache, block_tables, context_lens, scale),
        layout=layout,
        pos_bias_u=pos_bias_u,
        bias=bias,
        bias_kind=bias_kind,
        out_of_range=out_of_range,
        pre_scale=pre_scale,
        pos_bias_v=pos_bias_v,
        r=r,
        alibi_slopes=alibi_slopes,
        window=window,
        backend=backend,
    )


# ---- NVFP4 -----------------------------------------------------------------------------------------------------------


def _nvfp4_gemv_fake(
    a: Tensor, b: Tensor, sfa: Tensor, sfb: Tensor, alpha: float = 1.0, out_dtype: str = "float16", *_: Any, **__: Any
) -> Tensor:
    return a.new_empty((a.shape[0], 1, a.shape[2]), dtype=_dtype(out_dtype))


@_operator("nvfp4_gemv", _nvfp4_gemv_fake)
def nvfp4_gemv(
    a: Tensor,
    b: Tensor,
    sfa: Tensor,
    sfb: Tensor,
    alpha: float = 1.0,
    out_dtype: str = "float16",
    scale_layout: str = "plain",
    backend: str | None = None,
) -> Tensor:
    """c[m, 0, l] = alpha · Σ_k a·b with both sides NVFP4: a [M, K/2, L], b [1 or 128, K/2, L]; c [M, 1, L]."""
    codes = [_as_bytes(x) for x in (a, b, sfa, sfb)]
    c: Tensor = _run(
        hopwell.nvfp4_gemv, *codes, alpha=alpha, out_dtype=out_dtype, scale_layout=scale_layout, backend=backend
    )
    return c.contiguous()


def _nvfp4_linear_fake(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@_operator("nvfp4_linear", _nvfp4_linear_fake)
def _nvfp4_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_global: Tensor,
    bias: Tensor | None = None,
    scale_layout: str = "plain",
    global_is_reciprocal: bool = False,
    backend: str | None = None,
) -> Tensor:
    result: Tensor = _run(
        hopwell.nvfp4_linear,
        *(x, _as_bytes(weight), _as_bytes(weight_scale), weight_global),
        bias=bias,
        scale_layout=scale_layout,
        global_is_reciprocal=global_is_reciprocal,
        backend=backend,
    )
    return result


def nvfp4_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_global: Tensor | float,
    *,
    bias: Tensor | None = None,
    scale_layout: str = "plain",
    global_is_reciprocal: bool = False,
    backend: str | None = None,
) -> Tensor:
    """y = x · Wᵀ + bias with W in NVFP4 and x in 16 bits (on the CPU float32 too).

    x [n, K], weight [N, K/2] (two codes a byte), weight_scale [N, K/16] or blocked, weight_global a number or a 0-d
    float32 tensor on x's device. Returns y [n, N] in x's dtype.
    """
    if not isinstance(weight_global, Tensor):
        weight_global = torch.full((), weight_global, dtype=torch.float32, device=x.device)
    return _nvfp4_linear(x, weight, weight_scale, weight_global, bias, scale_layout, global_is_reciprocal, backend)


def _nvfp4_quantize_fake(x: Tensor, scale_layout: str = "plain", *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, k = x.shape
    codes = x.new_empty((rows, k // 2), dtype=torch.uint8)
    scales = x.new_empty(_scale_shape(rows, k, scale_layout), dtype=torch.uint8)
    return codes, scales, x.new_empty((), dtype=torch.float32)


@_operator("nvfp4_quantize", _nvfp4_quantize_fake)
def _nvfp4_quantize(
    x: Tensor,
    scale_layout: str = "plain",
    global_scale: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, used = _run(
        hopwell.nvfp4_quantize, x, scale_layout=scale_layout, global_scale=global_scale, backend=backend
    )
    if global_scale is not None:
        used = global_scale.clone()  # an op's output must not be its input
    return _as_bytes(codes), _as_bytes(scales).reshape(_scale_shape(x.shape[0], x.shape[1], scale_layout)), used


def nvfp4_quantize(
    x: Tensor,
    *,
    scale_layout: str = "plain",
    global_scale: Tensor | float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds x [rows, K] to NVFP4. Returns codes uint8 [rows, K/2], scales uint8 [rows, K/16] (padded to whole blocks
    where blocked) and the global scale, a 0-d float32 tensor.
    """
    if global_scale is not None and not isinstance(global_scale, Tensor):
        global_scale = torch.full((), global_scale, dtype=torch.float32, device=x.device)
    return _nvfp4_quantize(x, scale_layout=scale_layout, global_scale=global_scale, backend=backend)


def _nvfp4_dequantize_fake(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    scale_layout: str = "plain",
    dtype: str = "float32",
    backend: str | None = None,
) -> Tensor:
    return codes.new_empty((codes.shape[0], codes.shape[1] * 2), dtype=_dtype(dtype))


@_operator("nvfp4_dequantize", _nvfp4_dequantize_fake)
def _nvfp4_dequantize(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    scale_layout: str = "plain",
    dtype: str = "float32",
    backend: str | None = None,
) -> Tensor:
    options = {"scale_layout": scale_layout, "dtype": dtype, "backend": backend}
    result: Tensor = _run(hopwell.nvfp4_dequantize, _as_bytes(codes), _as_bytes(scales), global_scale, **options)
    return result


def nvfp4_dequantize(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | float,
    *,
    scale_layout: str = "plain",
    dtype: str = "float32",
    backend: str | None = None,
) -> Tensor:
    """code · scale · global as a [rows, K] tensor of the dtype named."""
    if not isinstance(global_scale, Tensor):
        global_scale = torch.full((), global_scale, dtype=torch.float32, device=codes.device)
    return _nvfp4_dequantize(codes, scales, global_scale, scale_layout=scale_layout, dtype=dtype, backend=backend)
