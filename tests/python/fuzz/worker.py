"""A process that `__main__.py` starts: rounds of calls. Each line of its output is an event as JSON.

A call may end this process. The last lines then name that call.
"""

import argparse
import faulthandler
import json
import os
import time
import traceback
from typing import Any

import torch

from . import backends
from .call import FuzzedCall


class Events:
    """The standard output, for events alone: whatever else this process prints goes to its standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, **event: Any) -> None:
        print(json.dumps(event), file=self._out, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", required=True, help="operator@backend, separated by commas")
    parser.add_argument("--first-round", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--every", type=int, default=1, help="make only every n-th call of a round")
    parser.add_argument("--call", type=int, help="the only one to make of each round")
    parser.add_argument("--device", help="where the tensors are: cuda, or for tests of this program cpu")
    return parser.parse_args()


def is_lost(device: torch.device | None) -> bool:
    """Whether the device takes no more work from this process."""
    if device is None or device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main() -> None:
    given = arguments()
    faulthandler.enable()
    say = Events().say
    device = None if given.device is None else torch.device(given.device)
    tasks = [tuple(task.split("@")) for task in given.tasks.split(",")]
    end = time.monotonic() + given.seconds
    number = given.first_round
    while True:
        operator, backend = tasks[number % len(tasks)]
        round_seed = given.seed + number // len(tasks)
        backends.set_shapes(backend)
        say(round=number, operator=operator, backend=backend, seed=round_seed)

        def visit(
            which: int,
            call: FuzzedCall,
            backend: str = backend,
            round_seed: int = round_seed,
            first: bool = given.seconds <= 0,
        ) -> None:
            chosen = which == given.call if given.call is not None else (which + round_seed) % given.every == 0
            if not chosen or (time.monotonic() >= end and not first):
                return
            say(call=which, text=repr(call))
            try:
                say(refused=backends.check(call, backend, device))
            except Exception as error:
                text = "".join(traceback.format_exception(error))
                say(failed=f"{type(error).__name__}: {error}", traceback=text, call=which)
                if is_lost(device):
                    os._exit(1)  # hypothesis would catch an exception

        backends.one_round(operator, round_seed, visit)
        number += 1
        if time.monotonic() >= end and (given.seconds > 0 or number % len(tasks) == 0):
            break
    say(ended=True)


if __name__ == "__main__":
    main()
