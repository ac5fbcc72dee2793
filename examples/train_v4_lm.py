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
import sys

from dsa_lm.options import QUICK, ExperimentParser, at_least, run_experiment, seed


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = ExperimentParser("train_v4_lm", __doc__, name="v4_lm")
    parser.add_argument("--steps", type=at_least(5), help="updates of each model (default: 600; 200 with --quick)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of initial weights and batches (default: 0)")
    parser.add_argument("--quick", action="store_true", help=QUICK)
    return parser.options(arguments)


def main(arguments: list[str] | None = None) -> int:
    return run_experiment("train_v4_lm", lambda: parse(arguments), "v4_lm.experiment")


if __name__ == "__main__":
    sys.exit(main())
