"""Training with a sequence's tokens distributed over GPUs: tokens/s of the demo's model, compared with one GPU.

    python benchmarks/context_parallel.py --json one.json                              one GPU
    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --beside one.json       two, and their ratio

Runs updates of sparse training on random tokens, with one sequence of --s tokens: forward, losses, backward, optimizer.
Under torchrun the ranks share the sequence (hopwell.torch.parallel, zig-zag) and the weights (FSDP2).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from hopwell.bench import record
from tokenizers import Tokenizer, models

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from dsa_lm import model as network
from dsa_lm import parallel
from dsa_lm.text import Corpus
from dsa_lm.training import Settings, Trainer


def update_seconds(trainer: Trainer, device: torch.device, warm: int, timed: int) -> list[float]:
    trainer.stage = "sparse"
    seconds = []
    for _ in range(warm + timed):
        began = time.perf_counter()
        trainer.train_step()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds[warm:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--s", type=int, default=65536, help="tokens of the sequence (default: 65536)")
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--updates", type=int, default=5, help="updates to time, after two warm-up updates")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="one GPU's record, to print the ratio")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record to FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device; got none")
    launched = parallel.launched()
    device = torch.device("cuda", torch.distributed.get_node_local_rank() if launched else 0)
    torch.cuda.set_device(device)
    size = replace(network.LARGE, context=options.s, topk=options.topk, layers=options.layers)
    ids = torch.randint(size.vocabulary, (4 * options.s,), generator=torch.Generator().manual_seed(0))
    corpus = Corpus(ids, ids, Tokenizer(models.BPE()), len(ids), 1)
    ranks = parallel.Ranks.join(options.s, device, 120) if launched else parallel.Ranks()
    windows = (ids[None, : options.s], ids[None, 1 : options.s + 1])
    trainer = Trainer(Settings(size, sequences=1, learning_rate=1e-3), corpus, windows, device, ranks)
    seconds = median(update_seconds(trainer, device, 2, options.updates))
    result = {
        "gpus": ranks.count,
        "settings": {"s": options.s, "topk": options.topk, "layers": options.layers},
        "tokens_per_second": options.s / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device),
    }
    if ranks.rank == 0:
        line = f"{ranks.count} GPU(s), s {options.s}: {result['tokens_per_second']:,.0f} tokens/s"
        if options.beside:
            one = json.loads(options.beside.read_text())["results"][0]
            if one["settings"] != result["settings"]:
                parser.error(f"argument --beside: expected a record of {result['settings']}; got {one['settings']}")
            result["times_one_gpu"] = result["tokens_per_second"] / one["tokens_per_second"]
            line += f", {result['times_one_gpu']:.2f} times one's"
        print(f"{line}; {result['peak_bytes'] / 2**30:.1f} GiB on this GPU")
        if options.json:
            record.write(options.json, [result])
    ranks.leave()


if __name__ == "__main__":
    main()
