"""A refused call changes no state of a module: the next right call gives the result that it gives without it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hopwell.compat import cudnn, vllm
from hopwell.torch import nn, ops, parallel
from hopwell.torch.parallel import ContextShard, ParallelDSA
from test_torch_nn import D_MODEL, make_dsa
from torch import Tensor

pytestmark = pytest.mark.usefixtures("torch_seed")


@contextmanager
def failing(place: Any, name: str, error: type[BaseException] = RuntimeError) -> Iterator[None]:
    """A function that raises, as where memory runs out or the user presses Ctrl-C."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, fail)
        yield


def refused_by_autocast(dsa: nn.DSA, x: Tensor, cache: nn.KeyCache) -> None:
    message = r"KeyCache: kv must be torch.float32 as the cache's is; got torch.bfloat16"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=message):
        dsa.extend(x, cache)


def refused_because_it_is_full(dsa: nn.DSA, x: Tensor, cache: nn.KeyCache) -> None:
    with pytest.raises(ValueError, match="KeyCache: it holds 8 tokens; got 9"):
        dsa.extend(x.expand(1, 9 - int(cache.length), -1), cache)


def ended_in_the_attention(dsa: nn.DSA, x: Tensor, cache: nn.KeyCache) -> None:
    with failing(ops, "sparse_mla", KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        dsa.extend(x, cache)


def refused_by_the_selection(dsa: nn.DSA, x: Tensor, cache: nn.KeyCache) -> None:
    topk, dsa.indexer.topk = dsa.indexer.topk, -1
    with pytest.raises(ValueError, match="lightning_indexer: topk must be "):
        dsa.extend(x, cache)
    dsa.indexer.topk = topk


def refused_keys(dsa: nn.DSA, x: Tensor, cache: nn.KeyCache) -> None:
    """Of `append` itself: each of the two alone would fit."""
    kv, k_index = dsa.project(x)[1][0], dsa.indexer.project(x)[1][0]
    wrong: dict[str, tuple[Any, Any]] = {
        r"k_index must be \[s=1, d.*\]; got \[2, 16\]": (kv, k_index.expand(2, -1)),
        r"k_index must be torch.float32 as the cache's is; got torch.float64": (kv, k_index.double()),
        r"k_index must be \[s=1, d=16\]; got \[1, 15\]": (kv, k_index[:, 1:]),
        r"k_index must be on cpu as .* is; got meta": (kv, k_index.to("meta")),
        r"k_index must be a torch.Tensor; got NoneType": (kv, None),
    }
    for message, keys in wrong.items():
        if cache.kv is not None or ("cache" not in message and "=16" not in message):
            with pytest.raises((ValueError, TypeError), match=f"KeyCache: {message}"):
                cache.append(*keys)


REFUSALS = [
    refused_by_autocast,
    refused_because_it_is_full,
    ended_in_the_attention,
    refused_by_the_selection,
    refused_keys,
]


@pytest.mark.parametrize("refuse", REFUSALS)
@pytest.mark.parametrize("counted", [False, True])
@torch.no_grad()
def test_a_refused_extend_adds_no_keys(refuse: Callable[..., None], counted: bool) -> None:
    if counted and refuse is refused_because_it_is_full:
        return  # a length on the device is not read
    dsa, x = make_dsa(), torch.randn(1, 7, D_MODEL)
    cache, undisturbed = nn.KeyCache(8), nn.KeyCache(8)
    for one in (cache, undisturbed):
        dsa.extend(x[:, :5], one)
    if counted:
        cache.length, undisturbed.length = torch.tensor(5), torch.tensor(5)
    refuse(dsa, x[:, 5:6], cache)
    assert int(cache.length) == 5
    for i in (5, 6):
        assert torch.equal(dsa.extend(x[:, i : i + 1], cache), dsa.extend(x[:, i : i + 1], undisturbed))
        if counted:
            cache.length, undisturbed.length = cache.length + 1, undisturbed.length + 1
    assert torch.equal(cache.kv[:7], undisturbed.kv[:7]) and torch.equal(cache.k_index[:7], undisturbed.k_index[:7])


@pytest.mark.parametrize("refuse", REFUSALS)
@torch.no_grad()
def test_a_refused_first_extend_leaves_an_empty_cache(refuse: Callable[..., None]) -> None:
    """And so of any dtype: the keys of the refused call do not decide it."""
    dsa, x, cache = make_dsa(), torch.randn(1, 5, D_MODEL), nn.KeyCache(8)
    if refuse is refused_by_autocast:
        with torch.autocast("cpu", torch.bfloat16), failing(ops, "sparse_mla"), pytest.raises(RuntimeError):
            dsa.extend(x, cache)
    else:
        refuse(dsa, x[:, :1], cache)
    assert (cache.length, cache.kv, cache.k_index) == (0, None, None)
    assert torch.equal(dsa.extend(x, cache), dsa(x)[0])


@torch.no_grad()
def test_lengths_that_are_none() -> None:
    dsa, x = make_dsa(), torch.randn(1, 1, D_MODEL)
    for length, message in (
        (-1, "at least 0; got -1"),
        (2.0, "an integer; got 2.0"),
        (None, "an integer; got None"),
        (torch.tensor(2.0), r"a number or a 0-d int64 tensor; got torch.float32 \[\]"),
        (torch.tensor([2]), r"a number or a 0-d int64 tensor; got torch.int64 \[1\]"),
        (3, "0 until there are tokens; got 3"),
    ):
        with pytest.raises(ValueError, match=f"KeyCache: length must be {message}"):
            dsa.extend(x, nn.KeyCache(8, length))


@pytest.mark.parametrize("kind", [nn.DSA, ParallelDSA])
def test_a_refused_forward_keeps_the_selection(kind: type[nn.DSA]) -> None:
    dsa, x = make_dsa(attn_sink=True), torch.randn(2, 9, D_MODEL)
    if kind is ParallelDSA:
        dsa, more = ParallelDSA(dsa, dsa.indexer), (ContextShard.zigzag(9),)
    else:
        more = ()
    dsa(x, *more)
    before = dsa.selected
    other = torch.randn(2, 9, D_MODEL)
    for mode, place, name in (
        ("sparse", ops, "sparse_mla" if kind is nn.DSA else "sparse_mla_forward"),
        ("sparse", ops, "attention_distribution"),
        ("sparse", dsa, "combine"),
        ("warm-up", dsa, "combine"),
    ):
        with failing(place, name), pytest.raises(RuntimeError, match="planted"):
            dsa(other, *more, mode)
        assert dsa.selected is before
    if kind is nn.DSA:
        with pytest.raises(ValueError, match="attention sink"):
            dsa(other, "dense")
        assert dsa.selected is before


def test_modules_without_a_state_keep_their_parameters() -> None:
    dsa, x = make_dsa(attn_sink=True), torch.randn(2, 9, D_MODEL)
    layer = nn.NVFP4Linear.from_linear(torch.nn.Linear(64, 8))
    wrong: list[tuple[torch.nn.Module, Callable[[], object]]] = [
        (dsa, lambda: nn.SparseMLA.forward(dsa, x, torch.zeros(2, 9, 3))),
        (dsa.indexer, lambda: dsa.indexer(x.double())),
        (layer, lambda: layer(torch.randn(2, 64).to("meta"))),
        (layer, lambda: layer(torch.randn(2, 63))),
    ]
    for module, call in wrong:
        before = copy.deepcopy(module.state_dict())
        with pytest.raises((ValueError, RuntimeError)):
            call()
        after = module.state_dict()
        assert list(before) == list(after)
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("missing", ["o_proj", "attn_sink"])
def test_refused_shard_heads_keeps_every_head(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(parallel.dsa, "place", lambda group: (1, 2))
    mla = make_dsa(attn_sink=True)
    given = getattr(mla, missing)
    delattr(mla, missing)
    before = dict(mla.state_dict())
    with pytest.raises(AttributeError):
        parallel.shard_heads(mla, None)
    assert mla.h_q == 4 and all(mla.state_dict()[name] is not None for name in before)
    assert all(torch.equal(mla.state_dict()[name], x) for name, x in before.items())
    setattr(mla, missing, given)
    parallel.shard_heads(mla, None)
    assert mla.h_q == 2


def test_refused_wrappers_overwrite_nothing() -> None:
    """`attn_score` and `index_score` become gradients, caches take tokens: only if the whole call is right."""
    b, s, heads, d, topk = 1, 4, 2, 16, 3
    topk_call: dict[str, Any] = {
        "index_q": torch.randn(b, s, heads, d),
        "weights": torch.randn(b, s, heads),
        "index_k": torch.randn(b, 5, d),
        "attn_score": torch.rand(b, s, topk),
        "index_score": torch.rand(b, s, topk),
        "topk_indices": torch.randint(0, 5, (b, s, topk), dtype=torch.int32),
        "grad_loss": 1.0,
    }
    dense_call = {name: x for name, x in topk_call.items() if name != "topk_indices"}
    dense_call |= {"attn_score": torch.rand(b, s, 5), "index_score": torch.rand(b, s, 5)}
    dense_call |= {"attn_l1norm": torch.rand(b, s), "index_lse": torch.rand(b, s)}
    tokens: dict[str, Any] = {
        "key": torch.randn(2, 1, 8),
        "value": torch.randn(2, 1, 8),
        "key_cache": torch.randn(3, 1, 2, 4, 4),
        "value_cache": torch.randn(3, 1, 8, 4),
        "slot_mapping": torch.tensor([1, 7]),
        "kv_cache_dtype": "auto",
    }
    for function, call, name in (
        (cudnn.indexer_backward_wrapper, topk_call, "weights"),
        (cudnn.indexer_backward_wrapper, topk_call, "index_k"),
        (cudnn.dense_indexer_backward_wrapper, dense_call, "weights"),
        (vllm.reshape_and_cache, tokens, "value"),
        (vllm.reshape_and_cache, tokens, "value_cache"),
    ):
        before = {n: x.clone() for n, x in call.items() if isinstance(x, Tensor)}
        with pytest.raises(ValueError, match=f"{function.__name__}: {name} must be on cpu as .* is; got meta"):
            function(**call | {name: call[name].to("meta")})
        assert all(torch.equal(call[n], x) for n, x in before.items())
    before = topk_call["attn_score"].clone()
    with failing(ops, "lightning_indexer_backward"), pytest.raises(RuntimeError, match="planted"):
        cudnn.indexer_backward_wrapper(**topk_call)
    assert torch.equal(topk_call["attn_score"], before)
