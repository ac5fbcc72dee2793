"""The overlap of the selections of neighbouring queries, in a model that was trained with sparse attention.

    python examples/train_dsa_lm.py --large --name large --text FILES   trains one on a GPU
    python benchmarks/selection_overlap.py runs/large --text FILES      its layers, over consecutive windows of text

A kernel that processes g neighbouring queries together gathers the keys of their union once. Compared with separate
queries it reads the share |union| / Σ|selection| of the bytes, which is between 1/g (equal selections) and 1. The
quantiles are over groups of queries whose visible keys are at least twice topk, because a query with fewer keys has
hardly a choice.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import safetensors.torch
import torch
from hopwell.bench import record
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from dsa_lm import model as network
from dsa_lm import text

GROUPS = (2, 4, 8)
QUANTILES = (0.1, 0.5, 0.9)


def load(folder: Path, device: torch.device) -> tuple[network.Decoder, Tokenizer]:
    weights = folder / "model.safetensors"
    with safetensors.safe_open(weights, "pt") as file:
        size = network.Size(**json.loads(file.metadata()["size"]))
    model = network.Decoder(size).to(device)
    model.load_state_dict(safetensors.torch.load_file(weights, str(device)))
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def union_shares(selected: Tensor, group: int, topk: int) -> Tensor:
    """|union| / Σ|selection| of each group of neighbours; selected is int32 [s, topk], −1 if invalid."""
    s = len(selected)
    chosen = torch.zeros(s, s + 1, dtype=torch.bool, device=selected.device)
    chosen.scatter_(1, torch.where(selected < 0, s, selected).long(), True)
    chosen = chosen[:, :s].reshape(s // group, group, s)
    shares = chosen.any(1).sum(1) / chosen.sum((1, 2))
    return shares[-(-2 * topk // group) :]


@torch.no_grad()
def measure(model: network.Decoder, windows: Tensor, topk: int) -> list[dict[str, object]]:
    for block in model.blocks:
        block.attention.indexer.topk = topk
    shares: dict[tuple[int, int], list[Tensor]] = {}
    for tokens in windows:
        model(tokens[None], "sparse")
        for layer, block in enumerate(model.blocks):
            for group in GROUPS:
                found = union_shares(block.attention.selected[0], group, topk)
                shares.setdefault((layer, group), []).append(found.float())
    results: list[dict[str, object]] = []
    for (layer, group), parts in shares.items():
        values = torch.cat(parts)
        quantiles = values.quantile(torch.tensor(QUANTILES, device=values.device)).tolist()
        print(f"{topk:6} {layer:6} {group:6}   " + "  ".join(f"{q:.3f}" for q in quantiles), flush=True)
        results.append(
            {
                "topk": topk,
                "layer": layer,
                "queries": group,
                "union_share": dict(zip(QUANTILES, quantiles, strict=True)),
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a folder that examples/train_dsa_lm.py wrote")
    parser.add_argument("--text", nargs="+", type=Path, default=[], metavar="PATH", help="default: the run's default")
    parser.add_argument(
        "--topk", action="append", type=int, help="keys to select; may be repeated (default: the model's)"
    )
    parser.add_argument("--s", type=int, help="tokens of a window; default: the model's context")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record to FILE")
    options = parser.parse_args()
    model, tokenizer = load(options.run, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    s = options.s or model.size.context
    topks = options.topk or [model.size.topk]
    if s % max(GROUPS) or max(topks) * 2 >= s:
        parser.error(f"argument --s: expected a multiple of {max(GROUPS)} above twice topk {max(topks)}; got {s}")
    _, validation = text.read_split(options.text)
    ids = torch.tensor([i for encoding in tokenizer.encode_batch(validation) for i in encoding.ids])
    if len(ids) <= s:
        parser.error(f"argument --text: expected more than {s} tokens of validation text; got {len(ids)}")
    windows, _ = text.validation_windows(ids, s, options.windows)
    print("  topk  layer  queries  |union| / sum of selections, quantiles " + ", ".join(map(str, QUANTILES)))
    results = [result for topk in topks for result in measure(model, windows.to(model.head.weight.device), topk)]
    record.write(options.json, results, s=s, windows=len(windows), run=options.run.name)


if __name__ == "__main__":
    main()
