"""DeepSeek-V4's layers: their parameters' names, `from_config`, and their results against a float64 layer in numpy that
is written from the formulae and shares nothing with Hopwell.
"""

import math
import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hopwell.torch import nn
from hopwell.torch.parallel import ContextShard, ParallelCSA, ParallelHCA
from support import norm_error

pytestmark = pytest.mark.usefixtures("torch_seed")

D_MODEL, H_Q, D, D_ROPE, Q_RANK, GROUPS, O_RANK, WINDOW = 24, 4, 16, 8, 12, 2, 6, 5
SIZES: dict[str, Any] = {
    "d": D,
    "d_rope": D_ROPE,
    "q_rank": Q_RANK,
    "o_groups": GROUPS,
    "o_rank": O_RANK,
    "window": WINDOW,
    "norm_eps": 1e-2,  # so large that the results show it
}
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 8, "beta_fast": 2, "beta_slow": 1}
INDEXER = {"topk": 3, "h_index": 3, "d_index": 12}
LAYERS: dict[str, tuple[type[nn.HCA], dict[str, Any]]] = {
    "window": (nn.HCA, SIZES | {"ratio": 0, "rope_scaling": YARN}),
    "HCA": (nn.HCA, SIZES | {"ratio": 6, "rope_theta": 100.0}),
    "CSA": (nn.CSA, SIZES | INDEXER | {"ratio": 4, "rope_theta": 50.0, "rope_scaling": YARN}),
    "overlap": (
        nn.CSA,
        SIZES | INDEXER | {"ratio": 3, "overlap": True, "rope_scaling": YARN | {"attention_factor": 1.25}},
    ),
}
NAMES = {
    "wq_a.weight": (Q_RANK, D_MODEL),
    "q_norm.weight": (Q_RANK,),
    "wq_b.weight": (H_Q * D, Q_RANK),
    "wkv.weight": (D, D_MODEL),
    "kv_norm.weight": (D,),
    "wo_a.weight": (GROUPS * O_RANK, H_Q * D // GROUPS),
    "wo_b.weight": (D_MODEL, GROUPS * O_RANK),
    "attn_sink": (H_Q,),
}
COMPRESSOR = {"wkv.weight": (D, D_MODEL), "wgate.weight": (D, D_MODEL), "ape": (6, D), "norm.weight": (D,)}
OF_CSA = {
    "compressor.wkv.weight": (2 * D, D_MODEL),
    "compressor.wgate.weight": (2 * D, D_MODEL),
    "compressor.ape": (4, 2 * D),
    "compressor.norm.weight": (D,),
    "indexer.wq_b.weight": (36, Q_RANK),
    "indexer.weights_proj.weight": (3, D_MODEL),
    "indexer.compressor.wkv.weight": (24, D_MODEL),
    "indexer.compressor.wgate.weight": (24, D_MODEL),
    "indexer.compressor.ape": (4, 24),
    "indexer.compressor.norm.weight": (12,),
}


def layer(kind: str, **changes: Any) -> nn.HCA:
    """A layer whose parameters are all random, also those that begin as ones and zeros."""
    cls, options = LAYERS[kind]
    made = cls(D_MODEL, H_Q, **options | changes)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.2, 0.6)
    return made


