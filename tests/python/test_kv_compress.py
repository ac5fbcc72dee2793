"""The kernels of kv_compress_backward on devices of several sizes, and for tensors that are not aligned."""

from typing import Any

import hopwell
import pytest
import torch
from support import assert_close
from zero_difference import same_bits

BACKENDS = [b for b in hopwell.backends("kv_compress_backward") if b != "cpu"]


def gradients(*given: Any, **options: Any) -> list[torch.Tensor]:
    return [x for x in hopwell.kv_compress_backward(*given, **options) if x is not None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("multiprocessors", ["1", "3", "17", "70", "132"])
def test_partial_sums_of_d_position_bias(backend: str, multiprocessors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2 to 163 partial sums: a thread adds one, up to four, or more than four of them."""
    monkeypatch.setenv("HOPWELL_EMULATOR_SMS", multiprocessors)
    torch.manual_seed(0)
    device = "cpu" if backend.startswith("emu") else "cuda"
    kv, gate = (torch.randn(5200, 256).bfloat16() for _ in range(2))
    bias, d_out = torch.randn(4, 256), torch.randn(1300, 128).bfloat16()
    given = [x.to(device) for x in (d_out, kv, gate)]
    got = gradients(*given, 4, position_bias=bias.to(device), overlap=True, backend=backend)
    want = gradients(d_out, kv, gate, 4, position_bias=bias, overlap=True, backend="cpu")
    for mine, theirs, tolerance in zip(got, want, (1e-2, 1e-2, 1e-5), strict=True):
        assert_close(mine.float().cpu().numpy(), theirs.float().numpy(), tolerance)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.startswith("emu")])
@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (2, False), (16, False), (128, False), (3, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_alignment_and_shared_memory_do_not_change_bits(
    backend: str, ratio: int, overlap: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without 16-byte alignment, or with the shared memory of a smaller GPU, other kernels run."""
    monkeypatch.setenv("HOPWELL_EMULATOR_SMS", "2")
    torch.manual_seed(0)
    s, w = 9 * ratio + 1, 128
    bias, d_out = torch.randn(ratio, w), torch.randn(9, w // 2 if overlap else w).to(dtype)

    def results(kv: torch.Tensor, gate: torch.Tensor) -> list[torch.Tensor]:
        given: dict[str, Any] = {"position_bias": bias, "overlap": overlap, "backend": backend}
        return [hopwell.kv_compress(kv, gate, ratio, **given), *gradients(d_out, kv, gate, ratio, **given)]

    kv, gate = (torch.randn(s, w).to(dtype) for _ in range(2))
    unaligned = torch.zeros(s, w + 1, dtype=dtype)[:, 1:]
    unaligned.copy_(kv)
    want = results(kv, gate)
    assert len(want) == 4
    found = results(unaligned, gate)
    monkeypatch.setenv("HOPWELL_EMULATOR_DEVICE", "rtx-4090")
    for mine, theirs in zip(found + results(kv, gate), 2 * want, strict=True):
        assert same_bits(mine, theirs)
