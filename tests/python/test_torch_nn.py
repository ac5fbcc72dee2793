"""hopwell.torch.nn: modules against dense attention, gradients of both losses, generation with a cache, NVFP4."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hopwell.torch import lightning_indexer, nn, nvfp4_dequantize
from hopwell.torch.ops import _sparse_mla
from hopwell.torch.parallel import ContextShard, ParallelDSA
from torch import Tensor

D_MODEL = 48

pytestmark = pytest.mark.usefixtures("torch_seed")


def make_mla(attn_sink: bool = False) -> nn.SparseMLA:
    return nn.SparseMLA(D_MODEL, 4, d_v=24, d_rope=8, d_nope=12, d_head=10, attn_sink=attn_sink)


def make_dsa(topk: int = 6, attn_sink: bool = False) -> nn.DSA:
    return nn.DSA(make_mla(attn_sink), nn.LightningIndexer(D_MODEL, topk=topk, h_index=3, d_index=16, d_rope=8))


attend = nn.SparseMLA.forward  # of a DSA: attention over the keys that the caller names


def all_keys(b: int, s: int) -> Tensor:
    """Index lists of dense causal attention: row t has the keys 0 … t, then −1; int32 [b, s, s]."""
    keys = torch.arange(s, dtype=torch.int32)
    return torch.where(keys <= keys[:, None], keys, -1).expand(b, s, s)


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def test_every_key_selected_is_dense_attention() -> None:
    dsa, x = make_dsa(topk=40), torch.randn(3, 17, D_MODEL)
    dsa(x)
    dense, no_loss = dsa(x, "dense")
    assert no_loss is None and dsa.selected is None
    for mode in ("warm-up", "sparse"):
        torch.testing.assert_close(dsa(x, mode)[0], dense, rtol=1e-4, atol=1e-5)
        y = attend(dsa, x, dsa.indexer(x) if mode == "sparse" else all_keys(3, 17))
        torch.testing.assert_close(y, dense, rtol=1e-4, atol=1e-5)


def test_gradients_of_every_key_selected_are_those_of_dense_attention() -> None:
    dsa, x = make_dsa(topk=40), torch.randn(2, 11, D_MODEL)
    d_y = torch.randn_like(x)
    results = []
    for mode in ("dense", "sparse"):
        dsa.zero_grad()
        leaf = x.clone().requires_grad_()
        dsa(leaf, mode)[0].backward(d_y)
        results.append({n: g for n, g in gradients(dsa).items() if "indexer" not in n} | {"x": leaf.grad})
    assert len(results[0]) == len(list(make_mla().parameters())) + 1
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("direction", ["_forward", "_backward"])
def test_share_keys_reaches_both_directions(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    """Tests the module and the module over ranks; the hint is off by default."""
    assert not make_dsa().share_keys
    call, given = getattr(_sparse_mla, direction), []

    def note(*arguments: Any, share_keys: bool, **options: Any) -> Any:
        given.append(share_keys)
        return call(*arguments, share_keys=share_keys, **options)

    monkeypatch.setattr(_sparse_mla, direction, note)
    dsa, x = make_dsa(), torch.randn(2, 15, D_MODEL)
    parallel, shard = ParallelDSA(dsa, dsa.indexer), ContextShard.zigzag(15, None)
    for hint in (False, True):
        dsa.share_keys = parallel.share_keys = hint
        dsa(x)[0].sum().backward()
        parallel(x, shard)[0].sum().backward()
    assert given == [False, False, True, True]


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    dsa, x = make_dsa(), torch.randn(4, 15, D_MODEL)
    together, _ = dsa(x)
    alone = torch.cat([dsa(x[i : i + 1])[0] for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert dsa.selected is not None
    assert dsa.selected.shape == (1, 15, 6)
    assert (dsa.selected <= torch.arange(15)[:, None]).all()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("b", "s"), [(4, 15), (1, 300), (70, 3), (3, 1)])
def test_selection_equals_a_loop_over_the_batch(b: int, s: int, exact: bool) -> None:
    """The same keys are selected, also if many scores are equal."""
    shapes = ((b, s, 3, 16), (b, s, 16), (b, s, 3))
    q, k, w = (torch.randint(-1, 2, shape).float() if exact else torch.randn(shape) for shape in shapes)
    selected = nn.LightningIndexer(D_MODEL, topk=6, h_index=3, d_index=16).select(q, k, w)
    alone = [lightning_indexer(*sequence, 6, q_start=0)[0] for sequence in zip(q, k, w, strict=True)]
    assert selected.dtype == torch.int32
    assert torch.equal(selected, torch.stack(alone))


def test_selection_needs_memory_for_the_tokens_alone() -> None:
    """A pack of 16,384 tokens: the scores of all pairs would need 1 GiB."""
    q, k, w = torch.randn(4096, 4, 3, 16), torch.randn(4096, 4, 16), torch.randn(4096, 4, 3)
    indexer = nn.LightningIndexer(D_MODEL, topk=6, h_index=3, d_index=16)

    def peak_bytes() -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current use
    before = peak_bytes()
    selected = indexer.select(q, k, w)
    assert peak_bytes() - before < 2**28
    assert (selected[:, :, 0] == 0).all()


def test_indices_stay_within_their_sequence() -> None:
    """An index beyond its sequence is invalid, and must not become a key of the next sequence."""
    indices = torch.tensor([[[-7, 0, 14], [15, 16, -1]], [[1, 29, 2**31 - 1], [14, 15, -(2**31)]]], dtype=torch.int32)
    packed = [[-1, 0, 14], [-1, -1, -1], [16, -1, -1], [29, -1, -1]]
    assert nn.pack_indices(indices, 15).tolist() == packed
    mla, x = make_mla(), torch.randn(2, 15, D_MODEL)
    own = torch.randint(0, 15, (2, 15, 4), dtype=torch.int32)
    beyond = torch.full((2, 15, 3), 15, dtype=torch.int32)
    torch.testing.assert_close(mla(x, torch.cat([own, beyond], -1)), mla(x, own), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"SparseMLA: indices must be int32 \[b, s, topk\] .* got \[1, 30, 4\]"):
        mla(x, own.reshape(1, 30, 4))
    with pytest.raises(ValueError, match=r"DSA.extend: x must be \[1, s, d_model\]"):
        make_dsa().extend(x, nn.KeyCache(20))
    with pytest.raises(ValueError, match="DSA: mode must be 'dense' or 'warm-up' or 'sparse'; got 'spares'"):
        make_dsa()(x, "spares")


@pytest.mark.parametrize("attn_sink", [False, True])
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_nothing_gives_nothing(shape: tuple[int, int], attn_sink: bool) -> None:
    for mode in ("sparse", "warm-up") if attn_sink else ("sparse", "warm-up", "dense"):
        dsa, x = make_dsa(attn_sink=attn_sink), torch.randn(*shape, D_MODEL, requires_grad=True)
        y, loss = dsa(x, mode)
        assert y.shape == x.shape
        assert loss is None if mode == "dense" else loss == 0
        (y.sum() if loss is None else y.sum() + loss).backward()
        assert all(not gradient.any() for gradient in gradients(dsa).values())
        with torch.no_grad():
            assert dsa(x, mode)[0].shape == x.shape
    assert make_dsa().indexer(torch.randn(*shape, D_MODEL)).shape == (*shape, 6)


def test_who_learns_from_which_loss() -> None:
    dsa, x = make_dsa(attn_sink=True), torch.randn(2, 15, D_MODEL, requires_grad=True)
    for mode in ("warm-up", "sparse"):
        dsa.zero_grad()
        _, loss = dsa(x, mode)
        loss.backward()
        assert set(gradients(dsa)) == {f"indexer.{name}" for name, _ in dsa.indexer.named_parameters()}
        assert x.grad is None
        dsa.zero_grad()
        dsa(x, mode)[0].square().sum().backward()
        assert set(gradients(dsa)) == {name for name, _ in make_mla(attn_sink=True).named_parameters()}
        assert all(g.abs().sum() > 0 for g in gradients(dsa).values())
        x.grad = None
    with torch.no_grad():
        assert dsa(x)[1] is None
    with pytest.raises(ValueError, match="attention sink"):
        dsa(x, "dense")


def test_indexer_learns_to_select_what_attention_looks_at() -> None:
    """By training with the loss alone, the selected keys get more of the attention than at first."""
    dsa, x = make_dsa(topk=5), torch.randn(4, 40, D_MODEL)
    dsa.q_proj.weight.data *= 4  # attention that prefers some keys
    optimizer = torch.optim.AdamW(dsa.indexer.parameters(), lr=1e-2)

    def carried() -> float:
        with torch.no_grad():
            q, kv = (t.flatten(0, 1) for t in dsa.project(x))
            chosen = nn.pack_indices(dsa.indexer(x), 40)
            lse_all = dsa.attend(q, kv, nn.pack_indices(all_keys(4, 40), 40))[1]
            return float((dsa.attend(q, kv, chosen)[1] - lse_all).exp().mean())

    before, losses = carried(), []
    for _ in range(60):
        _, loss = dsa(x, "warm-up")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert carried() > before + 0.05


@pytest.mark.parametrize("attn_sink", [False, True])
def test_token_by_token_equals_all_at_once(attn_sink: bool) -> None:
    dsa, x = make_dsa(attn_sink=attn_sink), torch.randn(1, 20, D_MODEL)
    if attn_sink:
        dsa.attn_sink.data.normal_()
    with torch.no_grad():
        expected, _ = dsa(x)
        cache = nn.KeyCache(20)
        parts = [dsa.extend(x[:, :7], cache)] + [dsa.extend(x[:, i : i + 1], cache) for i in range(7, 20)]
        counted = nn.KeyCache(20)
        dsa.extend(x[:, :7], counted)
        counted.length = torch.tensor(7)
        for i in range(7, 20):  # all steps are equal except for the tensor's value
            torch.testing.assert_close(dsa.extend(x[:, i : i + 1], counted), parts[i - 6], rtol=1e-4, atol=1e-5)
            counted.length += 1
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-5)
    assert cache.length == 20
    with pytest.raises(ValueError, match="holds 20 tokens"):
        dsa.extend(x[:, :1], cache)
    with pytest.raises(ValueError, match="length must be a number until there are tokens"):
        dsa.extend(x[:, :1], nn.KeyCache(20, torch.tensor(0)))


def test_rotation_is_relative() -> None:
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    products = [(nn.rotate(q, start + 5) * nn.rotate(k, start)).sum() for start in (0, 3, 100)]
    torch.testing.assert_close(torch.stack(products), products[0].expand(3), rtol=1e-4, atol=1e-4)
    assert abs(products[0] - (q * k).sum()) > 1e-6
    heads = torch.randn(1, 9, 4, 16)
    torch.testing.assert_close(nn.rotate(heads, 2)[:, :, 1], nn.rotate(heads[:, :, 1], 2))


@pytest.mark.filterwarnings("error:Mismatch dtype")
def test_bfloat16_and_autocast() -> None:
    # Every key is selected, because rounded scores would select other keys, and the outputs would differ by whole keys.
    dsa, x = make_dsa(topk=40), torch.randn(2, 12, D_MODEL)
    expected, _ = dsa(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, loss = dsa(x)
        cache = nn.KeyCache(12)
        part = dsa.extend(x[:1], cache)
    (y.float().sum() + loss).backward()
    assert y.dtype == part.dtype == torch.bfloat16
    assert cache.kv.dtype == torch.bfloat16
    assert float((y.float() - expected).detach().norm() / expected.detach().norm()) < 0.1
    y, loss = make_dsa().bfloat16()(x.bfloat16())
    (y.float().sum() + loss).backward()


CASTS = ["bfloat16", "half", "double", "float"]


def test_the_sink_stays_float32() -> None:
    dsa = make_dsa(attn_sink=True)
    sink = dsa.attn_sink
    sink.data.normal_()
    exact, sink.grad = sink.detach().clone(), torch.ones_like(sink)
    for cast in CASTS:
        getattr(dsa, cast)()
        assert dsa.kv_b_proj.weight.dtype == dsa.q_proj.weight.dtype != torch.float32 or cast == "float"
        assert dsa.attn_sink.dtype == dsa.attn_sink.grad.dtype == torch.float32
        assert torch.equal(dsa.attn_sink, exact)
    y, loss = dsa.type(torch.bfloat16)(torch.randn(2, 12, D_MODEL).bfloat16())
    (y.float().sum() + loss).backward()
    assert torch.equal(dsa.attn_sink, exact)
    assert dsa.to("meta").to_empty(device="cpu").attn_sink.dtype == torch.float32
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert make_dsa(attn_sink=True).attn_sink.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_sink_that_a_wrapper_casts() -> None:
    """As FSDP's mixed precision casts it before forward."""
    mla, x = make_mla(attn_sink=True), torch.randn(2, 12, D_MODEL).bfloat16()
    cast = {name: p.bfloat16() for name, p in mla.named_parameters()}
    y = torch.func.functional_call(mla, cast, (x, all_keys(2, 12)))
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("floats", [False, True])
def test_nvfp4_keeps_its_numbers(floats: bool) -> None:
    """Codes and scales may have PyTorch's types, and PyTorch's casts would convert them as numbers."""
    layer, x = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 21)), torch.randn(3, 64)
    if floats:
        codes, scales = layer.weight.view(torch.float4_e2m1fn_x2), layer.weight_scale.view(torch.float8_e4m3fn)
        layer = nn.NVFP4Linear(codes, scales, layer.weight_global, layer.bias)
    before = [layer.weight.view(torch.uint8), layer.weight_scale.view(torch.uint8), layer.weight_global.clone()]
    dtypes = [layer.weight.dtype, layer.weight_scale.dtype, torch.float32]
    for cast in CASTS:
        getattr(layer, cast)()
        now = [layer.weight, layer.weight_scale, layer.weight_global]
        assert [t.dtype for t in now] == dtypes
        for old, new in zip(before, now, strict=True):
            assert torch.equal(old, new if new.dtype == old.dtype else new.view(old.dtype))
        assert layer(x if cast == "double" else x.to(layer.bias.dtype)).isfinite().all()
    assert layer(x[:0]).shape == (0, 21)


