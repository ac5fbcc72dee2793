"""Real text: files, their split, a byte-pair tokenizer, batches, and the bigram model as the baseline."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from dsa_lm.report import DemoError

END_OF_FILE = "<|endoffile|>"
# Folders without useful text: installed packages, tests (absent on some machines), and generated tables.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}


@dataclass
class Corpus:
    """Token ids (END_OF_FILE before every file) of both splits, and their tokenizer and number of files."""

    train: Tensor
    validation: Tensor
    tokenizer: Tokenizer
    validation_bytes: int
    files: int

    def digest(self) -> str:
        """Identifies the corpus, so that a run resumes only with the text that it began with."""
        ids = torch.cat([self.train, self.validation]).to(torch.int32)
        return hashlib.sha256(ids.numpy().tobytes()).hexdigest()


def find_files(paths: list[Path]) -> list[tuple[str, Path]]:
    """Returns the text files below `paths`, each with its name relative to its path.

    The default is the standard library.
    """
    found = []
    for root in paths or [Path(sysconfig.get_paths()["stdlib"])]:
        if root.is_file():
            found.append((root.name, root))
        elif root.is_dir():
            pattern = "*" if paths else "*.py"
            names = [p for p in sorted(root.rglob(pattern)) if p.is_file()]
            found += [
                (str(p.relative_to(root)), p) for p in names if paths or not SKIPPED & set(p.relative_to(root).parts)
            ]
        else:
            raise DemoError(f"cannot read text: {root}: no such file or directory")
    return found


def read_split(paths: list[Path], max_bytes: int | None = None) -> tuple[list[str], list[str]]:
    """Returns training and validation texts, split by file: a hash of the name sends every twentieth file to
    validation.

    A single file is split at nine tenths: its last tenth is the validation text. With max_bytes, files are read in the
    order of the hash until this many bytes have been read.
    """
    files = [(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16), path) for name, path in find_files(paths)]
    train: list[str] = []
    validation: list[str] = []
    size = 0
    for number, path in sorted(files) if max_bytes else files:
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            if path not in paths:  # another file in a folder of texts
                continue
            raise DemoError(f"cannot read text: {path}: not UTF-8") from None
        except OSError as error:
            raise DemoError(f"cannot read text: {path}: {error.strerror}") from None
        (validation if number % 20 == 0 else train).append(text)
        size += len(text)
        if max_bytes and size >= max_bytes:
            break
    if not (train and validation) and train + validation:
        *train, last = train + validation
        cut = 0 if train else len(last) * 9 // 10
        train, validation = train or [last[:cut]], [last[cut:]]
    return train, validation


def load(paths: list[Path], vocabulary: int, context: int, max_bytes: int | None = None) -> Corpus:
    """Reads and splits the text, and trains the tokenizer on the training part only."""
    train, validation = read_split(paths, max_bytes)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END_OF_FILE], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(train, trainer)

    def encode(texts: list[str]) -> Tensor:
        end = tokenizer.token_to_id(END_OF_FILE)
        return torch.tensor([i for text in tokenizer.encode_batch(texts) for i in (end, *text.ids)], dtype=torch.int64)

    corpus = Corpus(
        train=encode(train),
        validation=encode(validation),
        tokenizer=tokenizer,
        validation_bytes=sum(len(text.encode()) for text in validation),
        files=len(train) + len(validation),
    )
    for split, ids, least in (("training", corpus.train, 16 * context), ("validation", corpus.validation, context + 1)):
        if len(ids) < least:
            raise DemoError(f"too little text: {len(ids)} {split} tokens, at least {least} are needed")
    return corpus


def batch(ids: Tensor, size: int, context: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """`size` windows from random offsets and their next tokens, both [size, context]. Depends on seed and step only."""
    places = np.random.default_rng([seed, step]).integers(0, len(ids) - context, size)
    windows = torch.stack([ids[p : p + context + 1] for p in places])
    return windows[:, :-1], windows[:, 1:]


def validation_windows(ids: Tensor, context: int, most: int) -> tuple[Tensor, Tensor]:
    """At most `most` non-overlapping windows and their next tokens, evenly spaced over the validation text."""
    count = (len(ids) - 1) // context
    chosen = np.linspace(0, count - 1, min(count, most)).astype(int) * context
    windows = torch.stack([ids[p : p + context + 1] for p in chosen])
    return windows[:, :-1], windows[:, 1:]


class Bigram:
    """A bigram model with modified Kneser–Ney smoothing (Chen and Goodman 1999), fitted to all training tokens."""

    def __init__(self, ids: Tensor, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        pairs = ids[:-1].numpy() * vocabulary + ids[1:].numpy()
        self.pairs, self.counts = np.unique(pairs, return_counts=True)
        previous, following = np.divmod(self.pairs, vocabulary)
        discounts = self._discounts()[np.minimum(self.counts, 3)]
        self.discounted = self.counts - discounts
        self.total = np.bincount(previous, self.counts, vocabulary)
        # The probability that the discounts remove from a context goes to the continuation distribution: the number of
        # contexts in which a token occurs.
        with np.errstate(invalid="ignore", divide="ignore"):
            backoff = np.bincount(previous, discounts, vocabulary) / self.total
        self.backoff = np.where(self.total > 0, backoff, 1.0)
        continuation = np.bincount(following, minlength=vocabulary) + 0.5  # half a context for unseen tokens
        self.continuation = continuation / continuation.sum()

    def _discounts(self) -> np.ndarray:
        """Discounts for pairs seen 0, 1, 2 and ≥ 3 times, by Chen and Goodman's estimate.

        The estimate needs enough pairs.
        """
        n1, n2, n3, n4 = (int((self.counts == i).sum()) for i in (1, 2, 3, 4))
        if 0 in (n1, n2, n3):
            return np.array([0.0, 0.75, 0.75, 0.75])
        y = n1 / (n1 + 2 * n2)
        return np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])

    def loss(self, tokens: Tensor, following: Tensor) -> float:
        """Mean negative log-likelihood, in nats, of `following` given `tokens`, same shapes."""
        previous, next_ = tokens.flatten().numpy(), following.flatten().numpy()
        pairs = previous * self.vocabulary + next_
        place = np.minimum(np.searchsorted(self.pairs, pairs), len(self.pairs) - 1)
        seen = np.where(self.pairs[place] == pairs, self.discounted[place], 0.0)
        p = seen / np.maximum(self.total[previous], 1) + self.backoff[previous] * self.continuation[next_]
        return float(-np.log(p).mean())
