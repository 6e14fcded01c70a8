"""What a client holds: a data set in memory, and the samples of it that one client trains on.

Nothing outside `deltafl.data` looks into `Samples.inputs`: the rest of the package only counts
samples and asks for batches, so a set of another kind fits the same seam. `deltafl.data.text` has
one whose batches are mappings of tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltafl.data.augment import Augmentation, augmentation
from deltafl.errors import UserError
from deltafl.tensorfile import digest

MOST_CLASSES = 10**6

Index = Tensor | npt.NDArray[np.int64] | Sequence[int]


class Fields(dict[str, Tensor]):
    """Inputs that are several tensors, each by the name the model knows it by."""

    def to(self, device: torch.device | str) -> Fields:
        """Return them on a device, as a single tensor would do it."""
        return Fields({name: value.to(device) for name, value in self.items()})


class AnyDataset(Protocol):
    """What a run asks of a data set, of images or of text.

    Of its splits, `train` and `test`, it reads the labels and the length; `samples` turns rows of
    one into batches that the model understands.
    """

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def train(self) -> Any:
        """The training split."""

    @property
    def test(self) -> Any:
        """The test split."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""

    @property
    def num_classes(self) -> int:
        """How many classes the labels number."""

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width of an image; None where samples are not images."""

    @property
    def part(self) -> str | None:
        """What this is a part of, in words for results; None where it is the whole set."""

    def augmentation(self, name: str | None) -> Augmentation:
        """Return the augmentation of that name, or else the set's own."""

    def samples(self, split: Any, index: Index | None = None) -> AnySamples:
        """Return the rows of a split in `index`, or all of them."""

    def facts(self) -> dict[str, Any]:
        """Return what a node has to know to feed data of its own to the model, for JSON."""

    def by_value(self) -> AnyDataset:
        """Return the set made to pickle by value, for machines that do not have its files."""

    def fingerprint(self) -> str:
        """Return a checksum of everything a run on this set depends on."""


