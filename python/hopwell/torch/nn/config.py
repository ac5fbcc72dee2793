"""Sizes of a layer from a Hugging Face configuration of DeepSeek-V3.2, GLM-5 or DeepSeek-V4."""

from collections.abc import Mapping
from typing import Any

from hopwell._checks import require
from hopwell.torch.nn.rope import Rope, Yarn

MISSING = object()


class Config:
    """A configuration of `model`: an object with attributes, or a mapping. Some names may be missing."""

    def __init__(self, module: str, config: object, model: str = "DeepSeek-V3.2") -> None:
        self.module, self.given, self.model = module, config, model

    def __call__(self, name: str, default: Any = MISSING) -> Any:
        values = self.given
        value = values.get(name, default) if isinstance(values, Mapping) else getattr(values, name, default)
        expected = f"one with {name}, as {self.model}'s"
        require(value is not MISSING, self.module, "config", expected, f"{type(values).__name__} without it")
        return value

    def refuse(self, name: str, *allowed: object) -> None:
        """Raises ValueError, unless `name` is missing or has an allowed value."""
        value = self(name, allowed[0])
        require(value in allowed, self.module, name, " or ".join(map(repr, allowed)), value)


def _rope(config: Config) -> Rope:
    """The rotation of the attention. transformers 5 has all in `rope_parameters`, older ones in `rope_scaling`."""
    scaling = config("rope_parameters", None) or config("rope_scaling", None) or {}
    theta = scaling.get("rope_theta") or config("rope_theta", 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    require(kind in ("default", "yarn"), config.module, "rope_scaling", "of type 'default' or 'yarn'", kind)
    yarn = None
    if kind == "yarn":
        yarn = Yarn(
            float(scaling["factor"]),
            int(scaling.get("original_max_position_embeddings") or config("max_position_embeddings")),
            float(scaling.get("beta_fast") or 32),
            float(scaling.get("beta_slow") or 1),
            float(scaling.get("mscale") or 0),
            float(scaling.get("mscale_all_dim") or 0),
            scaling.get("attention_factor"),
        )
    return Rope(float(theta), bool(config("rope_interleave", True)), yarn)


def attention_options(module: str, given: object) -> dict[str, Any]:
    """Arguments of `SparseMLA`. The options that the module does not have are refused."""
    config = Config(module, given)
    config.refuse("attention_bias", False)
    config.refuse("mla_use_nope", False)
    return {
        "d_model": config("hidden_size"),
        "h_q": config("num_attention_heads"),
        "d_v": config("kv_lora_rank"),
        "d_rope": config("qk_rope_head_dim"),
        "d_nope": config("qk_nope_head_dim"),
        "d_head": config("v_head_dim"),
        "q_lora_rank": config("q_lora_rank"),
        "norm_eps": config("rms_norm_eps", 1e-6),
        "rope": _rope(config),
    }


def indexer_options(module: str, given: object) -> dict[str, Any]:
    """Arguments of `LightningIndexer`. GLM-5's indexer has interleaved pairs, DeepSeek-V3.2's has half-split ones."""
    config = Config(module, given)
    config.refuse("index_kpool", 1)
    attention = _rope(config)
    interleaved = config("indexer_rope_interleave", config("model_type", "") == "glm_moe_dsa")
    return {
        "d_model": config("hidden_size"),
        "topk": config("index_topk"),
        "h_index": config("index_n_heads"),
        "d_index": config("index_head_dim"),
        "d_rope": config("qk_rope_head_dim"),
        "q_lora_rank": config("q_lora_rank"),
        "rope": Rope(attention.theta, bool(interleaved), attention.yarn),
    }


def _hybrid_rope(config: Config, compressed: bool) -> dict[str, Any]:
    """The rotation of a layer of DeepSeek-V4 with or without compressed keys. transformers 5.24 has both in
    `rope_parameters`, named "main" and "compress". Only layers with compressed keys have YaRN.
    """
    scaling = config("rope_parameters", None) or config("rope_scaling", None) or {}
    if "main" in scaling and "compress" in scaling:
        scaling = scaling["compress" if compressed else "main"]
        theta = scaling["rope_theta"]
    else:
        theta = config("compress_rope_theta" if compressed else "rope_theta")
        scaling = scaling if compressed else {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    allowed = ("default", "yarn") if compressed else ("default",)
    require(kind in allowed, config.module, "rope_scaling", f"of type {' or '.join(map(repr, allowed))}", kind)
    return {"rope_theta": float(theta), "rope_scaling": scaling if kind == "yarn" else None}


def hybrid_options(module: str, given: object, kind: str, ratio: int | None) -> dict[str, Any]:
    """Arguments that `HCA` and `CSA` share. `kind` names the layer's ratio in `compress_rates`. `ratio` takes its place
    unless it is None. Without either, the class's default ratio holds.
    """
    config = Config(module, given, "DeepSeek-V4")
    config.refuse("model_type", "deepseek_v4")
    config.refuse("num_key_value_heads", 1)
    config.refuse("attention_bias", False)
    config.refuse("attention_dropout", 0)
    if ratio is None:
        ratio = (config("compress_rates", None) or {}).get(kind)
    if ratio is not None and not isinstance(ratio, int):
        raise TypeError(f"{module}: ratio must be an int; got {ratio!r}")
    d_rope = config("qk_rope_head_dim", None)
    options = {
        "d_model": config("hidden_size"),
        "h_q": config("num_attention_heads"),
        "window": config("sliding_window"),
        "d": config("head_dim"),
        "d_rope": int(config("head_dim") * config("partial_rotary_factor")) if d_rope is None else d_rope,
        "q_rank": config("q_lora_rank"),
        "o_groups": config("o_groups"),
        "o_rank": config("o_lora_rank"),
        "norm_eps": config("rms_norm_eps", 1e-6),
    }
    options |= _hybrid_rope(config, compressed=ratio != 0)
    return options if ratio is None else options | {"ratio": ratio}


def hybrid_indexer_options(module: str, given: object) -> dict[str, Any]:
    """Arguments of `CSA` that its indexer needs."""
    config = Config(module, given, "DeepSeek-V4")
    return {
        "topk": config("index_topk"),
        "h_index": config("index_n_heads"),
        "d_index": config("index_head_dim"),
    }
