"""DeepSeek Sparse Attention: the attention, its indexer and the loss that trains the indexer."""

from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from hopwell._checks import require
from hopwell.torch import ops
from hopwell.torch.nn._module import backward_may_follow, check_tokens, check_type, take_parts
from hopwell.torch.nn.attention import SparseMLA, pack_indices
from hopwell.torch.nn.cache import KeyCache
from hopwell.torch.nn.config import attention_options, indexer_options
from hopwell.torch.nn.indexer import LightningIndexer, loss_over_tokens
from hopwell.torch.nn.pack import Pack

Mode = Literal["dense", "warm-up", "sparse"]


def has_loss(module: nn.Module, mode: "Mode", with_loss: bool | None) -> bool:
    """Whether a `DSA` returns its loss: as `with_loss` says. The default, None, asks if a backward may follow."""
    if mode == "dense":
        name = type(module).__name__
        require(not with_loss, name, "with_loss", "None or False in mode 'dense', which has no loss", with_loss)
        return False
    return backward_may_follow(module.training) if with_loss is None else bool(with_loss)


def check_mode(module: str, mode: str) -> None:
    """A mode of `DSA`."""
    if mode not in get_args(Mode):
        raise ValueError(f"{module}: mode must be {' or '.join(map(repr, get_args(Mode)))}; got {mode!r}")


class DSA(SparseMLA):
    """DeepSeek Sparse Attention: MLA over the keys that `indexer` selects, and the loss the indexer learns from.

    It has the parts of `mla` as its own, so that its parameters have the names of a published layer, from
    `q_a_proj.weight` to `o_proj.weight` and `indexer.weights_proj.weight`. `from_config` makes a layer for a published
    configuration, and `load_state_dict` then takes the published tensors.

    Three ways to run it, the stages of the report:
      "dense"    attention over every visible key, by PyTorch; the indexer rests
      "warm-up"  attention over every visible key and the indexer's loss over all of them; the caller keeps the rest
                 fixed
      "sparse"   attention over the selected keys and the indexer's loss over these

    The loss is the mean over tokens (without any, 0) of KL(attention distribution ‖ softmax of the index scores). The
    indexer's input is detached and the target carries no gradient, so the indexer learns from this loss only and
    nothing else learns from it. `selected` holds the last selection, int32 [b, s, topk]: the keys
    that were read; None if all were.
    """

    def __init__(self, mla: SparseMLA, indexer: LightningIndexer) -> None:
        name = type(self).__name__
        if not isinstance(mla, SparseMLA):
            raise TypeError(f"{name}: mla must be a SparseMLA; got {type(mla).__name__}")
        check_type(name, "indexer", indexer, nn.Module)  # a LightningIndexer, perhaps compiled or wrapped
        nn.Module.__init__(self)
        take_parts(self, mla)
        self.attn_sink = mla.attn_sink
        self.indexer = indexer
        self.selected: Tensor | None = None

    @classmethod
    def from_config(cls, config: object) -> Self:
        """A layer with the sizes of a Hugging Face configuration, an object or a dict, of DeepSeek-V3.2 or GLM-5."""
        name = f"{cls.__name__}.from_config"
        mla = SparseMLA(**attention_options(name, config))
        return cls(mla, LightningIndexer(**indexer_options(name, config)))

    def project_all(
        self, x: Tensor, start: int | Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """What `project` of the attention and of the indexer make; the indexer's is cut off from what precedes it."""
        latent = self.query_latent(x)
        index: tuple[Tensor, Tensor, Tensor] = self.indexer.project(x.detach(), start, latent.detach())
        return self.project(x, start, latent), index

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        mode: Mode = "sparse",
        with_loss: bool | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        k_start: Tensor | None = None,
        k_end: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x [b, s, d_model] → y [b, s, d_model] and the indexer's loss, or None.

        with_loss: whether the loss is made. None: if a backward may follow, that is with gradients on, and under
        activation checkpointing also in the reentrant kind's first run. Mode "dense" has no loss.

        For packed documents x is [1, s, d_model]. Either cu_seqlens int32 or int64 [documents + 1] has their bounds, as
        in `key_ranges`, and each begins at position 0; or token i sees the keys k_start[i] … k_end[i] − 1, int32 [s].
        """
        check_mode("DSA", mode)
        check_tokens("DSA", x, self.d_model, self.kv_a_proj_with_mqa)
        with_loss = has_loss(self, mode, with_loss)
        b, s, _ = x.shape
        pack = Pack.of("DSA", x, s, cu_seqlens, k_start, k_end)
        if mode == "dense":
            y, self.selected = self.dense(x, pack), None
            return y, None
        (q, kv), (q_index, k_index, weights) = self.project_all(x, pack.start)
        q, kv = q.flatten(0, 1), kv.flatten(0, 1)
        masks: dict[str, Any] = {}
        selected = indices = None
        if mode == "sparse":
            selected = self.indexer.select(q_index, k_index, weights, pack)
            indices = pack_indices(selected, s)
        else:
            masks = dict(pack.ranges())
        out, lse = self.attend(q, kv, indices, ascending=True, **masks)
        y, loss = self.combine(out.view(b, s, self.h_q, self.d_v)), None
        if with_loss:
            index = q_index.flatten(0, 1), k_index.flatten(0, 1), weights.flatten(0, 1)
            loss = loss_over_tokens((q, kv, lse), index, indices, self.sm_scale, **masks) / max(b * s, 1)
        self.selected = selected
        return y, loss

    def extend(self, x: Tensor, cache: KeyCache) -> Tensor:
        """The tokens x [1, s, d_model] that follow those in the cache: adds their keys to it and attends sparsely. If
        this raises, the cache has the tokens of before.
        """
        check_tokens("DSA.extend", x, self.d_model, self.kv_a_proj_with_mqa)
        if len(x) != 1:
            raise ValueError(
                f"DSA.extend: x must be [1, s, d_model], one sequence as the cache is; got {list(x.shape)}"
            )
        if not isinstance(cache, KeyCache):
            raise TypeError(f"DSA.extend: cache must be a KeyCache; got {type(cache).__name__}")
        start = cache.count()
        (q, kv), (q_index, k_index, weights) = self.project_all(x, start)
        mask: dict[str, Any] = {"q_start": start}
        if isinstance(start, Tensor):
            mask = {"q_positions": (start + torch.arange(x.shape[1], device=start.device)).int()}
        with cache.unchanged_on_error():
            keys, index_keys = cache.append(kv[0], k_index[0])
            indices, _ = ops.lightning_indexer(q_index[0], index_keys, weights[0], self.indexer.topk, **mask)
            out, _ = self.attend(q[0], keys, indices, ascending=True)
            return self.combine(out[None])
