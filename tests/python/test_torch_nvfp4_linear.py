"""hopwell.torch.nn.NVFP4Linear: inputs that nn.Linear takes, gradients, reciprocal globals, any number of rows."""

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from hopwell import torch as hw
from hopwell.torch import nn
from support import norm_error
from torch import Tensor

pytestmark = pytest.mark.usefixtures("torch_seed")


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    """PyTorch compiles a function for a limited number of modules in a process."""
    yield
    torch.compiler.reset()


def dense(layer: nn.NVFP4Linear) -> Tensor:
    """The weight as the layer means it, float64."""
    reciprocal = layer.global_is_reciprocal
    quantized = layer.weight, layer.weight_scale, layer.weight_global
    return hw.nvfp4_dequantize(*quantized, global_is_reciprocal=reciprocal).double()


ACTIVATIONS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(64, 5).T,
    "transposed, three dimensions": lambda: torch.randn(2, 64, 5).transpose(1, 2),
    "a slice with a step": lambda: torch.randn(5, 128)[:, ::2],
    "columns of a wider matrix": lambda: torch.randn(2, 5, 100)[..., 7:71],
    "every second row": lambda: torch.randn(9, 64)[::2],
    "of a convolution": lambda: torch.nn.functional.conv1d(torch.randn(2, 8, 11), torch.randn(64, 8, 3)).transpose(
        1, 2
    ),
    "of a convolution, channels last": lambda: (
        torch.randn(2, 64, 3, 4).to(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    ),
    "expanded rows": lambda: torch.randn(64).expand(5, 64),
    "expanded columns": lambda: torch.randn(5, 1).expand(5, 64),
    "one row": lambda: torch.randn(64),
    "no rows": lambda: torch.randn(2, 0, 64),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_takes_what_nn_linear_takes(name: str) -> None:
    layer, x = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 21)), ACTIVATIONS[name]()
    y = layer(x)
    assert y.shape == (*x.shape[:-1], 21)
    assert torch.equal(y, layer(x.clone(memory_format=torch.contiguous_format)))
    leaf = x.detach().requires_grad_()
    layer(leaf).sum().backward()  # of a sum the gradient is one number, expanded
    expected = dense(layer).sum(0).expand(x.shape)
    torch.testing.assert_close(leaf.grad, expected.float(), rtol=1e-4, atol=1e-4)


def test_weights_of_any_strides() -> None:
    linear = torch.nn.Linear(64, 32)
    expected = nn.NVFP4Linear.from_linear(linear).state_dict()
    for stored in (linear.weight.detach().T.contiguous().T, linear.weight.detach().repeat_interleave(2, 1)[:, ::2]):
        assert not stored.is_contiguous()
        linear.weight = torch.nn.Parameter(stored)
        for name, buffer in nn.NVFP4Linear.from_linear(linear).state_dict().items():
            assert torch.equal(buffer, expected[name])


@pytest.mark.parametrize(("in_features", "out_features"), [(0, 5), (0, 0), (64, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_no_features(in_features: int, out_features: int) -> None:
    linear = torch.nn.Linear(in_features, out_features)
    layer, x = nn.NVFP4Linear.from_linear(linear), torch.randn(2, 3, in_features)
    torch.testing.assert_close(layer(x), linear(x), rtol=0.2, atol=0.2)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "x of integers": (
        lambda: nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 8))(torch.ones(2, 64, dtype=torch.int32)),
        "NVFP4Linear: x must be torch.float32 or torch.float16 or torch.bfloat16; got torch.int32",
    ),
    "weight of doubles": (
        lambda: nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 8).double()),
        "NVFP4Linear.from_linear: linear.weight must be torch.float32 or torch.float16 or torch.bfloat16;"
        " got torch.float64",
    ),
    "x on another device": (
        lambda: nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 8))(torch.ones(2, 64, device="meta")),
        "NVFP4Linear: weight must be on meta as x is; got cpu",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_the_module_s(name: str) -> None:
    call, words = WRONG[name]
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        call()


@pytest.mark.parametrize("missing", ["weight", "weight_scale", "weight_global", "bias"])
def test_a_buffer_that_the_checkpoint_lacked(missing: str) -> None:
    """It has no memory; a product with it would be of whatever lies there."""
    state = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 21)).state_dict()
    layer = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 21, device="meta"))
    del state[missing]
    layer.load_state_dict(state, assign=True, strict=False)
    message = f"NVFP4Linear: {missing} must be on cpu as x is; got meta"
    with pytest.raises(ValueError, match=f"^{message}$"):
        layer(torch.randn(3, 64))