class AnySamples(Protocol):
    """What a client asks of its samples."""

    def __len__(self) -> int: ...

    def batch(self, index: Tensor) -> tuple[Any, Tensor]:
        """Return the inputs and the labels of some rows."""

    def grouped(self, batches: Iterable[Tensor], generator: torch.Generator) -> Iterable[Tensor]:
        """Return as many batches of the same rows, put together so that they cost least."""

    def all_batches(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield all samples once, to evaluate on."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples ready to feed a model: float32 and normalised, with their labels."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and the labels of the rows in `index`, in that order."""
        return self.inputs.index_select(0, index), self.labels.index_select(0, index)

    def grouped(self, batches: Iterable[Tensor], generator: torch.Generator) -> Iterable[Tensor]:
        """Return the batches as they are: images of one size gain nothing by another order."""
        return batches

    def all_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all samples, at once, to evaluate on."""
        yield self.inputs, self.labels


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the test part of a data set, as stored: images N,C,H,W and int64 labels."""

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.inputs.ndim != 4:
            raise UserError(
                f"images have shape {tuple(self.inputs.shape)}: give four axes, N,C,H,W "
                "(unsqueeze(1) adds the channel of grey images)"
            )
        if self.labels.dtype != torch.int64 or self.labels.ndim != 1:
            raise UserError(
                f"labels are {self.labels.dtype} of shape {tuple(self.labels.shape)}: "
                "give one int64 class number per image"
            )
        if len(self.inputs) != len(self.labels):
            raise UserError(
                f"{len(self.inputs)} images but {len(self.labels)} labels: give one label per image"
            )

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A labelled image set with a training and a test split, and how to normalise it.

    `scale` is the stored value that means 1.0 (255 for bytes); `mean` and `std` are per channel
    and apply after the division by it. `augment` names the set's usual training augmentation.

    A set from the catalog pickles as a reference to its files, so worker processes map the same
    memory instead of receiving copies; one built from your own tensors pickles by value.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0
    augment: str = "none"
    part: ClassVar[str | None] = None
    # Not an argument, so that `dataclasses.replace` drops it: a changed copy is no longer
    # what the files hold, and has to travel by value.
    _reopen: Callable[[], Dataset] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        channels = self.train.inputs.shape[1]
        if self.train.inputs.shape[1:] != self.test.inputs.shape[1:]:
            raise UserError(
                f"data set {self.name!r}: training images are {tuple(self.train.inputs.shape[1:])} "
                f"but test images {tuple(self.test.inputs.shape[1:])}: give both the same C,H,W"
            )
        if len(self.mean) != channels or len(self.std) != channels:
            raise UserError(
                f"data set {self.name!r}: {len(self.mean)} means and {len(self.std)} deviations "
                f"for {channels} channels: give one of each per channel"
            )
        values = (*self.mean, *self.std, self.scale)
        if not all(map(math.isfinite, values)) or min(*self.std, self.scale) <= 0:
            raise UserError(
                f"data set {self.name!r}: mean {self.mean}, std {self.std}, scale {self.scale}: "
                "give finite numbers, and a positive std and scale"
            )
        for part, split in (("training", self.train), ("test", self.test)):
            labels = split.labels
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
                raise UserError(
                    f"data set {self.name!r}: {part} labels run from {int(labels.min())} to "
                    f"{int(labels.max())}: use class numbers from 0 to {self.num_classes - 1}"
                )

    @classmethod
    def from_tensors(
        cls,
        name: str,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        *,
        classes: Sequence[str] | None = None,
        scale: float | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        augment: str = "none",
    ) -> Dataset:
        """Build a data set from your own (images, labels) pairs.

        What is left out is measured: the classes from the largest label, the scale from the type
        (255 for bytes, else 1), mean and standard deviation from the training images.
        """
        pairs = Split(*train), Split(*test)
        images = pairs[0].inputs
        if len(pairs[0]) == 0:
            raise UserError(f"data set {name!r} has no training images: give at least one")
        if scale is None:
            scale = 255.0 if images.dtype == torch.uint8 else 1.0
        if mean is None or std is None:
            values = images.to(torch.float64) / scale
            deviation = values.std(dim=(0, 2, 3), correction=0)
            mean = values.mean(dim=(0, 2, 3)).tolist() if mean is None else mean
            # A constant channel carries nothing to scale.
            std = deviation.where(deviation > 0, 1.0).tolist() if std is None else std
        if classes is None:
            top = max(int(split.labels.max()) for split in pairs if len(split))
            if top >= MOST_CLASSES:  # before a name is made for each
                raise UserError(
                    f"data set {name!r}: a label is {top}: use class numbers from 0, "
                    f"at most {MOST_CLASSES - 1}"
                )
            classes = [str(label) for label in range(top + 1)]
        return cls(name, *pairs, tuple(classes), tuple(mean), tuple(std), scale, augment)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.train.inputs.shape[1:]
        return channels, height, width

    @property
    def num_classes(self) -> int:
        """How many classes the labels number."""
        return len(self.classes)

    @property
    def black(self) -> tuple[float, ...]:
        """What a stored zero becomes in each channel, for augmentations that pad images."""
        return tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))

    def augmentation(self, name: str | None) -> Augmentation:
        """Return the augmentation of that name, or else the set's own, padding with black."""
        return augmentation(name or self.augment, self.black)

    def samples(self, split: Split, index: Index | None = None) -> Samples:
        """Return the rows of `split` in `index` (all of them when None), normalised."""
        images, labels = split.inputs, split.labels
        if index is not None:
            rows = torch.as_tensor(index, dtype=torch.int64)
            images, labels = images.index_select(0, rows), labels.index_select(0, rows)
        mean = torch.tensor(self.mean, dtype=torch.float32).view(-1, 1, 1)
        std = torch.tensor(self.std, dtype=torch.float32).view(-1, 1, 1)
        # Divide, subtract, divide: the order of the usual ToTensor and Normalize, bit for bit.
        inputs = images.to(torch.float32).div(self.scale).sub_(mean).div_(std)
        return Samples(inputs, labels)

    def fingerprint(self) -> str:
        """Return a checksum of everything a run on this set depends on."""
        tensors = {
            f"{part} {kind}": tensor
            for part, split in (("train", self.train), ("test", self.test))
            for kind, tensor in (("inputs", split.inputs), ("labels", split.labels))
        }
        about = f"{digest(tensors)} {self.classes} {self.mean} {self.std} {self.scale}"
        return hashlib.sha256(f"{about} {self.augment}".encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """Return what a node has to know to feed images of its own to the model, for JSON."""
        names = ("name", "shape", "classes", "mean", "std", "scale", "augment")
        return {name: getattr(self, name) for name in names}

    def by_value(self) -> Dataset:
        """Return this set made to pickle by value, for machines that do not have its files."""
        return Dataset(*self._values())

    def referring_to(self, reopen: Callable[[], Dataset]) -> Dataset:
        """Return this set made to pickle as a call of `reopen`, which must itself pickle."""
        twin = self.by_value()
        object.__setattr__(twin, "_reopen", reopen)
        return twin

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, item.name) for item in fields(self) if item.init)

    def __reduce__(self) -> tuple[Callable[..., Dataset], tuple[Any, ...]]:
        if self._reopen is not None:
            return self._reopen, ()
        return Dataset, self._values()
