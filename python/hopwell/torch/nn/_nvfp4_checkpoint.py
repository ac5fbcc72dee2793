"""One layer of an NVFP4 checkpoint: the names of its tensors by convention, and their checks.

Names and meaning are from compressed-tensors (`compressors/nvfp4`, `quantization/utils/helpers.py`) and from ModelOpt
(`torch/export/unified_export_hf.py`, `qtensor/nvfp4_tensor.py`). Both put element 2i in the low half of byte i.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor

from hopwell._checks import require, require_sizes

_NAME = "NVFP4Linear.from_checkpoint"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Convention:
    """How a format names the tensors of a layer, beside weight_scale and bias."""

    weight: str
    weight_global: str
    input_scale: str
    global_is_reciprocal: bool


COMPRESSED_TENSORS = Convention("weight_packed", "weight_global_scale", "input_global_scale", True)
MODELOPT = Convention("weight", "weight_scale_2", "input_scale", False)


@dataclass(frozen=True)
class Layer:
    """The tensors of a layer as `NVFP4Linear` takes them."""

    prefix: str
    convention: Convention
    weight: Tensor
    weight_scale: Tensor
    weight_global: Tensor
    input_scale: Tensor | None
    bias: Tensor | None
    output_sizes: list[int]


def key(prefix: str, name: str) -> str:
    """The tensor `name` of the layer `prefix`, which may end in a dot, and be empty for a layer alone."""
    prefix = prefix.removesuffix(".")
    return f"{prefix}.{name}" if prefix else name


def convention_of(tensors: Mapping[str, Tensor], prefix: str) -> Convention | None:
    """The convention that a layer's tensors follow; None if it is not NVFP4 by either."""
    if key(prefix, COMPRESSED_TENSORS.weight) in tensors or key(prefix, COMPRESSED_TENSORS.weight_global) in tensors:
        return COMPRESSED_TENSORS
    if key(prefix, "weight_scale") in tensors or key(prefix, MODELOPT.weight_global) in tensors:
        return MODELOPT
    return None


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The names that a wrong `name` may have meant, the nearest first. Names that end as it does come first."""
    tail = name.removesuffix(".")
    ends = sorted((n for n in names if n.endswith(f".{tail}") or tail.endswith(f".{n}")), key=len)
    return (ends + [n for n in get_close_matches(tail, names, count, cutoff=0) if n not in ends])[:count]


def read_layer(tensors: Mapping[str, Tensor], prefix: str) -> Layer:
    """The layer's tensors, checked. A ValueError names the tensor that is missing or wrong."""
    convention = convention_of(tensors, prefix)
    if convention is None:
        marks = [c.weight_global for c in (COMPRESSED_TENSORS, MODELOPT)]
        layers = {layer for layer, _, last in (name.rpartition(".") for name in tensors) if last in marks}
        near = f"the nearest layers that have one are {nearest(prefix, layers)}" if layers else "no layer has one"
        expected = f"a layer of the checkpoint that has {' or '.join(marks)}"
        raise ValueError(f"{_NAME}: prefix must be {expected}; got {prefix!r}, and {near}")

    def given(name: str) -> Tensor:
        require(key(prefix, name) in tensors, _NAME, "tensors", f"a mapping with {key(prefix, name)}", "none")
        return tensors[key(prefix, name)]

    weight, scale, bias = given(convention.weight), given("weight_scale"), tensors.get(key(prefix, "bias"))
    fits = weight.dtype == torch.uint8 and weight.ndim == 2 and weight.shape[1] % 8 == 0
    expected = "torch.uint8 [out_features, in_features/2] with in_features a multiple of 16"
    require(fits, _NAME, key(prefix, convention.weight), expected, weight)
    fits = scale.dtype == torch.float8_e4m3fn
    require(fits, _NAME, key(prefix, "weight_scale"), "torch.float8_e4m3fn", scale)
    require_sizes(_NAME, key(prefix, "weight_scale"), scale, (weight.shape[0], weight.shape[1] // 8))
    if bias is not None:
        require(bias.dtype in _FLOATS, _NAME, key(prefix, "bias"), "float32, float16 or bfloat16", bias)
        require_sizes(_NAME, key(prefix, "bias"), bias, (weight.shape[0],))
    reciprocal = convention.global_is_reciprocal
    weight_global = _scalar(key(prefix, convention.weight_global), given(convention.weight_global), reciprocal)
    input_scale = None
    if key(prefix, convention.input_scale) in tensors:
        input_scale = _scalar(key(prefix, convention.input_scale), given(convention.input_scale), True)
    return Layer(prefix, convention, weight, scale, weight_global, input_scale, bias, [weight.shape[0]])


def _scalar(name: str, tensor: Tensor, is_divisor: bool) -> Tensor:
    """A global scale, stored 0-d or [1], as a 0-d float32 tensor. Something is divided by it if is_divisor."""
    require(tensor.dtype in _FLOATS and tensor.numel() == 1, _NAME, name, "one float32 number, 0-d or [1]", tensor)
    scalar = tensor.float().reshape(())
    if not scalar.is_meta:
        value = scalar.item()
        fits = bool(scalar.isfinite()) and (not is_divisor or (value > 0 and bool(scalar.reciprocal().isfinite())))
        require(fits, _NAME, name, "finite and above 0, with a finite reciprocal" if is_divisor else "finite", value)
    return scalar


def fuse(layers: Sequence[Layer]) -> Layer:
    """One layer with the rows of all. Globals stay one for each, unless all are equal."""
    first = layers[0]
    if len(layers) == 1:
        return first
    for layer in layers[1:]:
        for what, one, other in (
            ("with tensors named", first.convention.weight_global, layer.convention.weight_global),
            ("of in_features", first.weight.shape[1] * 2, layer.weight.shape[1] * 2),
            ("with bias:", first.bias is not None, layer.bias is not None),
            ("with a scale of its input:", first.input_scale is not None, layer.input_scale is not None),
        ):
            require(one == other, _NAME, layer.prefix, f"{what} {one} as {first.prefix} is", other)

    def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
        given = [t for t in tensors if t is not None]
        return torch.cat(given) if given else None

    def one_or_all(tensors: Sequence[Tensor | None]) -> Tensor | None:
        given = [t for t in tensors if t is not None]
        if not given or all(torch.equal(t, given[0]) for t in given):
            return given[0] if given else None
        return torch.stack(given)

    scales = torch.cat([layer.weight_scale.view(torch.uint8) for layer in layers]).view(torch.float8_e4m3fn)
    weight_global = one_or_all([layer.weight_global for layer in layers])
    assert weight_global is not None
    return Layer(
        prefix=first.prefix,
        convention=first.convention,
        weight=torch.cat([layer.weight for layer in layers]),
        weight_scale=scales,
        weight_global=weight_global,
        input_scale=one_or_all([layer.input_scale for layer in layers]),
        bias=joined([layer.bias for layer in layers]),
        output_sizes=[layer.weight.shape[0] for layer in layers],
    )