def test_reciprocal_global() -> None:
    """As compressed-tensors stores it. As a factor it would be off by its square, 3.8e9 here."""
    layer, x = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 21)), torch.randn(3, 64)
    buffers = layer.weight, layer.weight_scale, 1 / layer.weight_global, layer.bias
    same = nn.NVFP4Linear(*buffers, global_is_reciprocal=True)
    torch.testing.assert_close(same(x), layer(x))
    leaf = x.clone().requires_grad_()
    same(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, dense(layer).sum(0).float().expand(3, 64), rtol=1e-4, atol=1e-4)
    assert "global_is_reciprocal=True" in repr(same) and "reciprocal" not in repr(layer)
    torch.testing.assert_close(torch.compile(same, fullgraph=True, backend="aot_eager")(x), layer(x))
    broken = nn.NVFP4Linear(*buffers[:2], torch.tensor(0.0), global_is_reciprocal=True)
    with pytest.raises(ValueError, match="weight_global must be finite with a finite reciprocal"):
        broken(x)


# ---- gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["plain", "blocked"])
def test_gradients_against_float64(layout: str, dtype: torch.dtype) -> None:
    codes, scales, factor = hw.nvfp4_quantize(torch.randn(150, 96), scale_layout=layout)
    weight = hw.nvfp4_dequantize(codes, scales, factor, scale_layout=layout).double()
    x, bias = torch.randn(7, 96).to(dtype).requires_grad_(), torch.randn(150).to(dtype).requires_grad_()
    d_y = torch.randn(7, 150).to(dtype)
    hw.nvfp4_linear(x, codes, scales, float(factor), bias=bias, scale_layout=layout).backward(d_y)
    bound = 1e-4 if dtype == torch.float32 else 4e-3
    assert x.grad.dtype == bias.grad.dtype == dtype
    assert norm_error(x.grad, d_y.double() @ weight) <= bound
    assert norm_error(bias.grad, d_y.double().sum(0)) <= bound
    d_x = hw.nvfp4_linear_backward(d_y, codes, scales, factor, scale_layout=layout)
    assert torch.equal(d_x, x.grad)


def test_only_the_gradients_that_are_needed() -> None:
    quantized, x = hw.nvfp4_quantize(torch.randn(10, 64)), torch.randn(3, 64)
    bias = torch.randn(10, requires_grad=True)
    hw.nvfp4_linear(x, *quantized, bias=bias).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((10,), 3.0))


class Adapted(torch.nn.Module):
    """A frozen NVFP4 layer with a low-rank adapter beside it, between two layers: QLoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 64)
        self.frozen = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 48))
        self.down, self.up = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        y: Tensor = self.frozen(h) + self.up(self.down(h))
        return y


@pytest.mark.parametrize("compiled", [False, True])
def test_adapters_over_frozen_weights_train(compiled: bool) -> None:
    model, x = Adapted(), torch.randn(2, 5, 32)
    target = torch.randn(2, 5, 48)
    plain = torch.nn.Linear(64, 48)
    plain.weight, plain.bias = torch.nn.Parameter(dense(model.frozen).float()), torch.nn.Parameter(model.frozen.bias)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    gradients = []
    for frozen in (model.frozen, plain):
        model.zero_grad()
        step = run if frozen is model.frozen else model
        model.frozen = frozen
        (step(x) - target).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if not name.startswith("frozen")})
    assert len(gradients[0]) == 4
    for name, expected in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], expected, rtol=1e-3, atol=1e-6, msg=name)


# ---- any number of rows


@pytest.mark.parametrize("dimensions", [2, 3])
def test_one_exported_program_serves_every_number_of_rows(dimensions: int) -> None:
    layer = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 21)).eval()
    dims = [torch.export.Dim(name) for name in ("b", "s")[: dimensions - 1]]
    program = torch.export.export(
        layer, (torch.randn(*(6, 5)[: dimensions - 1], 64),), dynamic_shapes={"x": dict(enumerate(dims))}
    ).module()
    for n in (2, 3, 96, 97, 300):
        x = torch.randn(*(n, 7)[: dimensions - 1], 64)
        assert torch.equal(program(x), layer(x))


@pytest.mark.parametrize("grad", [False, True])
def test_one_compiled_graph_serves_every_number_of_rows(grad: bool) -> None:
    layer = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 21))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((6, 64), (2, 5, 64)):
        compiled(torch.randn(shape, requires_grad=grad))
    with torch.compiler.set_stance("fail_on_recompile"):
        for n in (3, 96, 97, 300):
            for shape in ((n, 64), (n, 7, 64)):
                x = torch.randn(shape, requires_grad=grad)
                y = compiled(x)
                torch.testing.assert_close(y, layer(x))
                if grad:
                    y.sum().backward()
                    assert x.grad.shape == shape
