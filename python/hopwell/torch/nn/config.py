"""Sizes of a layer from a Hugging Face configuration of DeepSeek-V3.2 or GLM-5."""

from collections.abc import Mapping
from typing import Any

from hopwell._checks import require
from hopwell.torch.nn.rope import Rope, Yarn

MISSING = object()


class Config:
    """A configuration: an object with attributes, or a mapping. Some names may be missing."""

    def __init__(self, module: str, config: object) -> None:
        self.module, self.given = module, config

    def __call__(self, name: str, default: Any = MISSING) -> Any:
        values = self.given
        value = values.get(name, default) if isinstance(values, Mapping) else getattr(values, name, default)
        require(
            value is not MISSING, self.module, "config", f"one with {name}, as DeepSeek-V3.2's", type(values).__name__
        )
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
