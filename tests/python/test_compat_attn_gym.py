"""attention-gym's conventions, against a float64 computation of one query of one head at a time, and its autograd."""

import enum
import math
from typing import Any

import pytest
import torch
from hopwell.compat._tensors import in_rows
from hopwell.compat.attn_gym import AuxRequest, GatherAttnAux, gather_attn
from support import norm_error
from torch_inputs import RESTRIDES, Restride, restrided

pytestmark = pytest.mark.usefixtures("torch_seed")


def plain(
    query: torch.Tensor,
    local_kv: torch.Tensor,
    sparse_kv: torch.Tensor,
    kv_indices: torch.Tensor,
    sink: torch.Tensor | None,
    window: int,
    scale: float,
    cu_seqlens: list[int] | None = None,
    cu_seqlens_k: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in float64, differentiable. Rows after the last document are 0 and −inf."""
    b, heads, s, d = query.shape
    starts, starts_k = cu_seqlens or [0, s], cu_seqlens_k or [0, sparse_kv.shape[2]]
    out, lse = query.new_zeros(b, heads, s, d, dtype=torch.float64), torch.full((b, heads, s), -math.inf).double()
    rows: list[torch.Tensor] = []
    for i in range(b):
        for h in range(heads):
            of_keys = h if sparse_kv.shape[1] > 1 else 0
            for t in range(s):
                document = next((n for n in range(len(starts) - 1) if starts[n] <= t < starts[n + 1]), None)
                keys, logits = [], []
                if document is not None:
                    keys += [local_kv[i, of_keys, j] for j in range(max(starts[document], t - window + 1), t + 1)]
                    first, end = starts_k[document], starts_k[document + 1]
                    selected = [first + j for j in kv_indices[i, t].tolist() if 0 <= j < end - first]
                    keys += [sparse_kv[i, of_keys, j] for j in selected]
                logits = [(query[i, h, t].double() @ key.double()) * scale for key in keys]
                if sink is not None and document is not None:
                    logits.append(sink[h].double())
                if not logits or all(x == -math.inf for x in logits):
                    rows.append(torch.zeros(d).double())
                    continue
                total = torch.stack(logits).logsumexp(0)
                lse[i, h, t] = total.detach()
                terms = [(x - total).exp() * key.double() for x, key in zip(logits, keys, strict=False)]
                rows.append(torch.stack(terms).sum(0) if terms else torch.zeros(d).double())
    return out + torch.stack(rows).view(b, heads, s, d), lse


def inputs(b: int, heads: int, s: int, entries: int, topk: int, *, shared: bool = True) -> list[torch.Tensor]:
    d, of_keys = 16, 1 if shared else heads
    shapes = (b, heads, s, d), (b, of_keys, s, d), (b, of_keys, entries, d)
    tensors = [torch.randn(*shape).requires_grad_() for shape in shapes]
    return [*tensors, torch.randint(-3, entries + 3, (b, s, topk))]


@pytest.mark.parametrize("sink", [None, "float32", "like query"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [0, 1, 4, 100])
def test_agrees_with_a_plain_computation(window: int, packed: bool, sink: str | None) -> None:
    given = inputs(1 if packed else 2, 3, 11, 6, 5)
    given[3][:, :3] = -1  # rows without a selected entry
    given[3][:, 4, :2] = torch.tensor([0, 1])  # with one key each, all gradients of q would be 0 but for roundings
    given[3][:, 5, :2] = 1  # one that counts twice
    logit = None if sink is None else torch.tensor([0.5, -1.0, -math.inf]).requires_grad_()
    documents: dict[str, Any] = {}
    offsets: list[list[int]] = []
    if packed:
        offsets = [[0, 4, 4, 10], [0, 2, 2, 5]]  # the last row and the last entry belong to no document
        documents = dict(zip(("cu_seqlens", "cu_seqlens_k"), (torch.tensor(x).int() for x in offsets), strict=True))
    out, aux = gather_attn(
        *given, logit, sliding_window_size=window, scale=0.4, return_aux=AuxRequest(lse=True), **documents
    )
    expected, lse = plain(*given, logit, window, 0.4, *offsets)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    rows = slice(0, offsets[0][-1] if packed else 11)
    torch.testing.assert_close(aux.lse[:, :, rows].double(), lse[:, :, rows], rtol=1e-5, atol=1e-5)
    assert not aux.lse.requires_grad
    learned = [x for x in (*given[:3], logit) if x is not None]
    d_out = torch.randn_like(out)
    found = torch.autograd.grad(out, learned, d_out)
    wanted = torch.autograd.grad(expected, learned, d_out.double(), allow_unused=True)
    for mine, reference in zip(found, wanted, strict=True):
        reference = torch.zeros(()) if reference is None else reference
        reference = torch.nan_to_num(reference)  # the gradient of the sink of −inf
        assert norm_error(mine, reference) < 1e-4


def test_heads_with_keys_of_their_own() -> None:
    given = inputs(2, 3, 7, 5, 4, shared=False)
    out = gather_attn(*given, sliding_window_size=3)
    expected, _ = plain(*given, None, 3, 0.25)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    found, wanted = (torch.autograd.grad(x.sum(), given[:3]) for x in (out, expected))
    for mine, reference in zip(found, wanted, strict=True):
        assert norm_error(mine, reference) < 1e-4


def test_no_entries_and_no_keys_at_all() -> None:
    given = inputs(1, 2, 5, 3, 4)
    given[2] = given[2][:, :, :0]
    sink = torch.tensor([0.25, -2.0])
    expected, lse = plain(*given, sink, 2, 0.25)
    out, aux = gather_attn(*given, sink, sliding_window_size=2, return_aux=AuxRequest(lse=True))
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(aux.lse.double(), lse, rtol=1e-5, atol=1e-5)
    for logit, empty in ((sink, sink), (None, torch.full((2,), -math.inf))):
        out, aux = gather_attn(*given, logit, sliding_window_size=0, return_aux=AuxRequest(lse=True))
        assert out.eq(0).all()
        assert torch.equal(aux.lse, empty[None, :, None].expand(1, 2, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_window_local_kv_gets_zeros(dtype: torch.dtype) -> None:
    for shared, entries, topk in ((True, 3, 4), (False, 3, 4), (True, 0, 4), (True, 3, 0), (False, 0, 0)):
        *tensors, indices = inputs(2, 3, 5, max(entries, 1), topk, shared=shared)
        given = [x.detach().to(dtype).requires_grad_() for x in tensors]
        keys = given[2][:, :, :entries]
        out = gather_attn(given[0], given[1], keys, indices, torch.zeros(3), sliding_window_size=0)
        out.float().square().sum().backward()
        for x in given:
            assert x.grad is not None and x.grad.dtype == dtype and x.grad.shape == x.shape
        assert given[1].grad is not None and given[1].grad.eq(0).all()
    keys, local_kv = given[2].detach(), given[1]
    out = gather_attn(given[0].detach(), local_kv, keys, indices, sliding_window_size=0)
    assert torch.autograd.grad(out.sum(), local_kv)[0].eq(0).all()  # also if nothing else needs a gradient
    with torch.no_grad():
        assert not gather_attn(given[0], local_kv, keys, indices, sliding_window_size=0).requires_grad


@pytest.mark.parametrize("restride", RESTRIDES)
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_tensors_of_any_strides(packed: bool, shared: bool, window: int, restride: Restride) -> None:
    given = [*inputs(1 if packed else 2, 3, 7, 5, 4, shared=shared), torch.randn(3).requires_grad_()]
    given[3] = given[3].int()
    options: dict[str, Any] = {"sliding_window_size": window, "return_aux": AuxRequest(lse=True)}
    if packed:
        options |= {"cu_seqlens": torch.tensor([0, 4, 7]).int(), "cu_seqlens_k": torch.tensor([0, 2, 5]).int()}
    d_out = torch.randn(given[0].shape)
    results = []
    for tensors, gradient in ((given, d_out), (restrided(restride, *given), restride(d_out))):
        out, aux = gather_attn(*tensors, **options)
        learned = [x for x in tensors if x.requires_grad]
        results.append([out, aux.lse, *torch.autograd.grad(out, learned, gradient)])
    assert len(results[0]) == 6
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("window", [0, 3])
def test_compiled_with_any_strides(window: int) -> None:
    *tensors, indices = inputs(1, 2, 7, 5, 4)
    given = restrided(RESTRIDES[0], *tensors)
    compiled: Any = torch.compile(gather_attn, fullgraph=True, backend="aot_eager")
    results = []
    for function in (gather_attn, compiled):
        out = function(*given, indices, sliding_window_size=window)
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_compiled_once_for_all_lengths() -> None:
    compiled: Any = torch.compile(gather_attn, fullgraph=True, dynamic=True, backend="aot_eager")
    for s, entries in ((12, 5), (20, 9), (35, 8)):
        given = inputs(1, 2, s, entries, 4)
        options = {"cu_seqlens": torch.tensor([0, 5, s]).int(), "cu_seqlens_k": torch.tensor([0, 2, entries]).int()}
        with torch.compiler.set_stance("default" if s == 12 else "fail_on_recompile"):
            out = compiled(*given, sliding_window_size=3, **options)
        expected = gather_attn(*given, sliding_window_size=3, **options)
        assert torch.equal(out, expected)
        gradients = [torch.autograd.grad(x.square().sum(), given[:3]) for x in (out, expected)]
        for one, other in zip(*gradients, strict=True):
            assert torch.equal(one, other)


def test_expanded_keys() -> None:
    """One key for all tokens and all heads, and one number for all columns."""
    given = inputs(1, 3, 7, 5, 4, shared=False)
    numbers = [torch.randn(1, 1, 1, n).requires_grad_() for n in (16, 1)]
    for number in numbers:
        local_kv, sparse_kv = number.expand(1, 3, 7, 16), number.expand(1, 3, 5, 16)
        gradients = [
            torch.autograd.grad(gather_attn(given[0], *keys, given[3], sliding_window_size=3).square().sum(), number)
            for keys in ((local_kv, sparse_kv), (local_kv.contiguous(), sparse_kv.contiguous()))
        ]
        assert torch.equal(*(gradient[0] for gradient in gradients)) and gradients[0][0].ne(0).any()


def test_only_strides_that_the_operators_refuse_are_copied() -> None:
    x = torch.zeros(2, 7, 3, 16)
    for view in (x, x.transpose(1, 2), x[..., 1:9], x[:, :1].expand(-1, 5, -1, -1), x[0, 0, 0], torch.zeros(())):
        assert in_rows(view) is view
    assert in_rows(None) is None
    assert in_rows(x.transpose(2, 3)).is_contiguous() and in_rows(x[0, 0, 0, ::2]).is_contiguous()
    wide = torch.zeros(5, 40, dtype=torch.bfloat16, device="meta")  # rows of 80 bytes, not on the host
    for view in (wide[:, :32], wide[:, 8:40], wide[:1, :32].expand(5, -1), wide[:, :33], wide.int()[:, 1:33]):
        assert in_rows(view) is view
    for view in (wide[:, 1:33], torch.zeros(5, 36, dtype=torch.bfloat16, device="meta")[:, :32]):
        copy = in_rows(view)
        assert copy is not view and copy.is_contiguous() and copy.storage_offset() == 0
    narrow = torch.zeros(161, dtype=torch.bfloat16, device="meta")[1:].view(5, 32)
    assert in_rows(narrow).storage_offset() == 0


def test_a_sink_in_the_dtype_of_bfloat16_queries() -> None:
    """Its gradient has its dtype. Queries and keys are strided, as a projection to [b, s, heads, d] makes them."""
    q, local, sparse, indices = inputs(1, 3, 9, 4, 4)
    q, local, sparse = (x.detach().bfloat16().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, local, sparse))
    sink = torch.randn(3).bfloat16().requires_grad_()
    out = gather_attn(q, local, sparse, indices.int(), sink, sliding_window_size=4)
    expected, _ = plain(q, local, sparse, indices, sink, 4, 0.25)
    assert out.dtype == torch.bfloat16 and norm_error(out.detach(), expected.detach()) < 4e-3
    mine, reference = (torch.autograd.grad(x.double().square().sum(), sink)[0] for x in (out, expected))
    assert mine.dtype == torch.bfloat16 and norm_error(mine, reference) < 1e-2


def test_what_is_returned_and_which_implementation_is_named() -> None:
    class Impl(enum.Enum):
        FUSED = "fused"

    given = inputs(1, 2, 5, 3, 4)
    out = gather_attn(*given)
    assert isinstance(out, torch.Tensor)
    for options in ({"impl": "reference"}, {"impl": Impl.FUSED}, {"kernel_options": {"backend": "triton"}}):
        same, aux = gather_attn(*given, **options, return_aux=AuxRequest())
        assert torch.equal(same, out) and aux == GatherAttnAux(None)


Q, LOCAL, SPARSE = torch.zeros(1, 2, 5, 8), torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 3, 8)
INDICES = torch.zeros(1, 5, 4).long()
OFFSETS = torch.tensor([0, 5]).int()
GIVEN = {"query": Q, "local_kv": LOCAL, "sparse_kv": SPARSE, "kv_indices": INDICES}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": Q[0]}, "query must be"),
        ({"query": Q.double()}, "query must be torch.bfloat16 or torch.float32; got torch.float64"),
        ({"local_kv": LOCAL[:, :, :4]}, "local_kv must be"),
        ({"local_kv": LOCAL.bfloat16()}, "local_kv must be torch.float32 like query"),
        ({"sparse_kv": SPARSE.bfloat16()}, "sparse_kv must be torch.float32 like query"),
        ({"sparse_kv": torch.zeros(1, 3, 3, 8)}, "sparse_kv must be"),
        ({"kv_indices": INDICES.float()}, "kv_indices must be"),
        ({"kv_indices": INDICES[:, :4]}, "kv_indices must be"),
        ({"attention_sink": torch.zeros(3)}, "attention_sink must be"),
        ({"attention_sink": torch.zeros(2).bfloat16()}, "attention_sink must be"),
        ({"sliding_window_size": -1}, "sliding_window_size must be at least 0; got -1"),
        ({"sliding_window_size": 2.0}, "sliding_window_size must be an integer"),
        ({"scale": 0.0}, "scale must be above 0"),
        ({"impl": "eager"}, "impl must be 'fused' or 'reference'; got eager"),
        ({"kernel_options": {"num_warps": "4"}}, "kernel_options must be"),
        ({"kernel_options": {"backend": "cute"}, "impl": "reference"}, "kernel_options must be none"),
        ({"cu_seqlens": OFFSETS}, "cu_seqlens_k must be int32"),
        ({"cu_seqlens_k": OFFSETS}, "cu_seqlens must be int32"),
        ({"cu_seqlens": OFFSETS.long(), "cu_seqlens_k": OFFSETS}, "cu_seqlens must be int32"),
        ({"cu_seqlens": OFFSETS, "cu_seqlens_k": torch.tensor([0, 1, 3]).int()}, "cu_seqlens_k must be"),
        (
            {name: x.expand(2, *x.shape[1:]) for name, x in GIVEN.items()}
            | {"cu_seqlens": OFFSETS, "cu_seqlens_k": OFFSETS},
            "query must be",
        ),
    ],
)
def test_bad_input_names_the_argument(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^gather_attn: {message}"):
        gather_attn(**(GIVEN | changes))
