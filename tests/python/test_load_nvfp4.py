"""hopwell.torch.load_nvfp4 and nn.NVFP4Linear.from_checkpoint: folders as compressed-tensors and ModelOpt write them.

The tests write such folders of random codes and scales, and dequantise them in float64 themselves.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hopwell import torch as hw
from hopwell.torch import nn
from safetensors.torch import save_file
from torch import Tensor

pytestmark = pytest.mark.usefixtures("torch_seed")

State = dict[str, Tensor]
FORMATS = ("compressed-tensors", "modelopt")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
SIZES = {"q_proj": (32, 64), "k_proj": (16, 64), "v_proj": (16, 64), "o_proj": (64, 32)}
SIZES |= {"gate_proj": (48, 64), "up_proj": (48, 64), "down_proj": (64, 48)}


class Layer(torch.nn.Module):
    """The linear layers of a decoder layer, apart or fused."""

    def __init__(self, fused: bool, bias: bool) -> None:
        super().__init__()
        parts = {"qkv_proj": (64, 64)} if fused else {k: SIZES[k] for k in ("q_proj", "k_proj", "v_proj")}
        parts |= {"o_proj": SIZES["o_proj"]}
        self.self_attn = torch.nn.ModuleDict({k: torch.nn.Linear(i, o, bias=bias) for k, (o, i) in parts.items()})
        parts = {"gate_up_proj": (96, 64)} if fused else {k: SIZES[k] for k in ("gate_proj", "up_proj")}
        parts |= {"down_proj": SIZES["down_proj"]}
        self.mlp = torch.nn.ModuleDict({k: torch.nn.Linear(i, o, bias=False) for k, (o, i) in parts.items()})
        self.norm = torch.nn.RMSNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        """Every linear layer has its part in the result."""
        attn, mlp = self.self_attn, self.mlp
        if "qkv_proj" in attn:
            q, k, v = attn["qkv_proj"](x).split([32, 16, 16], -1)
            gate, up = mlp["gate_up_proj"](x).chunk(2, -1)
        else:
            q, k, v = (attn[n](x) for n in ("q_proj", "k_proj", "v_proj"))
            gate, up = mlp["gate_proj"](x), mlp["up_proj"](x)
        x = x + attn["o_proj"](q * torch.cat([k, v], -1).tanh())
        return self.norm(x) + mlp["down_proj"](gate.tanh() * up.tanh())


class Model(torch.nn.Module):
    """Two layers, an embedding and a head that may be tied to it."""

    def __init__(self, fused: bool = False, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding.from_pretrained(torch.zeros(48, 64), freeze=False)
        self.layers = torch.nn.ModuleList(Layer(fused, bias) for _ in range(2))
        self.lm_head = torch.nn.Linear(64, 48, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def random_layer(
    name: str, out_features: int, in_features: int, method: str, shape: tuple[int, ...]
) -> tuple[State, Tensor]:
    """A layer's tensors in a checkpoint, and its weight in float64."""
    codes = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8)
    scales = torch.empty(out_features, in_features // 16).uniform_(20, 400).to(torch.float8_e4m3fn)
    factor = 2.0 ** torch.randint(-14, -11, ()).item() * torch.empty(shape).uniform_(0.5, 1)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()
    values = E2M1[nibbles & 7] * torch.where(nibbles < 8, 1.0, -1.0).double()
    stored = 1 / factor if method == "compressed-tensors" else factor
    exact = 1 / stored.double() if method == "compressed-tensors" else stored.double()
    weight = values * scales.double().repeat_interleave(16, dim=1) * exact.reshape(())
    names = ("weight_packed", "weight_global_scale") if method == "compressed-tensors" else ("weight", "weight_scale_2")
    return {f"{name}.{names[0]}": codes, f"{name}.weight_scale": scales, f"{name}.{names[1]}": stored}, weight


def input_scale(state: State, name: str, method: str, factor: float, shape: tuple[int, ...]) -> None:
    if method == "compressed-tensors":
        state[f"{name}.input_global_scale"] = torch.full(shape, 1 / factor)
    else:
        state[f"{name}.input_scale"] = torch.full(shape, factor)


def made(
    method: str, w4a4: bool = False, shape: tuple[int, ...] = (), bias: bool = False, plain: tuple[str, ...] = ()
) -> tuple[State, State]:
    """A checkpoint's tensors, and the tensors of a float64 model."""
    state: State = {"embed_tokens.weight": torch.randn(48, 64), "lm_head.weight": torch.randn(48, 64)}
    dense = {name: t.double() for name, t in state.items()}
    for i in range(2):
        for name, (out_features, in_features) in SIZES.items():
            attention = name in ("q_proj", "k_proj", "v_proj", "o_proj")
            full = f"layers.{i}.{'self_attn' if attention else 'mlp'}.{name}"
            if full in plain:
                state[f"{full}.weight"] = torch.randn(out_features, in_features) / 8
                dense[f"{full}.weight"] = state[f"{full}.weight"].double()
            else:
                tensors, dense[f"{full}.weight"] = random_layer(full, out_features, in_features, method, shape)
                state |= tensors
                if w4a4:
                    input_scale(state, full, method, 1 / (500 + 10 * len(name) + i), shape)
            if bias and attention:
                state[f"{full}.bias"] = torch.randn(out_features)
                dense[f"{full}.bias"] = state[f"{full}.bias"].double()
        state[f"layers.{i}.norm.weight"] = torch.rand(64) + 0.5
        dense[f"layers.{i}.norm.weight"] = state[f"layers.{i}.norm.weight"].double()
    return state, dense


def config_of(method: str, w4a4: bool = False, ignore: list[str] | None = None) -> dict[str, Any]:
    arguments = {"num_bits": 4, "type": "float", "group_size": 16, "symmetric": True, "strategy": "tensor_group"}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": arguments if w4a4 else None}
    if method == "compressed-tensors":
        return {
            "quant_method": method, "format": "nvfp4-pack-quantized", "config_groups": {"group_0": group},
            "ignore": ["lm_head"] if ignore is None else ignore,
        }  # fmt: skip
    algorithm = "NVFP4" if w4a4 else "W4A16_NVFP4"
    return {"quant_method": method, "quant_algo": algorithm, "config_groups": {"group_0": group},
            "ignore": ["lm_head"] if ignore is None else ignore}  # fmt: skip


def write(folder: Path, state: State, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "test", "quantization_config": config}))
    save_file(state, folder / "model.safetensors")
    return folder


