"""A linear layer with 4-bit weights, and with 4-bit activations where it has their scale."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hopwell._checks import require, require_one_device
from hopwell.torch import ops
from hopwell.torch.nn import _nvfp4_checkpoint as checkpoint
from hopwell.torch.nn._module import KeepsDtypes, check_type
from hopwell.torch.ops._nvfp4 import nvfp4_linear_any_rows
from hopwell.torch.ops._register import contiguous_rows

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))


class _NoGradient(torch.autograd.Function):
    """y, which depends on x. A backward through it is an error, instead of a gradient that lacks this layer's part."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "NVFP4Linear: a layer with input_scale rounds x to 4 bits (W4A4) and has no gradient; "
            "load it with quantize_input=False to train layers before it"
        )


class NVFP4Linear(KeepsDtypes):
    """A linear layer whose weight is NVFP4: 4-bit codes, an e4m3 scale per 16 of them, one float32 scale, which all
    stay as they are in a module of another dtype. The weight and the bias are buffers and are not trained; x has its
    gradient, so layers before it and adapters beside it (LoRA) are. Many rows of bf16 x on a GPU are multiplied by the
    dequantised weight where that is faster; it exists for the time of the call.

    With `input_scale` x is rounded to NVFP4 as well (W4A4), and a backward through the layer is an error. Without it x
    stays in 16 bits (W4A16).
    """

    kept = ("weight", "weight_scale", "weight_global", "input_scale")
    _bytes: ClassVar[dict[str, tuple[torch.dtype, ...]]] = {
        "weight": (torch.uint8, torch.float4_e2m1fn_x2),
        "weight_scale": (torch.uint8, torch.float8_e4m3fn),
    }

    weight: Tensor
    weight_scale: Tensor
    weight_global: Tensor
    input_scale: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        weight_global: Tensor,
        bias: Tensor | None = None,
        *,
        global_is_reciprocal: bool = False,
        input_scale: Tensor | None = None,
        output_sizes: Sequence[int] | None = None,
    ) -> None:
        """weight uint8 or float4_e2m1fn_x2 [out_features, in_features/2], weight_scale uint8 or float8_e4m3fn
        [out_features, in_features/16], weight_global float32 0-d, input_scale float32 0-d: the global scale that x is
        rounded with. With global_is_reciprocal weight_global and input_scale are 1 / the factor, as compressed-tensors
        stores them (`weight_global_scale`, `input_global_scale`).

        A fused layer has rows of several layers one after another, output_sizes of each. Then weight_global and
        input_scale may be [layers]: no e4m3 scale can take up the ratio of two globals exactly.
        """
        super().__init__()
        tensors = {"weight": weight, "weight_scale": weight_scale, "weight_global": weight_global}
        tensors |= {} if input_scale is None else {"input_scale": input_scale}
        for name, tensor in (tensors | ({} if bias is None else {"bias": bias})).items():
            check_type("NVFP4Linear", name, tensor, Tensor)
        if weight.ndim != 2 or weight.dtype not in self._bytes["weight"]:
            expected = f"{_names(self._bytes['weight'])} [out_features, in_features/2]"
            raise ValueError(f"NVFP4Linear: weight must be {expected}; got {weight.dtype} {list(weight.shape)}")
        self.out_features, self.in_features = weight.shape[0], weight.shape[1] * 2
        self.output_sizes = [self.out_features] if output_sizes is None else list(output_sizes)
        expected = f"sizes that add up to out_features={self.out_features}"
        require(sum(self.output_sizes) == self.out_features, "NVFP4Linear", "output_sizes", expected, output_sizes)
        expected = "float32 0-d" + (f" or [{len(self.output_sizes)}]" if len(self.output_sizes) > 1 else "")
        for name in tensors.keys() - self._bytes:
            fits = tensors[name].dtype == torch.float32 and tensors[name].shape in ((), (len(self.output_sizes),))
            require(fits, "NVFP4Linear", name, expected, tensors[name])
        self.global_is_reciprocal = global_is_reciprocal
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("weight_global", weight_global)
        self.register_buffer("input_scale", input_scale)
        self.register_buffer("bias", bias)
        self._read_alphas()

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

    @classmethod
    def from_checkpoint(
        cls, tensors: Mapping[str, Tensor], prefix: str | Sequence[str], *, quantize_input: bool = True
    ) -> "NVFP4Linear":
        """The layer of this prefix in a checkpoint of compressed-tensors (`nvfp4-pack-quantized`) or ModelOpt (NVFP4),
        told apart by the tensors' names. It shares the checkpoint's memory where it can.

        Several prefixes are the layers of one fused layer, in the order of its rows; each keeps its global scales. A
        layer that has the scale of its input becomes W4A4; with quantize_input=False it stays W4A16.
        """
        layers = [checkpoint.read_layer(tensors, p) for p in ([prefix] if isinstance(prefix, str) else prefix)]
        require(len(layers) > 0, "NVFP4Linear.from_checkpoint", "prefix", "at least one", prefix)
        fused = checkpoint.fuse(layers)
        return cls(
            *(fused.weight, fused.weight_scale, fused.weight_global, fused.bias),
            global_is_reciprocal=fused.convention.global_is_reciprocal,
            input_scale=fused.input_scale if quantize_input else None,
            output_sizes=fused.output_sizes,
        )

    def _read_alphas(self) -> None:
        """Reads the factor of W4A4 for each fused layer. `nvfp4_matmul` takes a number, and to read one from a GPU in
        `forward` would wait for it.
        """
        self._alphas = [1.0] * len(self.output_sizes)  # on the meta device any will do
        if self.input_scale is not None and not self.input_scale.is_meta and not self.weight_global.is_meta:
            product = self.weight_global.double() * self.input_scale.double()
            product = product.reciprocal() if self.global_is_reciprocal else product
            self._alphas = product.expand(len(self.output_sizes)).tolist()

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
        self._read_alphas()

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
        y = self._by_layers(rows, bias)
        if self.input_scale is not None and x.requires_grad and not torch.compiler.is_compiling():
            y = _NoGradient.apply(y, x)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], self.out_features)

    def _by_layers(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """rows [n, in_features] → [n, out_features]: one product for each fused layer, or one if globals are shared."""
        shared = self.weight_global.ndim == 0 and (self.input_scale is None or self.input_scale.ndim == 0)
        sizes = [self.out_features] if shared else self.output_sizes
        weights = list(zip(torch.split(self.weight, sizes), torch.split(self.weight_scale, sizes), strict=True))
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        if self.input_scale is None:
            reciprocal = self.global_is_reciprocal
            results = [
                nvfp4_linear_any_rows(rows, *weight, factor, bias=own_bias, global_is_reciprocal=reciprocal)
                for weight, factor, own_bias in zip(
                    weights, self.weight_global.expand(len(sizes)).unbind(), biases, strict=True
                )
            ]
        else:
            scales = self.input_scale.reciprocal() if self.global_is_reciprocal else self.input_scale
            inputs = [ops.nvfp4_quantize(rows, global_scale=scale)[:2] for scale in scales.reshape(-1).unbind()]
            inputs = inputs * len(sizes) if len(inputs) < len(sizes) else inputs
            results = [
                ops.nvfp4_matmul(x, codes, sfx, scales, alpha, own_bias, rows.dtype)
                for (x, sfx), (codes, scales), alpha, own_bias in zip(
                    inputs, weights, self._alphas[: len(sizes)], biases, strict=True
                )
            ]
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        text += ", global_is_reciprocal=True" if self.global_is_reciprocal else ""
        text += f", output_sizes={self.output_sizes}" if len(self.output_sizes) > 1 else ""
        return text + ("" if self.input_scale is None else ", W4A4")
