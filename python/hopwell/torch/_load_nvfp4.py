"""Checkpoints in NVFP4, loaded into a model of `nn.Linear`."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from hopwell._checks import require
from hopwell.torch._checkpoint_folder import Scheme, read_scheme, read_tensors
from hopwell.torch.nn import NVFP4Linear
from hopwell.torch.nn._module import check_type
from hopwell.torch.nn._nvfp4_checkpoint import convention_of, key, nearest

_NAME = "load_nvfp4"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Scales of a cache of keys and values in FP8, which no module here has.
_NOT_WEIGHTS = ("k_scale", "v_scale")


def load_nvfp4(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    quantize_input: bool = True,
    strict: bool = True,
    fused: Mapping[str, Sequence[str]] = FUSED,
) -> list[str]:
    """Loads a checkpoint whose linear layers are NVFP4. They become `nn.NVFP4Linear`, in place of `nn.Linear`.

    The folder has config.json with `quantization_config`, or ModelOpt's hf_quant_config.json, and model.safetensors, or
    several files and model.safetensors.index.json. Formats: `nvfp4-pack-quantized` of compressed-tensors, and NVFP4 and
    W4A16_NVFP4 of ModelOpt. Layers that the checkpoint has in 16 bits stay `nn.Linear`. Its scales of an FP8 cache of
    keys and values (`k_scale`, `v_scale`) are left out. If this raises, the model is unchanged.

    Args:
        model: its tensors have the checkpoint's names. If any is on the meta device, all become the checkpoint's
            tensors with its dtypes, on the CPU; else values are copied, and dtypes and devices stay.
        folder: the checkpoint's.
        quantize_input: layers with a scale of their input round it to NVFP4 too (W4A4). False: they stay W4A16.
        strict: every tensor of the model must be in the checkpoint, and the reverse.
        fused: the layers of the checkpoint that one layer of the model is made of, by the last part of their names.

    Returns:
        The names of the layers that are NVFP4.

    Raises:
        ValueError: the format is another one, or tensors are missing, unknown or wrong; it names the first of them.
        ImportError: the package safetensors is not installed.
    """
    check_type(_NAME, "model", model, nn.Module)
    scheme, tensors = read_scheme(Path(folder)), read_tensors(Path(folder))
    tensors = {name: t for name, t in tensors.items() if name.rpartition(".")[2] not in _NOT_WEIGHTS}
    names: dict[str, set[str]] = defaultdict(set)
    for name in tensors:
        prefix, _, last = name.rpartition(".")
        names[prefix].add(last)
    layers: dict[str, NVFP4Linear] = {}
    for name, module in model.named_modules():
        if name and (type(module) is nn.Linear or isinstance(module, NVFP4Linear)):
            parts = _parts(names, name, fused)
            quantized = [part for part in parts if convention_of(tensors, part) is not None]
            if quantized:
                _require_nvfp4(tensors, parts, quantized[0], scheme, quantize_input)
                layers[name] = _layer(tensors, name, module, parts, quantize_input)
            elif len(parts) > 1:
                _put_together(tensors, name, parts, names)
    own = {k: t for k, t in model.state_dict(keep_vars=True).items() if k.rpartition(".")[0] not in layers}
    rest = _matched(tensors, own, strict)
    model.load_state_dict(rest, strict=False, assign=any(t.is_meta for t in own.values()))
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
    return list(layers)


def _parts(names: Mapping[str, set[str]], name: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """The layers of the checkpoint that make up the model's layer `name`."""
    parent, _, last = name.rpartition(".")
    return [name] if last not in fused or name in names else [key(parent, part) for part in fused[last]]


def _put_together(tensors: dict[str, Tensor], name: str, parts: list[str], names: Mapping[str, set[str]]) -> None:
    """Replaces several layers in 16 bits by one layer with the rows of all."""
    for last in names.get(parts[0], ()):
        for part in parts:
            require(key(part, last) in tensors, _NAME, key(part, last), f"in the checkpoint as {parts[0]}'s is", "none")
        tensors[key(name, last)] = torch.cat([tensors.pop(key(part, last)) for part in parts])


def _require_nvfp4(
    tensors: Mapping[str, Tensor], parts: list[str], quantized: str, scheme: Scheme, quantize_input: bool
) -> None:
    """Requires that all `parts` are NVFP4, as the layer `quantized` is, and that the folder's configuration agrees."""
    for part in parts:
        convention = convention_of(tensors, part)
        require(convention is not None, _NAME, part, f"NVFP4 as {quantized} is, with which it is one layer", "16 bits")
        require(not scheme.ignores(part), _NAME, part, "in 16 bits, as the folder's list of such layers says", "NVFP4")
        expected = f"with {scheme.convention.weight_global}, as the folder's format has it"
        require(convention is scheme.convention, _NAME, part, expected, "another format's tensors")
        if scheme.quantizes_input and quantize_input:
            scale = key(part, scheme.convention.input_scale)
            require(scale in tensors, _NAME, scale, "in the checkpoint, or quantize_input False", "none")


