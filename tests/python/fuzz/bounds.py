"""The comparison of a result with float64, and the bounds of GPUs.

A bound follows the contract ("Accuracy every backend must reach"), row by row. It is a share of the norm of the
reference's row, plus `slack` for the rounding of fp32 sums: 2^-21 times the same sum with absolute values, carried
through the later steps. If numbers leave fp32's range on the way, or may do so in another order of summation, the
slack is infinite and the value is not judged. NaN and ±inf have their places everywhere else.

The files of `operators` have the CPU's bounds. `GPU_BOUNDS` and `e4m3_cut` widen them for GPUs.
"""

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

ROUNDING = 2.0**-21
EXP = 2.0**-20  # relative error of an fp32 exp
TINY = 2.0**-126  # error of a product below fp32's normal numbers
LARGE = 1e37  # sums of more than this may overflow on the way
SMALL = 1e-30  # weights of less than this may be 0 in fp32
BOUNDS = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 4e-3}
PAGED_BOUNDS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 4e-3}


@dataclass
class Expected:
    name: str
    value: Any
    bound: float = 0.0  # of the norm of a row, the last dimension; 0 with no slack: exactly the value
    slack: Any = None
    elementwise: bool = False  # every element is a row of its own
    sums: Any = None  # of attention: the products that are summed, with absolute values


def compare(got: Any, expected: Expected) -> None:
    value = np.asarray(expected.value)
    assert got.shape == value.shape, f"{expected.name} is {list(got.shape)}, expected {list(value.shape)}"
    if expected.slack is None:
        if got.dtype.kind == "V" and got.dtype == value.dtype:  # of ml_dtypes, whose NaN numpy does not know
            got, value = (np.ascontiguousarray(x).view(f"u{x.itemsize}") for x in (got, value))
        np.testing.assert_array_equal(got, value, err_msg=expected.name)
        return
    info = ml_dtypes.finfo(got.dtype)
    limit = float(info.max)
    x, value = got.astype(np.float64), value.astype(np.float64)
    slack = np.broadcast_to(expected.slack, value.shape) + float(info.smallest_subnormal)
    with np.errstate(all="ignore"):
        size = np.abs(value)
        sure = np.isfinite(slack) & ~(
            (size * 1.01 + slack > limit) & (size * 0.99 - slack < limit) & np.isfinite(value)
        )
        value = np.where(size > limit, np.copysign(np.inf, value), value)
        for what, is_it in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
            at = np.argwhere(sure & (is_it(x) != is_it(value)))
            where = tuple(at[0]) if len(at) else ()
            assert not len(at), (
                f"{expected.name}{list(map(int, where))} is {x[where]}, expected {value[where]} ({what})"
            )
        sure &= np.isfinite(value)
        error, value, slack = (np.where(sure, a, 0.0) for a in (x - value, value, slack))
    if expected.elementwise:
        error, value, slack = error[..., None], value[..., None], slack[..., None]
    off, allowed = (np.linalg.norm(a, axis=-1) for a in (error, slack))
    allowed = allowed + expected.bound * np.linalg.norm(value, axis=-1)
    worst = np.unravel_index(np.argmax(off - allowed), off.shape) if off.size else ()
    assert (off <= allowed).all(), (
        f"{expected.name}{list(map(int, worst))} is off by {off[worst]:.3g}, allowed {allowed[worst]:.3g}"
        f" of {np.linalg.norm(value, axis=-1)[worst]:.3g}"
    )


def finite(x: Any) -> Any:
    """|x| as float64, 0 where it is NaN or infinite."""
    x = np.abs(np.asarray(x).astype(np.float64))
    return np.where(np.isfinite(x), x, 0.0)


def unless(condition: Any, slack: Any) -> Any:
    return np.where(condition, np.inf, slack)


@dataclass(frozen=True)
class Bound:
    """A GPU's bound for one output, where it differs from the CPU's."""

    of_norm: float | None = None  # instead of the CPU's share
    absolute: float = 0.0
    of_sums: float = 0.0


