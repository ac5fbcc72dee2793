"""Matrices in NVFP4."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import hopwell

from ..problem import Call, Peer, Problem, first, measured, randn, torch_peer
from ..scale import DEVICE, cold_copies

LAYERS = [(28672, 4096), (7168, 16384), (8192, 8192), (4096, 7168), (7168, 2048), (1536, 7168)]

BYTES_OF_WEIGHT = 9 / 16  # four bits, and a byte of scale for sixteen


def packed(rows: int, k: int, copies: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Random matrices in NVFP4: codes, scales, global."""
    return [hopwell.nvfp4_quantize(randn(rows, k)) for _ in range(copies)]


@measured(
    [{"N": rows, "K": k, "n": n} for rows, k in LAYERS for n in (1, 8, 16)]
    + [{"N": 28672, "K": 4096, "n": n} for n in (32, 64, 128)],
    on_cpu=[{"N": 7168, "K": 16384}, {"N": 7168, "K": 2048, "n": 8}],
    tiny={"N": 64, "K": 128, "n": 2},
)
def nvfp4_linear(N: int = 28672, K: int = 4096, n: int = 1) -> Problem:  # noqa: N803
    """Four-bit weights [N, K] and n rows of bf16."""
    copies = cold_copies(N * K * BYTES_OF_WEIGHT)
    weights, x = packed(N, K, copies), randn(n, K)

    def pytorch() -> Call:
        dense = [hopwell.nvfp4_dequantize(*w, dtype="bfloat16") for w in weights]
        return lambda i: [functional.linear(x, dense[i])]

    def marlin() -> Call:
        utilities = "vllm.model_executor.layers.quantization.utils.marlin_utils"
        marlin_utils, marlin_utils_fp4 = import_module(utilities), import_module(f"{utilities}_fp4")
        layers = []
        for codes, scales, factor in weights:
            layer: Any = torch.nn.Module()
            layer.output_size_per_partition, layer.input_size_per_partition = N, K
            layer.params_dtype = x.dtype
            for name, value in (("", codes), ("_scale", scales.view(torch.float8_e4m3fn)), ("_global_scale", factor)):
                setattr(layer, f"weight{name}", torch.nn.Parameter(value, requires_grad=False))
            marlin_utils_fp4.prepare_fp4_layer_for_marlin(layer)
            layers.append((layer.weight, layer.weight_scale, layer.weight_global_scale))
        workspace = marlin_utils.marlin_make_workspace_new(x.device)
        return lambda i: [marlin_utils_fp4.apply_fp4_marlin_linear(x, *layers[i], workspace, N, K)]

    return Problem(
        lambda i: [hopwell.nvfp4_linear(x, *weights[i])],
        first(1),
        [
            torch_peer("torch F.linear, bf16", pytorch, first(1), "weights of 16 bits: 3.6 times as many bytes"),
            Peer("vLLM Marlin", "vllm", marlin, first(1)),
        ],
        copies=copies,
        bytes=N * K * BYTES_OF_WEIGHT,
    )


@measured(
    [{"N": rows, "K": k, "n": n} for rows, k in ((28672, 4096), (4096, 7168)) for n in (16, 128, 4096)],
    on_cpu=[{"N": 1024, "K": 1024, "n": 64}],
    tiny={"N": 64, "K": 128, "n": 2},
)
def nvfp4_linear_backward(N: int = 28672, K: int = 4096, n: int = 4096) -> Problem:  # noqa: N803
    """The gradient for n rows of x over four-bit weights [N, K]."""
    copies = cold_copies(N * K * BYTES_OF_WEIGHT)
    weights, d_out = packed(N, K, copies), randn(n, N)

    def pytorch() -> Call:
        dense = [hopwell.nvfp4_dequantize(*w, dtype="bfloat16") for w in weights]
        return lambda i: [d_out @ dense[i]]

    return Problem(
        lambda i: [hopwell.nvfp4_linear_backward(d_out, *weights[i])],
        first(1),
        [torch_peer("torch matmul, bf16", pytorch, first(1), "weights of 16 bits: 3.6 times as many bytes")],
        copies=copies,
        operations=2 * n * N * K,
    )


@measured([{}], on_cpu=[{"M": 7168, "K": 4096}], tiny={"M": 64, "K": 128})
def nvfp4_gemv(M: int = 7168, K: int = 16384) -> Problem:  # noqa: N803
    """Both sides of four bits, one column."""
    copies = cold_copies(M * K * BYTES_OF_WEIGHT)
    a, (b, sfb, _) = packed(M, K, copies), hopwell.nvfp4_quantize(randn(1, K))

    def pytorch() -> Call:
        dense = [hopwell.nvfp4_dequantize(codes, scales, 1.0, dtype="bfloat16") for codes, scales, _ in a]
        x = hopwell.nvfp4_dequantize(b, sfb, 1.0, dtype="bfloat16")
        return lambda i: [functional.linear(x, dense[i]).T[..., None]]

    return Problem(
        lambda i: [hopwell.nvfp4_gemv(a[i][0][..., None], b[..., None], a[i][1][..., None], sfb[..., None],
                                      out_dtype="bfloat16")],
        first(1),
        [torch_peer("torch F.linear, bf16", pytorch, first(1), "both sides of 16 bits")],
        copies=copies,
        bytes=M * K * BYTES_OF_WEIGHT,
    )  # fmt: skip