def logits_agree(model: torch.nn.Module, dense: State, **options: bool) -> None:
    exact = Model(**options).double()
    exact.load_state_dict(dense)
    tokens = torch.arange(40).view(2, 20)
    expected, y = exact(tokens), model(tokens)
    assert (y.double() - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("method", FORMATS)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_loads(method: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    state, dense = made(method, shape=shape, bias=True)
    model = Model(bias=True).bfloat16().float()
    layers = hw.load_nvfp4(model, write(tmp_path, state, config_of(method)))
    assert len(layers) == 14 and "layers.1.mlp.down_proj" in layers and type(model.lm_head) is torch.nn.Linear
    logits_agree(model, dense, bias=True)
    hw.load_nvfp4(model, tmp_path)  # into NVFP4Linear
    logits_agree(model, dense, bias=True)


@pytest.mark.parametrize("method", FORMATS)
def test_on_the_meta_device_in_several_files(method: str, tmp_path: Path) -> None:
    state, dense = made(method)
    del state["lm_head.weight"]
    dense["lm_head.weight"] = dense["embed_tokens.weight"]
    write(tmp_path, {}, config_of(method))
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: t for name, t in state.items() if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    with torch.device("meta"):
        model = Model(tied=True)
    hw.load_nvfp4(model, tmp_path)
    assert model.lm_head.weight is model.embed_tokens.weight
    logits_agree(model, dense)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files | {"absent": file}}))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json; got none of \['absent'\]"):
        hw.load_nvfp4(model, tmp_path)


def test_hf_quant_config(tmp_path: Path) -> None:
    """ModelOpt's own file, with scales of an FP8 cache beside the weights."""
    state, dense = made("modelopt")
    save_file(state | {"layers.0.self_attn.k_proj.k_scale": torch.ones(())}, tmp_path / "model.safetensors")
    details = {
        "quant_algo": "w4a16_nvfp4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": details})
    )
    model = Model()
    hw.load_nvfp4(model, tmp_path)
    logits_agree(model, dense)