def _layer(
    tensors: dict[str, Tensor], name: str, module: nn.Linear | NVFP4Linear, parts: list[str], quantize_input: bool
) -> NVFP4Linear:
    """Takes the layer's tensors out of `tensors` and makes it of them, on the device of the model's."""
    layer = NVFP4Linear.from_checkpoint(tensors, parts, quantize_input=quantize_input)
    for what, got, expected in (
        ("in_features", layer.in_features, module.in_features),
        ("out_features", layer.out_features, module.out_features),
        ("bias", layer.bias is not None, module.bias is not None),
    ):
        require(got == expected, _NAME, f"{what} of {name} in the checkpoint", f"{expected} as the model's is", got)
    for part in parts:
        convention = convention_of(tensors, part)
        assert convention is not None
        used = (convention.weight, "weight_scale", convention.weight_global, convention.input_scale, "bias")
        for last in used:
            tensors.pop(key(part, last), None)
    layer.train(module.training)
    return layer if module.weight.is_meta else layer.to(module.weight.device)


def _matched(tensors: dict[str, Tensor], own: dict[str, Tensor], strict: bool) -> dict[str, Tensor]:
    """The checkpoint's tensors that the model has, checked. A tensor that the model has under several names may be in
    the checkpoint under one.
    """
    tied: dict[int, list[str]] = defaultdict(list)
    for name, tensor in own.items():
        tied[id(tensor)].append(name)
    rest = {name: t for name, t in tensors.items() if name in own}
    for names in tied.values():
        given = [rest[name] for name in names if name in rest]
        if len(names) > 1 and given and isinstance(own[names[0]], nn.Parameter):
            rest |= dict.fromkeys(names, nn.Parameter(given[0], requires_grad=own[names[0]].requires_grad))
    missing, unknown = sorted(own.keys() - rest.keys()), sorted(tensors.keys() - own.keys())
    if missing and unknown and (strict or not rest):
        _require_common_prefix(missing, unknown)
    require(not (strict and missing), _NAME, "folder", f"a checkpoint with all of {missing[:3]}", "not all of them")
    require(not (strict and unknown), _NAME, "folder", "a checkpoint of this model", f"unknown tensors {unknown[:3]}")
    for name, tensor in rest.items():
        expected = own[name]
        require(tensor.shape == expected.shape, _NAME, name, str(list(expected.shape)), list(tensor.shape))
        number = tensor.is_floating_point() and tensor.element_size() > 1  # 8 bits are codes, which need their scales
        fits = tensor.dtype == expected.dtype or (number and expected.is_floating_point())
        require(fits, _NAME, name, f"{expected.dtype} or one that converts to it", tensor.dtype)
    return rest


def _require_common_prefix(missing: list[str], unknown: list[str]) -> None:
    """Raises an error if no layer of the model that is missing has a name of the checkpoint. It names the prefix that
    only one side has, or the checkpoint's layers whose names are nearest.
    """
    ours, theirs = ({name.rpartition(".")[0] for name in names} for names in (missing, unknown))
    if ours & theirs:
        return
    for longer, shorter, side in ((theirs, ours, "with"), (ours, theirs, "without")):
        pairs = [(layer, _longest_end(layer, shorter)) for layer in sorted(longer)]
        prefixes = Counter(layer.removesuffix(end) for layer, end in pairs if end)
        if prefixes:
            prefix = prefixes.most_common(1)[0][0]
            names = next((layer, end) for layer, end in pairs if end and layer == prefix + end)
            got, mine = names if side == "with" else names[::-1]
            expected = f"a checkpoint with the model's names, such as {mine}"
            require(False, _NAME, "folder", expected, f"{got}: names {side} the prefix {prefix!r}")
    first = min(ours)
    expected = f"a checkpoint with the model's names, such as {first}"
    require(False, _NAME, "folder", expected, f"other names, the nearest {nearest(first, theirs)}")


def _longest_end(layer: str, names: set[str]) -> str:
    """The longest of `names` that ends the name `layer` after a dot, or ""."""
    parts = layer.split(".")
    return next((end for i in range(1, len(parts)) if (end := ".".join(parts[i:])) in names), "")
