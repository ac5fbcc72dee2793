"""FlashMLA's conventions, against a plain torch computation."""

import math

import pytest
import torch
from hopwell.compat.flash_mla import flash_mla_sparse_fwd

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def plain(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> Results:
    """Computes one head of one query at a time, in float64."""
    s_q, h_q, _ = q.shape
    out, max_logits, lse = torch.zeros(s_q, h_q, d_v), torch.zeros(s_q, h_q), torch.zeros(s_q, h_q)
    for s in range(s_q):
        row = indices[s, 0].tolist()[: None if topk_length is None else int(topk_length[s])]
        keys = kv[[t for t in row if 0 <= t < len(kv)], 0].double()
        for h in range(h_q):
            scores = sm_scale * (keys @ q[s, h].double())
            total = scores.logsumexp(0)
            lonely = len(keys) == 0
            max_logits[s, h] = -math.inf if lonely else scores.max()
            lse[s, h] = math.inf if lonely else total
            if not lonely:
                factor = 1.0 if attn_sink is None else torch.sigmoid(total - attn_sink[h].double())
                out[s, h] = factor * ((scores - total).exp() @ keys[:, :d_v])
    return out, max_logits, lse


@pytest.mark.parametrize("h_q", [64, 128, 3])
@pytest.mark.parametrize(("s_kv", "topk"), [(128, 128), (592, 128), (95, 128), (32, 512)])
@pytest.mark.parametrize(("sink", "length"), [(False, False), (True, True)])
def test_agrees_with_a_plain_computation(h_q: int, s_kv: int, topk: int, sink: bool, length: bool) -> None:
    s_q, d_qk = 3, 576
    q, kv = torch.randn(s_q, h_q, d_qk).bfloat16() / 10, torch.randn(s_kv, 1, d_qk).bfloat16() / 10
    indices = torch.randint(-10, s_kv + 10, (s_q, 1, topk), dtype=torch.int32)
    indices[1] = torch.tensor([-1, s_kv, 2147480000, -(2**31)] * (topk // 4))  # a query without a valid key
    attn_sink = torch.tensor(([0.5, math.inf, -math.inf] * h_q)[:h_q]) if sink else None
    topk_length = torch.randint(1, topk + 1, (s_q,), dtype=torch.int32) if length else None
    scale = d_qk**-0.5
    actual = flash_mla_sparse_fwd(q, kv, indices, scale, 512, attn_sink, topk_length)
    expected = plain(q, kv, indices, scale, 512, attn_sink, topk_length)
    assert actual[0].dtype == torch.bfloat16
    torch.testing.assert_close(actual[0].float(), expected[0], atol=8e-4, rtol=2.01 / 128)
    torch.testing.assert_close(actual[1], expected[1], atol=1e-6, rtol=2**-15)
    torch.testing.assert_close(actual[2], expected[2], atol=2e-5, rtol=2**-15)
    assert actual[0][1].eq(0).all() and actual[1][1].eq(-math.inf).all() and actual[2][1].eq(math.inf).all()


def test_takes_tensors_that_require_grad_and_tracks_nothing() -> None:
    q = torch.randn(2, 4, 64).bfloat16().requires_grad_()
    kv = torch.randn(9, 1, 64).bfloat16()
    indices = torch.randint(0, 9, (2, 1, 5), dtype=torch.int32)
    assert not any(x.requires_grad for x in flash_mla_sparse_fwd(q, kv, indices, sm_scale=0.1, d_v=32))


@pytest.mark.parametrize("length", [False, True])
@pytest.mark.parametrize("indexer_topk", [1, 4, 7, 512])
def test_lse_of_the_indexer_s_entries(indexer_topk: int, length: bool) -> None:
    q, kv = torch.randn(5, 3, 48), torch.randn(20, 1, 48)
    indices = torch.randint(-3, 23, (5, 1, 7), dtype=torch.int32)
    indices[1] = torch.tensor([-1, 20, -1, 99, 3, 3, 5])  # no valid entry among the first 4
    topk_length = torch.tensor([2, 7, 0, 9, 5]).int() if length else None
    sink = torch.randn(3)
    arguments = 0.2, 32, sink, topk_length
    actual = flash_mla_sparse_fwd(q, kv, indices, *arguments, indexer_topk=indexer_topk)
    for mine, whole in zip(actual[:3], flash_mla_sparse_fwd(q, kv, indices, *arguments), strict=True):
        assert torch.equal(mine, whole)
    own_length = None if topk_length is None else topk_length.clamp(max=indexer_topk)
    expected = plain(q, kv, indices[..., :indexer_topk], 0.2, 32, None, own_length)[2]
    torch.testing.assert_close(actual[3], expected, atol=1e-5, rtol=1e-5)
    assert actual[3][1].eq(math.inf).all() == (indexer_topk <= 4)


def test_the_result_is_written_to_out() -> None:
    q, kv, indices = torch.randn(3, 2, 32), torch.randn(5, 1, 32), torch.zeros(3, 1, 4, dtype=torch.int32)
    out = torch.full((3, 2, 32), math.nan)
    result = flash_mla_sparse_fwd(q, kv, indices, 0.2, 32, out=out)
    assert result[0].data_ptr() == out.data_ptr()
    assert torch.equal(out, flash_mla_sparse_fwd(q, kv, indices, 0.2, 32)[0])


def test_megatron_s_call() -> None:
    q, kv, indices = torch.zeros(2, 4, 64), torch.zeros(9, 1, 64), torch.zeros(2, 1, 5, dtype=torch.int32)
    assert len(flash_mla_sparse_fwd(q, kv, indices, 0.1, d_v=32, indexer_topk=0)) == 3
    with pytest.raises(ValueError, match="flash_mla_sparse_fwd: indexer_topk must be at least 0; got -1"):
        flash_mla_sparse_fwd(q, kv, indices, 0.1, d_v=32, indexer_topk=-1)
