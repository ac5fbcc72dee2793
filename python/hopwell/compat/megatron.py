"""Hooks of Megatron-LM: the four of a backend of its DeepSeek sparse attention, and four of DeepSeek-V4's attention.

    from megatron.core.transformer.experimental_attention_variant import dsa_kernels
    dsa_kernels._BACKEND_MODULE_NAME_BY_BACKEND["cudnn"] = "hopwell.compat.megatron"    # and dsa_kernel_backend "cudnn"

After `megatron/core/transformer/experimental_attention_variant/dsa_kernels.py` of github.com/NVIDIA/Megatron-LM at
d98e8a6, which calls them, its two backends beside it, and `dsa.py`, whose PyTorch functions say what is computed.
Arguments, layouts ([sequence, batch, heads, d]), results and `None` for what is declined are those.

Every layout that these functions get as row-wise bounds of keys (causal, packed documents, context-parallel shards) is
one call with key ranges here, so the arguments which tell the packed and context-parallel layouts apart aren't needed.
Both losses are here, over the selected keys and over all (for packed documents too), with and without the relu, padded
rows, and heads on several tensor-parallel ranks, whose targets are added before they are normalised. Indices ascend,
and results have the same bits every time where PyTorch is told to be deterministic.

Declined: dtypes other than bf16 (on the CPU float32 too) in the attention, several heads of keys, d other than 512 or
576 and latent values other than 512 on GPUs, GPUs older than Ampere, index d above 128 on GPUs, additive masks, keys
with positions of their own, attention that isn't absorbed, shapes that do not fit.

What the losses cost: the sparse one stores targets and gradients, no scores of all keys. The dense one stores
nothing of size s_q × s_kv on one tensor-parallel rank; on several its target, float32 [s_q, s_kv] a sequence.

DeepSeek-V4's attention on the branch dev (at d48bd6b) calls functions of `csa_utils`. These four replace them:

    from megatron.core.transformer.experimental_attention_variant import csa
    from hopwell.compat import megatron
    for name in ("csa_sparse_attn", "fused_csa_indexer_sparse_attn", "indexer_topk", "maybe_compress_thd_fused"):
        setattr(csa, name, getattr(megatron, name))

`csa_utils.cp_utils` has `indexer_topk` under a name of its own. Megatron-LM's configuration takes these kernels only if
the modules `flash_mla` and `cudnn` (with `DSA`) can be imported and the GPU is Hopper or newer; on Hopper it refuses
the loss over all keys at ratio 4. The functions here have none of these limits: `hopwell.compat.flash_mla` and
`hopwell.compat.cudnn` may stand in for the two modules in `sys.modules`. Arguments, layouts, entries and results are
the same as in `fused_sparse_attention.py` and `fused_compressor.py`. Differences: the functions run on GPUs from Ampere
on and on the CPU, where they take float32 too. Tensors may have any strides. Selected entries are in ascending order.
Lengths of the longest segment are not used. `fused_csa_indexer_sparse_attn` computes the indexer's gradients in the
backward and rounds them once; Megatron-LM rounds them before and after it multiplies by the gradient of the loss. With
a loss_coeff of 0 they are zeros. For the loss over all keys it runs two more forwards, one over the window and one over
all visible compressed keys. A `topk_length` beside an `indexer_topk` is allowed. `maybe_compress_thd_fused` takes any
ratio, and also runs where PyTorch is told to be deterministic. It returns None if it declines, and rows after the last
key are 0. The other functions raise a ValueError that names the argument.

Not here: `FusedCSAIndexerSparseAttnFromTopkFunc`, for context-parallel packed training, and `build_flat_topk_idxs`.
They remain Megatron-LM's own; with compact=True the latter needs cuDNN's front end on a GPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopwell.torch import ops
from hopwell.torch.nn._module import backward_may_follow

from .._checks import INTEGERS, require
from ._index_scores import as_int32
from ._megatron_csa import csa_sparse_attn, fused_csa_indexer_sparse_attn, indexer_topk, maybe_compress_thd_fused
from ._tensors import in_rows

__all__ = [
    "csa_sparse_attn",
    "fused_csa_indexer_sparse_attn",
    "indexer_topk",
    "maybe_compress_thd_fused",
    "run_fused_absorbed_sparse_attention",
    "run_fused_dsa_attention",
    "run_fused_qk_topk",
    "run_fused_qk_topk_with_loss",
]

_LEAST_TARGET_SUM = 1e-10
_MOST_VALUE_COLUMNS = 512


def _device_takes(*tensors: Tensor) -> bool:
    device = tensors[0].device
    if any(x.device != device for x in tensors):
        return False
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))


def _indexer_takes(q: Tensor, k: Tensor, weights: Tensor, starts: Tensor | None, ends: Tensor | None) -> bool:
    if q.ndim != 4 or k.ndim != 3 or weights.shape != q.shape[:3] or starts is None or ends is None:
        return False
    if k.shape[1] != q.shape[1] or k.shape[2] != q.shape[3] or starts.shape != q.shape[:1] or ends.shape != q.shape[:1]:
        return False
    kinds = (torch.bfloat16, torch.float32)
    if q.dtype not in kinds or k.dtype != q.dtype or weights.dtype not in kinds or 0 in q.shape[1:]:
        return False
    if starts.dtype not in INTEGERS or ends.dtype not in INTEGERS:
        return False
    return _device_takes(q, k, weights, starts, ends) and (q.device.type == "cpu" or q.shape[3] <= 128)


def _attention_takes(query: Tensor, key: Tensor, v_channels: int) -> bool:
    if query.ndim != 4 or key.ndim != 4 or key.shape[2] != 1 or key.shape[1] != query.shape[1]:
        return False
    d = query.shape[3]
    if (
        0 in query.shape[1:]
        or key.shape[3] != d
        or not 0 < v_channels <= d
        or query.dtype != key.dtype
        or not _device_takes(query, key)
    ):
        return False
    if query.device.type == "cpu":
        return query.dtype in (torch.bfloat16, torch.float32)
    return query.dtype == torch.bfloat16 and d in (512, 576) and v_channels == _MOST_VALUE_COLUMNS


def _select(
    q: Tensor, k: Tensor, weights: Tensor, index_topk: int, starts: Tensor, ends: Tensor, use_relu: bool
) -> tuple[Tensor, Tensor]:
    """The keys of largest index score, int32 [b, s_q, topk] in ascending order, and how many there are, int32 [b, s_q].

    Entries whose score is −inf are none.
    """
    require(index_topk >= 0, "hopwell.compat.megatron", "index_topk", "at least 0", index_topk)
    s_q, b = q.shape[:2]
    topk = min(index_topk, len(k))
    q, k, weights = in_rows(q), in_rows(k), in_rows(weights)
    indices = torch.empty(b, s_q, topk, dtype=torch.int32, device=q.device)
    lengths = torch.empty(b, s_q, dtype=torch.int32, device=q.device)
    k_start, k_end = (as_int32(bound, len(k)) for bound in (starts, ends))
    options: dict[str, Any] = {"k_start": k_start, "k_end": k_end, "relu": use_relu}
    with torch.no_grad():
        for i in range(b):
            chosen, scores = ops.lightning_indexer(q[:, i], k[:, i], weights[:, i], topk, **options)
            lengths[i] = (chosen >= 0).sum(-1)
            indices[i] = chosen.masked_fill_(scores == -torch.inf, -1)
    return indices, lengths


def _row_weights(
    query_valid_rows: Tensor | None, b: int, s_q: int, loss_coeff: float, is_sum: bool, device: torch.device
) -> Tensor:
    """What each row's loss counts, float32 [b, s_q]."""
    if query_valid_rows is None:
        factor = loss_coeff / (1 if is_sum else max(b * s_q, 1))
        return torch.full((b, s_q), factor, dtype=torch.float32, device=device)
    shape = list(query_valid_rows.shape)
    fits = shape in ([s_q], [1, s_q], [b, s_q])
    expected = f"[{s_q}], [1, {s_q}] or [{b}, {s_q}]"
    require(fits, "hopwell.compat.megatron", "query_valid_rows", expected, shape)
    rows = query_valid_rows.to(device).bool().expand(b, s_q).float()
    return in_rows(rows * (loss_coeff if is_sum else loss_coeff / rows.sum().clamp(min=1)))