def test_compiles_without_graph_breaks() -> None:
    dsa, x = make_dsa(), torch.randn(2, 12, D_MODEL)
    results = []
    for run in (dsa, torch.compile(dsa, fullgraph=True, backend="aot_eager")):  # inductor: test_torch_dispatch.py
        dsa.zero_grad()
        y, loss = run(x)
        (y.square().sum() + loss).backward()
        results.append({"y": y.detach(), "loss": loss.detach()} | gradients(dsa))
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-3, atol=1e-5, msg=name)


class InMode(torch.nn.Module):
    def __init__(self, dsa: nn.DSA, mode: nn.Mode) -> None:
        super().__init__()
        self.dsa, self.mode = dsa, mode

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dsa(x, self.mode)[0]
        return y


@torch.no_grad()
@pytest.mark.parametrize("mode", ["dense", "warm-up", "sparse"])
def test_one_exported_program_serves_every_number_of_sequences_and_tokens(mode: nn.Mode) -> None:
    layer, sizes = InMode(make_dsa(), mode), {0: torch.export.Dim("b"), 1: torch.export.Dim("s")}
    program = torch.export.export(layer, (torch.randn(2, 11, D_MODEL),), dynamic_shapes={"x": sizes}).module()
    for b, s in ((2, 11), (3, 20), (5, 4)):
        x = torch.randn(b, s, D_MODEL)
        torch.testing.assert_close(program(x), layer(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_linear(bias: bool, dtype: torch.dtype) -> None:
    linear = torch.nn.Linear(64, 21, bias=bias).to(dtype)
    layer, x = nn.NVFP4Linear.from_linear(linear), torch.randn(2, 3, 64).to(dtype)
    weight = nvfp4_dequantize(layer.weight, layer.weight_scale, layer.weight_global)
    expected = x.double() @ weight.double().T + (linear.bias.detach().double() if bias else 0.0)
    y = layer(x)
    assert y.dtype == dtype
    assert y.shape == (2, 3, 21)
    assert (y.double() - expected).norm() <= 4e-3 * expected.norm()
    assert not list(layer.parameters())
    assert sum(b.nbytes for n, b in layer.named_buffers() if n != "bias") == 21 * (64 // 2 + 64 // 16) + 4

    other = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 21, bias=bias).to(dtype))
    assert not torch.equal(other(x), y)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), y)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), y)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.float()).dtype == linear(x.float()).dtype == torch.bfloat16


