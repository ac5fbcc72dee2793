"""The format and the tensors of a folder with an NVFP4 checkpoint."""

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from hopwell._checks import require
from hopwell.torch.nn._nvfp4_checkpoint import COMPRESSED_TENSORS, MODELOPT, Convention

_NAME = "load_nvfp4"


@dataclass(frozen=True)
class Scheme:
    """A checkpoint's format. `quantizes_input`: its layers have scales of their inputs (W4A4). `ignore`: layers that
    are not quantised, by name or pattern.
    """

    convention: Convention
    quantizes_input: bool
    ignore: list[str]

    def ignores(self, layer: str) -> bool:
        """Whether `ignore` names this layer: compressed-tensors has names and, after "re:", regular expressions that
        match from the start; ModelOpt has shell patterns.
        """
        if self.convention is MODELOPT:
            return any(fnmatchcase(layer, pattern) for pattern in self.ignore)
        regular = [p.removeprefix("re:") for p in self.ignore if p.startswith("re:")]
        return layer in self.ignore or any(re.match(pattern, layer) for pattern in regular)


def read_scheme(folder: Path) -> Scheme:
    """The format that config.json or hf_quant_config.json states. Any other than NVFP4 is refused by its name."""
    config = _json(folder / "config.json").get("quantization_config") if (folder / "config.json").exists() else None
    if config is None and (folder / "hf_quant_config.json").exists():
        config = {"quant_method": "modelopt", **_json(folder / "hf_quant_config.json")}
    expected = "a folder whose config.json has a quantization_config, or which has hf_quant_config.json"
    require(isinstance(config, dict), _NAME, "folder", expected, str(folder))
    assert isinstance(config, dict)
    method = str(config.get("quant_method"))
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    known = method in ("modelopt", "modelopt_fp4")
    require(known, _NAME, "quant_method of the folder", "compressed-tensors or modelopt", method)
    return _modelopt(config)


def _compressed_tensors(config: dict[str, Any]) -> Scheme:
    """After compressed-tensors' `QuantizationConfig`. A group may state a format of its own."""
    groups: dict[str, Any] = config.get("config_groups") or {}
    require(len(groups) > 0, _NAME, "config_groups of quantization_config", "at least one", list(groups))
    for name, group in groups.items():
        where = f"config_groups.{name} of quantization_config"
        if isinstance(group, list):  # the name is a preset's, the list has its layers
            require(name in ("NVFP4", "NVFP4A16"), _NAME, where, "NVFP4 or NVFP4A16", name)
            continue
        form = group.get("format") or config.get("format")
        require(form == "nvfp4-pack-quantized", _NAME, f"format in {where}", "nvfp4-pack-quantized", form)
        for part in ("weights", "input_activations"):
            if part == "weights" or group.get(part):
                _require_4_bits(f"{part} of {where}", group.get(part) or {})
    inputs = [
        name == "NVFP4" if isinstance(g, list) else bool(g.get("input_activations")) for name, g in groups.items()
    ]
    return Scheme(COMPRESSED_TENSORS, all(inputs), config.get("ignore") or [])


def _require_4_bits(where: str, arguments: dict[str, Any]) -> None:
    got = arguments.get("num_bits"), arguments.get("type"), arguments.get("group_size")
    require(got == (4, "float", 16), _NAME, where, "num_bits 4, type float, group_size 16", got)
    require(arguments.get("symmetric", True) is True, _NAME, where, "symmetric", "symmetric: false")


def _modelopt(config: dict[str, Any]) -> Scheme:
    """hf_quant_config.json has "quantization" with exclude_modules; config.json the same flat, with ignore."""
    details = config.get("quantization", config)
    algorithm = str(details.get("quant_algo")).upper()
    fits = algorithm in ("NVFP4", "W4A16_NVFP4")
    require(fits, _NAME, "quant_algo of the folder", "NVFP4 or W4A16_NVFP4", algorithm)
    sizes = [details.get("group_size", 16)]
    sizes += [g["weights"].get("group_size", 16) for g in (details.get("config_groups") or {}).values()]
    for size in sizes:
        require(size == 16, _NAME, "group_size of the folder", "16", size)
    ignore = details.get("exclude_modules") or details.get("ignore") or []
    return Scheme(MODELOPT, algorithm == "NVFP4", ignore)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the files that model.safetensors.index.json names."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise ImportError("load_nvfp4: needs the package safetensors: pip install safetensors") from None
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    files: dict[str, str] = _json(index)["weight_map"]
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        tensors |= load_file(folder / name)
    missing = sorted(files.keys() - tensors.keys())
    require(not missing, _NAME, "folder", f"files with the tensors of {index.name}", f"none of {missing[:3]}")
    return tensors


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{_NAME}: {path.name} must be JSON; {error}") from None
    require(isinstance(read, dict), _NAME, path.name, "an object of JSON", type(read).__name__)
    result: dict[str, Any] = read
    return result