class Numpy:
    """A layer in float64, one document at a time."""

    def __init__(self, options: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.w = {name: tensor.detach().double().numpy() for name, tensor in tensors.items()}
        self.options = options
        self.ratio = int(options["ratio"])

    @classmethod
    def of(cls, kind: str, module: nn.HCA) -> "Numpy":
        return cls(LAYERS[kind][1], dict(module.named_parameters()))

    def norm(self, x: Any, weight: Any = 1.0) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.options["norm_eps"]) * weight

    def frequencies(self) -> Any:
        theta = self.options.get("rope_theta") or (160_000.0 if self.ratio else 10_000.0)
        plain = [theta ** (-2 * i / D_ROPE) for i in range(D_ROPE // 2)]
        scaling = self.options.get("rope_scaling") if self.ratio else None
        if scaling is None:
            return np.array(plain)

        def dim(beta: float) -> float:
            context = scaling["original_max_position_embeddings"]
            return D_ROPE * math.log(context / (2 * math.pi * beta)) / (2 * math.log(theta))

        low, high = max(math.floor(dim(scaling["beta_fast"])), 0), min(math.ceil(dim(scaling["beta_slow"])), D_ROPE - 1)
        found = []
        for i, f in enumerate(plain):
            ramp = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
            found.append(f * (1 - ramp) + f / scaling["factor"] * ramp)
        return np.array(found)

    def rope(self, x: Any, position: int, sign: int = 1) -> Any:
        """x [..., d], whose last columns turn in neighbouring pairs, as complex numbers."""
        turned = np.array(x)
        pairs = turned[..., -D_ROPE::2] + 1j * turned[..., -D_ROPE + 1 :: 2]
        scaling = (self.options.get("rope_scaling") if self.ratio else None) or {}
        pairs = pairs * np.exp(1j * sign * position * self.frequencies()) * scaling.get("attention_factor", 1.0)
        turned[..., -D_ROPE::2], turned[..., -D_ROPE + 1 :: 2] = pairs.real, pairs.imag
        return turned

    def keys(self, x: Any, prefix: str) -> Any:
        """Compressed keys of a document."""
        w, r = (
            {name: self.w[prefix + name] for name in ("wkv.weight", "wgate.weight", "ape", "norm.weight")},
            self.ratio,
        )
        kv, gate = x @ w["wkv.weight"].T, x @ w["wgate.weight"].T
        d = len(w["norm.weight"])
        overlap, found = self.options.get("overlap", r == 4), []
        for j in range(len(x) // r):
            entries = [(j * r + i, i, d if overlap else 0) for i in range(r)]
            if overlap and j > 0:
                entries += [((j - 1) * r + i, i, 0) for i in range(r)]
            g = np.array([gate[t, o : o + d] + w["ape"][i, o : o + d] for t, i, o in entries])
            v = np.array([kv[t, o : o + d] for t, i, o in entries])
            share = np.exp(g - g.max(0))
            found.append(self.rope(self.norm((share / share.sum(0) * v).sum(0), w["norm.weight"]), j * r))
        return np.array(found).reshape(-1, d)

    def select(self, x: Any, latent: Any, mode: str) -> tuple[list[Any], list[Any]]:
        """The compressed keys that each token attends, and their index scores."""
        visible = [np.arange((i + 1) // self.ratio) if self.ratio else np.arange(0) for i in range(len(x))]
        if "indexer.wq_b.weight" not in self.w:
            return visible, [None] * len(x)
        keys, heads = self.keys(x, "indexer.compressor."), INDEXER["h_index"]
        chosen, scores = [], []
        for i, seen in enumerate(visible):
            q = self.rope((self.w["indexer.wq_b.weight"] @ latent[i]).reshape(heads, -1), i)
            weights = self.w["indexer.weights_proj.weight"] @ x[i] / math.sqrt(heads * INDEXER["d_index"])
            score = (weights[:, None] * np.maximum(q @ keys[seen].T, 0)).sum(0)
            best = np.sort(np.argsort(-score, kind="stable")[: INDEXER["topk"]]) if mode == "sparse" else seen
            chosen.append(seen[best])
            scores.append(score[best])
        return chosen, scores

    def __call__(self, x: Any, mode: str = "sparse") -> tuple[Any, float]:
        """x [n, d_model] of one document → y, and the sum of the indexer's loss over its tokens."""
        latent = self.norm(x @ self.w["wq_a.weight"].T, self.w["q_norm.weight"])
        window = self.norm(x @ self.w["wkv.weight"].T, self.w["kv_norm.weight"])
        window = np.array([self.rope(row, i) for i, row in enumerate(window)]).reshape(-1, D)
        compressed = self.keys(x, "compressor.") if self.ratio else np.zeros((0, D))
        chosen, scores = self.select(x, latent, mode)
        y, loss = np.zeros_like(x), 0.0
        for i in range(len(x)):
            q = self.rope(self.norm((self.w["wq_b.weight"] @ latent[i]).reshape(H_Q, D)), i)
            keys = np.concatenate([window[max(0, i + 1 - WINDOW) : i + 1], compressed[chosen[i]]])
            share = np.exp(q @ keys.T / math.sqrt(D))
            share = share / (share.sum(1) + np.exp(self.w["attn_sink"]))[:, None]
            out = self.rope(share @ keys, i, -1).reshape(GROUPS, -1)
            lowered = [self.w["wo_a.weight"][g * O_RANK : (g + 1) * O_RANK] @ out[g] for g in range(GROUPS)]
            y[i] = self.w["wo_b.weight"] @ np.concatenate(lowered)
            if scores[i] is not None and len(scores[i]):
                target = share[:, -len(scores[i]) :].sum(0)
                target = target / target.sum()
                log_prob = scores[i] - np.log(np.exp(scores[i]).sum())
                loss += float((target * (np.log(target) - log_prob)).sum())
        return y, loss


def result(module: nn.HCA, x: torch.Tensor, cu_seqlens: torch.Tensor | None, mode: Any) -> tuple[torch.Tensor, float]:
    if not isinstance(module, nn.CSA):
        return module(x, cu_seqlens=cu_seqlens), 0.0
    y, loss = module(x, mode, cu_seqlens=cu_seqlens)
    assert loss is not None
    return y, float(loss.detach())


@pytest.mark.parametrize("mode", ["sparse", "warm-up"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_equals_the_formulae(kind: str, mode: str) -> None:
    module = layer(kind)
    x = torch.randn(2, 27, D_MODEL)
    y, loss = result(module, x, None, mode)
    of_each = [Numpy.of(kind, module)(sequence.double().numpy(), mode) for sequence in x]
    assert norm_error(y.detach(), torch.from_numpy(np.stack([y for y, _ in of_each]))) < 1e-5
    assert loss == pytest.approx(sum(loss for _, loss in of_each) / 54, rel=1e-4)
    assert loss > 0 or not isinstance(module, nn.CSA)


@pytest.mark.parametrize("kind", LAYERS)
def test_packed_documents_are_as_one_by_one(kind: str) -> None:
    module = layer(kind)
    x = torch.randn(1, 40, D_MODEL)
    bounds = [0, 3, 3, 21, 36]  # an empty document, and tokens after the last
    y, loss = result(module, x, torch.tensor(bounds), "sparse")
    total = 0.0
    for first, end in pairwise(bounds):
        if first == end:
            continue
        alone, of_document = result(module, x[:, first:end], None, "sparse")
        assert norm_error(y[:, first:end].detach(), alone.detach()) < 1e-5
        total += of_document * (end - first)
    assert not y[:, 36:].any()
    assert loss == pytest.approx(total / 40, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "names"), [("window", {}), ("HCA", {f"compressor.{n}": s for n, s in COMPRESSOR.items()}), ("CSA", OF_CSA)]
)
def test_parameters_have_the_published_names(kind: str, names: dict[str, tuple[int, ...]]) -> None:
    assert {name: tuple(p.shape) for name, p in layer(kind).state_dict().items()} == NAMES | names


def test_only_the_indexer_learns_from_the_loss() -> None:
    module = layer("CSA")
    _, loss = module(torch.randn(1, 30, D_MODEL))
    loss.backward()
    for name, parameter in module.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == name.startswith("indexer."), name


def test_the_output_does_not_teach_the_indexer() -> None:
    module = layer("CSA")
    y, _ = module(torch.randn(1, 30, D_MODEL))
    y.square().sum().backward()
    for name, parameter in module.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) != name.startswith("indexer."), name


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_equal_finite_differences(kind: str) -> None:
    module = layer(kind)
    x = torch.randn(1, 22, D_MODEL)
    direction = torch.randn(1, 22, D_MODEL)
    numpy = {name: torch.randn_like(p) for name, p in module.named_parameters() if not name.startswith("indexer.")}
    y, _ = result(module, x, None, "warm-up")
    (y * direction).sum().backward()
    expected = sum(float((p.grad * numpy[n]).sum()) for n, p in module.named_parameters() if n in numpy)  # type: ignore[operator]
    step, values = 1e-4, []
    for sign in (1, -1):
        moved = Numpy.of(kind, module)
        for name, change in numpy.items():
            moved.w[name] = moved.w[name] + sign * step * change.double().numpy()
        values.append(float((moved(x[0].double().numpy(), "warm-up")[0] * direction[0].double().numpy()).sum()))
    assert expected == pytest.approx((values[0] - values[1]) / (2 * step), rel=2e-3)


def test_selected_counts_in_the_document() -> None:
    module = layer("CSA")
    module(torch.randn(1, 30, D_MODEL), cu_seqlens=torch.tensor([0, 9, 30]))
    assert module.selected is not None
    assert module.selected[0, 8].tolist() == [0, 1, -1]
    assert module.selected[0, 11].tolist() == [-1, -1, -1]
    assert module.selected[0, 16].tolist() == [0, 1, -1]


def test_sink_and_bias_stay_float32() -> None:
    module = layer("CSA").bfloat16()
    kept = {name for name, p in module.named_parameters() if p.dtype == torch.float32}
    assert kept == {"attn_sink", "compressor.ape", "indexer.compressor.ape"}


@pytest.mark.parametrize(
    ("change", "argument"),
    [({"ratio": -1}, "ratio"), ({"window": 0}, "window"), ({"o_groups": 3}, "o_groups"), ({"d_rope": 7}, "d_rope")],
)
def test_bad_sizes_are_named(change: dict[str, Any], argument: str) -> None:
    with pytest.raises(ValueError, match=f"HCA: {argument} must be"):
        layer("HCA", **change)


HUGGING_FACE = {
    "wq_a.weight": "q_a_proj.weight",
    "q_norm.weight": "q_a_norm.weight",
    "wq_b.weight": "q_b_proj.weight",
    "wkv.weight": "kv_proj.weight",
    "kv_norm.weight": "kv_norm.weight",
    "wo_a.weight": "o_a_proj.weight",
    "wo_b.weight": "o_b_proj.weight",
    "attn_sink": "sinks",
    "compressor.wkv.weight": "compressor.kv_proj.weight",
    "compressor.wgate.weight": "compressor.gate_proj.weight",
    "compressor.ape": "compressor.position_bias",
    "compressor.norm.weight": "compressor.kv_norm.weight",
    "indexer.wq_b.weight": "compressor.indexer.q_b_proj.weight",
    "indexer.weights_proj.weight": "compressor.indexer.scorer.weights_proj.weight",
    "indexer.compressor.wkv.weight": "compressor.indexer.kv_proj.weight",
    "indexer.compressor.wgate.weight": "compressor.indexer.gate_proj.weight",
    "indexer.compressor.ape": "compressor.indexer.position_bias",
    "indexer.compressor.norm.weight": "compressor.indexer.kv_norm.weight",
}
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": D_MODEL,
    "num_attention_heads": H_Q,
    "num_key_value_heads": 1,
    "head_dim": D,
    "q_lora_rank": Q_RANK,
    "o_groups": GROUPS,
    "o_lora_rank": O_RANK,
    "sliding_window": WINDOW,
    "rms_norm_eps": 1e-2,
    "index_topk": 3,
    "index_n_heads": 3,
    "index_head_dim": 12,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
CONFIGS: dict[str, Any] = {  # of transformers 5.24, and of the published config.json
    "object": SimpleNamespace(
        **CONFIG,
        partial_rotary_factor=0.5,
        compress_rates={"compressed_sparse_attention": 3, "heavily_compressed_attention": 4},
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 20, "partial_rotary_factor": 0.5},
            "compress": YARN | {"rope_type": "yarn", "rope_theta": 70, "attention_factor": 1.25},
        },
    ),
    "file": CONFIG
    | {
        "qk_rope_head_dim": D_ROPE,
        "compress_ratios": [0, 4, 6],
        "rope_theta": 20,
        "compress_rope_theta": 70,
        "rope_scaling": YARN,
    },
}
OF_CONFIG: dict[tuple[str, str], dict[str, Any]] = {
    ("object", "window"): {"ratio": 0, "rope_theta": 20.0},
    ("object", "HCA"): {"ratio": 4, "overlap": False, "rope_scaling": YARN | {"attention_factor": 1.25}},
    ("object", "CSA"): {"ratio": 3, "overlap": True, "rope_scaling": YARN | {"attention_factor": 1.25}},
    ("file", "window"): {"ratio": 0, "rope_theta": 20.0},
    ("file", "HCA"): {"ratio": 6, "overlap": False, "rope_scaling": YARN},
    ("file", "CSA"): {"ratio": 4, "overlap": True, "rope_scaling": YARN},
}


KINDS = ("window", "HCA", "CSA")


def of_config(kind: str, name: str) -> nn.HCA:
    ratio = {"window": 0, "HCA": 6 if name == "file" else None, "CSA": None}[kind]
    return LAYERS[kind][0].from_config(CONFIGS[name], ratio=ratio)


def tensors_of(module: nn.HCA) -> dict[str, torch.Tensor]:
    return {name: 0.2 + 0.6 * torch.randn(t.shape) for name, t in module.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_and_hugging_face_s_tensors_make_the_layer(kind: str, name: str) -> None:
    module = of_config(kind, name)
    tensors = tensors_of(module)
    module.load_state_dict({HUGGING_FACE[n]: t for n, t in tensors.items()})
    x = torch.randn(2, 27, D_MODEL)
    y, loss = result(module, x, None, "sparse")
    options = SIZES | {"rope_theta": 70.0} | OF_CONFIG[name, kind]
    of_each = [Numpy(options, tensors)(sequence.double().numpy()) for sequence in x]
    assert norm_error(y.detach(), torch.from_numpy(np.stack([y for y, _ in of_each]))) < 1e-5
    assert loss == pytest.approx(sum(loss for _, loss in of_each) / 54, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_load_by_each_of_their_names(kind: str) -> None:
    module = of_config(kind, "file")
    tensors = tensors_of(module)
    saved = {"norm.weight" if n == "kv_norm.weight" else n: t for n, t in tensors.items()}
    for given in (tensors, saved, {HUGGING_FACE[n]: t for n, t in tensors.items()}):
        before = dict(given)
        model = torch.nn.ModuleDict({"self_attn": of_config(kind, "file")})
        model.load_state_dict({f"self_attn.{n}": t for n, t in given.items()})
        module = of_config(kind, "file")
        module.load_state_dict(given)
        assert given == before  # the caller's dict is not changed
        for n, t in tensors.items():
            assert torch.equal(module.state_dict()[n], t), n
            assert torch.equal(model.state_dict()[f"self_attn.{n}"], t), n


def test_tensors_that_a_layer_does_not_have_are_named() -> None:
    module = of_config("HCA", "file")
    tensors = tensors_of(module)
    for name in ("sinks", "q_a_proj.weight_scale_inv", "wq_a.scale"):  # the sink twice; not multiplied out
        with pytest.raises(RuntimeError, match=f"Unexpected key.*{re.escape(name)}"):
            module.load_state_dict(tensors | {name: torch.zeros(1)})
    del tensors["attn_sink"]
    with pytest.raises(RuntimeError, match=r"Missing key.*attn_sink"):
        module.load_state_dict(tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_parallel_layers_of_a_configuration(kind: str) -> None:
    module = of_config(kind, "file")
    tensors = {HUGGING_FACE[n]: t for n, t in tensors_of(module).items()}
    module.load_state_dict(tensors)
    cls: type[ParallelHCA] = ParallelCSA if kind == "CSA" else ParallelHCA
    parallel = cls.from_config(CONFIGS["file"], ratio=module.ratio)
    parallel.load_state_dict(tensors)
    x = torch.randn(2, 48, D_MODEL)
    y = parallel(x, ContextShard.zigzag(48, multiple=max(module.ratio, 1)))
    torch.testing.assert_close(y[0] if isinstance(y, tuple) else y, result(module, x, None, "sparse")[0])


def test_published_sizes_are_the_defaults() -> None:
    """Sizes of DeepSeek-V4-Flash."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 64, "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8}
    sizes |= {"o_lora_rank": 1024, "sliding_window": 128, "rms_norm_eps": 1e-6, "qk_rope_head_dim": 64}
    sizes |= {"index_topk": 512, "index_n_heads": 64, "index_head_dim": 128}
    scaling = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    config = sizes | {"rope_theta": 10000, "compress_rope_theta": 160000, "rope_scaling": scaling}
    with torch.device("meta"):
        for cls in (nn.CSA, nn.HCA):
            assert repr(cls.from_config(config)) == repr(cls(4096, 64, rope_scaling=scaling))
        assert repr(nn.HCA.from_config(config, ratio=0)) == repr(nn.HCA(4096, 64, ratio=0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "deepseek_v41"}, "model_type must be 'deepseek_v4'; got deepseek_v41"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be 1; got 2"),
        ({"attention_bias": True}, "attention_bias must be False; got True"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0; got 0.1"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling must be of type 'default' or 'yarn'; got linear"),
    ],
)
def test_configurations_of_other_layers_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^HCA.from_config: {re.escape(words)}$"):
        nn.HCA.from_config(CONFIGS["file"] | change)


def test_missing_sizes_and_scaling_of_window_layers_are_named() -> None:
    config = {name: value for name, value in CONFIGS["file"].items() if name != "index_topk"}
    words = "CSA.from_config: config must be one with index_topk, as DeepSeek-V4's; got dict without it"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        nn.CSA.from_config(config)
    parameters = {kind: YARN | {"rope_theta": 20} for kind in ("main", "compress")}
    with pytest.raises(ValueError, match=r"^HCA.from_config: rope_scaling must be of type 'default'; got yarn$"):
        nn.HCA.from_config(config | {"rope_parameters": parameters}, ratio=0)
    with pytest.raises(ValueError, match=r"^HCA: rope_scaling must be of type 'default' or 'yarn'; got linear$"):
        layer("HCA", rope_scaling={"type": "linear", "factor": 2})


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_empty_work(shape: tuple[int, int]) -> None:
    sizes: dict[str, Any] = {"window": 8, "d": 32, "d_rope": 16, "q_rank": 32, "o_groups": 2, "o_rank": 16}
    x = torch.zeros(*shape, 64)
    y, loss = nn.CSA(64, 4, topk=8, h_index=4, d_index=32, **sizes)(x)
    assert y.shape == x.shape and loss is not None and loss.item() == 0
    assert nn.HCA(64, 4, **sizes)(x).shape == x.shape


@pytest.mark.parametrize("strict", [True, False])
def test_weights_that_still_have_a_scale_are_refused(strict: bool) -> None:
    layer = nn.HCA(64, 4, window=8, d=32, d_rope=16, q_rank=32, o_groups=2, o_rank=16)
    codes = torch.ones(32, 64).to(torch.float8_e4m3fn)
    with pytest.raises(
        RuntimeError, match=r"HCA: wq_a\.weight must be multiplied by its scale first; got torch\.float8"
    ):
        layer.load_state_dict(layer.state_dict() | {"wq_a.weight": codes}, strict=strict)
    with pytest.raises(RuntimeError, match=r"HCA: wq_a\.scale must be multiplied into its weight first; got \[1, 1\]"):
        layer.load_state_dict(layer.state_dict() | {"wq_a.scale": torch.ones(1, 1)}, strict=strict)
