#!/usr/bin/env python3
"""Trains a language model with DeepSeek Sparse Attention on real text, quantises it to NVFP4 and generates with it.

All of its sparse attention uses Hopwell's operators (hopwell.torch). First the model learns with dense attention. Then
the indexer alone learns the attention distribution (the warm-up). Then both learn with sparse attention. The model is
compared with a dense twin (same initial weights, batches and updates) and a smoothed bigram model. At the end a table
states whether each claim held; the exit code is 0 only if all did.

The run writes metrics.json, loss.png, model.safetensors, tokenizer.json, sample.txt and checkpoint.pt to runs/NAME/. If
Hopwell has a CUDA backend for the machine, a larger model is trained on the GPU. Under torchrun the ranks share the
tokens of every sequence and, by FSDP2, the weights. The checkpoint is then a folder, and any number of ranks can resume
from it:

  torchrun --nproc-per-node 2 examples/train_dsa_lm.py
"""

import argparse
import sys

from dsa_lm.options import QUICK, ExperimentParser, at_least, run_experiment, seed

PROMPT = "def read_lines(path):\n"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = ExperimentParser("train_dsa_lm", __doc__, name="dsa_lm")
    parser.add_argument("--steps", type=at_least(1), help="updates of the main model (default: 1000; 300 with --large)")
    parser.add_argument(
        "--seed", type=seed, default=0, help="seed of initial weights, batches and the sample (default: 0)"
    )
    parser.add_argument("--prompt", default=PROMPT, help="text that the sample continues")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint in runs/NAME")
    parser.add_argument(
        "--timeout",
        type=at_least(1),
        default=600,
        metavar="SECONDS",
        help="under torchrun: how long a rank waits for the others before it ends with an error (default: 600)",
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help=QUICK)
    sizes.add_argument(
        "--large",
        action="store_true",
        help="about 100 million parameters and a context of 8192, on a GPU: minutes on an H200",
    )
    return parser.options(arguments)


def main(arguments: list[str] | None = None) -> int:
    return run_experiment(
        "train_dsa_lm",
        lambda: parse(arguments),
        "dsa_lm.experiment",
        "interrupted; --resume goes on from the last checkpoint",
    )


if __name__ == "__main__":
    sys.exit(main())
