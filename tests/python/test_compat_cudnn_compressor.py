"""cuDNN's compressor wrappers, against a pooling in float64 of one compressed key at a time, and its autograd."""

import importlib
import sys
from typing import Any

import hopwell.compat.cudnn
import pytest
import torch
from hopwell.compat.cudnn import CSA
from support import norm_error
from torch_inputs import RESTRIDES, Restride, restrided

pytestmark = pytest.mark.usefixtures("torch_seed")
LENGTHS = [9, 0, 3, 17, 4]  # one is empty, one shorter than a block, and tails


def pooled(kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, ratio: int, coff: int) -> torch.Tensor:
    """The compressed keys of the documents, one after another."""
    d, first, keys = kv.shape[1] // coff, 0, []
    for length in LENGTHS:
        for block in range(length // ratio):
            rows = torch.arange(ratio) + first + block * ratio
            values, gates = kv[rows, -d:], (score[rows] + ape)[:, -d:]
            if coff == 2 and block:
                values = torch.cat([kv[rows - ratio, :d], values])
                gates = torch.cat([(score[rows - ratio] + ape)[:, :d], gates])
            keys.append((gates.softmax(0) * values).sum(0))
        first += length
    return torch.stack(keys)


def offsets(ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([0, *LENGTHS])
    return lengths.cumsum(0).int(), (lengths // ratio).cumsum(0).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coff", [1, 2])
@pytest.mark.parametrize(("ratio", "spare"), [(4, None), (4, 0), (4, 40), (3, 1), (2, -2)])
def test_agrees_with_a_plain_pooling(ratio: int, spare: int | None, coff: int, dtype: torch.dtype) -> None:
    """`spare` rows of out more than there are keys, which are 0; or fewer, and the last keys have no gradient."""
    tokens, d = sum(LENGTHS) + 5, 8
    kv, score = (torch.randn(tokens, coff * d).to(dtype) for _ in range(2))
    ape = torch.randn(ratio, coff * d)
    cu_seqlens, cu_comp = offsets(ratio)
    rows = int(cu_comp[-1]) + (spare or 0)
    given = kv, score, ape, cu_seqlens, cu_comp
    options: dict[str, Any] = {"ratio": ratio, "coff": coff}
    out = CSA.csa_compressor_forward_wrapper(*given, total_comp=None if spare is None else rows, **options)["out"]
    leaves = [x.double().requires_grad_() for x in (kv, score, ape)]
    expected = pooled(*leaves, ratio, coff)[:rows]
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    assert out.dtype == dtype and out.shape == (rows, d)
    assert norm_error(out[: len(expected)], expected.detach()) < tolerance
    assert out[len(expected) :].eq(0).all()
    grad_out = torch.randn(rows, d).to(dtype)
    grads = CSA.csa_compressor_backward_wrapper(*given, grad_out, head_dim=d, **options)
    wanted = torch.autograd.grad(expected, leaves, grad_out[: len(expected)].double())
    assert list(grads.keys()) == ["grad_kv", "grad_score", "grad_ape"]
    for mine, reference, like in zip(grads, wanted, (kv, score, ape), strict=True):
        assert mine.dtype == like.dtype and norm_error(mine, reference) < tolerance
    assert grads["grad_kv"][sum(LENGTHS) :].eq(0).all()
    torch.use_deterministic_algorithms(True)
    again = CSA.csa_compressor_backward_wrapper(*given, grad_out, **options)
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


KV, APE, OFFSETS = torch.zeros(8, 16), torch.zeros(4, 16), torch.tensor([0, 8]).int()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio": 0}, "ratio must be at least 1; got 0"),
        ({"coff": 3}, "coff must be 1 or 2; got 3"),
        ({"kv": KV[0]}, "kv must be"),
        ({"kv": KV.half()}, "kv must be"),
        ({"head_dim": 16}, "head_dim must be 8"),
        ({"score": KV[:4]}, "score must be"),
        ({"score": KV.bfloat16()}, "score must be torch.float32 like kv"),
        ({"ape": APE[:3]}, "ape must be"),
        ({"ape": APE.bfloat16()}, "ape must be float32"),
        ({"cu_seqlens": OFFSETS.long()}, "cu_seqlens must be int32"),
        ({"cu_seqlens_comp": OFFSETS[:1]}, "cu_seqlens_comp must be int32"),
        ({"cu_seqlens_comp": torch.tensor([0, 1, 2]).int()}, "cu_seqlens_comp must be"),
        ({"total_comp": -1}, "total_comp must be at least 0; got -1"),
        ({"grad_out": torch.zeros(2, 16)}, "grad_out must be"),
    ],
)
def test_bad_input_names_the_argument(changes: dict[str, Any], message: str) -> None:
    given = {"kv": KV, "score": KV, "ape": APE, "cu_seqlens": OFFSETS, "cu_seqlens_comp": OFFSETS // 4} | changes
    for name, more in (("forward", {}), ("backward", {"grad_out": torch.zeros(2, 8)})):
        if (name == "forward" and "grad_out" in changes) or (name == "backward" and "total_comp" in changes):
            continue
        with pytest.raises(ValueError, match=f"^csa_compressor_{name}_wrapper: {message}"):
            getattr(CSA, f"csa_compressor_{name}_wrapper")(**(more | given))


@pytest.mark.parametrize("restride", RESTRIDES)
def test_tensors_of_any_strides(restride: Restride) -> None:
    """Results have the bits of contiguous tensors."""
    cu_seqlens, cu_comp = offsets(4)
    shapes = (sum(LENGTHS), 16), (sum(LENGTHS), 16), (4, 16), (int(cu_comp[-1]), 8)
    kv, score, ape, grad_out = (torch.randn(*shape) for shape in shapes)
    given = kv, score, ape, cu_seqlens, cu_comp, grad_out
    results = [
        [*CSA.csa_compressor_forward_wrapper(*x[:5]), *CSA.csa_compressor_backward_wrapper(*x)]
        for x in (given, restrided(restride, *given))
    ]
    assert len(results[0]) == 4
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_callers_of_the_front_end_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the module in the front end's place, `cudnn.csa.compressor` and `cudnn.__version__` are found."""
    monkeypatch.setitem(sys.modules, "cudnn", hopwell.compat.cudnn)
    for name in ("cudnn.csa", "cudnn.csa.compressor"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    compressor = importlib.import_module("cudnn.csa.compressor")
    assert compressor.csa_compressor_forward_wrapper is CSA.csa_compressor_forward_wrapper
    assert compressor.csa_compressor_backward_wrapper is CSA.csa_compressor_backward_wrapper
    assert importlib.import_module("cudnn").__version__ == "1.32.0"
