"""On a GPU: paged_attention on views that vector loads cannot read has the results of the CPU.

`test_views.py` has the emulated backends.
"""

from typing import Any

import hopwell
import pytest
import torch
from test_views import ODD_KEYS
from torch import Tensor

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU from Ampere on"
)
DTYPES = [torch.float16, torch.bfloat16]


def attend(backend: str, **arguments: Any) -> None:
    """Compares the backend with the CPU, which gets copies without gaps."""
    on_cpu: dict[str, Any] = {
        name: x.cpu().contiguous() if isinstance(x, Tensor) else x for name, x in arguments.items()
    }
    expected, expected_lse = hopwell.paged_attention(**on_cpu)
    try:
        out, lse = hopwell.paged_attention(**arguments, backend=backend)
    except hopwell.Error as error:
        if "no backend runs this" not in str(error):
            raise
        pytest.skip(str(error))
    torch.cuda.synchronize()
    assert float((out.cpu().double() - expected.double()).norm() / expected.double().norm()) < 4e-3
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=2**-15, atol=2e-5)


@pytest.mark.parametrize("backend", ["sm80", "sm90"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "strides"), ODD_KEYS)
def test_keys_at_odd_distances(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, backend: str
) -> None:
    blocks, h_kv, groups, block, x = shape
    memory = torch.randn(1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)))
    attend(
        backend,
        q=torch.randn(2, 2 * h_kv, groups * x).to("cuda", dtype),
        k_cache=memory.to("cuda", dtype).as_strided(shape, strides),
        v_cache=torch.randn(blocks, h_kv, groups * x, block).to("cuda", dtype),
        block_tables=torch.randint(blocks, (2, 3), dtype=torch.int32).cuda(),
        context_lens=torch.tensor([2 * block + 3, block - 1], dtype=torch.int32).cuda(),
        scale=0.1,
        layout="vllm",
    )


@pytest.mark.parametrize("backend", ["sm80", "sm90"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_of_r(dtype: torch.dtype, backend: str) -> None:
    """Its stride is 1 to DLPack, since no second row follows."""
    attend(
        backend,
        q=torch.randn(2, 2, 4, 64).to("cuda", dtype),
        k_cache=torch.randn(5, 16, 2, 64).to("cuda", dtype),
        v_cache=torch.randn(5, 16, 2, 64).to("cuda", dtype),
        block_tables=torch.randint(5, (2, 3), dtype=torch.int32).cuda(),
        context_lens=torch.tensor([37, 20], dtype=torch.int32).cuda(),
        scale=0.1,
        r=torch.randn(1, 1, 64).to("cuda", dtype),
        out_of_range="clamp",
    )