IGNORED = {"compressed-tensors": ["lm_head", r"re:layers\.1\.mlp\..*"], "modelopt": ["lm_head", "layers.1.mlp*"]}
PLAIN = tuple(f"layers.1.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj"))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("method", FORMATS)
def test_ignored_layers_and_fused_ones(method: str, fused: bool, tmp_path: Path) -> None:
    """q, k and v have three globals, gate and up two; every row has the bits that it has in a layer of its own."""
    state, dense = made(method, plain=PLAIN, bias=True)
    write(tmp_path, state, config_of(method, ignore=IGNORED[method]))
    model, apart = Model(fused, bias=True), Model(bias=True)
    layers = hw.load_nvfp4(model, tmp_path)
    assert not any(name.startswith("layers.1.mlp") for name in layers)
    hw.load_nvfp4(apart, tmp_path)
    logits_agree(apart, dense, bias=True)
    tokens = torch.arange(40).view(2, 20)
    assert torch.equal(model(tokens), apart(tokens))
    if fused:
        qkv = model.layers[0].self_attn.qkv_proj
        assert qkv.weight_global.shape == (3,) and "output_sizes=[32, 16, 16]" in repr(qkv)
        again = Model(True, bias=True)
        hw.load_nvfp4(again, tmp_path)
        again.load_state_dict(model.state_dict())
        assert torch.equal(again(tokens), model(tokens))


def test_fused_with_one_global(tmp_path: Path) -> None:
    state, _ = made("modelopt", w4a4=True)
    names = [f"layers.0.self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj")]
    for name in names:
        state[f"{name}.weight_scale_2"] = torch.tensor(0.001)
        state[f"{name}.input_scale"] = torch.tensor(0.002)
    layer = nn.NVFP4Linear.from_checkpoint(state, names)
    assert layer.weight_global.ndim == 0 and layer.input_scale is not None and layer.input_scale.ndim == 0


def e2m1(x: Tensor) -> Tensor:
    """The nearest numbers of e2m1."""
    nearest = (x.abs()[..., None] - E2M1).abs().argmin(dim=-1)
    return E2M1[nearest] * x.sign()


def rounded(x: Tensor, factor: float) -> Tensor:
    """x as NVFP4 with this global scale, float64."""
    blocks = x.double().unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1, keepdim=True) / (6 * factor)).float().to(torch.float8_e4m3fn).double() * factor
    return (e2m1(blocks / scale) * scale).flatten(-2)


