"""The ranks of test_parallel.py. Each line of standard input is a launch, as JSON: [task, ranks, folder].

The program imports PyTorch once and forks the ranks of each launch. When all have ended, it prints their exit codes and
what they wrote to standard error: [[code, text], …].
"""

import copy
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hopwell.torch import nn
from hopwell.torch.parallel import (
    ContextShard,
    ParallelCSA,
    ParallelDSA,
    ParallelHCA,
    shard_heads,
    sum_gradients,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

B, D_MODEL, STEPS = 2, 32, 6
MODES: tuple[nn.Mode, ...] = ("sparse", "warm-up", "dense")  # modes of the steps, in turn
TIMEOUT = {"die": timedelta(seconds=5)}  # other tasks: longer than a busy machine needs to start a rank
LONGEST = 150  # seconds of a launch


class Model(torch.nn.Module):
    def __init__(self, heads: dist.ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        mla = nn.SparseMLA(D_MODEL, 4, d_v=16, d_rope=8, d_nope=8, d_head=8, q_lora_rank=12, attn_sink=True)
        indexer = nn.LightningIndexer(D_MODEL, topk=5, h_index=2, d_index=16, d_rope=8, q_lora_rank=12)
        shard_heads(mla, heads)
        self.attention = ParallelDSA(mla, indexer, heads)

    def forward(self, x: torch.Tensor, shard: ContextShard, mode: nn.Mode) -> tuple[torch.Tensor, torch.Tensor]:
        y, loss = self.attention(x, shard, mode)
        assert (loss is None) == (mode == "dense")
        assert (self.attention.selected is None) == (mode != "sparse")
        return x + y, x.new_zeros(()) if loss is None else loss


def train(scenario: str, folder: Path, s: int, first: int, last: int) -> dict[str, object]:
    """Trains steps `first` … `last` − 1. The scenario "alone" trains this rank without the others.

    With FSDP, training resumes from the folder's checkpoint if `first` is not 0, and saves it if `last` is not the end.
    """
    world = dist.group.WORLD
    context, heads = {"alone": (None, None), "heads": (None, world)}.get(scenario, (world, None))
    model, fsdp = Model(heads), scenario == "fsdp"
    if fsdp:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if first:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder / "checkpoint")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    shard = ContextShard.zigzag(s, context)
    losses = []
    for step in range(first, last):
        x = torch.randn(B, s, D_MODEL, generator=torch.Generator().manual_seed(step))
        mine = shard.split(x).requires_grad_()
        y, indexer_loss = model(mine, shard, MODES[step % len(MODES)])
        loss = (y - shard.split(x.roll(1, 1))).square().sum() / x.numel()
        optimizer.zero_grad()
        (loss + indexer_loss).backward()
        if not fsdp:
            sum_gradients(model.parameters(), context)
        optimizer.step()
        both = torch.stack([loss.detach(), indexer_loss.detach()])
        if context is not None:
            dist.all_reduce(both, group=context)
        losses.append(both.tolist())
        if step == first:
            at_first = {"first_y": y.detach(), "first_grad": mine.grad}
    if fsdp and last < STEPS:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder / "checkpoint")
    return {"losses": losses, "positions": shard.positions, **at_first}


def packed(context: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """A forward over documents of 7, 0 and 13 tokens and padding. Two ranks share both documents."""
    model, shard = Model(None), ContextShard.zigzag(22, context)
    x = shard.split(torch.randn(1, 22, D_MODEL, generator=torch.Generator().manual_seed(0)))
    y, loss = model.attention(x, shard, cu_seqlens=torch.tensor([0, 7, 7, 20]))
    if context is not None:
        dist.all_reduce(loss, group=context)
    return {"y": y.detach(), "loss": loss.detach(), "positions": shard.positions}


def data_parallel(rank: int) -> dict[str, torch.Tensor]:
    """FSDP2 with sequences of each rank: its gradients are the mean of the gradients without it."""
    options: dict[str, int] = {"d_rope": 8, "q_lora_rank": 12}
    torch.manual_seed(0)
    mla = nn.SparseMLA(D_MODEL, 4, d_v=16, d_nope=8, d_head=8, **options)
    dsa = nn.DSA(mla, nn.LightningIndexer(D_MODEL, topk=5, h_index=2, d_index=16, **options))
    x, sharded = torch.randn(B, 9, D_MODEL) + rank, copy.deepcopy(dsa)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    register_fsdp_forward_method(sharded, "extend")
    gradients = []
    for model in (dsa, sharded):
        with torch.no_grad():
            generated = model.extend(x[:1], nn.KeyCache(9))
        y, loss = model(x)
        torch.testing.assert_close(generated, y[:1])
        (y.square().mean() + loss).backward()
        gradients.append([p.grad for p in model.parameters()])
    for gradient in gradients[0]:
        dist.all_reduce(gradient)
    alone = torch.cat([gradient.flatten() for gradient in gradients[0]]) / dist.get_world_size()
    return {"alone": alone, "fsdp": torch.cat([gradient.full_tensor().flatten() for gradient in gradients[1]])}


HYBRID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the layer, and of the call
    "window": ({"ratio": 0, "window": 9}, {}),
    "HCA": ({"ratio": 3}, {}),
    "CSA": ({"ratio": 4}, {"mode": "sparse"}),
    "CSA warm-up": ({"ratio": 4, "window": 30}, {"mode": "warm-up"}),
}


