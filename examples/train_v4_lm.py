#!/usr/bin/env python3
"""Trains a language model with DeepSeek-V4's hybrid attention on real text, beside a model with window attention alone.

The layers are, in turn: attention over a window alone; CSA, which adds the compressed keys that an indexer selects; and
HCA, which adds every compressed key of a larger ratio. First CSA attends every visible compressed key, and its indexer
learns the attention (the warm-up). Then it attends the selected keys. The second model has windows alone in every
layer, and gets the same batches and as many updates.

At the end a table states whether each claim held: a lower loss than windows alone, the recall of the indexer's
selection, the same bits twice, two ranks within 1e-4 of one, packed documents as one by one. The exit code is 0 only if
all did. The run writes runs/NAME/metrics.json.
"""

import argparse
import os
import sys
from pathlib import Path

from dsa_lm.options import Parser, at_least, seed
from dsa_lm.report import DemoError, console


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="train_v4_lm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        default=[],
        metavar="PATH",
        help="files or folders of UTF-8 text (default: the Python standard library's sources)",
    )
    parser.add_argument("--steps", type=at_least(5), help="updates of each model (default: 600; 200 with --quick)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of initial weights and batches (default: 0)")
    parser.add_argument("--name", default="v4_lm", help="results go to runs/NAME (default: v4_lm)")
    parser.add_argument(
        "--quick", action="store_true", help="a smaller model on a part of the text: seconds instead of minutes"
    )
    options = parser.parse_args(arguments)
    if Path(options.name).name != options.name:
        parser.error(f"argument --name: expected a plain name; got {options.name!r}")
    return options


def main(arguments: list[str] | None = None) -> int:
    # PyTorch's threads spin while they wait, and take processor time from the library's threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        options = parse(arguments)
        from v4_lm.experiment import run  # after the line above, because OpenMP reads it when PyTorch is imported

        return 0 if run(options, console()) else 1
    except DemoError as error:
        reason = str(error)
    except KeyboardInterrupt:
        reason = "interrupted"
    print(f"train_v4_lm: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
