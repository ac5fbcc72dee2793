"""A linear layer with 4-bit weights."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hopwell._checks import require_one_device
from hopwell.torch import ops
from hopwell.torch.nn._module import KeepsDtypes, check_type
from hopwell.torch.ops._nvfp4 import nvfp4_linear_any_rows
from hopwell.torch.ops._register import contiguous_rows

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))


class NVFP4Linear(KeepsDtypes):
    """A linear layer whose weight is NVFP4: 4-bit codes, an e4m3 scale per 16 of them, one float32 scale, which all
    stay as they are in a module of another dtype. The weight and the bias are buffers and are not trained; x has its
    gradient, so layers before it and adapters beside it (LoRA) are. Many rows of bf16 x on a GPU are multiplied by the
    dequantised weight where that is faster; it exists for the time of the call.
    """

    kept = ("weight", "weight_scale", "weight_global")
    _bytes: ClassVar[dict[str, tuple[torch.dtype, ...]]] = {
        "weight": (torch.uint8, torch.float4_e2m1fn_x2),
        "weight_scale": (torch.uint8, torch.float8_e4m3fn),
    }

    weight: Tensor
    weight_scale: Tensor
    weight_global: Tensor
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        weight_global: Tensor,
        bias: Tensor | None = None,
        *,
        global_is_reciprocal: bool = False,
    ) -> None:
        """weight uint8 or float4_e2m1fn_x2 [out_features, in_features/2], weight_scale uint8 or float8_e4m3fn
        [out_features, in_features/16], weight_global float32 0-d. With global_is_reciprocal weight_global is
        1 / the factor, as compressed-tensors stores it (`weight_global_scale`).
        """
        super().__init__()
        for name, tensor in (("weight", weight), ("weight_scale", weight_scale), ("weight_global", weight_global)):
            check_type("NVFP4Linear", name, tensor, Tensor)
        if bias is not None:
            check_type("NVFP4Linear", "bias", bias, Tensor)
        if weight.ndim != 2 or weight.dtype not in self._bytes["weight"]:
            expected = f"{_names(self._bytes['weight'])} [out_features, in_features/2]"
            raise ValueError(f"NVFP4Linear: weight must be {expected}; got {weight.dtype} {list(weight.shape)}")
        self.out_features, self.in_features = weight.shape[0], weight.shape[1] * 2
        self.global_is_reciprocal = global_is_reciprocal
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("weight_global", weight_global)
        self.register_buffer("bias", bias)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "NVFP4Linear":
        """Rounds a linear layer's weight, of any strides, to NVFP4. Its in_features must be a multiple of 16."""
        check_type("NVFP4Linear.from_linear", "linear", linear, nn.Linear)
        if linear.in_features % 16:
            raise ValueError(f"NVFP4Linear: in_features must be a multiple of 16; got {linear.in_features}")
        weight = linear.weight.detach()
        if weight.dtype not in _FLOATS:
            raise ValueError(f"NVFP4Linear.from_linear: linear.weight must be {_names(_FLOATS)}; got {weight.dtype}")
        bias = None if linear.bias is None else linear.bias.detach().clone()
        return cls(*ops.nvfp4_quantize(contiguous_rows(weight)), bias)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Codes and scales are bytes, whichever of their types a checkpoint has them in: PyTorch would convert values
        of one to those of the other, which are other numbers.
        """
        for name, types in self._bytes.items():
            key, own = prefix + name, getattr(self, name)
            if key not in state_dict:
                continue
            given = state_dict[key]
            if given.dtype not in types:
                errors, expected = rest[-1], _names(types)
                errors.append(f"NVFP4Linear: {key} must be {expected}; got {given.dtype} {list(given.shape)}")
                given = own
            if given.dtype != own.dtype:
                given = given.view(own.dtype)
            state_dict[key] = given
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] of any strides → [..., out_features] in x's dtype, or in autocast's where that is on."""
        check_type("NVFP4Linear", "x", x, Tensor)
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"NVFP4Linear: x must be [..., in_features={self.in_features}]; got {list(x.shape)}")
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if x.dtype not in _FLOATS:
            raise ValueError(f"NVFP4Linear: x must be {_names(_FLOATS)}; got {x.dtype}")
        buffers = {name: getattr(self, name) for name in (*self.kept, "bias")}
        require_one_device("NVFP4Linear", x=x, **buffers)  # one that a checkpoint lacked may be on meta
        bias = None if self.bias is None else self.bias.to(x.dtype)
        rows = contiguous_rows(x.reshape(math.prod(x.shape[:-1]), self.in_features))
        y = nvfp4_linear_any_rows(
            *(rows, self.weight, self.weight_scale, self.weight_global, bias),
            global_is_reciprocal=self.global_is_reciprocal,
        )
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return text + (", global_is_reciprocal=True" if self.global_is_reciprocal else "")
