"""On a GPU: the decode operators give the CPU's results on PyTorch's tensors, in CUDA graphs and on vLLM's caches."""

import math

import hopwell
import pytest
import torch
from hopwell.compat import vllm
from hopwell.torch import nn
from torch import Tensor

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU from Ampere on"
)

CONTEXTS = [0, 1, 15, 16, 17, 300, 1000, 33]


def relative_error(x: Tensor, y: Tensor) -> float:
    x, y = x.double().cpu(), y.double().cpu()
    return float((x - y).norm() / y.norm())


def make_cache(
    layout: str, dtype: torch.dtype, h_kv: int, d: int, block: int = 16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Caches on the CPU in their engines' layouts, shuffled block tables with garbage at the end, context lengths."""
    generator = torch.Generator().manual_seed(h_kv * d)
    lengths = torch.tensor(CONTEXTS, dtype=torch.int32)
    width = math.ceil(max(CONTEXTS) / block) + 2
    pages = len(CONTEXTS) * width
    tables = torch.randperm(pages, generator=generator).view(len(CONTEXTS), width).int()
    tables[:, -1] = 2**31 - 1
    k, v = (torch.randn(pages, block, h_kv, d, generator=generator).to(dtype) for _ in "kv")
    if layout == "hnd":
        k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
    if layout == "vllm":
        x = 16 // k.element_size()
        k = k.view(pages, block, h_kv, d // x, x).permute(0, 2, 3, 1, 4).contiguous()
        v = v.permute(0, 2, 3, 1).contiguous()
    return k, v, tables, lengths


@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("h_q", "h_kv", "d"), [(16, 16, 64), (32, 8, 128), (6, 3, 40)])
def test_paged_attention_as_on_the_cpu(layout: str, dtype: torch.dtype, h_q: int, h_kv: int, d: int) -> None:
    k, v, tables, lengths = make_cache(layout, dtype, h_kv, d)
    q, u = torch.randn(len(CONTEXTS), h_q, d).to(dtype), torch.randn(h_q, d)
    bias = torch.randn(len(CONTEXTS), h_q, 1, max(CONTEXTS)).to(dtype)

    def attend(device: str) -> tuple[Tensor, Tensor]:
        arguments = [x.to(device) for x in (q, k, v, tables, lengths)]
        return hopwell.paged_attention(
            *arguments, d**-0.5, layout=layout, pos_bias_u=u.to(device), bias=bias.to(device)
        )

    (out, lse), (expected, expected_lse) = attend("cuda"), attend("cpu")
    assert out.device.type == "cuda" and out.dtype == dtype
    assert relative_error(out, expected) < {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
    assert torch.equal(out[0].cpu(), torch.zeros(h_q, d, dtype=dtype)) and bool((lse[0] == -math.inf).all())
    torch.testing.assert_close(lse[1:].cpu(), expected_lse[1:], rtol=2**-15, atol=2e-5)


@pytest.mark.parametrize("q_len", [1, 4, 16])
def test_fused_relative_positions_as_on_the_cpu(q_len: int) -> None:
    k, v, tables, lengths = make_cache("nhd", torch.bfloat16, 8, 64)
    q, u, w = (torch.randn(*shape).bfloat16() for shape in ((len(CONTEXTS), q_len, 8, 64), (8, 64), (8, 64)))
    r = torch.randn(8, 200, 64).bfloat16()

    def attend(device: str) -> Tensor:
        arguments = [x.to(device) for x in (q, k, v, tables, lengths)]
        relative = {"pos_bias_u": u.to(device), "pos_bias_v": w.to(device), "r": r.to(device)}
        return hopwell.paged_attention(*arguments, 0.125, window=150, **relative)[0]

    assert relative_error(attend("cuda"), attend("cpu")) < 4e-3


def test_graph_follows_lengths_and_tables() -> None:
    k, v, tables, lengths = (x.cuda() for x in make_cache("nhd", torch.bfloat16, 16, 64))
    q = torch.randn(len(CONTEXTS), 16, 64).bfloat16().cuda()
    hopwell.paged_attention(q, k, v, tables, lengths, 0.125)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = hopwell.paged_attention(q, k, v, tables, lengths, 0.125)
        twice, _ = hopwell.paged_attention(out, k, v, tables, lengths, 0.125)
    for shift in (1, 3):
        lengths.copy_(lengths.roll(shift))
        tables[:, :-1] = tables[:, :-1].roll(shift, 0)
        q.normal_()
        graph.replay()
        expected, _ = hopwell.paged_attention(q, k, v, tables, lengths, 0.125)
        assert torch.equal(out, expected)
        assert torch.equal(twice, hopwell.paged_attention(expected, k, v, tables, lengths, 0.125)[0])


def test_vllm_caches() -> None:
    """Caches as vLLM allocates them (halves of one tensor), filled by slots; ALiBi; in-place results."""
    blocks, block, h_kv, h_q, d = 64, 16, 4, 16, 128
    kv_cache = torch.zeros(2, blocks, block * h_kv * d, dtype=torch.float16, device="cuda")
    key_cache, value_cache = kv_cache[0].view(blocks, h_kv, d // 8, block, 8), kv_cache[1].view(blocks, h_kv, d, block)
    lengths = [37, 5, 120]
    tables = torch.randperm(blocks)[: 3 * 8].view(3, 8).int().cuda()
    new, slots = torch.randn(2, sum(lengths), h_kv, d).half().cuda().unbind(0), []
    for row, length in enumerate(lengths):
        slots += [int(tables[row, t // block]) * block + t % block for t in range(length)]
    vllm.reshape_and_cache(*new, key_cache, value_cache, torch.tensor(slots).cuda(), "auto")
    query, out = torch.randn(3, h_q, d).half().cuda(), torch.full((3, h_q, d), math.nan, dtype=torch.float16).cuda()
    slopes = torch.linspace(0.01, 0.3, h_q).cuda()
    seq_lens = torch.tensor(lengths, dtype=torch.int32).cuda()
    vllm.paged_attention_v1(
        out, query, key_cache, value_cache, h_kv, d**-0.5, tables, seq_lens, block, 120, slopes, "auto"
    )
    first = 0
    for row, length in enumerate(lengths):
        k, v = (x[first : first + length].double().repeat_interleave(h_q // h_kv, 1) for x in new)
        first += length
        distance = length - 1 - torch.arange(length, device="cuda")
        logits = torch.einsum("hd,jhd->hj", query[row].double(), k) * d**-0.5 - slopes.double()[:, None] * distance
        expected = torch.einsum("hj,jhd->hd", logits.softmax(-1), v)
        assert relative_error(out[row], expected) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 3, 8, 16, 40, 150])
@pytest.mark.parametrize(("rows", "k"), [(512, 1024), (77, 4096), (130, 48)])
def test_nvfp4_linear_as_on_the_cpu(dtype: torch.dtype, n: int, rows: int, k: int) -> None:
    weight, x, bias = torch.randn(rows, k), torch.randn(n, k).to(dtype), torch.randn(rows).to(dtype)
    codes, scales, scale = hopwell.nvfp4_quantize(weight)
    expected = hopwell.nvfp4_linear(x, codes, scales, scale, bias=bias)
    here = hopwell.nvfp4_linear(x.cuda(), codes.cuda(), scales.cuda(), scale.cuda(), bias=bias.cuda())
    assert here.dtype == dtype
    assert relative_error(here, expected) < {torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 16, 17, 40, 150, 3000])
@pytest.mark.parametrize(("rows", "k"), [(512, 1024), (77, 4096), (3000, 2048), (130, 48)])
def test_nvfp4_linear_backward_as_on_the_cpu(dtype: torch.dtype, n: int, rows: int, k: int) -> None:
    weight, d_out = hopwell.nvfp4_quantize(torch.randn(rows, k)), torch.randn(n, rows).to(dtype)
    expected = hopwell.nvfp4_linear_backward(d_out, *weight)
    here = hopwell.nvfp4_linear_backward(d_out.cuda(), *(x.cuda() for x in weight))
    assert here.dtype == dtype
    assert relative_error(here, expected) < {torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("m", "n"), [(1, 512), (512, 1), (8, 77), (77, 8), (40, 300), (300, 150)])
@pytest.mark.parametrize("k", [48, 1024])
def test_nvfp4_matmul_as_on_the_cpu(dtype: str, m: int, n: int, k: int) -> None:
    (a, sfa, _), (b, sfb, _) = hopwell.nvfp4_quantize(torch.randn(m, k)), hopwell.nvfp4_quantize(torch.randn(n, k))
    bias = torch.randn(n).to(getattr(torch, dtype))
    arguments = a, b, sfa, sfb, bias

    def product(a: Tensor, b: Tensor, sfa: Tensor, sfb: Tensor, bias: Tensor) -> Tensor:
        return hopwell.nvfp4_matmul(a, b, sfa, sfb, alpha=1e-5, bias=bias, out_dtype=dtype)

    here, expected = product(*(x.cuda() for x in arguments)), product(*arguments)
    assert relative_error(here, expected) < {"float16": 1e-3, "bfloat16": 4e-3}[dtype]


def test_nvfp4_quantize_and_dequantize_as_on_the_cpu() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = (torch.randn(300, 1040) * torch.logspace(-3, 3, 300)[:, None]).to(dtype)
        here, there = hopwell.nvfp4_quantize(x.cuda()), hopwell.nvfp4_quantize(x)
        for mine, theirs in zip(here, there, strict=True):
            assert torch.equal(mine.cpu().view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8))
        assert torch.equal(hopwell.nvfp4_dequantize(*here).cpu(), hopwell.nvfp4_dequantize(*there))


def test_nvfp4_quantize_in_one_pass_as_in_two() -> None:
    """Rows without gaps are read once, by CTAs that wait for each other: in a replayed graph, and on two streams."""
    x = torch.empty(4096, 4608, dtype=torch.bfloat16, device="cuda")
    with_gaps = torch.empty(4096, 4608 + 16, dtype=torch.bfloat16, device="cuda")[:, :4608]

    def expect_as_in_two(result: tuple[Tensor, ...]) -> None:
        with_gaps.copy_(x)
        for one, two in zip(result, hopwell.nvfp4_quantize(with_gaps), strict=True):
            assert torch.equal(one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8))

    x.normal_()
    expect_as_in_two(hopwell.nvfp4_quantize(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hopwell.nvfp4_quantize(x)
    for scale in (1e-3, 10, 1e-6, 1):
        x.normal_(std=scale)
        x[77, ::500] = torch.inf
        graph.replay()
        expect_as_in_two(captured)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(hopwell.nvfp4_quantize(x))
    torch.cuda.synchronize()
    for result in results:
        expect_as_in_two(result)


@pytest.mark.parametrize("n", [4, 40, 200, 300])  # two kernels, one and two tiles of columns; a dequantised weight
def test_nvfp4_layer_in_a_graph_and_repeatable(n: int) -> None:
    layer = nn.NVFP4Linear.from_linear(torch.nn.Linear(2048, 1536, device="cuda", dtype=torch.bfloat16))
    x = torch.randn(n, 2048, dtype=torch.bfloat16, device="cuda")
    first = layer(x)
    assert all(torch.equal(layer(x), first) for _ in range(100))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.normal_()
    graph.replay()
    assert torch.equal(y, layer(x))
    weight = hopwell.nvfp4_dequantize(layer.weight, layer.weight_scale, layer.weight_global)
    assert relative_error(y, torch.nn.functional.linear(x.float(), weight, layer.bias.float())) < 5e-3
    d_y = torch.randn_like(y)
    gradients = [torch.autograd.grad(layer(leaf), leaf, d_y)[0] for leaf in (x.clone().requires_grad_() for _ in "ab")]
    assert torch.equal(*gradients)
    assert relative_error(gradients[0], d_y.float() @ weight) < 5e-3


def test_paged_attention_gives_the_same_bits_every_time() -> None:
    k, v, tables, lengths = (x.cuda() for x in make_cache("nhd", torch.bfloat16, 16, 64))
    q = torch.randn(len(CONTEXTS), 16, 64).bfloat16().cuda()
    first = hopwell.paged_attention(q, k, v, tables, lengths, 0.125)
    for _ in range(100):
        again = hopwell.paged_attention(q, k, v, tables, lengths, 0.125)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_a_captured_step_follows_its_length() -> None:
    """Sparse attention of one token after another in one CUDA graph, with the length as a tensor, as without a
    graph.
    """
    torch.manual_seed(0)
    mla = nn.SparseMLA(64, 16, d_nope=32, d_head=32)
    dsa = nn.DSA(mla, nn.LightningIndexer(64, topk=24, h_index=16)).cuda().bfloat16()
    x = torch.randn(1, 40, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        caches = [nn.KeyCache(40), nn.KeyCache(40)]
        for cache in caches:
            dsa.extend(x[:, :10], cache)
        caches[0].length = length = torch.tensor(10, device="cuda")
        token, warm = x[:, 10:11].clone(), torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            dsa.extend(token, caches[0])
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = dsa.extend(token, caches[0])
            length += 1
        for i in range(10, 40):
            token.copy_(x[:, i : i + 1])
            graph.replay()
            assert relative_error(y, dsa.extend(x[:, i : i + 1], caches[1])) < 4e-3
    assert int(length) == 40
