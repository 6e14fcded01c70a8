"""Text in tokens: a data set, and the samples of one client as batches padded to their longest.

Padding is work for nothing, so samples of about the same length share a batch: the client's random
order is cut into windows of several batches, a window is sorted by length, cut, and its batches are
shuffled. What is drawn depends on the seed and the lengths of the client's samples alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from deltafl.data.augment import Augmentation, augmentation
from deltafl.data.dataset import Fields, Index
from deltafl.errors import UserError
from deltafl.tensorfile import digest

Thing = TypeVar("Thing")

WINDOW = 16
"""Batches that are sorted by length together: few enough to stay mixed, many enough to fit."""

EVALUATION_BATCH = 25
"""Samples of about the same length that are evaluated together."""


class Tokenizer(Protocol):
    """What turns text into numbers: the words of one model."""

    @property
    def key(self) -> str:
        """A checksum of everything its numbers depend on."""

    @property
    def pad(self) -> int:
        """The number that fills a batch up."""

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of every text, cut to what the model is given."""


@dataclass(frozen=True, eq=False)
class TextSplit:
    """The training or the test part: all tokens one after the other, where texts end, labels."""

    tokens: Tensor
    ends: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if not len(self.ends) == len(self.labels):
            raise UserError(
                f"{len(self.ends)} texts but {len(self.labels)} labels: give one label per text"
            )
        if self.labels.dtype != torch.int64 or self.labels.ndim != 1:
            raise UserError(
                f"labels are {self.labels.dtype} of shape {tuple(self.labels.shape)}: "
                "give one int64 class number per text"
            )

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class TokenSamples:
    """Some texts of a split, ready to feed a model."""

    tokens: Tensor
    starts: Tensor
    lengths: Tensor
    labels: Tensor
    pad: int

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, index: Tensor) -> tuple[Fields, Tensor]:
        """Return texts padded to the longest of them, and their labels.

        Where none is padded there is no mask: a model computes less without one.
        """
        lengths = self.lengths.index_select(0, index).unsqueeze(1)
        place = torch.arange(int(lengths.max()))
        real = place < lengths
        # Past its end a text stays on its last token, which the padding then covers.
        rows = self.starts.index_select(0, index).unsqueeze(1) + place.minimum(lengths - 1)
        tokens = self.tokens[rows].long().masked_fill_(~real, self.pad)
        inputs = Fields(input_ids=tokens)
        if not real.all():
            inputs["attention_mask"] = real.long()
        return inputs, self.labels.index_select(0, index)

    def grouped(self, batches: Iterable[Tensor], generator: torch.Generator) -> Iterator[Tensor]:
        """Exchange samples between the batches of a window until each has about one length."""
        for window in pieces(batches, WINDOW):
            rows = torch.cat(window)
            rows = rows[self.lengths[rows].argsort(stable=True)]
            parts = torch.split(rows, [len(batch) for batch in window])
            for place in torch.randperm(len(parts), generator=generator).tolist():
                yield parts[place]

    def all_batches(self) -> Iterator[tuple[Fields, Tensor]]:
        """Yield all samples once, in batches of about one length, to evaluate on."""
        for rows in torch.split(self.lengths.argsort(stable=True), EVALUATION_BATCH):
            yield self.batch(rows)


@dataclass(frozen=True, eq=False)
class Labelled:
    """Texts as people read them, and their int64 class numbers."""

    texts: Sequence[str]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


class _OfText:
    """What sets of texts have in common, with tokens and without."""

    name: str
    classes: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """How many classes the labels number."""
        return len(self.classes)

    @property
    def shape(self) -> None:
        """No channels, height or width: texts are as long as they are."""
        return None

    def augmentation(self, name: str | None) -> Augmentation:
        """Return the augmentation that leaves texts alone, the only one they have."""
        return text_augmentation(self.name, name)

    def facts(self) -> dict[str, Any]:
        """Return what a node has to know to feed texts of its own to the model, for JSON."""
        return {"name": self.name, "classes": self.classes, "text": True}


@dataclass(frozen=True, eq=False)
class Texts(_OfText):
    """A labelled text set before it is put into any model's tokens: to look at, not to train on."""

    name: str
    train: Labelled
    test: Labelled
    classes: tuple[str, ...]
    part: str | None = None

    def samples(self, split: Labelled, index: Index | None = None) -> TokenSamples:
        """Raise UserError: a model has its own tokens."""
        raise UserError(f"{self.name} is text without tokens: load it with a model's tokenizer")

    def by_value(self) -> Texts:
        """Return the set itself, which refers to no files."""
        return self

    def fingerprint(self) -> str:
        """Return a checksum of the texts and their classes."""
        rows = zip(self.train.texts, self.train.labels.tolist(), strict=True)
        more = zip(self.test.texts, self.test.labels.tolist(), strict=True)
        return hashlib.sha256(repr([self.classes, *rows, *more]).encode()).hexdigest()