# lse and max_logits: the contract's 2^-15 of the number, or 2e-5.
_LOGARITHM = Bound(of_norm=2.0**-15, absolute=2e-5)
# Tensor cores take P and dS in bf16, which rounds each number by up to 2^-8 of itself. If all terms of a sum round
# alike, as in constant rows, so does the sum; then the result is rounded once more.
_ROUNDED_OPERAND = Bound(of_sums=2.0**-8)
GPU_BOUNDS = {
    ("sparse_mla_forward", "out"): _ROUNDED_OPERAND,
    ("sparse_mla_forward", "max_logits"): _LOGARITHM,
    ("sparse_mla_forward", "lse"): _LOGARITHM,
    ("sparse_mla_decode", "out"): _ROUNDED_OPERAND,
    ("sparse_mla_decode", "lse"): _LOGARITHM,
    ("sparse_mla_backward", "dq"): _ROUNDED_OPERAND,
    ("sparse_mla_backward", "dkv"): _ROUNDED_OPERAND,
    ("sparse_mla_backward", "d_window_kv"): _ROUNDED_OPERAND,
    ("paged_attention", "lse"): _LOGARITHM,
}


def is_gpu(backend: str) -> bool:
    """Whether it is one, or an emulated one."""
    return backend != "cpu"


def on_backend(operator: str, expected: Expected, backend: str) -> Expected:
    """The same expectation with the bounds of a backend."""
    if not is_gpu(backend) or expected.slack is None:
        return expected
    bound = GPU_BOUNDS.get((operator, expected.name), Bound())
    # 2^-21 of scores' sums with absolute values; the CPU keeps to half of that.
    slack = 2 * np.asarray(expected.slack) + bound.absolute
    if bound.of_sums:
        slack = slack + bound.of_sums * expected.sums
    return replace(expected, slack=slack, bound=expected.bound if bound.of_norm is None else bound.of_norm)


def is_cut(backend: str, dtype: str) -> bool:
    """Whether the backend's tensor cores cut sums of this type: e4m3 on Hopper (sm80 multiplies bf16)."""
    return dtype == "float8_e4m3fn" and backend.endswith("sm90")


def e4m3_cut(q: Any, k: Any) -> Any:
    """How far off Hopper's products q·k of e4m3 may be, [h, n] for q [h, d] and k [n, d].

    One wgmma adds 32 products to the sum so far. It aligns them to the largest exponent, cuts all bits more than 13
    below the leading bit of that number, and cuts the new sum to 13 bits after its own (docs/emulator.md has the
    sources). The exponent of a product is the sum of its factors' exponents. Zeros and subnormals have the exponent −6.
    """
    bits, least = 2.0**-13, 2.0**-6
    q, k = q.astype(np.float64), k.astype(np.float64)
    total, off = np.zeros((2, len(q), len(k)))
    for first in range(0, q.shape[1], 32):
        for keys in (slice(at, at + 512) for at in range(0, len(k), 512)):
            a, b = q[:, None, first : first + 32], k[None, keys, first : first + 32]
            of_a, of_b = np.maximum(finite(a), least), np.maximum(finite(b), least)
            before = np.abs(total[:, keys]) + off[:, keys]
            unit = bits * np.maximum((of_a * of_b).max(axis=-1), before)
            last_bit = 2.0 ** (
                np.frexp(of_a)[1] + np.frexp(of_b)[1] - 8.0
            )  # of the product: e4m3 has 3 after the first
            product = finite(a) * finite(b)
            cut = np.where(last_bit >= unit[..., None], 0.0, np.minimum(unit[..., None], product)).sum(axis=-1)
            cut += np.minimum(unit, before)
            total[:, keys] += np.where(np.isfinite(a * b), a * b, 0.0).sum(axis=-1)
            off[:, keys] += cut + bits * (np.abs(total[:, keys]) + off[:, keys] + cut)
    return off