WRONG_ARGUMENTS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "from_linear": (
        lambda: nn.NVFP4Linear.from_linear(None),
        TypeError,
        "NVFP4Linear.from_linear: linear must be a torch.nn.Linear; got NoneType",
    ),
    "from_linear of a convolution": (
        lambda: nn.NVFP4Linear.from_linear(torch.nn.Conv1d(16, 16, 1)),
        TypeError,
        "NVFP4Linear.from_linear: linear must be a torch.nn.Linear; got Conv1d",
    ),
    "weight": (
        lambda: nn.NVFP4Linear(None, torch.ones(8, 4), torch.tensor(1.0)),
        TypeError,
        "NVFP4Linear: weight must be a torch.Tensor; got NoneType",
    ),
    "weight_global": (
        lambda: nn.NVFP4Linear(torch.ones(8, 32, dtype=torch.uint8), torch.ones(8, 4), 1.0),
        TypeError,
        "NVFP4Linear: weight_global must be a torch.Tensor; got float",
    ),
    "bias": (
        lambda: nn.NVFP4Linear(torch.ones(8, 32, dtype=torch.uint8), torch.ones(8, 4), torch.tensor(1.0), False),
        TypeError,
        "NVFP4Linear: bias must be a torch.Tensor; got bool",
    ),
    "weight of numbers": (
        lambda: nn.NVFP4Linear(torch.ones(8, 64), torch.ones(8, 4), torch.tensor(1.0)),
        ValueError,
        "NVFP4Linear: weight must be torch.uint8 or torch.float4_e2m1fn_x2 [out_features, in_features/2];"
        " got torch.float32 [8, 64]",
    ),
    "x of NVFP4Linear": (
        lambda: nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 8))(np.ones((2, 64))),
        TypeError,
        "NVFP4Linear: x must be a torch.Tensor; got ndarray",
    ),
    "mla": (lambda: nn.DSA(None, make_dsa().indexer), TypeError, "DSA: mla must be a SparseMLA; got NoneType"),
    "indexer": (lambda: nn.DSA(make_mla(), 3), TypeError, "DSA: indexer must be a torch.nn.Module; got int"),
    "x of DSA": (lambda: make_dsa()(None), TypeError, "DSA: x must be a torch.Tensor; got NoneType"),
    "width of x of DSA": (
        lambda: make_dsa()(torch.ones(1, 2, D_MODEL + 1)),
        ValueError,
        f"DSA: x must be [b, s, d_model={D_MODEL}]; got [1, 2, {D_MODEL + 1}]",
    ),
    "indices": (
        lambda: make_mla()(torch.ones(1, 2, D_MODEL), None),
        TypeError,
        "SparseMLA: indices must be a torch.Tensor; got NoneType",
    ),
    "cache": (
        lambda: make_dsa().extend(torch.ones(1, 2, D_MODEL), None),
        TypeError,
        "DSA.extend: cache must be a KeyCache; got NoneType",
    ),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_arguments_are_named(name: str) -> None:
    call, error, words = WRONG_ARGUMENTS[name]
    with pytest.raises(error, match=f"^{re.escape(words)}$"):
        call()