@dataclass
class _Loss:
    """The indexer's loss Σ row_weights·KL(attention ‖ softmax of the index scores), over some keys or all."""

    q: Tensor
    k: Tensor
    weights: Tensor
    query: Tensor
    key: Tensor
    softmax_scale: float
    row_weights: Tensor
    tp_group: Any
    use_relu: bool

    @property
    def has_more_ranks(self) -> bool:
        """Whether other ranks have other heads of the attention."""
        return self.tp_group is not None and self.tp_group.size() > 1

    def over(
        self, entries: Tensor, lse: list[Tensor], k_start: Tensor | None = None, k_end: Tensor | None = None
    ) -> Tensor:
        """Entries [b, s_q, n]; lse is that of the attention on them, of this rank's heads."""
        loss = self.q.new_zeros((), dtype=torch.float32)
        for i, table in enumerate(entries):
            with torch.no_grad():
                attention = self.query[:, i], self.key[:, i], table, lse[i], self.softmax_scale
                target = ops.attention_distribution(*attention, k_start=k_start, k_end=k_end)
                if self.has_more_ranks:
                    torch.distributed.all_reduce(target, group=self.tp_group)
                target.div_(target.sum(-1, keepdim=True).clamp_(min=_LEAST_TARGET_SUM))
            index = self.q[:, i], self.k[:, i], self.weights[:, i], table, target
            loss = loss + ops.indexer_loss(
                *index, k_start=k_start, k_end=k_end, row_weights=self.row_weights[i], relu=self.use_relu
            )
        return loss

    def over_all_keys(self, starts: Tensor, ends: Tensor) -> Tensor:
        """Of those that a query sees. The target of heads on several ranks has to be stored, to be added."""
        k_start, k_end = (as_int32(bound, len(self.k)) for bound in (starts, ends))
        masks: dict[str, Any] = {"k_start": k_start, "k_end": k_end}
        with torch.no_grad():
            attention = [
                (self.query[:, i], self.key[:, i], None, self.softmax_scale, _values_beside(self.key))
                for i in range(self.q.shape[1])
            ]
            lse = [ops.sparse_mla(*inputs, **masks)[2] for inputs in attention]
        if self.has_more_ranks:
            table = torch.arange(len(self.k), dtype=torch.int32, device=self.q.device).expand(len(self.q), -1)
            return self.over(table.expand(len(lse), -1, -1), lse, **masks)
        loss = self.q.new_zeros((), dtype=torch.float32)
        for i, of_sequence in enumerate(lse):
            inputs = self.query[:, i], self.key[:, i], of_sequence, self.q[:, i], self.k[:, i], self.weights[:, i]
            loss = loss + ops.indexer_dense_loss(
                *inputs, self.softmax_scale, row_weights=self.row_weights[i], relu=self.use_relu, **masks
            )
        return loss


