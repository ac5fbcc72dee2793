"""The stages of training, their schedule and their checkpoints.

  dense       the main model learns with attention over all keys; sparse training begins from it, as in the report
  warm-up     the main model is frozen; the indexer learns the attention distribution over all keys
  sparse      attention over the selected keys; the main model learns from the text, the indexer from its own loss
  dense twin  the model after `dense` gets the updates of `sparse` on the same batches, with dense attention

So the twin has the same initial weights, the same batches and the same number of updates. It needs no warm-up, because
the warm-up changes only the indexer.
"""

import io
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from hopwell.torch.nn import Mode
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from dsa_lm import parallel
from dsa_lm.model import ALONE, Decoder, LanguageModel, Size, evaluate
from dsa_lm.parallel import Ranks
from dsa_lm.report import DemoError, Reporter, write_atomically
from dsa_lm.text import Corpus, batch

MODES: dict[str, Mode] = {"dense": "dense", "warm-up": "warm-up", "sparse": "sparse", "dense twin": "dense"}


@dataclass(frozen=True)
class Settings:
    size: Size
    steps: int = 1000
    sequences: int = 4
    seed: int = 0
    learning_rate: float = 3e-3
    validate_every: int = 200
    checkpoint_every: int = 100

    def lengths(self) -> dict[str, int]:
        """Returns the number of steps of each stage.

        The main model gets `steps` updates, the first sixth of them dense; the warm-up of the indexer is extra.
        """
        dense = max(1, self.steps // 6)
        return {
            "dense": dense,
            "warm-up": max(1, self.steps // 20),
            "sparse": self.steps - dense,
            "dense twin": self.steps - dense,
        }

    def rate(self, update: int) -> float:
        """Returns the factor of the learning rate: a short linear rise, then a cosine down to a twentieth."""
        rise = min(1.0, (update + 1) / min(30, self.steps / 4))
        return rise * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * update / self.steps)))


def make_optimizer(model: LanguageModel, settings: Settings) -> torch.optim.AdamW:
    """AdamW. The embedding and the head have a higher learning rate; only the matrices between them have weight
    decay.
    """
    rate, indexer = settings.learning_rate, model.indexer_parameters()
    special = {id(p) for p in [*indexer, model.embedding.weight, model.head.weight]}
    rest = [p for p in model.parameters() if id(p) not in special]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "lr": rate, "weight_decay": 0.1},
        {"params": [p for p in rest if p.ndim < 2], "lr": rate},
        {"params": [model.embedding.weight], "lr": 10 * rate},
        {"params": [model.head.weight], "lr": 3 * rate},
        {"params": indexer, "lr": rate},
    ]
    for group in groups:
        group["peak"] = group["lr"]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


