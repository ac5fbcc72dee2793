"""The kernels of kv_compress_backward on devices with many multiprocessors."""

import hopwell
import pytest
import torch
from support import assert_close


@pytest.mark.parametrize("backend", [b for b in hopwell.backends("kv_compress_backward") if b != "cpu"])
@pytest.mark.parametrize("multiprocessors", ["1", "3", "17", "70", "132"])
def test_partial_sums_of_d_position_bias(backend: str, multiprocessors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2 to 163 partial sums: a thread adds one, up to four, or more than four of them."""
    monkeypatch.setenv("HOPWELL_EMULATOR_SMS", multiprocessors)
    torch.manual_seed(0)
    device = "cpu" if backend.startswith("emu") else "cuda"
    kv, gate = (torch.randn(5200, 256).bfloat16() for _ in range(2))
    bias, d_out = torch.randn(4, 256), torch.randn(1300, 128).bfloat16()
    given = [x.to(device) for x in (d_out, kv, gate)]
    got = hopwell.kv_compress_backward(*given, 4, position_bias=bias.to(device), overlap=True, backend=backend)
    want = hopwell.kv_compress_backward(d_out, kv, gate, 4, position_bias=bias, overlap=True, backend="cpu")
    for mine, theirs, tolerance in zip(got, want, (1e-2, 1e-2, 1e-5), strict=True):
        assert_close(mine.float().cpu().numpy(), theirs.float().numpy(), tolerance)