def _values_beside(key: Tensor) -> int:
    """Columns of values of an attention whose lse alone is wanted; GPUs make 512."""
    return min(_MOST_VALUE_COLUMNS, key.shape[-1])


def _attend(
    query: Tensor, key: Tensor, indices: Tensor, lengths: Tensor | None, softmax_scale: float, v_channels: int
) -> tuple[Tensor, list[Tensor]]:
    """Attention [s_q, b, heads, v_channels], differentiable in query and key, and each sequence's lse [s_q, heads]."""
    query, key, indices = in_rows(query), in_rows(key), in_rows(indices)
    results = [
        ops.sparse_mla(
            *(query[:, i], key[:, i], indices[i], softmax_scale, v_channels),
            topk_length=None if lengths is None else in_rows(lengths[i]),
        )
        for i in range(query.shape[1])
    ]
    outs = [out for out, _, _ in results]
    out = outs[0][:, None] if len(outs) == 1 else torch.stack(outs, 1)
    return out, [lse for _, _, lse in results]


def run_fused_qk_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    block_size: int,
    use_relu: bool = True,
    use_local_indexer_varlen: bool = False,
    single_packed_thd_sequence: bool = False,
    local_packed_cp_rank: int = 0,
    local_packed_cp_query_start: int = 0,
    local_packed_cp_query_len: int | None = None,
    packed_seq_params: Any = None,
    cp_size: int = 1,
) -> tuple[Tensor, Tensor] | None:
    """The indexer's choice: q [s_q, b, h_index, d_index], k [s_kv, b, d_index], weights [s_q, b, h_index].

    starts and ends [s_q] are the keys that a query sees, from and up to. Returns topk_indices int32 [b, s_q, topk], −1
    after the last, and topk_length int32 [b, s_q], with topk = min(index_topk, s_kv).
    """
    if not _indexer_takes(q, k, weights, starts, ends):
        return None
    return _select(q, k, weights, index_topk, starts, ends, use_relu)


