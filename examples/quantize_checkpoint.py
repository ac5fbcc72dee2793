#!/usr/bin/env python3
"""Quantises a Llama-shaped checkpoint in Hugging Face's format to NVFP4, loads the result, and generates with it.

The folder has config.json and model.safetensors, or several files and model.safetensors.index.json, as
`save_pretrained` writes them. Without --model the program first makes a tiny checkpoint with random weights. It writes
a folder in the format `nvfp4-pack-quantized` of compressed-tensors. A folder that is in that format already, or in
ModelOpt's NVFP4, is only loaded. Generation is greedy. It begins with token numbers, because there is no tokenizer.

The exit code is 0 only if the claims hold: the layers that were quantised are smaller by the factor of NVFP4, and the
quantised model computes the same as its dequantised weights.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

# PyTorch's threads spin while they wait, and take processor time from the library's threads. PyTorch's OpenMP reads
# this variable at import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from dsa_lm.options import Parser, at_least
from dsa_lm.report import DemoError
from hopwell.torch import load_nvfp4, nvfp4_dequantize
from hopwell.torch import nn as hopwell_nn
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

# ---- the model, with the names of Hugging Face's Llama


@dataclass(frozen=True)
class Config:
    """The entries of config.json that the model uses; other entries are ignored."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    vocab_size: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class Attention(nn.Module):
    """Causal attention with rotary positions; heads of a group share keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = nn.Linear(width, kv_width, bias=False), nn.Linear(width, kv_width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [s, width] → [s, width]."""
        q, k, v = (p(x).unflatten(-1, (-1, self.config.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (hopwell_nn.rotate(t[None], rope=hopwell_nn.Rope(self.config.rope_theta))[0] for t in (q, k))
        heads = (t.transpose(0, 1) for t in (q, k, v))
        out = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(0, 1).flatten(1))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [s, width] → [s, width]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and SwiGLU, each after a norm and with a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """x [s, width] → [s, width]."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Maps token numbers to logits of the next token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [s] → logits [s, vocabulary]."""
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.model.norm(x))
        return logits

    @torch.no_grad()
    def generate(self, tokens: list[int], count: int) -> list[int]:
        """Generates `count` tokens, each the most likely one. It uses no cache, because the text is short."""
        for _ in range(count):
            tokens = [*tokens, int(self(torch.tensor(tokens))[-1].argmax())]
        return tokens[-count:]


# ---- the checkpoint


def make_checkpoint(folder: Path) -> None:
    """Makes a checkpoint with random bf16 weights."""
    torch.manual_seed(0)
    config = Config()
    state = {name: t.to(torch.bfloat16) for name, t in Llama(config).state_dict().items()}
    save_file(state, folder / "model.safetensors")
    written = {field.name: getattr(config, field.name) for field in fields(config)}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **written}, indent=1))


def read_config(folder: Path) -> tuple[Config, bool]:
    """Returns the configuration, and whether the checkpoint is quantised already."""
    try:
        entries: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise DemoError(f"cannot read the checkpoint {folder}: {error}") from None
    rope = {**(entries.get("rope_scaling") or {}), **(entries.get("rope_parameters") or {})}
    kind = rope.get("rope_type", "default")
    for name, value, expected in (
        ("model_type", entries.get("model_type"), "llama"),
        ("hidden_act", entries.get("hidden_act", "silu"), "silu"),
        ("rope_type", kind, "default"),  # other types change the frequencies
    ):
        if value != expected:
            raise DemoError(f"config.json: {name} must be {expected}; got {value!r}")
    entries.update({name: value for name, value in rope.items() if name == "rope_theta"})
    known = {field.name for field in fields(Config)}
    config = Config(**{name: value for name, value in entries.items() if name in known})
    return config, "quantization_config" in entries or (folder / "hf_quant_config.json").exists()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors by name."""
    try:
        index = folder / "model.safetensors.index.json"
        names = (
            sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if index.exists()
            else ["model.safetensors"]
        )
        state: dict[str, Tensor] = {}
        for name in names:
            state |= load_file(folder / name)
        return state
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DemoError(f"cannot read the checkpoint {folder}: {error}") from None


def fill(model: Llama, state: dict[str, Tensor], config: Config) -> None:
    """Copies the tensors into the model. A tensor that is missing, unknown or of another shape is an error."""
    if config.tie_word_embeddings:
        state = (
            {"lm_head.weight": state["model.embed_tokens.weight"], **state}
            if "model.embed_tokens.weight" in state
            else state
        )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise DemoError(f"the checkpoint does not fit its config.json: {' '.join(str(error).split())}") from None


def quantize(model: Llama) -> dict[str, Tensor]:
    """Returns the model's tensors, with codes, scales and a global scale for each linear layer, by the names of
    compressed-tensors. The output head is unchanged.
    """
    state = {name: t.to(torch.bfloat16) for name, t in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head" and module.in_features % 16 == 0:
            del state[f"{name}.weight"]
            layer = hopwell_nn.NVFP4Linear.from_linear(module)
            state[f"{name}.weight_packed"] = layer.weight
            state[f"{name}.weight_scale"] = layer.weight_scale.view(torch.float8_e4m3fn)
            state[f"{name}.weight_global_scale"] = layer.weight_global.reciprocal().reshape(1)
    return state


def write_quantized(model: Llama, source: Path, folder: Path) -> None:
    """Writes the tensors, and the configuration of `source` with the format."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in quantize(model).items()}, folder / "model.safetensors")
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "symmetric": True}
    layers = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    form = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": [name for name in layers if name == "lm_head" or model.get_submodule(name).in_features % 16],
        "quantization_status": "compressed",
    }
    entries = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**entries, "quantization_config": form}, indent=1))