@pytest.mark.parametrize("method", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_w4a4(method: str, dtype: torch.dtype) -> None:
    state, weight = random_layer("a", 32, 64, method, ())
    x, factor = torch.randn(2, 5, 64).to(dtype), 1 / 700
    input_scale(state, "a", method, factor, (1,))
    layer = nn.NVFP4Linear.from_checkpoint(state, "a.")
    exact = rounded(x, factor) @ weight.T
    assert layer(x).dtype == dtype and "W4A4" in repr(layer)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    assert (layer(x).double() - exact).norm() < tolerance * exact.norm()
    w4a16 = nn.NVFP4Linear.from_checkpoint(state, "a", quantize_input=False)
    exact = x.double() @ weight.T
    assert (w4a16(x).double() - exact).norm() < tolerance * exact.norm()
    (w4a16(x.requires_grad_()) + x.sum()).sum().backward()
    with pytest.raises(RuntimeError, match="no gradient; load it with quantize_input=False"):
        (layer(x) + x.sum()).sum().backward()  # not the gradient of the sum alone
    if dtype == torch.float32:
        empty = nn.NVFP4Linear.from_checkpoint(state, "a").to_empty(device="meta")
        empty.load_state_dict(layer.state_dict(), assign=True)
        assert torch.equal(empty(x), layer(x))


@pytest.mark.parametrize("method", FORMATS)
def test_w4a4_folder(method: str, tmp_path: Path) -> None:
    state, dense = made(method, w4a4=True)
    write(tmp_path, state, config_of(method, w4a4=True))
    tokens, models = torch.arange(40).view(2, 20), [Model(), Model(fused=True)]
    for model in models:
        hw.load_nvfp4(model, tmp_path)
    assert all("W4A4" in repr(model.layers[1].mlp.down_proj) for model in models)
    assert torch.equal(models[0](tokens), models[1](tokens))
    model = Model()
    hw.load_nvfp4(model, tmp_path, quantize_input=False)
    logits_agree(model, dense)


def changed(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[State, dict[str, Any]], None]:
    def apply(state: State, _: dict[str, Any]) -> None:
        given = change(state.pop(name))
        if given is not None:
            state[name] = given

    return apply


def configured(**entries: object) -> Callable[[State, dict[str, Any]], None]:
    return lambda _, config: config.update(entries)


LAYER = "layers.1.mlp.down_proj"
WRONG: dict[str, tuple[str, Callable[[State, dict[str, Any]], None], str]] = {
    "another method": ("modelopt", configured(quant_method="gptq"),
        "load_nvfp4: quant_method of the folder must be compressed-tensors or modelopt; got gptq"),
    "no configuration": ("modelopt", lambda _, config: config.clear(),
        "load_nvfp4: quant_method of the folder must be compressed-tensors or modelopt; got None"),
    "another format": ("compressed-tensors", configured(format="mxfp4-pack-quantized"),
        "load_nvfp4: format in config_groups.group_0 of quantization_config must be nvfp4-pack-quantized;"
        " got mxfp4-pack-quantized"),
    "activations in 8 bits": ("compressed-tensors",
        lambda _, c: c["config_groups"]["group_0"].update(input_activations={"num_bits": 8, "type": "float"}),
        "load_nvfp4: input_activations of config_groups.group_0 of quantization_config must be num_bits 4, type float,"
        " group_size 16; got (8, 'float', None)"),
    "another algorithm": ("modelopt", configured(quant_algo="NVFP4_AWQ"),
        "load_nvfp4: quant_algo of the folder must be NVFP4 or W4A16_NVFP4; got NVFP4_AWQ"),
    "another group": ("modelopt", configured(group_size=32), "load_nvfp4: group_size of the folder must be 16; got 32"),
    "the other convention": ("modelopt", lambda _, c: c.update(config_of("compressed-tensors")),
        "load_nvfp4: layers.0.self_attn.q_proj must be with weight_global_scale, as the folder's format has it;"
        " got another format's tensors"),
    "an ignored layer": ("compressed-tensors", configured(ignore=["re:.*down_proj"]),
        "load_nvfp4: layers.0.mlp.down_proj must be in 16 bits, as the folder's list of such layers says; got NVFP4"),
    "no scales of activations": ("modelopt", configured(quant_algo="NVFP4"),
        "load_nvfp4: layers.0.self_attn.q_proj.input_scale must be in the checkpoint, or quantize_input False;"
        " got none"),
    "no codes": ("compressed-tensors", changed(f"{LAYER}.weight_packed", lambda t: None),
        f"NVFP4Linear.from_checkpoint: tensors must be a mapping with {LAYER}.weight_packed; got none"),
    "no scales": ("modelopt", changed(f"{LAYER}.weight_scale", lambda t: None),
        f"NVFP4Linear.from_checkpoint: tensors must be a mapping with {LAYER}.weight_scale; got none"),
    "no norm": ("modelopt", changed("layers.1.norm.weight", lambda t: None),
        "load_nvfp4: folder must be a checkpoint with all of ['layers.1.norm.weight']; got not all of them"),
    "one more": ("modelopt", lambda state, _: state.update({f"{LAYER}.pre_quant_scale": torch.ones(48)}),
        f"load_nvfp4: folder must be a checkpoint of this model; got unknown tensors ['{LAYER}.pre_quant_scale']"),
    "weights in 8 bits": ("modelopt", changed(f"{LAYER}.weight", lambda t: torch.ones(64, 48).to(torch.float8_e4m3fn)),
        f"NVFP4Linear.from_checkpoint: {LAYER}.weight must be torch.uint8 [out_features, in_features/2] with"
        " in_features a multiple of 16; got torch.float8_e4m3fn [64, 48]"),
    "a head in 8 bits": ("modelopt", changed("lm_head.weight", lambda t: t.to(torch.float8_e4m3fn)),
        "load_nvfp4: lm_head.weight must be torch.float32 or one that converts to it; got torch.float8_e4m3fn"),
    "scales of another shape": ("modelopt", changed(f"{LAYER}.weight_scale", lambda t: t[:, :2].contiguous()),
        f"NVFP4Linear.from_checkpoint: {LAYER}.weight_scale must be [64, 3]; got [64, 2]"),
    "another width": ("modelopt", changed("layers.1.norm.weight", lambda t: t[:48].clone()),
        "load_nvfp4: layers.1.norm.weight must be [64]; got [48]"),
    "a layer of another size": ("modelopt",
        lambda state, _: state.update(random_layer(LAYER, 64, 64, "modelopt", ())[0]),
        f"load_nvfp4: in_features of {LAYER} in the checkpoint must be 48 as the model's is; got 64"),
    "two globals": ("modelopt", changed(f"{LAYER}.weight_scale_2", lambda t: torch.ones(2)),
        f"NVFP4Linear.from_checkpoint: {LAYER}.weight_scale_2 must be one float32 number, 0-d or [1];"
        " got torch.float32 [2]"),
    "a reciprocal of 0": ("compressed-tensors", changed(f"{LAYER}.weight_global_scale", torch.zeros_like),
        f"NVFP4Linear.from_checkpoint: {LAYER}.weight_global_scale must be finite and above 0, with a finite"
        " reciprocal; got 0.0"),
}  # fmt: skip


def renamed(state: State, prefix: str = "", old: str = "layers", new: str = "layers") -> State:
    return {prefix + name.replace(f"{old}.", f"{new}."): tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("method", FORMATS)
def test_another_prefix_is_named(method: str, strict: bool, tmp_path: Path) -> None:
    state, _ = made(method)
    write(tmp_path / "with", renamed(state, "model."), config_of(method))
    write(tmp_path / "without", state, config_of(method))
    model, inner = Model(), Model()
    before = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    outer = torch.nn.ModuleDict({"model": inner})
    for folder, target, expected in (
        ("with", inner, "such as embed_tokens; got model.embed_tokens: names with the prefix 'model.'"),
        ("without", outer, "such as model.embed_tokens; got embed_tokens: names without the prefix 'model.'"),
    ):
        with pytest.raises(
            ValueError, match=r"^load_nvfp4: folder must be a checkpoint with the model's names, "
        ) as error:
            hw.load_nvfp4(target, tmp_path / folder, strict=strict)
        assert str(error.value).endswith(expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in inner.state_dict().items())
    hw.load_nvfp4(outer, tmp_path / "with", strict=strict)
    hw.load_nvfp4(model, tmp_path / "without", strict=strict)
    tokens = torch.arange(40).view(2, 20)
    assert torch.equal(inner(tokens), model(tokens))


def test_names_of_another_model_are_named(tmp_path: Path) -> None:
    state, _ = made("modelopt")
    layers = {name: tensor for name, tensor in state.items() if name.startswith("layers.")}
    write(tmp_path, renamed(layers, old="layers", new="h"), config_of("modelopt"))
    with pytest.raises(ValueError, match=r"such as embed_tokens; got other names, the nearest \['h\.") as error:
        hw.load_nvfp4(Model(), tmp_path, strict=False)
    assert "layers" not in str(error.value)


def test_a_wrong_prefix_of_a_layer_is_named() -> None:
    state, _ = random_layer("model.mlp.up_proj", 32, 64, "modelopt", ())
    state |= random_layer("model.mlp.down_proj", 32, 64, "modelopt", ())[0] | {"norm.weight": torch.ones(64)}
    expected = "prefix must be a layer of the checkpoint that has weight_global_scale or weight_scale_2; got "
    near = "and the nearest layers that have one are "
    for prefix, names in (
        ("mlp.up_proj", "['model.mlp.up_proj', 'model.mlp.down_proj']"),
        ("model.model.mlp.down_proj.", "['model.mlp.down_proj', 'model.mlp.up_proj']"),
        ("norm", "["),
    ):
        with pytest.raises(ValueError, match="prefix must be a layer") as error:
            nn.NVFP4Linear.from_checkpoint(state, prefix)
        text = f"NVFP4Linear.from_checkpoint: {expected}{prefix!r}, {near}{names}"
        assert str(error.value).startswith(text)
    with pytest.raises(ValueError, match=r"got 'norm', and no layer has one$"):
        nn.NVFP4Linear.from_checkpoint({"norm.weight": torch.ones(64)}, "norm")


@pytest.mark.parametrize("name", WRONG)
def test_nothing_is_half_loaded(name: str, tmp_path: Path) -> None:
    method, change, message = WRONG[name]
    state, _ = made(method)
    config = config_of(method)
    change(state, config)
    model = Model()
    before = {k: t.clone() for k, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        hw.load_nvfp4(model, write(tmp_path, state, config))
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    assert not any(isinstance(module, nn.NVFP4Linear) for module in model.modules())


def test_a_fused_layer_half_in_16_bits(tmp_path: Path) -> None:
    state, _ = made("modelopt", plain=("layers.0.mlp.up_proj",))
    write(tmp_path, state, config_of("modelopt"))
    message = "layers.0.mlp.up_proj must be NVFP4 as layers.0.mlp.gate_proj is, with which it is one layer; got 16 bits"
    with pytest.raises(ValueError, match=message):
        hw.load_nvfp4(Model(fused=True), tmp_path)


def test_strict_false(tmp_path: Path) -> None:
    """A checkpoint has layers that the model does not, such as those that predict several tokens."""
    state, dense = made("compressed-tensors")
    state |= random_layer("layers.2.mlp.down_proj", 64, 48, "compressed-tensors", ())[0]
    model = Model()
    hw.load_nvfp4(model, write(tmp_path, state, config_of("compressed-tensors")), strict=False)
    logits_agree(model, dense)


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config_of("modelopt")}))
    with pytest.raises(ImportError, match=r"^load_nvfp4: needs the package safetensors"):
        hw.load_nvfp4(Model(), tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^load_nvfp4: folder must be a folder whose config\.json has"):
        hw.load_nvfp4(Model(), tmp_path / "absent")