def run_fused_qk_topk_with_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    block_size: int,
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    loss_coeff: float,
    pg_collection: Any,
    query_valid_rows: Tensor | None = None,
    calculate_per_token_loss: bool = False,
    use_relu: bool = True,
    config: Any = None,
    use_local_indexer_varlen: bool = False,
    single_packed_thd_sequence: bool = False,
    local_packed_cp_rank: int = 0,
    local_packed_cp_query_start: int = 0,
    local_packed_cp_query_len: int | None = None,
    packed_seq_params: Any = None,
    cp_size: int = 1,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`run_fused_qk_topk` and the loss over its choice, differentiable in q, k and weights.

    query [s_q, b, heads, d] and key [s_kv, b, 1, d] are those of the attention that is the target. The loss is
    loss_coeff times the mean over rows (the valid ones, bool [s_q] or [b, s_q]), or their sum with
    calculate_per_token_loss. Returns (topk_indices, topk_length, loss float32 0-d).
    """
    d_v = _values_beside(key)
    if not _indexer_takes(q, k, weights, starts, ends) or not _attention_takes(query, key, d_v):
        return None
    if query.shape[:2] != q.shape[:2] or len(key) != len(k):
        return None
    q, k, weights, query, key = in_rows(q), in_rows(k), in_rows(weights), in_rows(query), in_rows(key)
    indices, lengths = _select(q, k, weights, index_topk, starts, ends, use_relu)
    s_q, b = q.shape[:2]
    with torch.no_grad():
        _, lse = _attend(query, key, indices, None, softmax_scale, d_v)
    row_weights = _row_weights(query_valid_rows, b, s_q, loss_coeff, calculate_per_token_loss, q.device)
    tp_group = getattr(pg_collection, "tp", None)
    loss = _Loss(q, k, weights, query, key, softmax_scale, row_weights, tp_group, use_relu)
    return indices, lengths, loss.over(indices, lse)


def run_fused_absorbed_sparse_attention(
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: Tensor | None = None,
) -> Tensor | None:
    """Attention over given entries: query [s_q, b, heads, d], key [s_kv, b, 1, d], topk_indices [b, s_q, topk].

    Entries outside the keys, and from topk_length [b, s_q] on, are none. Returns [s_q, b, heads, v_channels],
    differentiable in query and key; 0 where a query has no entry.
    """
    if not _attention_takes(query, key, v_channels):
        return None
    rows = (query.shape[1], query.shape[0])
    if topk_indices.ndim != 3 or topk_indices.shape[:2] != rows or topk_indices.device != query.device:
        return None
    if topk_length is not None and (topk_length.shape != rows or topk_length.device != query.device):
        return None
    if any(x is not None and x.dtype not in INTEGERS for x in (topk_indices, topk_length)):
        return None
    entries = as_int32(topk_indices, len(key))
    lengths = None if topk_length is None else as_int32(topk_length, topk_indices.shape[2])
    return _attend(query, key, entries, lengths, softmax_scale, v_channels)[0]


def run_fused_dsa_attention(
    *,
    config: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    up_v_weight: Tensor | None,
    q_indexer: Tensor,
    k_indexer: Tensor,
    indexer_weights: Tensor,
    indexer_topk: int,
    softmax_scale: float,
    loss_coeff: float,
    sparse_loss: bool,
    calculate_per_token_loss: bool,
    absorbed_mla: bool,
    cp_size: int,
    attn_mask_type: Any,
    packed_seq_params: Any,
    varlen_starts: Tensor | None,
    varlen_ends: Tensor | None,
    key_positions: Tensor | None,
    query_valid_rows: Tensor | None,
    varlen_is_plain_causal: bool = False,
    use_relu: bool,
    use_local_indexer_varlen: bool = False,
    single_packed_thd_sequence: bool = False,
    local_packed_cp_rank: int = 0,
    local_packed_cp_query_start: int = 0,
    local_packed_cp_query_len: int | None = None,
    pg_collection: Any = None,
) -> tuple[Tensor, Tensor] | None:
    """Choice, loss, attention and the values' up-projection by up_v_weight [heads, d_value, kv_lora_rank] in one.

    Without bounds of keys the attention is causal. Returns (output [s_q, b, heads·d_value], loss float32 0-d), the
    first differentiable in query, key and up_v_weight, the second in the indexer's inputs; the loss is 0 if loss_coeff
    is not positive, or no backward can follow. One can where gradients are on, and in the first run of reentrant
    activation checkpointing.
    """
    v_channels = int(getattr(config, "kv_lora_rank", 0) or 0)
    if not absorbed_mla or value is not None or up_v_weight is None or key_positions is not None:
        return None
    if getattr(attn_mask_type, "name", None) != "causal" or not _attention_takes(query, key, v_channels):
        return None
    if varlen_starts is None and varlen_ends is None:
        if cp_size != 1 or packed_seq_params is not None or len(query) != len(key):
            return None
        varlen_ends = torch.arange(1, len(query) + 1, dtype=torch.int32, device=query.device)
        varlen_starts = torch.zeros_like(varlen_ends)
    if not _indexer_takes(q_indexer, k_indexer, indexer_weights, varlen_starts, varlen_ends):
        return None
    if varlen_starts is None or varlen_ends is None or query.shape[:2] != q_indexer.shape[:2]:
        return None
    if len(key) != len(k_indexer):
        return None
    if up_v_weight.ndim != 3 or up_v_weight.shape[::2] != (query.shape[2], v_channels):
        return None

    query, key = in_rows(query), in_rows(key)
    index = in_rows(q_indexer), in_rows(k_indexer), in_rows(indexer_weights)
    indices, lengths = _select(*index, indexer_topk, varlen_starts, varlen_ends, use_relu)
    out, lse = _attend(query, key, indices, lengths, softmax_scale, v_channels)
    output = torch.einsum("sbhc,hdc->sbhd", out, up_v_weight).flatten(2)
    if loss_coeff <= 0 or not backward_may_follow():
        return output, torch.zeros((), dtype=torch.float32, device=query.device)
    s_q, b = query.shape[:2]
    row_weights = _row_weights(query_valid_rows, b, s_q, loss_coeff, calculate_per_token_loss, query.device)
    tp_group = getattr(pg_collection, "tp", None)
    loss = _Loss(*index, query, key, softmax_scale, row_weights, tp_group, use_relu)
    if sparse_loss:
        return output, loss.over(indices, lse)
    return output, loss.over_all_keys(varlen_starts, varlen_ends)