@measured([{}], on_cpu=[{"M": 64, "N": 1024}], tiny={"M": 16, "N": 32, "K": 128})
def nvfp4_matmul(M: int = 128, N: int = 7168, K: int = 4096) -> Problem:  # noqa: N803
    """Both sides of four bits."""
    (a, sfa, _), (b, sfb, _) = hopwell.nvfp4_quantize(randn(M, K)), hopwell.nvfp4_quantize(randn(N, K))

    def pytorch() -> Call:
        x, weight = (hopwell.nvfp4_dequantize(c, s, 1.0, dtype="bfloat16") for c, s in ((a, sfa), (b, sfb)))
        return lambda _: [functional.linear(x, weight)]

    return Problem(
        lambda _: [hopwell.nvfp4_matmul(a, b, sfa, sfb)],
        first(1),
        [torch_peer("torch F.linear, bf16", pytorch, first(1), "both sides of 16 bits")],
        operations=2 * M * N * K,
    )


HALF_WAY = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]  # between the magnitudes of e2m1
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@measured([{}], on_cpu=[{"rows": 1024}], tiny={"rows": 16, "K": 128})
def nvfp4_quantize(rows: int = 4096, K: int = 4096) -> Problem:  # noqa: N803
    """To NVFP4, its global factor found too."""
    copies = cold_copies(2 * rows * K)
    x = [randn(rows, K) for _ in range(copies)]

    def pytorch() -> Call:
        half_way = torch.tensor(HALF_WAY, device=DEVICE)
        to_even = torch.arange(7, device=DEVICE) % 2 == 1  # a tie goes to the even code, which is the one above
        boundaries = torch.where(to_even, torch.nextafter(half_way, torch.zeros_like(half_way)), half_way)

        def quantize(i: int) -> tuple[Tensor, Tensor, Tensor]:
            blocks = x[i].float().view(rows, K // 16, 16)
            amax = blocks.abs().amax(-1)
            factor = amax.amax() / 2688
            scales = (amax / (6 * factor)).to(torch.float8_e4m3fn)
            step = (scales.float() * factor)[..., None]
            rest = torch.where(step > 0, blocks / step, 0.0)
            codes = torch.bucketize(rest.abs(), boundaries) + 8 * (rest < 0)
            codes = codes.view(rows, K // 2, 2).to(torch.uint8)
            return codes[..., 0] | (codes[..., 1] << 4), scales.view(torch.uint8), factor

        return quantize

    def values(r: Any) -> list[Tensor]:
        return [hopwell.nvfp4_dequantize(*r)]

    return Problem(
        lambda i: hopwell.nvfp4_quantize(x[i]),
        values,
        [torch_peer("torch", pytorch, values, "a dozen operations; compared by the values of the codes")],
        copies=copies,
        bytes=rows * K * (2 + BYTES_OF_WEIGHT),
        tolerance=5e-2,  # PyTorch rounds the quotients, and many values of bf16 lie half way between two codes
    )


@measured([{}], on_cpu=[{"rows": 1024}], tiny={"rows": 16, "K": 128})
def nvfp4_dequantize(rows: int = 4096, K: int = 4096) -> Problem:  # noqa: N803
    """To bf16."""
    copies = cold_copies(rows * K * BYTES_OF_WEIGHT)
    matrices = packed(rows, K, copies)

    def pytorch() -> Call:
        table = torch.tensor(MAGNITUDES + [-m for m in MAGNITUDES], device=DEVICE)

        def dequantize(i: int) -> list[Tensor]:
            codes, scales, factor = matrices[i]
            halves = torch.stack((codes & 15, codes >> 4), -1).view(rows, K // 16, 16)
            steps = scales.view(torch.float8_e4m3fn).float() * factor
            return [(table[halves.int()] * steps[..., None]).view(rows, K).to(torch.bfloat16)]

        return dequantize

    return Problem(
        lambda i: [hopwell.nvfp4_dequantize(*matrices[i], dtype="bfloat16")],
        first(1),
        [torch_peer("torch", pytorch, first(1), "a table and a product")],
        copies=copies,
        bytes=rows * K * (2 + BYTES_OF_WEIGHT),
    )
