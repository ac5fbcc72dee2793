"""Activation checkpointing gives the bits of the run without it, also the reentrant kind, whose first run has gradients
off.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hopwell.torch import nn
from hopwell.torch.parallel import ContextShard, ParallelDSA
from test_compat_megatron import Case
from torch import Tensor
from torch.utils.checkpoint import checkpoint

D_MODEL, B, S = 32, 2, 11
pytestmark = pytest.mark.usefixtures("torch_seed")
KINDS = pytest.mark.parametrize("use_reentrant", [True, False])


def make(kind: type[nn.DSA], attn_sink: bool = False) -> nn.DSA:
    mla = nn.SparseMLA(D_MODEL, 4, d_v=16, d_rope=8, d_nope=8, d_head=8, attn_sink=attn_sink)
    return kind(mla, nn.LightningIndexer(D_MODEL, topk=5, h_index=2, d_index=16, d_rope=8))


class Block(torch.nn.Module):
    """As in a transformer: attention behind a norm, so that its input does not require gradients where they are off."""

    def __init__(self, attention: nn.DSA) -> None:
        super().__init__()
        self.norm, self.attention = torch.nn.RMSNorm(D_MODEL), attention

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        y, loss = self.attention(self.norm(x), *arguments, **options)
        return x + y, loss


def assert_same(module: torch.nn.Module, x: Tensor, run: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Results and gradients of two ways to run the module, bit for bit, where a tenth of its loss counts."""
    both = []
    for way in (run, other):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y, loss = way(leaf)
        total = y.square().sum()
        if loss is not None:
            total = total + 0.1 * loss
        total.backward()
        both.append([y, loss, leaf.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*both, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    assert both[0][1] is not None


@KINDS
@pytest.mark.parametrize("mode", ["sparse", "warm-up"])
@pytest.mark.parametrize("kind", [nn.DSA, ParallelDSA])
@pytest.mark.parametrize("training", [True, False])
def test_the_bits_of_the_run_without(kind: type[nn.DSA], mode: str, use_reentrant: bool, training: bool) -> None:
    block, x = Block(make(kind)).train(training), torch.randn(B, S, D_MODEL)
    arguments = (ContextShard.zigzag(S), mode) if kind is ParallelDSA else (mode,)
    assert_same(
        block,
        x,
        lambda x: block(x, *arguments),
        lambda x: checkpoint(block, x, *arguments, use_reentrant=use_reentrant),
    )


@KINDS
@pytest.mark.parametrize("sparse", [True, False])
def test_the_bits_of_megatron_s_without(use_reentrant: bool, sparse: bool) -> None:
    case = Case()
    names = ("query", "key", "up_v_weight", "q", "k", "weights")

    def run(*leaves: Tensor) -> Any:
        case.leaves = dict(zip(names, leaves, strict=True))
        return case.whole(sparse_loss=sparse)

    given = [case.leaves[name].detach() for name in names]
    both = []
    for way in (run, lambda *leaves: checkpoint(run, *leaves, use_reentrant=use_reentrant)):
        leaves = [x.clone().requires_grad_() for x in given]
        output, loss = way(*leaves)
        (output.square().sum() + 0.1 * loss).backward()
        both.append([output, loss, *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    assert both[0][1] > 0


@pytest.mark.parametrize("kind", [nn.DSA, ParallelDSA])
def test_a_loss_is_made_where_it_is_asked_for(kind: type[nn.DSA]) -> None:
    dsa, x = make(kind), torch.randn(B, S, D_MODEL)
    more = (ContextShard.zigzag(S),) if kind is ParallelDSA else ()
    y, loss = dsa(x, *more)
    assert loss is not None
    for context, automatic in ((torch.no_grad, False), (torch.inference_mode, False), (torch.enable_grad, True)):
        with context():
            assert (dsa(x, *more)[1] is not None) == automatic
            other_y, none = dsa(x, *more, with_loss=False)
            assert none is None and torch.equal(other_y, y)
            assert torch.equal(dsa(x, *more, with_loss=True)[1], loss)
            assert dsa(x, *more, "dense")[1] is None
            with pytest.raises(ValueError, match=f"{kind.__name__}: with_loss must be None or False in mode 'dense'"):
                dsa(x, *more, "dense", True)


@KINDS
def test_a_loss_that_is_not_wanted_trains_nothing(use_reentrant: bool) -> None:
    dsa, x = make(nn.DSA), torch.randn(B, S, D_MODEL, requires_grad=True)
    y, _ = checkpoint(dsa, x, "sparse", False, use_reentrant=use_reentrant)
    y.sum().backward()
    assert all(p.grad is None for p in dsa.indexer.parameters())
    assert x.grad is not None


@pytest.mark.parametrize("training", [True, False])
def test_compiled_without_gradients(training: bool) -> None:
    """Compiled code goes by `training`: under checkpointing a module that trains gives its loss."""
    dsa, x = make(nn.DSA).train(training), torch.randn(B, S, D_MODEL)
    compiled = torch.compile(dsa, fullgraph=True, backend="eager")
    with torch.no_grad():
        y, loss = compiled(x)
        assert (loss is not None) == training
        assert torch.equal(y, dsa(x)[0])
    if training:
        run = torch.compile(dsa, backend="eager")
        assert_same(dsa, x, run, lambda x: checkpoint(run, x, use_reentrant=True))
