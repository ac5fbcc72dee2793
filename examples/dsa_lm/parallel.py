"""The processes of a run: a single process, or the processes that torchrun started.

The processes share the tokens of every sequence (context parallelism, hopwell.torch.parallel), and the weights and the
optimizer (FSDP2). Each computes a part of the loss, and gradients are summed. So the model learns the same as in one
process.
"""

import json
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from hopwell.torch.parallel import ContextShard, ParallelDSA
from torch import Tensor

from dsa_lm.report import DemoError, write_atomically


class Ranks:
    """The ranks of a run. Without a shard, there is one process with all tokens."""

    def __init__(self, rank: int = 0, count: int = 1, shard: ContextShard | None = None) -> None:
        self.rank, self.count, self.shard = rank, count, shard

    @classmethod
    def join(cls, context: int, device: torch.device, seconds: int) -> Self:
        """Joins the processes that torchrun started, for sequences of `context` tokens.

        No process waits longer than `seconds` for another.
        """
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
        shard = ContextShard.zigzag(context, dist.group.WORLD, device)
        return cls(dist.get_rank(), dist.get_world_size(), shard)

    def leave(self) -> None:
        if self.shard is not None:
            dist.barrier()  # if a rank leaves while another still sends to it, the other rank fails
            dist.destroy_process_group()

    def part(self, x: Tensor) -> Tensor:
        """x [b, s] → the columns of this rank's tokens."""
        return x if self.shard is None else x.to(self.shard.positions.device)[:, self.shard.positions]

    def sum(self, *numbers: float) -> list[float]:
        """Sums each number over the ranks."""
        if self.shard is None:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self.shard.positions.device)
        dist.all_reduce(total)
        return total.tolist()

    def distribute(self, model: Any) -> None:
        """Gives the model's blocks attention over shards, and each rank a part of the weights."""
        if self.shard is None:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.shard.positions.device.type, (self.count,))
        for block in model.blocks:
            block.attention = ParallelDSA(block.attention, block.attention.indexer)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def reduce_gradients(self, model: Any) -> None:
        """Sums gradients over the ranks after a backward. FSDP2 has done so."""


def launched() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


# ---- weights. Each rank has a part (these imports take seconds, so a run of one process avoids them)


def parts(model: torch.nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """Returns this rank's parts of the weights and of the optimizer's moments, also for parameters without updates."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    for group in optimizer.param_groups:
        for p in group["params"]:
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state.setdefault(p, {"step": torch.zeros((), device=p.device), **moments})
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def set_parts(
    model: torch.nn.Module, optimizer: torch.optim.AdamW, weights: dict[str, Any], moments: dict[str, Any]
) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict

    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def whole(model: torch.nn.Module, weights: dict[str, Any]) -> dict[str, Tensor]:
    """Sets a model's weights from their parts, and returns the whole weights on every rank."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    set_model_state_dict(model, weights)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


# ---- checkpoints, which any number of ranks can read


def save(folder: Path, tensors: dict[str, Any], progress: dict[str, Any], rank: int) -> None:
    """Writes the checkpoint to a new folder, and then replaces `folder` with it."""
    import torch.distributed.checkpoint as dcp

    new = folder.with_name(folder.name + ".new")
    if rank == 0:
        shutil.rmtree(new, ignore_errors=True)
    dist.barrier()
    try:
        dcp.save(tensors, checkpoint_id=new)
    except dcp.api.CheckpointException as error:
        raise DemoError(f"cannot write {folder}: {_reason(error)}") from None
    if rank == 0:
        write_atomically(new / "progress.json", json.dumps(progress).encode())
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    dist.barrier()


def _reason(error: Any) -> str:
    """Returns the message of the first rank that failed."""
    failure = next((failure[0] for failure in error.failures.values()), error)
    return (str(failure) or type(failure).__name__).splitlines()[0]


def load_progress(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "progress.json").read_text())
    except FileNotFoundError:
        raise DemoError(f"nothing to resume: {folder} does not exist") from None
    except (OSError, ValueError) as error:
        raise DemoError(f"cannot resume from {folder}: {str(error).splitlines()[0]}") from None


def load(folder: Path, tensors: dict[str, Any]) -> None:
    """Loads the saved tensors into `tensors`, which have the same whole shapes. This rank may have any part of each."""
    import torch.distributed.checkpoint as dcp

    try:
        dcp.load(tensors, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        raise DemoError(f"cannot resume from {folder}: {_reason(error)}") from None
