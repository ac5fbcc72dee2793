"""The expected results of the indexer's operators, as in `judge.py`."""

from typing import Any

import numpy as np
from hopwell import reference
from hopwell.reference._visible import visible_keys

from .bounds import BOUNDS, EXP, LARGE, ROUNDING, SMALL, TINY, Expected, compare, e4m3_cut, finite, is_cut, unless
from .draw import E4M3


def _scores(
    q: Any, k: Any, w: Any, relu: bool = True, of_head: Any = None, of_key: Any = None, cut: bool = False
) -> tuple[Any, Any, Any]:
    """One query's scores, how far off each may be, and the sizes of the products q·k, [h, n]. `cut`: as Hopper does."""
    with np.errstate(all="ignore"):
        dot = q.astype(np.float64) @ k.astype(np.float64).T
        w = w.astype(np.float64) if of_head is None else w.astype(np.float64) * of_head.astype(np.float64)
        score = w @ (np.maximum(dot, 0.0) if relu else dot)
        sizes = finite(q) @ finite(k).T
        size = finite(w) @ sizes
        dot_off = e4m3_cut(q, k) if cut else 0.0 * sizes
        off = 2 * ROUNDING * size + finite(w) @ dot_off + TINY * (1 + finite(w).sum() * q.shape[1])
        if of_head is not None:  # times a weight, below fp32's numbers or above them
            off = unless((finite(w) > LARGE).any(), off + TINY * sizes.sum(axis=0))
        if of_key is not None:
            scale = of_key.astype(np.float64)
            unsure = np.isinf(off) | (np.isinf(scale) & (np.abs(score) <= off) & (size > 0))
            off = unless(unsure | (size * finite(scale) > LARGE), off * finite(scale) + TINY)
            score = score * scale
        # A product that may round to 0, or to the other side of it, is a gate in front of an infinite weight.
        near = (sizes > 0) & (np.abs(dot) <= 2 * ROUNDING * sizes + dot_off + TINY * q.shape[1])
        gate = (near & np.isinf(w)[:, None]).any(axis=0)
        off = unless((sizes > LARGE).any(axis=0) | (size > LARGE) | gate, off)
    return np.where(np.isnan(score), -np.inf, score), off, sizes


def check_selection(a: dict[str, Any], backend: str, indices: Any, scores: Any) -> None:
    """What `lightning_indexer` returns where rounding may choose another key than the reference does."""
    visible = visible_keys(
        "lightning_indexer",
        len(indices),
        len(a["k_index"]),
        a.get("q_positions"),
        a.get("q_start"),
        a.get("kv_stride", 1),
        a.get("k_start"),
        a.get("k_end"),
    )
    relu, cut = a.get("relu", True), is_cut(backend, a["q_index"].dtype.name)
    for s, (first, last) in enumerate(zip(*visible, strict=True)):
        seen = max(last - first, 0)
        count = min(a["topk"], seen)
        taken = indices[s, :count]
        assert (taken >= 0).all() and (np.diff(taken) > 0).all() and (indices[s, count:] == -1).all(), f"indices[{s}]"
        assert np.isneginf(scores[s, count:]).all(), f"scores[{s}] of no key"
        if count == 0:
            continue
        assert first <= taken[0] and taken[-1] < last, f"indices[{s}] names a key that is not visible"
        taken = taken - first
        of_head = a["q_scale"][s] if "q_scale" in a else None
        of_key = a["k_scale"][first:last] if "k_scale" in a else None
        score, off, _ = _scores(a["q_index"][s], a["k_index"][first:last], a["weights"][s], relu, of_head, of_key, cut)
        compare(scores[s, :count], Expected(f"scores[{s}]", score[taken], 0.0, off[taken], elementwise=True))
        left = np.setdiff1d(np.arange(seen), taken)
        if len(left) and np.isfinite(off).all():
            worst, best = taken[np.argmin(score[taken] + off[taken])], left[np.argmax(score[left] - off[left])]
            assert not score[worst] + off[worst] < score[best] - off[best], (
                f"indices[{s}] has key {first + worst} of score {score[worst]}, not {first + best} of {score[best]}"
            )


