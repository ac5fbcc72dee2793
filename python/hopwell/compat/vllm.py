"""`paged_attention_v1`, `paged_attention_v2` and `reshape_and_cache` with vLLM's arguments and caches.

    from hopwell.compat import vllm as ops        # instead of: from vllm import _custom_ops as ops

Signatures and conventions are those of `vllm/_custom_ops.py` of github.com/vllm-project/vllm, of the versions that have
paged attention for CUDA with scales as tensors (at 0002bde ROCm's alone is left, and `reshape_and_cache`): keys in
[blocks, h_kv, d/x, block, x] with x = 16 bytes, values in [blocks, h_kv, d, block], results written in place. Beyond
it: host tensors, fp32, any d that is a multiple of 8 from 32 to 256, any block from 1 to 256, page numbers out of range
are masked, and a sequence of length 0 gives 0. fp8 caches and block-sparse attention are a ValueError.
"""

import torch

from .._checks import INTEGERS, require, require_one_device
from .._operators import paged_attention

__all__ = ["paged_attention_v1", "paged_attention_v2", "reshape_and_cache"]

Scale = torch.Tensor | float
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _check_cache_dtype(operator: str, kv_cache_dtype: str, cache: torch.Tensor) -> None:
    own = DTYPE_NAMES.get(cache.dtype, "auto")
    expected = "auto" if own == "auto" else f"auto or {own}"
    require(kv_cache_dtype in ("auto", own), operator, "kv_cache_dtype", f"{expected} (no fp8 caches)", kv_cache_dtype)


def _attend(
    operator: str,
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    blocksparse_vert_stride: int,
) -> None:
    require(isinstance(out, torch.Tensor), operator, "out", "a tensor to write", out)
    _check_cache_dtype(operator, kv_cache_dtype, key_cache)
    sparse = blocksparse_vert_stride > 1  # vLLM's own test for it
    require(
        not sparse, operator, "blocksparse_vert_stride", "0 or 1 (no block-sparse attention)", blocksparse_vert_stride
    )
    shape = list(value_cache.shape)
    require(len(shape) == 4, operator, "value_cache", "[blocks, h_kv, d, block]", shape)
    require(num_kv_heads == shape[1], operator, "num_kv_heads", f"value_cache's h_kv = {shape[1]}", num_kv_heads)
    require(block_size == shape[3], operator, "block_size", f"value_cache's block = {shape[3]}", block_size)
    paged_attention(
        query, key_cache, value_cache, block_tables, seq_lens, scale, layout="vllm", alibi_slopes=alibi_slopes, out=out
    )


@torch.no_grad()
def paged_attention_v1(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attention of one query token a sequence to its paged keys and values.

    Args:
        out: like query, written in place.
        query: fp32, fp16 or bf16 [b, h_q, d]; its first stride is free.
        key_cache: like query [blocks, h_kv, d/x, block, x], x = 16 bytes.
        value_cache: like query [blocks, h_kv, d, block].
        num_kv_heads: h_kv.
        scale: factor of the logits.
        block_tables: int32 [b, max_blocks].
        seq_lens: int32 [b].
        block_size: block.
        max_seq_len: vLLM sizes its scratch by it; not needed here.
        alibi_slopes: fp32 [h_q].
        kv_cache_dtype: "auto", or the name of the caches' dtype.
        k_scale, v_scale: of fp8 caches; unused, as in vLLM for other caches.
        tp_rank, blocksparse_*: of block-sparse attention; blocksparse_vert_stride above 1 is an error.
    """
    _attend(
        "paged_attention_v1", out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens,
        block_size, alibi_slopes, kv_cache_dtype, blocksparse_vert_stride,
    )  # fmt: skip


@torch.no_grad()
def paged_attention_v2(
    out: torch.Tensor,
    exp_sum: torch.Tensor,
    max_logits: torch.Tensor,
    tmp_out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """`paged_attention_v1`; exp_sum, max_logits and tmp_out are vLLM's scratch for long sequences: untouched."""
    _attend(
        "paged_attention_v2", out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens,
        block_size, alibi_slopes, kv_cache_dtype, blocksparse_vert_stride,
    )  # fmt: skip


@torch.no_grad()
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
) -> None:
    """Writes new tokens into the caches. On a GPU the host waits for slot_mapping, so no CUDA graph captures this.

    Args:
        key, value: like the caches [tokens, h_kv, d]; tokens beyond slot_mapping are padding.
        key_cache: [blocks, h_kv, d/x, block, x], written in place.
        value_cache: [blocks, h_kv, d, block], written in place.
        slot_mapping: int64 or int32 [up to tokens]; token i goes to slot s % block of page s // block; −1: nowhere.
        kv_cache_dtype: "auto", or the name of the caches' dtype.
        k_scale, v_scale: of fp8 caches; unused.
    """
    name = "reshape_and_cache"
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    require_one_device(name, key=key, value=value, **caches, slot_mapping=slot_mapping)
    _check_cache_dtype(name, kv_cache_dtype, key_cache)
    require(value_cache.ndim == 4, name, "value_cache", "[blocks, h_kv, d, block]", list(value_cache.shape))
    blocks, h_kv, d, block = value_cache.shape
    x = 16 // key_cache.element_size()
    shape = [blocks, h_kv, d // x, block, x]
    require(list(key_cache.shape) == shape, name, "key_cache", str(shape), list(key_cache.shape))
    for argument, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        require(new.ndim == 3 and new.shape[1:] == (h_kv, d), name, argument, f"[tokens, {h_kv}, {d}]", list(new.shape))
        require(new.dtype == cache.dtype, name, argument, f"{cache.dtype} as its cache is", new.dtype)
    require(slot_mapping.dtype in INTEGERS, name, "slot_mapping", "int64 or int32", slot_mapping.dtype)
    tokens = len(slot_mapping)
    most = min(len(key), len(value))
    fits = slot_mapping.ndim == 1 and tokens <= most
    require(fits, name, "slot_mapping", f"[up to {most}]", list(slot_mapping.shape))
    require(
        bool((slot_mapping < blocks * block).all()), name, "slot_mapping", f"below {blocks * block}", "a slot beyond"
    )
    kept = slot_mapping >= 0
    page, slot = slot_mapping[kept].long() // block, slot_mapping[kept].long() % block
    key_cache[page, :, :, slot] = key[:tokens][kept].view(-1, h_kv, d // x, x)
    value_cache[page, :, :, slot] = value[:tokens][kept]
