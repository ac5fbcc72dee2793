"""Right calls on one backend: a GPU's on arrays that `device.py` has put there, an emulated GPU's on the host's."""

import os
from typing import Any

import hopwell
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from operators import OPERATORS

from . import judge, run
from .call import FuzzedCall
from .device import DeviceCall, HostCall
from .draw import Maker

# Without `deterministic` GPUs add these with atomics.
UNORDERED = ("dkv", "d_k_index")
CALLS_A_ROUND = 30  # hypothesis makes the first ten small


def is_emulated(backend: str) -> bool:
    return backend.startswith("emu:")


def set_shapes(backend: str) -> None:
    """Sizes of calls from here on, in this process."""
    Maker.kernels = True
    Maker.work = 1.5 if is_emulated(backend) else 25.0


def check(call: FuzzedCall, backend: str, device: torch.device | None) -> str | None:
    """Makes the call twice, on tensors of the device if one is given: the results are the reference's, nothing else was
    written, and what is promised to repeat has the same bits. Returns why the backend refuses the call; None: it ran.
    """
    call.arguments["backend"] = backend
    call.memory.remember()
    judged = judge.expect(call, backend)
    try:
        first = _results(call, device, 0)
    except hopwell.Error as error:
        _, refused, reasons = str(error).partition(": no backend runs this (")
        if not refused:
            raise
        assert all(block.bytes.tobytes() == block.before for block in call.memory.blocks), "a refused call wrote"
        return reasons.removeprefix(f"{backend}: ").removesuffix(")")
    run.check_memory(call)
    judged(tuple(first.values()))
    bits = run.bits_of(first)
    call.memory.restore()
    again = run.bits_of(_results(call, device, 1))
    for name, of_first in bits.items():
        if call.arguments.get("deterministic") or name not in UNORDERED:
            assert again[name] == of_first, f"a second call gave other bits of result {name}"
    return None


def _results(call: FuzzedCall, device: torch.device | None, schedule: int) -> dict[str, Any]:
    """`schedule`: the seed of the emulator's, whose checks are on."""
    os.environ["HOPWELL_EMULATOR_SEED"] = str(schedule)
    there = HostCall(call) if device is None else DeviceCall(call, device)
    try:
        made = run.results_of(call.operator, there.arguments)
        return {name: there.on_host(result) for name, result in made.items()}
    finally:
        there.fetch()


def one_round(operator: str, round_seed: int, visit: Any) -> None:
    """visit(number, call) for the calls of a seed, which are always the same."""
    number = 0

    @seed(round_seed)
    @settings(
        max_examples=CALLS_A_ROUND,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(OPERATORS[operator].right())
    def visit_all(call: FuzzedCall) -> None:
        nonlocal number
        visit(number, call)
        number += 1

    visit_all()
