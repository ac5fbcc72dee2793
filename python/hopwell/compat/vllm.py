"""vLLM's paged attention and the writers of its caches, with its arguments and layouts.

    from hopwell.compat import vllm as ops        # instead of: from vllm import _custom_ops as ops

Signatures and conventions follow `vllm/_custom_ops.py` of github.com/vllm-project/vllm.

`paged_attention_v1`, `paged_attention_v2` and `reshape_and_cache` are those of the versions that have paged attention
for CUDA with scales as tensors (at 0002bde ROCm's alone is left, and `reshape_and_cache`): keys in [blocks, h_kv, d/x,
block, x] with x = 16 bytes, values in [blocks, h_kv, d, block], results written in place. Beyond it: host tensors,
fp32, any d that is a multiple of 8 from 32 to 256, any block from 1 to 256, page numbers out of range are masked, and a
sequence of length 0 gives 0. fp8 caches and block-sparse attention are a ValueError.

`concat_and_cache_mla`, `indexer_k_quant_and_cache` and `cp_gather_indexer_k_quant_cache` are those at 0002bde, with the
layouts of `csrc/libtorch_stable/cache_kernels.cu`. Differences:

- Rows of "fp8_ds_mla" have scales of powers of two from 2^-13 on, as vLLM writes them since its pull request 49435.
  Before, the scales were amax / 448.
- New tokens are bf16, on the CPU also fp32. float16 is a ValueError, and so are "fp8_e5m2" and "nvfp4_ds_mla".
- A NaN or an infinity gets the code of NaN and does not enter the scale of its group.
- "fp8_ds_mla" also takes k_pe of no columns, for models without RoPE. The 128 bytes are then 0.
- An index row has one scale, so quant_block_size is the row's d.
- A slot or a page that does not exist is skipped. vLLM writes or reads memory there.
- Slots may be int32. Caches may be on the CPU. The host never waits for a GPU.
"""

import torch

from hopwell.torch import ops

from .._checks import INTEGERS, integer, require, require_one_device, require_shape
from .._operators import paged_attention
from ._names import named

__all__ = [
    "concat_and_cache_mla",
    "cp_gather_indexer_k_quant_cache",
    "indexer_k_quant_and_cache",
    "paged_attention_v1",
    "paged_attention_v2",
    "reshape_and_cache",
]

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


def _first_rows(name: str, argument: str, rows: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
    """The rows that have a slot. Rows after them are the padding of a CUDA graph."""
    require(slot_mapping.ndim == 1, name, "slot_mapping", "[up to tokens]", slot_mapping)
    fits = rows.ndim == 2 and len(rows) >= len(slot_mapping)
    require(fits, name, argument, f"[tokens, d] with at least {len(slot_mapping)} tokens", rows)
    return rows[: len(slot_mapping)]


@torch.no_grad()
def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: Scale,
    skip_scale: bool = False,
) -> None:
    """Writes the latents of new tokens into a cache of MLA.

    Args:
        kv_c: bf16 [tokens, d_v]; tokens beyond slot_mapping are padding.
        k_pe: like kv_c [tokens, d_rope], rotated.
        kv_cache: [blocks, block, row], written in place.
        slot_mapping: int64 or int32 [up to tokens]; −1: nowhere.
        kv_cache_dtype: "auto" or the dtype's name, for rows of kv_c's dtype and d_v + d_rope columns; "fp8" or
            "fp8_e4m3", one byte a column; "fp8_ds_mla", 656 bytes for d_v 512.
        scale: fp32 of one element; of "fp8" alone: a column is stored as code · scale.
        skip_scale: False.
    """
    name = "concat_and_cache_mla"
    require(not skip_scale, name, "skip_scale", "False", skip_scale)
    latents, rope = _first_rows(name, "kv_c", kv_c, slot_mapping), _first_rows(name, "k_pe", k_pe, slot_mapping)
    own = DTYPE_NAMES.get(kv_c.dtype, "auto")
    kinds = f"auto, {own}, fp8, fp8_e4m3 or fp8_ds_mla"
    known = kv_cache_dtype in ("auto", own, "fp8", "fp8_e4m3", "fp8_ds_mla")
    require(known, name, "kv_cache_dtype", kinds, kv_cache_dtype)
    columns = kv_c.shape[1] + k_pe.shape[1]
    one_scale = None
    if kv_cache_dtype == "fp8_ds_mla":
        require(kv_c.shape[1] == 512, name, "kv_c", "[tokens, 512] for fp8_ds_mla", kv_c)
        kv_cache = kv_cache.view(torch.uint8)
        require(kv_cache.shape[-1] == 656, name, "kv_cache", "of rows of 656 bytes for fp8_ds_mla", kv_cache)
    elif kv_cache_dtype.startswith("fp8"):
        fits = kv_cache.element_size() == 1 and kv_cache.shape[-1] == columns
        require(fits, name, "kv_cache", f"[blocks, block, {columns}] of bytes for {kv_cache_dtype}", kv_cache)
        one_scale = scale
        if isinstance(scale, torch.Tensor):
            require(scale.numel() == 1, name, "scale", "one number", scale)
            one_scale = scale.reshape(())
    else:
        fits = kv_cache.dtype == kv_c.dtype
        require(fits, name, "kv_cache", f"{kv_c.dtype} as kv_c is for {kv_cache_dtype}", kv_cache)
    with named(name, kv="kv_c", cache="kv_cache", slots="slot_mapping", k_rope="k_pe", kv_scale="scale"):
        ops.mla_cache_append(
            latents, kv_cache, slot_mapping, k_rope=rope if rope.shape[1] else None, kv_scale=one_scale
        )