def test_nvfp4_linear_needs_whole_blocks() -> None:
    with pytest.raises(ValueError, match="in_features must be a multiple of 16; got 24"):
        nn.NVFP4Linear.from_linear(torch.nn.Linear(24, 8))


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_nvfp4_linear_loads_bytes_of_either_type(floats: bool, assign: bool) -> None:
    """Checkpoints have scales as float8_e4m3fn: a conversion by value to uint8 would change them."""
    layer, x = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 21)), torch.randn(3, 64)
    y, other = layer(x), nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 21))
    as_floats = {"weight": torch.float4_e2m1fn_x2, "weight_scale": torch.float8_e4m3fn}
    if floats:
        codes, scales = (getattr(other, name).view(dtype) for name, dtype in as_floats.items())
        other = nn.NVFP4Linear(codes, scales, other.weight_global, other.bias)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), other)
    for dtypes in ({}, as_floats):
        state = {name: t.view(dtypes.get(name, t.dtype)) for name, t in layer.state_dict().items()}
        model.load_state_dict(model.state_dict() | {f"1.{name}": t.clone() for name, t in state.items()}, assign=assign)
        assert torch.equal(model[1](x), y)
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({name: t for name, t in state.items() if name != "weight"})
    for wrong in (torch.float32, torch.float8_e5m2):
        with pytest.raises(
            RuntimeError, match=r"NVFP4Linear: weight_scale must be torch.uint8 or torch.float8_e4m3fn; got"
        ):
            layer.load_state_dict(state | {"weight_scale": torch.ones(21, 4).to(wrong)})
    assert torch.equal(layer(x), y)


