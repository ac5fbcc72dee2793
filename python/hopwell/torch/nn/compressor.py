"""DeepSeek-V4's compressor: one key for each block of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from hopwell._checks import require, require_one_device
from hopwell.torch import ops
from hopwell.torch._packing import compressed_lengths, key_ranges
from hopwell.torch.nn._module import KeepsDtypes, RMSNorm, check_tokens, check_type
from hopwell.torch.nn.rope import Rope, Yarn, rotate_last


def rope_of(module: str, theta: float, scaling: Mapping[str, Any] | None) -> Rope:
    """The rotation of DeepSeek-V4: neighbouring columns, and YaRN without its factor of the softmax.

    scaling has the names of Hugging Face's `rope_scaling`: factor, original_max_position_embeddings, beta_fast,
    beta_slow, and attention_factor, the factor of sine and cosine (1 if it is missing).
    """
    if not scaling:
        return Rope(float(theta), True)
    kind = scaling.get("rope_type") or scaling.get("type") or "yarn"
    require(kind in ("default", "yarn"), module, "rope_scaling", "of type 'default' or 'yarn'", kind)
    if kind == "default":
        return Rope(float(theta), True)
    for name in ("factor", "original_max_position_embeddings"):
        require(name in scaling, module, "rope_scaling", f"a dict with {name}", dict(scaling))
    context = int(scaling["original_max_position_embeddings"])
    fast, slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)
    amplitude = float(scaling.get("attention_factor") or 1)
    return Rope(float(theta), True, Yarn(float(scaling["factor"]), context, fast, slow, attention_factor=amplitude))


@dataclass(frozen=True)
class Documents:
    """Documents that lie one after another in a pack of tokens: packed ones, or the sequences of a batch.

    Attributes:
        cu_seqlens: int32 [documents + 1], the first token of each document, and the end of the last one.
        first: int32 [tokens], the first token of each token's document, and `end`, one past the token itself. A token
            after the last document has the range 0 … 0.
        sequence: tokens of each sequence of the batch.
    """

    cu_seqlens: Tensor
    first: Tensor
    end: Tensor
    sequence: int

    @classmethod
    def of(cls, module: str, x: Tensor, cu_seqlens: Tensor | None) -> Self:
        """The documents of a module's input x [b, s, d_model]."""
        b, s = x.shape[:2]
        if cu_seqlens is None:
            cu_seqlens = torch.arange(b + 1, device=x.device, dtype=torch.int32) * s
        else:
            require(b == 1, module, "x", "[1, s, d_model] with cu_seqlens: one pack", list(x.shape))
            check_type(module, "cu_seqlens", cu_seqlens, Tensor)
            require_one_device(module, x=x, cu_seqlens=cu_seqlens)
        first, end = key_ranges(cu_seqlens, s_q=b * s)
        return cls(cu_seqlens.int(), first, end, s)

    def start(self) -> Tensor:
        """Added to 0 … tokens − 1 it is a token's position in its document."""
        return -self.first

    def keys(self, ratio: int, n: int) -> tuple[Tensor, Tensor]:
        """(cu_compressed int32 [documents + 1], start int32 [n]) of n rows of compressed keys.

        `start`, added to 0 … n − 1, is the position of a key's first token in its document. Rows that no document makes
        are at position 0.
        """
        cu_compressed = compressed_lengths(self.cu_seqlens, ratio)
        row = torch.arange(n, device=cu_compressed.device, dtype=torch.int32)
        document = torch.searchsorted(cu_compressed[1:], row, right=True).clamp(max=cu_compressed.shape[0] - 2)
        made = row < cu_compressed[-1]
        return cu_compressed, torch.where(made, (row - cu_compressed[document]) * ratio, 0).int() - row

    def visible(self, cu_compressed: Tensor, ratio: int) -> dict[str, Any]:
        """The compressed keys that each token sees, as the operators' arguments."""
        tokens = self.first.shape[0]
        k_start, k_end = key_ranges(self.cu_seqlens, cu_compressed, s_q=tokens, kv_stride=ratio)
        return {"k_start": k_start, "k_end": k_end}


class KVCompressor(KeepsDtypes):
    """Makes one key of each block of `ratio` tokens, by gated pooling of two projections, a norm and RoPE.

        keys = rope(rms(kv_compress(x · wkv, x · wgate, ape)) · norm)

    A key has the position of its block's first token. With `overlap` (None: where ratio is 4) the window of a key has
    the previous block of its document, too. Parameters have the names of DeepSeek-V4's published inference code. `ape`,
    the bias of the gates by a token's place in its block, stays float32 in a module of another dtype. The arithmetic
    is that of DeepSeek-V4's `inference/model.py`, without its fp8 simulation and its Hadamard rotation.
    """

    kept = ("ape",)

    def __init__(
        self,
        d_model: int,
        d: int,
        ratio: int,
        *,
        overlap: bool | None = None,
        d_rope: int = 64,
        norm_eps: float = 1e-6,
        rope_theta: float = 160_000.0,
        rope_scaling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        require(ratio >= 1, name, "ratio", "at least 1", ratio)
        require(0 <= d_rope <= d and d_rope % 2 == 0, name, "d_rope", f"even and between 0 and d = {d}", d_rope)
        self.d_model, self.d, self.ratio, self.d_rope = d_model, d, ratio, d_rope
        self.overlap = ratio == 4 if overlap is None else overlap
        self.rope = rope_of(name, rope_theta, rope_scaling)
        width = 2 * d if self.overlap else d
        self.wkv = nn.Linear(d_model, width, bias=False)
        self.wgate = nn.Linear(d_model, width, bias=False)
        self.ape = nn.Parameter(torch.zeros(ratio, width, dtype=torch.float32))
        self.norm = RMSNorm(d, eps=norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [b, s, d_model] → values and gates of the pooling, [b·s, width]."""
        return self.wkv(x).flatten(0, 1), self.wgate(x).flatten(0, 1)

    def pool(self, kv: Tensor, gate: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
        """Values and gates [tokens, width] → keys [tokens // ratio, d], and cu_compressed int32 [documents + 1]."""
        cu_compressed, start = documents.keys(self.ratio, kv.shape[0] // self.ratio)
        keys = ops.kv_compress(
            *(kv, gate, self.ratio),
            position_bias=self.ape.float(),
            overlap=self.overlap,
            cu_seqlens=documents.cu_seqlens,
            cu_compressed=cu_compressed,
        )
        return self.finish(keys[None], start)[0], cu_compressed

    def finish(self, keys: Tensor, start: Tensor) -> Tensor:
        """Norm and RoPE of pooled keys [b, n, d]; `start` as in `rotate`."""
        return rotate_last(self.norm(keys), self.d_rope, start, self.rope)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """x [b, s, d_model] → keys [b·s // ratio, d], sequence after sequence.

        cu_seqlens: int32 or int64 [documents + 1], packed documents in x [1, s, d_model]. Blocks and positions start
        again in each. A document of n tokens has n // ratio keys (`compressed_lengths`). Rows after the last key are
        rotated zeros.
        """
        name = type(self).__name__
        check_tokens(name, x, self.d_model, self.wkv)
        return self.pool(*self.project(x), Documents.of(name, x, cu_seqlens))[0]

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, d={self.d}, ratio={self.ratio}, overlap={self.overlap}, d_rope={self.d_rope}"