@torch.no_grad()
def indexer_k_quant_and_cache(
    k: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, quant_block_size: int, kv_cache_dtype: str
) -> None:
    """Quantises the index keys of new tokens to e4m3, each with an fp32 scale, and writes them into a cache.

    Args:
        k: bf16 [tokens, d].
        kv_cache: uint8 [blocks, block, d + 4], written in place. In a block, the codes of all rows come first, then the
            scales.
        slot_mapping: int64 or int32, at least [tokens]; −1: nowhere.
        quant_block_size: d.
        kv_cache_dtype: the format of scales, in spite of its name: "ue8m0" for powers of two, else amax / 448. "mxfp8",
            with four scales a row, is a ValueError.
    """
    name = "indexer_k_quant_and_cache"
    require(
        kv_cache_dtype != "mxfp8", name, "kv_cache_dtype", "ue8m0, or another format with one scale", kv_cache_dtype
    )
    require_shape(name, "k", k, tokens=None, d=None)
    tokens, d = k.shape
    block = integer(name, "quant_block_size", quant_block_size)
    require(block == d, name, "quant_block_size", f"d = {d} (one scale a key)", block)
    fits = kv_cache.element_size() == 1 and kv_cache.ndim == 3 and kv_cache.shape[-1] == d + 4
    require(fits, name, "kv_cache", f"[blocks, block, {d + 4}] of bytes", kv_cache)
    fits = slot_mapping.ndim == 1 and len(slot_mapping) >= tokens
    require(fits, name, "slot_mapping", f"at least [{tokens}]", slot_mapping)
    scale_format = "pow2" if kv_cache_dtype == "ue8m0" else "fp32"
    with named(name, kv="k", cache="kv_cache", slots="slot_mapping"):
        ops.mla_cache_append(k, kv_cache, slot_mapping[:tokens], scale_format=scale_format)


@torch.no_grad()
def cp_gather_indexer_k_quant_cache(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
) -> None:
    """Copies the index keys of sequences, one sequence after another, from a paged cache. Made of PyTorch operations.

    Args:
        kv_cache: uint8 [blocks, block, d + 4], as `indexer_k_quant_and_cache` writes it.
        dst_k: uint8 or float8_e4m3fn [tokens, d], written in place. Rows from cu_seq_lens[-1] on stay as they are.
        dst_scale: uint8 [tokens, 4] or fp32 [tokens, 1], written in place.
        block_table: int32 [b, max_blocks].
        cu_seq_lens: int32 [b + 1]: offsets of the sequences in dst_k.
    """
    name = "cp_gather_indexer_k_quant_cache"
    arguments = {"dst_k": dst_k, "dst_scale": dst_scale, "block_table": block_table, "cu_seq_lens": cu_seq_lens}
    require_one_device(name, kv_cache=kv_cache, **arguments)
    require_shape(name, "dst_k", dst_k, tokens=None, d=None)
    require(dst_k.element_size() == 1, name, "dst_k", "of bytes", dst_k)
    tokens, d = dst_k.shape
    fits = dst_scale.ndim == 2 and len(dst_scale) == tokens and dst_scale.shape[1] * dst_scale.element_size() == 4
    require(fits, name, "dst_scale", f"uint8 [{tokens}, 4] or float32 [{tokens}, 1] (one scale a key)", dst_scale)
    require_shape(name, "kv_cache", kv_cache, blocks=None, block=None, row=d + 4)
    blocks, block, row = kv_cache.shape
    whole = kv_cache.element_size() == 1 and (blocks == 0 or kv_cache[0].is_contiguous())
    require(whole, name, "kv_cache", "of bytes, contiguous inside a block", kv_cache)
    require_shape(name, "block_table", block_table, b=None, max_blocks=None)
    b, most = block_table.shape
    require(block_table.dtype == torch.int32, name, "block_table", "int32", block_table)
    require_shape(name, "cu_seq_lens", cu_seq_lens, offsets=b + 1)
    require(cu_seq_lens.dtype == torch.int32, name, "cu_seq_lens", "int32", cu_seq_lens)
    if tokens == 0 or block_table.numel() == 0 or kv_cache.numel() == 0:
        return
    token = torch.arange(tokens, device=dst_k.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seq_lens[1:].contiguous(), token, right=True)
    there = sequence < b
    sequence = sequence.clamp(max=b - 1)
    position = token - cu_seq_lens[sequence]
    there &= (position >= 0) & (position < most * block)
    page = block_table[sequence, (position // block).clamp(0, most - 1)].long()
    there &= (page >= 0) & (page < blocks)
    page, i = page.clamp(0, blocks - 1)[:, None], (position % block)[:, None].long()
    memory = kv_cache.view(torch.uint8).as_strided((blocks, block * row), (kv_cache.stride(0), 1))
    for target, first, count in ((dst_k, 0, d), (dst_scale, d * block, 4)):
        new = memory[page, first + count * i + torch.arange(count, device=memory.device)]
        old = target.view(torch.uint8)
        old.copy_(torch.where(there[:, None], new, old))