def test_nvfp4_linear_of_a_model_without_memory() -> None:
    """Loaders first make a model with shapes only, and then assign the checkpoint's tensors."""
    layer, x = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 21)), torch.randn(3, 64)
    skeleton = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 21, device="meta"))
    y = skeleton(x.to("meta"))
    assert y.is_meta and y.shape == (3, 21) and y.dtype == torch.float32
    skeleton.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(skeleton(x), layer(x))


def test_inputs_that_do_not_fit() -> None:
    layer = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 8))
    for shape in ((4, 32), (2, 128), (0, 32), ()):
        with pytest.raises(ValueError, match=r"NVFP4Linear: x must be \[..., in_features=64\]; got \["):
            layer(torch.randn(shape))
    dsa, flat = make_dsa(), torch.randn(5, D_MODEL)
    parallel, shard = ParallelDSA(dsa, dsa.indexer), ContextShard.zigzag(5)
    entries = torch.zeros(1, 5, 2, dtype=torch.int32)
    calls = {
        "DSA": lambda: dsa(flat),
        "LightningIndexer": lambda: dsa.indexer(flat),
        "SparseMLA": lambda: attend(dsa, flat, entries),
        "ParallelDSA": lambda: parallel(flat, shard),
        "DSA.extend": lambda: dsa.extend(flat[:1], nn.KeyCache(9)),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{name}: x must be \[.*, d_model={D_MODEL}\].*; got \["):
            call()
    with pytest.raises(ValueError, match=r"SparseMLA: indices must be int32 \[b, s, topk\]"):
        attend(dsa, flat[None], entries[:, :, 0])
    with pytest.raises(ValueError, match="ParallelDSA: mode must be 'dense' or 'warm-up' or 'sparse'; got 'spares'"):
        parallel(flat[None], shard, "spares")
    for odd in (torch.randn(1, 5, 7), torch.randn(5, 8), torch.randn(1, 5, 2, 2, 8)):
        with pytest.raises(ValueError, match=r"rotate: x must be \[b, s, d\] or \[b, s, h, d\] with d even; got "):
            nn.rotate(odd)
