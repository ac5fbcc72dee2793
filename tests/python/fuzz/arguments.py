"""Arguments that several operators take."""

from typing import Any

import numpy as np

from .draw import Maker, integers_around


def causality(maker: Maker, s_q: int, s_kv: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    stride = maker.choose(1, 2, 5, 1, 2**31, 2**62)
    if maker.chance():
        arguments["kv_stride"] = stride
    match maker.choose("none", "start", "positions"):
        case "start":
            near = maker.integer(-3, 2 * s_kv + 3)
            arguments["q_start"] = maker.choose(near, near, near, 2**62 - 1, 1 - 2**62, 2**31, -(2**31))
        case "positions":
            arguments["q_positions"] = maker.values(integers_around(maker, s_q, [0, s_kv, 2 * s_kv]), rows=False)
    return arguments


def key_ranges(maker: Maker, s_q: int, s_kv: int) -> dict[str, Any]:
    """Half of the calls have them: any two numbers, or documents of whose keys a query sees the first ones."""
    match maker.choose("none", "none", "any", "documents"):
        case "any":
            start, end = (integers_around(maker, s_q, [0, s_kv // 2, s_kv]) for _ in range(2))
        case "documents":
            starts = np.sort(maker.rng.integers(0, s_kv + 1, 3))
            document = np.sort(maker.rng.integers(0, 3, s_q))
            start, past = starts[document], np.append(starts[1:], s_kv)[document]
            end = start + (maker.rng.random(s_q) * (past - start + 1)).astype(np.int64)
        case _:
            return {}
    ranges = {"k_start": start, "k_end": end}
    return {name: maker.values(values.astype(np.int32), rows=False) for name, values in ranges.items()}


def scalar(maker: Maker, usual: float) -> float:
    """A finite float of 32 bits, as the operators take it: mostly a usual one."""
    extreme = maker.choose(0.0, -0.0, 3.4e38, -3.4e38, 1e-45, 1e-30, 1e6)
    return float(np.float32(maker.choose(usual, -usual, 1.0, usual, extreme)))


def sinks(maker: Maker, h_q: int) -> Any:
    sinks = maker.rng.choice(np.array([0.0, 1.5, -3.0, np.inf, -np.inf, 1e38, -1e38], np.float32), h_q)
    return maker.values(sinks, rows=False)
