"""The stages of training and a run of a few steps, which the checks repeat.

  warm-up   CSA attends every visible compressed key; the model learns from the text, and the indexer the attention
  sparse    CSA attends the compressed keys that the indexer selects; both go on learning

The model of windows alone has the same shape without compressors, and learns from the same batches in as many updates.
"""

from typing import Any

import torch
from dsa_lm.model import ALONE, validation_loss
from dsa_lm.parallel import Ranks
from dsa_lm.text import Corpus
from dsa_lm.training import Loop, Settings
from hopwell.torch.parallel import ContextShard, sum_gradients
from torch import Tensor

from v4_lm.model import HybridDecoder, Size


class HybridTrainer(Loop):
    """Trains a HybridDecoder. Its initial weights depend only on the seed and the size."""

    modes = {"warm-up": "warm-up", "sparse": "sparse"}  # noqa: RUF012, as in the base class

    def __init__(
        self,
        settings: Settings,
        corpus: Corpus,
        windows: tuple[Tensor, Tensor],
        ranks: Ranks = ALONE,
        name: str = "hybrid",
    ) -> None:
        self.name = name
        torch.manual_seed(settings.seed)
        super().__init__(settings, HybridDecoder(settings.size), corpus, windows, torch.device("cpu"), ranks)

    def lengths(self) -> dict[str, int]:
        warm_up = max(1, self.settings.steps // 5)
        return {"warm-up": warm_up, "sparse": self.settings.steps - warm_up}

    def validate_stage(self) -> None:
        loss = validation_loss(self.model, self.windows, self.modes[self.stage], self.ranks)
        self.validation.append({"model": self.name, "update": self.update, "loss": loss})

    def run_few(self, steps: int) -> tuple[list[float], list[Tensor]]:
        """Runs `steps` steps of each stage. Returns the losses of all, and the gradients after the first one."""
        losses: list[float] = []
        gradients: list[Tensor] = []
        for stage in self.modes:
            self.enter(stage)
            for _ in range(steps):
                record = self.train_step()
                losses += [record["loss"], record["indexer_loss"]]
                given = [p.grad for p in self.model.parameters() if p.grad is not None]
                gradients = gradients or [grad.clone() for grad in given]
        return losses, gradients


class ContextRanks(Ranks):
    """Ranks that share the tokens of every sequence, and have all weights each."""

    @classmethod
    def of(cls, group: Any, size: Size) -> "ContextRanks":
        multiple = max(size.csa_ratio, size.hca_ratio)  # a block of either ratio has one owner
        shard = ContextShard.zigzag(size.context, group, multiple=multiple)
        return cls(torch.distributed.get_rank(group), torch.distributed.get_world_size(group), shard)

    def distribute(self, model: HybridDecoder) -> None:
        model.share_context()

    def reduce_gradients(self, model: HybridDecoder) -> None:
        assert self.shard is not None
        sum_gradients(model.parameters(), self.shard.group)


def largest_difference(one: list[float], other: list[float]) -> float:
    """The largest relative difference of two lists of losses."""
    a, b = torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    return float(((a - b).abs() / a.abs().clamp(min=1e-6)).max())