class Loop:
    """Trains one model in stages: the steps, their records and their batches, which depend only on the step.

    Attributes:
        modes: for each stage, the mode of the model.
        frozen: the stages in which only the indexer learns. They have batches of their own.
    """

    modes: ClassVar[Mapping[str, str]]
    frozen: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        settings: Settings,
        model: LanguageModel,
        corpus: Corpus,
        windows: tuple[Tensor, Tensor],
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self.settings, self.corpus, self.windows, self.device, self.ranks = settings, corpus, windows, device, ranks
        self.model = model.to(device)
        ranks.distribute(self.model)
        self.optimizer = make_optimizer(self.model, settings)
        self.stage, self.step, self.update = next(iter(self.modes)), 0, 0
        self.steps: list[dict[str, Any]] = []
        self.validation: list[dict[str, Any]] = []

    def lengths(self) -> dict[str, int]:
        """Returns the number of steps of each stage."""
        raise NotImplementedError

    def records(self) -> list[dict[str, Any]]:
        """Returns the list that gets the records of this stage's steps."""
        return self.steps

    def enter(self, stage: str) -> None:
        """Begins a stage."""
        self.stage, self.step = stage, 0

    def save(self) -> None:
        """Writes a checkpoint, if the training has any."""

    def begin(self) -> None:
        """Is called before the first step of the first stage."""

    def validate_stage(self) -> None:
        """Is called after every `validate_every` updates and after the last one."""

    def run_stages(self, reporter: Reporter, on_step: Callable[[Any], None] | None = None) -> None:
        """Runs the remaining stages; calls `on_step` after each step."""
        lengths = self.lengths()
        names = list(lengths)
        if not self.steps:
            self.begin()
        left = names[names.index(self.stage) :]
        reporter.expect(sum(lengths[name] for name in left) - self.step)
        for name in left:
            if name != self.stage:
                self.enter(name)
                self.save()
            reporter.begin(name, self.step, lengths[name])
            try:
                while self.step < lengths[name]:
                    record = self.train_step()
                    reporter.step(self.step, record)
                    if self.step % self.settings.checkpoint_every == 0:
                        self.save()
                    if on_step:
                        on_step(self)
            finally:
                reporter.end()
        self.save()

    def train_step(self) -> dict[str, Any]:
        began = time.perf_counter()
        settings, frozen = self.settings, self.stage in self.frozen
        indexer = set(self.model.indexer_parameters())
        main = [p for p in self.model.parameters() if p not in indexer]
        for parameter in main:
            parameter.requires_grad_(not frozen)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * (1.0 if frozen else settings.rate(self.update))
        number = settings.steps + self.step if frozen else self.update
        tokens, following = batch(self.corpus.train, settings.sequences, settings.size.context, settings.seed, number)
        mine, following = self.ranks.part(tokens.to(self.device)), self.ranks.part(following.to(self.device))
        logits, indexer_loss = self.model(mine, self.modes[self.stage], self.ranks.shard)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="sum")
        loss = loss / tokens.numel()  # this rank's part of the mean
        self.optimizer.zero_grad()
        (indexer_loss if frozen else loss + indexer_loss).backward()
        self.ranks.reduce_gradients(self.model)
        clip_grad_norm_(main, 1.0)
        clip_grad_norm_(indexer, 1.0)
        self.optimizer.step()

        self.step += 1
        self.update += not frozen
        losses = self.ranks.sum(loss.item(), indexer_loss.item())
        records = self.records()
        record = {
            "step": len(records) + 1,
            "stage": self.stage,
            "update": self.update,
            "loss": losses[0],
            "indexer_loss": losses[1],
        }
        record["tokens_per_s"] = tokens.numel() / (time.perf_counter() - began)
        records.append(record)
        if not math.isfinite(record["loss"] + record["indexer_loss"]):
            raise DemoError(f"the loss is no longer finite at step {record['step']}")
        done = self.update == settings.steps
        if not frozen and (done or self.update % settings.validate_every == 0):
            self.validate_stage()
        return record