def check_paged_selection(a: dict[str, Any], backend: str, results: tuple[Any, ...]) -> None:
    """As `check_selection`, query by query over the keys that it sees."""
    q = a["q_index"] if a["q_index"].ndim == 4 else a["q_index"][:, None]
    (b, q_len, _, d), topk = q.shape, a["topk"]
    has_scores = a.get("scores") is not False
    indices = results[0].reshape(b, q_len, topk)
    scores = results[1].reshape(b, q_len, topk) if has_scores else None
    lengths = results[-1].reshape(b, q_len) if len(results) > 1 + has_scores else None
    keys, scales = _paged_keys(a["cache"], d, a["q_index"].dtype.name == "float8_e4m3fn")
    blocks, block = a["cache"].shape[:2]
    for s in range(b):
        for i in range(q_len):
            lens = a["context_lens"].astype(np.int64)
            seen = lens[s, i] if lens.ndim == 2 else lens[s] - (q_len - 1 - i)
            positions = np.arange(min(max(seen, 0), a["block_tables"].shape[1] * block))
            pages = a["block_tables"][s].astype(np.int64)[positions // block]
            there = (pages >= 0) & (pages < blocks)
            positions, slots = positions[there], (pages * block + positions % block)[there]
            row, at = indices[s, i].copy(), 0
            for j, index in enumerate(row[: min(topk, len(slots))]):  # of equal slots the first position is chosen
                names = slots if a.get("slots") else positions
                while at < len(names) and names[at] != index:
                    at += 1
                assert at < len(names), f"indices[{s}, {i}, {j}] = {index} is not visible, or does not ascend"
                row[j], at = at, at + 1
            one = {"q_index": q[s, i][None], "k_index": keys[slots], "topk": topk, "relu": a.get("relu", True)}
            one["weights"] = a["weights"].reshape(b, q_len, -1)[s, i][None]
            if "q_scale" in a:
                one["q_scale"] = a["q_scale"].reshape(b, q_len, -1)[s, i][None]
            if scales is not None:
                one["k_scale"] = scales[slots]
            if scores is not None:
                check_selection(one, backend, row[None], scores[s, i][None])
            elif len(slots) <= topk:
                assert (row[: len(slots)] == np.arange(len(slots))).all() and (row[len(slots) :] == -1).all()
            if lengths is not None:
                assert lengths[s, i] == min(topk, len(slots)), f"lengths[{s}, {i}]"


def _paged_keys(cache: Any, d: int, is_fp8: bool) -> tuple[Any, Any]:
    """The keys [slots, d] of a cache, and their scales."""
    blocks, block = cache.shape[:2]
    flat = np.ascontiguousarray(cache).reshape(blocks, block * cache.shape[-1])
    if not is_fp8:
        return flat.reshape(blocks * block, d), None
    codes, scales = flat.view(np.uint8)[:, : block * d], flat.view(np.uint8)[:, block * d :]
    keys = np.ascontiguousarray(codes).view(E4M3).reshape(blocks * block, d)
    return keys, np.ascontiguousarray(scales).view(np.float32).reshape(blocks * block)


def lightning_indexer_backward(a: dict[str, Any]) -> list[Expected]:
    loss, d_q, d_k, d_w = reference.lightning_indexer_backward(**a)
    d_loss, relu, d_scores = abs(float(a.get("d_loss", 1.0))), a.get("relu", True), a.get("d_scores")
    row_weights = a.get("row_weights", np.ones(len(d_q), np.float32)).astype(np.float64)
    indices = a["indices"].reshape(len(a["q_index"]), a["indices"].shape[-1]).astype(np.int64)
    loss_slack = 1e-7
    d_q_slack, d_w_slack = np.zeros(d_q.shape), np.zeros(d_w.shape)
    d_k_slack, d_k_size = np.zeros((2, *d_k.shape))
    largest, count = np.zeros((2, len(d_k)))  # of deterministic sums on GPUs: what bounds one number that is added
    ranges = a.get("k_start"), a.get("k_end")
    visible = visible_keys("lightning_indexer_backward", len(d_q), len(d_k), None, None, 1, *ranges)
    for s, (first, last) in enumerate(zip(*visible, strict=True)):
        entries = np.flatnonzero((indices[s] >= first) & (indices[s] < last))
        k = a["k_index"][indices[s, entries]]
        score, off, sizes = _scores(a["q_index"][s], k, a["weights"][s], relu)
        counted = ~np.isneginf(score)
        unsure = ~np.isfinite(off).all()
        entries, k, score, off, sizes = entries[counted], k[counted], score[counted], off[counted], sizes[:, counted]
        target = (a["target"] if d_scores is None else d_scores)[s, entries].astype(np.float64)
        factor = finite(row_weights[s : s + 1])[0]
        keys = indices[s, entries]
        if unsure:
            named = indices[s][(indices[s] >= first) & (indices[s] < last)]
            loss_slack = d_q_slack[s] = d_w_slack[s] = d_k_slack[named] = np.inf
            continue
        if not target.any():
            continue
        reach = off.max(initial=0.0) + ROUNDING * finite(score).max(initial=0.0)
        with np.errstate(all="ignore"):
            shifted = score - score.max(initial=-np.inf)
            p = np.exp(shifted) / np.exp(shifted).sum()
            size = factor * finite(target)
            loss_slack += (size * (2 * reach + EXP + 1e-6 * np.abs(finite(shifted) + np.log(len(p))))).sum()
            of_target = finite(np.log(np.where(target > 0, target, 1.0)))
            loss_slack += (size * of_target).sum() * 1e-6
            terms = finite(target) * (of_target + np.abs(finite(shifted)) + np.log(len(p)))
            loss_slack = np.inf if terms.sum() > LARGE else loss_slack
        if row_weights[s] == 0:
            continue
        factor *= d_loss
        if factor > LARGE:
            d_q_slack[s] = d_w_slack[s] = d_k_slack[keys] = np.inf
            continue
        g = factor * finite(p - target)
        g_off = factor * (finite(p) * (4 * reach + EXP) + ROUNDING * finite(target) + TINY)
        if d_scores is not None:
            g, g_off = factor * finite(target), factor * ROUNDING * finite(target)
        g_off = g_off + TINY * (1 + finite(target) + finite(p))  # the factor may lose as much
        w, q, keys_size = finite(a["weights"][s]), finite(a["q_index"][s]), finite(k)
        dot = a["q_index"][s].astype(np.float64) @ k.astype(np.float64).T
        exact = all((np.round(x) == x).all() and x.max(initial=0) < 100 for x in (q, keys_size))
        turns = (
            (np.abs(dot) <= 2 * ROUNDING * sizes + TINY) & (sizes > 0) & (not exact) & relu
        )  # relu's derivative may be the other one
        d_dot_off = w[:, None] * np.where(turns, g + g_off, g_off + ROUNDING * g) + TINY
        odd = ~(
            np.isfinite(k.astype(np.float64)).all()
            and np.isfinite(a["q_index"][s].astype(np.float64)).all()
            and np.isfinite(a["weights"][s].astype(np.float64)).all()
        )
        lost = odd & (((p > 0) & (p < SMALL)).any() | turns.any())
        d_dot_off = unless((w[:, None] * g > LARGE) | (g > LARGE) | lost, d_dot_off)
        sums = w[:, None] * g
        lost_products = TINY * len(g) * (1 + w[:, None])
        d_q_slack[s] = (d_dot_off + ROUNDING * sums) @ keys_size + lost_products
        d_q_slack[s] = unless((sums @ keys_size > LARGE) | (g @ keys_size > LARGE), d_q_slack[s])
        of_keys = (d_dot_off + ROUNDING * sums).T @ q + TINY * len(q) * (1 + g[:, None])
        np.add.at(d_k_slack, keys, unless(w @ q > LARGE, of_keys))
        np.add.at(d_k_size, keys, sums.T @ q)
        np.maximum.at(largest, keys, g * (w @ q.max(axis=1, initial=0.0)))
        np.add.at(count, keys, 1)
        overflows = (sizes @ g > LARGE) | (g > LARGE).any()
        d_w_slack[s] = unless(overflows, sizes @ (g_off + 2 * ROUNDING * g) + TINY * (1 + g.sum()))
        if lost:
            d_w_slack[s] = np.inf
    names = ("loss", "d_q_index", "d_k_index", "d_weights")
    dtypes = ("float32", str(a["q_index"].dtype), "float32", str(a["weights"].dtype))
    d_k_slack = unless((d_k_size > LARGE) | (largest * count > LARGE)[:, None], d_k_slack)
    slacks = (loss_slack, d_q_slack, d_k_slack, d_w_slack)
    return [
        Expected(name, value, BOUNDS[dtype], slack, elementwise=name == "loss")
        for name, value, dtype, slack in zip(names, (loss, d_q, d_k, d_w), dtypes, slacks, strict=True)
    ]


def indexer_dense_loss(a: dict[str, Any]) -> list[Expected]:
    names, dtypes = ("loss", "d_q_index", "d_k_index", "d_weights"), ("float32", str(a["q_index"].dtype), "float32")
    values = reference.indexer_dense_loss(**a)
    # softmax and target are each of size 1 and may cancel; a query adds its errors to what each key gets
    products = 4.0 * a["q_index"].shape[2] * (1 + len(a["q_index"]))
    return [
        Expected(name, value, BOUNDS[dtype], 4e-6 * products, elementwise=name == "loss")
        for name, value, dtype in zip(names, values, (*dtypes, str(a["weights"].dtype)), strict=True)
    ]