def load_quantized(config: Config, folder: Path) -> Llama:
    """Returns a model whose linear layers are NVFP4 where the folder has codes for them. x stays in 16 bits."""
    model = Llama(config)
    try:
        load_nvfp4(model, folder, quantize_input=False)
    except (OSError, ValueError, SafetensorError) as error:
        raise DemoError(f"cannot read the checkpoint {folder}: {' '.join(str(error).split())}") from None
    return model.eval()


def dequantized(model: Llama) -> dict[str, Tensor]:
    """Returns the model's tensors with dequantised weights for its codes, scales and global scales."""
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, hopwell_nn.NVFP4Linear):
            for part in ("weight_scale", "weight_global"):
                del state[f"{name}.{part}"]
            quantized = module.weight, module.weight_scale, module.weight_global
            reciprocal = module.global_is_reciprocal
            state[f"{name}.weight"] = nvfp4_dequantize(*quantized, global_is_reciprocal=reciprocal)
    return state


# ---- the run


def bytes_of_layers(state: dict[str, Tensor]) -> int:
    """Returns the bytes of all tensors except the embedding and the output head."""
    return sum(t.nbytes for name, t in state.items() if "embed_tokens" not in name and "lm_head" not in name)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def main(arguments: list[str] | None = None) -> int:
    """Quantises, writes, loads, generates, compares."""
    parser = Parser(
        prog="quantize_checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a folder with config.json and model.safetensors (default: make one)"
    )
    parser.add_argument("--output", type=Path, help="folder for the quantised checkpoint (default: MODEL/nvfp4)")
    parser.add_argument("--tokens", type=at_least(1), default=16, help="number of tokens to generate (default: 16)")
    try:
        options = parser.parse_args(arguments)
        with tempfile.TemporaryDirectory() as made:
            folder = options.model or Path(made)
            if options.model is None:
                make_checkpoint(folder)
            config, is_quantized = read_config(folder)
            model, written = None, folder
            if not is_quantized:
                model, written = Llama(config), options.output or folder / "nvfp4"
                fill(model, read_tensors(folder), config)
                write_quantized(model, folder, written)
            small = load_quantized(config, written)
            after = bytes_of_layers(read_tensors(written))
    except (DemoError, OSError) as error:
        print(f"quantize_checkpoint: {error}", file=sys.stderr)
        return 2

    prompt = [token % config.vocab_size for token in (1, 2, 3, 5, 8, 13, 21, 34)]
    exact = Llama(config)
    exact.load_state_dict(dequantized(small))
    before = bytes_of_layers({name: t.to(torch.bfloat16) for name, t in exact.state_dict().items()})
    with torch.no_grad():
        rounded, same = (m(torch.tensor(prompt)) for m in (small, exact))
    begin = time.perf_counter()
    tokens = small.generate(prompt, options.tokens)
    seconds = time.perf_counter() - begin

    print(f"layers: {before:,} bytes in bf16 → {after:,}, {after / before:.2f} of them")
    print(f"generated {tokens} in {seconds:.2f} s")
    claims = {"logits within 0.1 % of those of the dequantised weights": relative(rounded, same) < 1e-3}
    if model is not None:
        with torch.no_grad():
            whole = model(torch.tensor(prompt))
        agreeing = sum(a == b for a, b in zip(tokens, model.generate(prompt, options.tokens), strict=True))
        print(f"logits: {relative(rounded, whole):.1%} from those of the checkpoint in 16 bits")
        print(f"{agreeing} of {options.tokens} tokens as before")
        claims["layers below a third of their bytes"] = after < before / 3
    for claim, holds in claims.items():
        print(f"{'PASS' if holds else 'FAIL'}  {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