def hybrid(
    kind: str, s: int, context: dist.ProcessGroup | None, heads: dist.ProcessGroup | None = None
) -> dict[str, torch.Tensor]:
    """A step of a layer of DeepSeek-V4. If a window is longer than a piece, the halo has several owners."""
    options, call = HYBRID[kind]
    torch.manual_seed(0)
    sizes = {"window": 5, "d": 16, "d_rope": 8, "q_rank": 12, "o_groups": 2, "o_rank": 6, **options}
    indexer = {"topk": 3, "h_index": 2, "d_index": 12} if "mode" in call else {}
    alone = (nn.CSA if indexer else nn.HCA)(D_MODEL, 4, **indexer, **sizes)
    for parameter in alone.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.4)
    if heads is not None:
        shard_heads(alone, heads)
    layer = ParallelCSA(alone, heads) if isinstance(alone, nn.CSA) else ParallelHCA(alone, heads)
    shard = ContextShard.zigzag(s, context, multiple=max(layer.ratio, 1))
    given = torch.randn(2, B, s, D_MODEL, generator=torch.Generator().manual_seed(1))
    x = shard.split(given[0]).requires_grad_()
    result = layer(x, shard, **call)
    y, loss = result if isinstance(result, tuple) else (result, x.new_zeros(()))
    ((y * shard.split(given[1])).sum() + loss).backward()
    sum_gradients(layer.parameters(), context)
    loss = loss.detach()
    if context is not None:
        dist.all_reduce(loss, group=context)
    shared = {name: p.grad for name, p in layer.named_parameters() if heads is None or "compressor" in name}
    found = {"y": y.detach(), "x": x.grad, "loss": loss, "positions": shard.positions}
    return {**found, **{name: grad for name, grad in shared.items() if grad is not None}}


def message(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def compare(rank: int, folder: Path) -> dict[str, object]:
    world, result = dist.group.WORLD, {}
    for s in (16, 13, 1):  # with 1 token the other rank has none
        for scenario in ("alone", "context", "again", "heads", "fsdp"):
            result[scenario, s] = train(scenario, folder, s, 0, STEPS)
    result["data parallel"] = data_parallel(rank)
    result["packed"] = packed(None), packed(world)
    for kind in HYBRID:
        for s in (48, 29, 7):
            result[kind, s] = hybrid(kind, s, None), hybrid(kind, s, world)
        result[kind, "heads"] = hybrid(kind, 29, None), hybrid(kind, 29, None, world)
    csa = ParallelCSA(nn.CSA(D_MODEL, 4, d=16, d_rope=8, o_groups=2, d_index=12))
    unaligned = ContextShard.zigzag(17, world)
    result["multiple"] = message(lambda: csa(unaligned.split(torch.zeros(B, 17, D_MODEL)), unaligned))
    result["s"] = message(lambda: ContextShard.zigzag(8 + rank, world))
    result["shape"] = message(lambda: ContextShard.zigzag(8, world).split(torch.zeros(B + rank, 8, D_MODEL)))
    return result


def run(task: str, rank: int, ranks: int, folder: Path) -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{task}-{ranks}"), ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT.get(task, timedelta(seconds=60))
    )
    if task == "compare":
        torch.save(compare(rank, folder), folder / f"compare-{rank}.pt")
        train("fsdp", folder / "by-two", 16, 0, STEPS // 2)
    elif task == "resume-by-one":
        torch.save(train("fsdp", folder / "by-two", 16, STEPS // 2, STEPS), folder / f"{task}.pt")
        train("fsdp", folder / "by-one", 16, 0, STEPS // 2)
    elif task == "resume-by-two":
        result = train("fsdp", folder / "by-one", 16, STEPS // 2, STEPS)
        if rank == 0:
            torch.save(result, folder / f"{task}.pt")
    elif task == "die":
        shard = ContextShard.zigzag(16, dist.group.WORLD)
        if rank == 1:
            os._exit(3)
        Model(None)(shard.split(torch.zeros(B, 16, D_MODEL)), shard)
    dist.barrier()  # if a rank leaves while another still sends to it, the other rank fails
    dist.destroy_process_group()


def fork(task: str, rank: int, ranks: int, folder: Path) -> tuple[int, Path]:
    """Starts a rank. Returns its process and the file of its standard error."""
    errors = folder / f"errors-{task}-{rank}"
    child = os.fork()
    if child != 0:
        return child, errors
    code = 1
    try:
        with errors.open("w") as file:
            os.dup2(file.fileno(), 2)
        run(task, rank, ranks, folder)
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(code)


def ended(child: int, until: float) -> int:
    """Waits for a rank, and kills it if it takes longer. Returns its exit code."""
    while True:
        process, status = os.waitpid(child, os.WNOHANG)
        if process != 0:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def main() -> None:
    for line in sys.stdin:
        task, ranks, folder = json.loads(line)
        started = [fork(task, rank, ranks, Path(folder)) for rank in range(ranks)]
        until = time.monotonic() + LONGEST
        codes = [ended(child, until) for child, _ in started]
        print(
            json.dumps([[code, errors.read_text()] for code, (_, errors) in zip(codes, started, strict=True)]),
            flush=True,
        )


if __name__ == "__main__":
    main()
