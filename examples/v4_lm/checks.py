"""What else the run checks: repeated bits, two ranks against one, and packed documents against one document a call."""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from dsa_lm.text import Corpus
from dsa_lm.training import Settings
from torch import Tensor

from v4_lm.model import HybridDecoder
from v4_lm.training import ContextRanks, HybridTrainer, largest_difference

STEPS = 3  # of each stage


def few_steps(settings: Settings, corpus: Corpus) -> HybridTrainer:
    """A trainer of the first steps, without validation."""
    return HybridTrainer(replace(settings, validate_every=10**9), corpus, (corpus.validation, corpus.validation))


def same_bits(settings: Settings, corpus: Corpus) -> bool:
    """Runs the first steps of both stages twice, and compares losses, gradients and weights bit for bit."""
    runs = [few_steps(settings, corpus) for _ in range(2)]
    (losses, gradients), (losses_again, gradients_again) = (run.run_few(STEPS) for run in runs)
    weights, weights_again = ([*run.model.parameters()] for run in runs)
    pairs = zip([*gradients, *weights], [*gradients_again, *weights_again], strict=True)
    return losses == losses_again and all(torch.equal(a, b) for a, b in pairs)


def _rank(rank: int, settings: Settings, corpus: Corpus, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ranks = ContextRanks.of(dist.group.WORLD, settings.size)
    windows = (corpus.validation, corpus.validation)
    trainer = HybridTrainer(replace(settings, validate_every=10**9), corpus, windows, ranks)
    if rank == 0:
        torch.save(trainer.run_few(STEPS), f"{folder}/result.pt")
    else:
        trainer.run_few(STEPS)
    dist.barrier()
    dist.destroy_process_group()


def two_ranks(settings: Settings, corpus: Corpus) -> tuple[float, float]:
    """Trains the first steps of both stages in two processes that share every sequence, and in one. Returns the largest
    relative differences of losses, and of the gradients of the first step by their norms.
    """
    losses, gradients = few_steps(settings, corpus).run_few(STEPS)
    small = replace(corpus, tokenizer=None)  # the ranks need the ids alone
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (settings, small, folder), nprocs=2)
        shared, shared_gradients = torch.load(Path(folder) / "result.pt")
    pairs = zip(gradients, shared_gradients, strict=True)
    of_gradients = torch.stack([(a - b).norm() / a.norm().clamp(min=1e-12) for a, b in pairs])
    return largest_difference(losses, shared), float(of_gradients.max())


@torch.no_grad()
def packed_documents(model: HybridDecoder, ids: Tensor) -> float:
    """Packs documents of several lengths, and returns the largest difference between their logits and the
    logits of one document a call, relative to the largest logit.
    """
    lengths = [model.size.context // 2, 1, 37, 0, 3, model.size.context]
    documents = ids[: sum(lengths)].split(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = model(torch.cat(documents)[None], "sparse", None, cu_seqlens)[0][0].split(lengths)
    alone = [model(document[None])[0][0] if len(document) else packed[3] for document in documents]
    given, expected = torch.cat(packed), torch.cat(alone)
    return float((given - expected).abs().max() / expected.abs().max())