class Trainer(Loop):
    """The stages of DeepSeek Sparse Attention.

    `state()` holds everything that is needed to continue. So an interrupted and resumed run computes the same as an
    uninterrupted run.
    """

    modes = MODES
    frozen = ("warm-up",)
    network: ClassVar[type[Decoder]] = Decoder

    def __init__(
        self,
        settings: Settings,
        corpus: Corpus,
        windows: tuple[Tensor, Tensor],
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        torch.manual_seed(settings.seed)
        super().__init__(settings, self.network(settings.size), corpus, windows, device, ranks)
        self.digest = corpus.digest()
        self.fork: dict[str, Any] = {}
        self.trained: dict[str, Any] = {}
        self.dense_twin: list[dict[str, Any]] = []
        self.checkpoint: Path | None = None

    def lengths(self) -> dict[str, int]:
        return self.settings.lengths()

    def records(self) -> list[dict[str, Any]]:
        return self.dense_twin if self.stage == "dense twin" else self.steps

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        progress = {name: getattr(self, name) for name in ("stage", "step", "update", "fork", "trained")}
        history = {name: getattr(self, name) for name in ("steps", "dense_twin", "validation")}
        own = {"settings": asdict(self.settings), "text": self.digest}
        return own | progress | history | {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, path: Path | None = None) -> None:
        path = path or self.checkpoint
        assert path is not None
        if self.ranks.shard is not None:
            return self.save_parts(path.with_suffix(""))
        data = io.BytesIO()
        torch.save(self.state(), data)
        write_atomically(path, data.getvalue())

    def load(self, path: Path) -> None:
        if self.ranks.shard is not None:
            return self.load_parts(path.with_suffix(""))
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except FileNotFoundError:
            raise DemoError(f"nothing to resume: {path} does not exist") from None
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DemoError(f"cannot resume from {path}: {reason}") from None
        if not isinstance(state, dict) or state.keys() != self.state().keys():
            raise DemoError(f"cannot resume from {path}: it is no checkpoint of this demo")
        self.refuse_another_run(path, state)
        self.set_weights(state)
        for name in ("stage", "step", "update", "fork", "trained", "steps", "dense_twin", "validation"):
            setattr(self, name, state[name])

    def refuse_another_run(self, path: Path, state: dict[str, Any]) -> None:
        for name, mine in (("settings", asdict(self.settings)), ("text", self.digest)):
            if state[name] != mine:
                raise DemoError(f"cannot resume from {path}: it was written with other {name}")

    def weights(self) -> dict[str, Any]:
        """Returns the state of the model and the optimizer. With several ranks it is this rank's part of a
        checkpoint.
        """
        if self.ranks.shard is None:
            return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return parallel.parts(self.model, self.optimizer)

    def set_weights(self, state: dict[str, Any]) -> None:
        if self.ranks.shard is None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(_copy(state["optimizer"]))
        else:
            parallel.set_parts(self.model, self.optimizer, state["model"], _copy(state["optimizer"]))

    def save_parts(self, folder: Path) -> None:
        names = ("stage", "step", "update", "steps", "dense_twin", "validation")
        progress = {"settings": asdict(self.settings), "text": self.digest} | {n: getattr(self, n) for n in names}
        tensors = self.weights()
        if self.fork:
            progress["update of the fork"] = self.fork["update"]
            tensors["fork"] = {name: self.fork[name] for name in ("model", "optimizer")}
        if self.trained:
            tensors["trained"] = self.trained
        parallel.save(folder, tensors, progress | {"parts": list(tensors)}, self.ranks.rank)

    def load_parts(self, folder: Path) -> None:
        progress = parallel.load_progress(folder)
        self.refuse_another_run(folder, progress)
        parts = progress.pop("parts")
        tensors = self.weights()
        if "fork" in parts:
            tensors["fork"] = _copy(self.weights())
        if "trained" in parts:
            tensors["trained"] = _copy(tensors["model"])
        parallel.load(folder, tensors)
        self.set_weights(tensors)
        if "fork" in parts:
            self.fork = tensors["fork"] | {"update": progress.pop("update of the fork")}
        self.trained = tensors.get("trained", {})
        for name in ("stage", "step", "update", "steps", "dense_twin", "validation"):
            setattr(self, name, progress[name])

    def leave(self) -> None:
        """Ends the distributed part of the run: every rank gets the whole trained weights."""
        if self.ranks.shard is not None:
            self.trained = parallel.whole(self.model, self.trained)
            self.ranks.leave()

    # ---- stages

    def run(self, checkpoint: Path, reporter: Reporter, on_step: Callable[["Trainer"], None] | None = None) -> None:
        """Runs the remaining stages with checkpoints; calls `on_step` after each step."""
        self.checkpoint = checkpoint
        self.run_stages(reporter, on_step)

    def begin(self) -> None:
        self.validate("sparse", "dense")

    def enter(self, stage: str) -> None:
        """Begins a stage. At the end of `dense` it keeps the weights; the twin begins with them."""
        if self.stage == "dense":
            self.validate("dense twin", "dense")
            self.fork = _copy(self.weights() | {"update": self.update})
        if stage == "dense twin":
            self.trained = _copy(self.weights()["model"])
            self.set_weights(self.fork)
            self.update = self.fork["update"]
        super().enter(stage)

    def validate_stage(self) -> None:
        self.validate("dense twin" if self.stage == "dense twin" else "sparse", MODES[self.stage])

    def validate(self, model: str, mode: Mode) -> float:
        loss, read = evaluate(self.model, self.windows, mode, self.ranks)
        self.validation.append({"model": model, "update": self.update, "loss": loss, "keys_read": read})
        return loss


def _copy(state: Any) -> Any:
    """Copies a state_dict, because later steps overwrite its tensors."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_copy(value) for value in state]
    return state
