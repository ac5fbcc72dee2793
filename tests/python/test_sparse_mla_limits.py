"""Sparse MLA on every backend: shards of the keys, and numbers near the end of fp32's range."""

from typing import Any

import hopwell
import numpy as np
import pytest
import torch
from hopwell import reference
from support import norm_error

BACKENDS = hopwell.backends("sparse_mla_backward")
pytestmark = pytest.mark.usefixtures("numbers_only")
FORWARD = hopwell.backends("sparse_mla_forward")
SCALE = 576**-0.5


def random(rng: np.random.Generator, backend: str, *shape: int) -> torch.Tensor:
    device = "cuda" if backend.startswith("sm") else "cpu"
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).bfloat16().to(device)


def in_float64(function: Any, *tensors: torch.Tensor, **options: Any) -> Any:
    """The reference's results, as tensors."""
    arrays = [x.float().cpu().numpy() if x.is_floating_point() else x.cpu().numpy() for x in tensors]
    options = {n: x.float().cpu().numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    return [None if x is None else torch.from_numpy(x) for x in function(*arrays, SCALE, **options)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_shard_of_the_keys_gives_the_whole_d_sink(backend: str, rng: np.random.Generator) -> None:
    """With out and lse of all keys. The first shard has no key of the first two queries; the last has no key at all."""
    s_q, h_q, s_kv = 4, 8, 60
    q, kv = random(rng, backend, s_q, h_q, 576), random(rng, backend, s_kv, 576)
    d_out, sink = random(rng, backend, s_q, h_q, 512), random(rng, backend, h_q).float()
    indices = torch.from_numpy(rng.integers(0, s_kv, (s_q, 70)).astype(np.int32)).to(q.device)
    indices[:2] = indices[:2] % 20 + 40
    indices[3] = -1  # a query without any key: its lse is +inf
    out, _, lse = hopwell.sparse_mla_forward(q, kv, indices, SCALE, attn_sink=sink, backend=backend)
    given: dict[str, Any] = {"attn_sink": sink}
    dq, _, d_sink = in_float64(reference.sparse_mla_backward, d_out, q, kv, indices, out, lse, **given)
    assert (d_sink != 0).all()
    sum_of_dq = torch.zeros(q.shape, dtype=torch.float64)
    for first, end in ((0, 40), (40, 60), (60, 60)):
        rows = torch.where((indices >= first) & (indices < end), indices, -1)
        shard = (d_out, q, kv, rows, out, lse)
        part, _, whole = hopwell.sparse_mla_backward(*shard, SCALE, **given, backend=backend)
        assert norm_error(whole.cpu(), d_sink) < 4e-3, (first, end)
        assert norm_error(whole.cpu(), in_float64(reference.sparse_mla_backward, *shard, **given)[2]) < 4e-3
        sum_of_dq += part.double().cpu()
    assert norm_error(sum_of_dq, dq) < 6e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_that_are_finite_have_a_gradient(backend: str, rng: np.random.Generator) -> None:
    """A sink of 3e38 takes everything; GPUs count in units of log 2, where it is infinite."""
    q, kv, d_out = random(rng, backend, 2, 4, 576), random(rng, backend, 30, 576), random(rng, backend, 2, 4, 512)
    indices = torch.arange(30, dtype=torch.int32).expand(2, 30).contiguous().to(q.device)
    sink = torch.tensor([3e38, -3e38, float("inf"), -float("inf")], device=q.device)
    out, lse = random(rng, backend, 2, 4, 512), torch.full((2, 4), 4.0, device=q.device)
    got = hopwell.sparse_mla_backward(d_out, q, kv, indices, out, lse, SCALE, attn_sink=sink, backend=backend)
    expected = in_float64(reference.sparse_mla_backward, d_out, q, kv, indices, out, lse, attn_sink=sink)
    assert (got[2][1:] == 0).all()
    assert got[2][0] != 0
    for mine, wanted, bound in zip(got, expected, (6e-3, 4e-3, 4e-3), strict=True):  # sums of dq cancel: out is made up
        assert norm_error(mine.cpu(), wanted) < bound


@pytest.mark.parametrize("scale", [3.4e38, -3.4e38])
@pytest.mark.parametrize("backend", FORWARD)
def test_scores_of_zero_stay_zero(backend: str, scale: float, rng: np.random.Generator) -> None:
    """sm_scale · log2(e), by which GPUs multiply, is beyond fp32. q · kv is 0."""
    q, kv = random(rng, backend, 3, 4, 576), random(rng, backend, 30, 576)
    q[..., ::2] = kv[..., 1::2] = 0
    indices = torch.arange(30, dtype=torch.int32).expand(3, 30).contiguous().to(q.device)
    out, max_logits, lse = hopwell.sparse_mla_forward(q, kv, indices, scale, backend=backend)
    assert (max_logits == 0).all()
    assert torch.allclose(lse, torch.full_like(lse, np.log(30)), atol=1e-4)
    mean = kv[:, :512].double().mean(0).expand(3, 4, 512)
    assert norm_error(out.cpu(), mean.cpu()) < 4e-3
    attn = hopwell.attention_distribution(q, kv, indices, lse, scale, backend=backend)
    assert torch.allclose(attn, torch.full_like(attn, 4 / 30), rtol=1e-3)


@pytest.mark.parametrize("h_q", [8, 40])
@pytest.mark.parametrize("backend", FORWARD)
def test_max_logits_of_scores_that_are_infinite_and_nan(backend: str, h_q: int, rng: np.random.Generator) -> None:
    """As docs/operators/index.md says: beside +inf, NaN is lost where the maximum is fmaxf's."""
    q, kv = torch.zeros_like(random(rng, backend, 3, h_q, 576)), torch.zeros_like(random(rng, backend, 3, 576))
    q[..., 0] = 1
    kv[:, 0] = torch.tensor([float("inf"), float("nan"), 1.0])
    indices = torch.tensor([[0, 1, 2], [0, 2, -1], [1, 2, -1]], dtype=torch.int32, device=q.device)
    out, max_logits, lse = hopwell.sparse_mla_forward(q, kv, indices, SCALE, backend=backend)
    loses_nan = backend.endswith(("sm90", "sm100"))
    expected = torch.tensor([float("inf") if loses_nan else float("nan"), float("inf"), float("nan")])
    assert torch.equal(max_logits.cpu().nan_to_num(nan=-1.0), expected[:, None].expand(3, h_q).nan_to_num(nan=-1.0))
    assert lse.isnan().all()
    assert out[..., 0].isnan().all()


@pytest.mark.parametrize("backend", [b for b in FORWARD if b.endswith(("sm80", "sm90"))])
def test_kernels_refuse_keys_without_room_for_a_step_beyond_them(backend: str, rng: np.random.Generator) -> None:
    """Kernels number keys and entries in int32, up to 1,024 beyond the last one. The rows of kv share memory."""
    q, row = random(rng, backend, 1, 1, 512), random(rng, backend, 1, 512)
    few = torch.zeros(1, 5, dtype=torch.int32, device=q.device)
    for indices, window in ((few, None), (None, None), (few, 5)):
        many = row.expand(2**31 - 1 - (window or 0), 512)
        window_kv = None if window is None else row.expand(window, 512)
        with pytest.raises(hopwell.Error, match=rf"{backend}: needs s_q, s_kv, .* below 2\^31 - 1024"):
            hopwell.sparse_mla_forward(q, many, indices, SCALE, window_kv=window_kv, window=window, backend=backend)