def text_augmentation(dataset: str, name: str | None) -> Augmentation:
    """Return the augmentation that changes nothing, or refuse one that is for images."""
    if name not in (None, "none"):
        raise UserError(f"client.augment {name} is for images, {dataset} is text: use none")
    return augmentation("none")


@dataclass(frozen=True, eq=False)
class TextDataset(_OfText):
    """A labelled text set in the tokens of one model.

    A set from the catalog pickles as a reference to its store, so worker processes map the same
    memory instead of receiving copies; one built from your own texts pickles by value.
    """

    name: str
    train: TextSplit
    test: TextSplit
    classes: tuple[str, ...]
    pad: int
    part: str | None = None
    # Not an argument, so that `dataclasses.replace` drops it.
    _reopen: Callable[[], TextDataset] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for which, split in (("training", self.train), ("test", self.test)):
            labels = split.labels
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
                raise UserError(
                    f"data set {self.name!r}: {which} labels run from {int(labels.min())} to "
                    f"{int(labels.max())}: use class numbers from 0 to {self.num_classes - 1}"
                )

    @classmethod
    def from_texts(
        cls,
        name: str,
        train: tuple[Sequence[str], Sequence[int]],
        test: tuple[Sequence[str], Sequence[int]],
        tokenizer: Tokenizer,
        *,
        classes: Sequence[str] | None = None,
    ) -> TextDataset:
        """Build a data set from your own (texts, labels) pairs, in the words of a model.

        Classes that are not named are numbered, up to the largest label.
        """
        if not len(train[0]):
            raise UserError(f"data set {name!r} has no training texts: give at least one")
        if classes is None:
            top = max(int(label) for label in chain(train[1], test[1]))
            classes = [str(label) for label in range(top + 1)]
        splits = [encode(texts, labels, tokenizer) for texts, labels in (train, test)]
        return cls(name, splits[0], splits[1], tuple(classes), tokenizer.pad)

    def samples(self, split: TextSplit, index: Index | None = None) -> TokenSamples:
        """Return the rows of `split` in `index` (all of them when None)."""
        rows = torch.arange(len(split))
        if index is not None:
            rows = torch.as_tensor(index, dtype=torch.int64)
        ends = split.ends.index_select(0, rows)
        before = split.ends.index_select(0, (rows - 1).clamp(min=0))
        starts = torch.where(rows > 0, before, 0)
        labels = split.labels.index_select(0, rows)
        return TokenSamples(split.tokens, starts, ends - starts, labels, self.pad)

    def fingerprint(self) -> str:
        """Return a checksum of everything a run on this set depends on."""
        tensors = {
            f"{part} {kind.name}": getattr(split, kind.name)
            for part, split in (("train", self.train), ("test", self.test))
            for kind in fields(split)
        }
        about = f"{digest(tensors)} {self.classes} {self.pad}"
        return hashlib.sha256(about.encode()).hexdigest()

    def by_value(self) -> TextDataset:
        """Return this set made to pickle by value, for machines that do not have its files."""
        return TextDataset(*self._values())

    def referring_to(self, reopen: Callable[[], TextDataset]) -> TextDataset:
        """Return this set made to pickle as a call of `reopen`, which must itself pickle."""
        twin = self.by_value()
        object.__setattr__(twin, "_reopen", reopen)
        return twin

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, item.name) for item in fields(self) if item.init)

    def __reduce__(self) -> tuple[Callable[..., TextDataset], tuple[Any, ...]]:
        if self._reopen is not None:
            return self._reopen, ()
        return TextDataset, self._values()


def pieces(things: Iterable[Thing], size: int) -> Iterator[list[Thing]]:
    """Cut something into lists of `size`; the last may be shorter."""
    left = iter(things)
    while piece := list(islice(left, size)):
        yield piece


def encode(
    texts: Sequence[str],
    labels: Sequence[int],
    tokenizer: Tokenizer,
    progress: Callable[[int], None] = lambda _: None,
    chunk: int = 2_000,
) -> TextSplit:
    """Turn texts into tokens, many at a time; `progress` hears how many are done."""
    if len(texts) != len(labels):
        raise UserError(f"{len(texts)} texts but {len(labels)} labels: give one label per text")
    tokens, lengths = [], []
    for some in pieces(texts, chunk):
        # A text without a single token is a pad, so that every sample is something.
        found = [row or [tokenizer.pad] for row in tokenizer(some)]
        lengths += [len(row) for row in found]
        tokens.append(np.fromiter(chain.from_iterable(found), np.int32))
        progress(len(some))
    return TextSplit(
        torch.from_numpy(np.concatenate(tokens) if tokens else np.empty(0, np.int32)),
        torch.tensor(lengths, dtype=torch.int64).cumsum(0),
        torch.tensor(labels, dtype=torch.int64),
    )
