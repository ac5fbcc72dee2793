"""Layers of published checkpoints: `from_config`, the names of their tensors, and their results, against a float64
layer in numpy that is written from the formulae of DeepSeek's and Hugging Face's code and shares nothing with Hopwell.
"""

import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hopwell.torch import nn
from hopwell.torch.parallel import ContextShard, ParallelDSA
from support import norm_error
from torch import Tensor

pytestmark = pytest.mark.usefixtures("torch_seed")

SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "index_n_heads": 3,
    "index_head_dim": 16,
    "index_topk": 5,
    "attention_bias": False,
}
YARN = {"factor": 40, "beta_fast": 2, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
CONFIGS = {
    "deepseek_v32": SIZES
    | {
        "model_type": "deepseek_v32",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": YARN | {"type": "yarn", "original_max_position_embeddings": 64},
    },
    "glm_moe_dsa": SIZES
    | {
        "model_type": "glm_moe_dsa",
        "rms_norm_eps": 1e-2,  # so large that the results show it
        "rope_parameters": {"rope_theta": 1000, "rope_type": "default"},
    },
    "half-split": SIZES
    | {
        "rope_interleave": False,
        "indexer_rope_interleave": False,
        "rope_parameters": YARN
        | {"rope_theta": 100, "rope_type": "yarn", "original_max_position_embeddings": 30, "mscale_all_dim": 0.5},
    },
}
NAMES = {
    "q_a_proj.weight": (20, 48),
    "q_a_layernorm.weight": (20,),
    "q_b_proj.weight": (80, 20),
    "kv_a_proj_with_mqa.weight": (32, 48),
    "kv_a_layernorm.weight": (24,),
    "kv_b_proj.weight": (88, 24),
    "o_proj.weight": (48, 40),
    "indexer.wq_b.weight": (48, 20),
    "indexer.wk.weight": (16, 48),
    "indexer.k_norm.weight": (16,),
    "indexer.k_norm.bias": (16,),
    "indexer.weights_proj.weight": (3, 48),
}


def checkpoint() -> dict[str, Tensor]:
    """Random tensors of a layer, with the names and shapes of the published ones."""
    tensors = {name: torch.randn(shape) / math.sqrt(shape[-1]) for name, shape in NAMES.items()}
    return {name: 1 + t if "norm.weight" in name else t * (2 if "q_b" in name else 1) for name, t in tensors.items()}


class Published:
    """The layer of one sequence in float64, with the keys and values of all heads, as in the published prefill."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        self.w = {name.removesuffix(".weight"): t.double().numpy() for name, t in tensors.items()}
        self.config, self.kind = config, config.get("model_type")
        rope = config.get("rope_parameters") or config["rope_scaling"] | {"rope_theta": config["rope_theta"]}
        self.yarn = rope if "factor" in rope else None
        self.theta = rope["rope_theta"]

    def angles(self, s: int) -> np.ndarray:
        d, rates = self.config["qk_rope_head_dim"], []
        for i in range(d // 2):
            rate = self.theta ** (-2 * i / d)
            if self.yarn is not None:
                # the pairs whose wave fits beta_slow … beta_fast times into the first context
                first, y = self.yarn["original_max_position_embeddings"], self.yarn
                edges = [
                    d * math.log(first / (2 * math.pi * beta)) / (2 * math.log(self.theta))
                    for beta in (y["beta_fast"], y["beta_slow"])
                ]
                low, high = max(math.floor(edges[0]), 0), min(math.ceil(edges[1]), d - 1)
                ramp = min(max((i - low) / (high - low), 0), 1)
                rate = rate * (1 - ramp) + rate / y["factor"] * ramp
            rates.append(rate)
        return np.arange(s)[:, None] * np.array(rates)

    def turn(self, x: np.ndarray, interleaved: bool) -> np.ndarray:
        """x [s, ..., d]: pairs as complex numbers, times e^(i·angle)."""
        s, d = x.shape[0], x.shape[-1]
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : d // 2], x[..., d // 2 :])
        turned = (first + 1j * second) * np.exp(1j * self.angles(s)).reshape(s, *(1,) * (x.ndim - 2), d // 2)
        if self.yarn is not None:
            log = 0.1 * math.log(self.yarn["factor"])
            turned *= (self.yarn["mscale"] * log + 1) / (self.yarn["mscale_all_dim"] * log + 1)
        if interleaved:
            return np.stack([turned.real, turned.imag], -1).reshape(x.shape)
        return np.concatenate([turned.real, turned.imag], -1)

    def rms_norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.get("rms_norm_eps", 1e-6)) * self.w[name]

    def scores(self, x: np.ndarray, latent: np.ndarray) -> np.ndarray:
        """Index scores, causal: [s, s]. Both sides are turned by a Hadamard matrix, as in DeepSeek's code."""
        s, heads, d = x.shape[0], self.config["index_n_heads"], self.config["index_head_dim"]
        rope, interleaved = self.config["qk_rope_head_dim"], self.kind == "glm_moe_dsa"
        q = (latent @ self.w["indexer.wq_b"].T).reshape(s, heads, d)
        k = x @ self.w["indexer.wk"].T
        k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
        k = k * self.w["indexer.k_norm"] + self.w["indexer.k_norm.bias"]
        q[..., :rope], k[..., :rope] = self.turn(q[..., :rope], interleaved), self.turn(k[..., :rope], interleaved)
        hadamard = np.ones((1, 1))
        while len(hadamard) < d:
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]]) / math.sqrt(2)
        q, k = q @ hadamard, k @ hadamard
        weights = x @ self.w["indexer.weights_proj"].T * heads**-0.5
        scores = np.einsum("sh,sht->st", weights, np.maximum(np.einsum("shd,td->sht", q, k) * d**-0.5, 0))
        return np.where(np.tril(np.ones((s, s))) > 0, scores, -np.inf)

    def __call__(self, x: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """x [s, hidden_size], chosen bool [s, s] → [s, hidden_size]."""
        c, s = self.config, x.shape[0]
        heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        interleaved = c.get("rope_interleave", True)
        q = (self.latent(x) @ self.w["q_b_proj"].T).reshape(s, heads, nope + rope)
        q_pe = self.turn(q[..., nope:], interleaved)
        compressed = x @ self.w["kv_a_proj_with_mqa"].T
        k_pe = self.turn(compressed[:, None, c["kv_lora_rank"] :], interleaved)
        lifted = self.rms_norm(compressed[:, : c["kv_lora_rank"]], "kv_a_layernorm") @ self.w["kv_b_proj"].T
        lifted = lifted.reshape(s, heads, nope + c["v_head_dim"])
        logits = np.einsum("shd,thd->sht", q[..., :nope], lifted[..., :nope])
        logits += np.einsum("shd,td->sht", q_pe, k_pe[:, 0])
        scale = (nope + rope) ** -0.5
        if self.yarn is not None:
            scale *= (0.1 * self.yarn["mscale_all_dim"] * math.log(self.yarn["factor"]) + 1) ** 2
        logits = np.where(chosen[:, None], logits * scale, -np.inf)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        out = np.einsum("sht,thd->shd", p / p.sum(-1, keepdims=True), lifted[..., nope:])
        return out.reshape(s, -1) @ self.w["o_proj"].T

    def latent(self, x: np.ndarray) -> np.ndarray:
        return self.rms_norm(x @ self.w["q_a_proj"].T, "q_a_layernorm")


def check(published: Published, x: Tensor, y: Tensor, selected: Tensor | None) -> None:
    """The keys of the largest scores, up to rounding, are selected, and y is the layer's result over them."""
    for sequence, result, keys in zip(
        x.double().numpy(), y.detach(), [None] * len(x) if selected is None else selected, strict=True
    ):
        s = len(sequence)
        chosen = np.tril(np.ones((s, s), dtype=bool))
        if keys is not None:
            scores, chosen = published.scores(sequence, published.latent(sequence)), np.zeros((s, s), dtype=bool)
            for t, row in enumerate(keys.numpy()):
                chosen[t, row[row >= 0]] = True
                count = min(t + 1, published.config["index_topk"])
                assert chosen[t].sum() == count
                assert scores[t, chosen[t]].min() >= np.sort(scores[t])[-count] - 1e-4
        torch.testing.assert_close(result, torch.from_numpy(published(sequence, chosen)).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_layer_gives_its_results(name: str) -> None:
    config, tensors, x = CONFIGS[name], checkpoint(), torch.randn(2, 40, 48)
    published = Published(tensors, config)
    dsa = nn.DSA.from_config(SimpleNamespace(**config) if name == "glm_moe_dsa" else config)
    dsa.load_state_dict(tensors)
    for mode in ("sparse", "warm-up", "dense"):
        y, _ = dsa(x, mode)
        check(published, x, y, dsa.selected)
    with torch.no_grad():
        cache = nn.KeyCache(40)
        y = torch.cat([dsa.extend(x[:1, :30], cache), dsa.extend(x[:1, 30:], cache)], dim=1)
        torch.testing.assert_close(y, dsa(x[:1])[0], rtol=1e-4, atol=1e-4)
    parallel = ParallelDSA.from_config(config)
    parallel.load_state_dict(tensors)
    y, _ = parallel(x, ContextShard.zigzag(40))
    check(published, x, y, parallel.selected)


@pytest.mark.parametrize("mode", ["warm-up", "dense"])
def test_a_published_layer_in_bfloat16(mode: nn.Mode) -> None:
    """The dtype of the published tensors. All keys are read, because rounded scores select other keys."""
    config, x = CONFIGS["deepseek_v32"], torch.randn(1, 40, 48).bfloat16()
    tensors = {name: t.bfloat16() for name, t in checkpoint().items()}
    dsa = nn.DSA.from_config(config).bfloat16()
    dsa.load_state_dict(tensors)
    expected = Published(tensors, config)(x[0].double().numpy(), np.tril(np.ones((40, 40), dtype=bool)))
    assert norm_error(dsa(x, mode)[0][0].detach(), torch.from_numpy(expected)) < 0.02


def test_names_are_the_published_ones() -> None:
    with torch.device("meta"):
        dsa = nn.DSA.from_config(CONFIGS["deepseek_v32"])
    assert {name: tuple(t.shape) for name, t in dsa.state_dict().items()} == NAMES
    assert set(dict(dsa.named_parameters())) == set(NAMES)
    tensors = checkpoint()
    fp8 = tensors | {"q_a_proj.weight_scale_inv": torch.ones(1, 1)}
    dsa = nn.DSA.from_config(CONFIGS["deepseek_v32"])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*q_a_proj.weight_scale_inv"):  # not dequantised
        dsa.load_state_dict(fp8)


@pytest.mark.parametrize("kind", [nn.DSA, nn.SparseMLA])
@pytest.mark.parametrize("strict", [True, False])
def test_weights_that_still_have_a_scale_are_refused(kind: type, strict: bool) -> None:
    layer = kind.from_config(CONFIGS["deepseek_v32"])
    tensors = layer.state_dict()
    codes = tensors["q_a_proj.weight"].to(torch.float8_e4m3fn)
    words = r"q_a_proj\.weight must be multiplied by its scale first; got torch\.float8_e4m3fn"
    with pytest.raises(RuntimeError, match=f"{kind.__name__}: {words}"):
        layer.load_state_dict(tensors | {"q_a_proj.weight": codes}, strict=strict)
    words = r"q_a_proj\.weight_scale_inv must be multiplied into its weight first; got \[1, 1\]"
    with pytest.raises(RuntimeError, match=f"{kind.__name__}: {words}"):
        layer.load_state_dict(tensors | {"q_a_proj.weight_scale_inv": torch.ones(1, 1)}, strict=strict)


def test_published_sizes_are_the_defaults() -> None:
    """Sizes of DeepSeek-V3.2's layer, by its configuration and by hand."""
    sizes = {"hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512}
    sizes |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    sizes |= {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    config = CONFIGS["deepseek_v32"] | sizes | {"rope_scaling": scaling | {"mscale": 1.0, "mscale_all_dim": 1.0}}
    with torch.device("meta"):
        by_config = nn.DSA.from_config(config)
        yarn = nn.Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
        mla = nn.SparseMLA(7168, 128, q_lora_rank=1536, rope=nn.Rope(interleaved=True, yarn=yarn))
        by_hand = nn.DSA(mla, nn.LightningIndexer(7168, q_lora_rank=1536, rope=nn.Rope(yarn=yarn)))
    assert repr(by_config) == repr(by_hand)
    assert by_config.sm_scale == by_hand.sm_scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    assert yarn.amplitude == 1


def test_selections_of_another_layer() -> None:
    """GLM-5's "shared" layers have no indexer: they read the keys that a layer before selected."""
    tensors, x = checkpoint(), torch.randn(1, 30, 48)
    dsa, shared = nn.DSA.from_config(CONFIGS["glm_moe_dsa"]), nn.SparseMLA.from_config(CONFIGS["glm_moe_dsa"])
    dsa.load_state_dict(tensors)
    shared.load_state_dict({name: t for name, t in tensors.items() if "indexer" not in name})
    y, _ = dsa(x)
    torch.testing.assert_close(shared(x, dsa.selected), y)
    torch.testing.assert_close(dsa.indexer(x, dsa.query_latent(x)), dsa.selected)


WRONG = {
    "another model": (
        {"model_type": "llama"},
        "config must be one with hidden_size, as DeepSeek-V3.2's; got dict without it",
    ),
    "bias": (SIZES | {"attention_bias": True}, "attention_bias must be False; got True"),
    "no rotation": (SIZES | {"mla_use_nope": True}, "mla_use_nope must be False; got True"),
    "rope_scaling": (
        SIZES | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "rope_scaling must be of type 'default' or 'yarn'; got llama3",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_configurations_of_other_layers_are_refused(name: str) -> None:
    config, words = WRONG[name]
    with pytest.raises(ValueError, match=f"^DSA.from_config: {re.escape(words)}$"):
        nn.DSA.from_config(config)
    with pytest.raises(ValueError, match=r"^DSA.from_config: index_kpool must be 1; got 4$"):
        nn.DSA.from_config(SIZES | {"index_kpool": 4})


def test_the_latent_of_queries_is_asked_for() -> None:
    indexer = nn.LightningIndexer.from_config(SIZES)
    with pytest.raises(TypeError, match=r"LightningIndexer: latent must be a torch.Tensor; got NoneType"):
        indexer(torch.randn(1, 3, 48))
    with pytest.raises(
        ValueError, match=r"latent must be \[b, s, 20\] with \[b, s\] = \[1, 3\] as x has; got \[1, 3, 48\]"
    ):
        indexer(torch.randn(1, 3, 48), torch.randn(1, 3, 48))
