"""What a node is told by its owner: which client it is, and where its data and memory lie.

It comes from the SuperNode's `--node-config`, so it is the owner's word and not the server's.
"""

from __future__ import annotations

import importlib
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import platformdirs
import safetensors.numpy
import torch
from torch import Tensor

from deltafl import models, optim
from deltafl.data import AnyDataset, Dataset, Partition, Split, TextDataset
from deltafl.engine import Setup
from deltafl.errors import UserError
from deltafl.experiment import Config
from deltafl.experiment.config import Strict, validated
from deltafl.experiment.federation import build_setup
from deltafl.flower.wire import MalformedError, Order, read_experiment

LARGEST_UNASKED = 1 << 28
MOST_COMPRESSED = 100
"""An .npz that unpacks to over 256 MiB may do so to at most a hundred times its size."""


@dataclass(frozen=True)
class Node:
    """One node's own configuration."""

    client: int
    data: str | None = None
    loader: str | None = None
    memory: Path | None = None
    allow_import: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Node:
        """Read a SuperNode's configuration, or say what is missing."""
        client = given.get("partition-id")
        if type(client) is not int or client < 0:
            raise UserError('this node has no number: add partition-id=0 to its "--node-config"')
        for name, kind in (("data", str), ("loader", str), ("memory", str), ("allow-import", bool)):
            if name in given and type(given[name]) is not kind:
                raise UserError(f"{name} in the node's configuration is not a {kind.__name__}")
        if "data" in given and "loader" in given:
            raise UserError("the node's configuration has both data and loader: give one of them")
        return cls(
            client,
            given.get("data"),
            given.get("loader"),
            Path(given["memory"]).expanduser() if "memory" in given else None,
            given.get("allow-import", False),
        )

    @property
    def own_data(self) -> bool:
        """Whether the node trains on data of its own, not on a part of a known data set."""
        return self.data is not None or self.loader is not None

    def memory_of(self, config: Config) -> Path:
        """Return the folder for what the client remembers of a run."""
        home = self.memory or Path(platformdirs.user_data_dir("deltafl", appauthor=False)) / "nodes"
        return home / config.hash

    def config(self, order: Order) -> Config:
        """Return the configuration the server sent, if this node is to follow it."""
        tree = read_experiment(order.experiment)
        client = tree.get("client", {})
        name = client.get("optimizer", "delta-sgd") if isinstance(client, dict) else None
        if not self.allow_import and name not in optim.names():
            # Even looking such a name up would import code that the server chose.
            raise MalformedError(
                f"optimizer {str(name)[:80]!r} is not of the catalog, and this node imports "
                "nothing for a server (its owner may set allow-import=true)"
            )
        config = validated(Config, tree, "from the server")
        if order.client != self.client:
            raise MalformedError(f"this node holds client {self.client}, not {order.client}")
        if order.round > config.run.rounds or not 0 <= self.client < config.federation.clients:
            raise MalformedError(f"client {order.client} or round {order.round} is not of this run")
        return config

    def setup(self, config: Config, facts: str) -> Setup:
        """Return what the node needs for its client's work."""
        if not self.own_data:
            return build_setup(config)
        dataset = self.dataset(config, facts)
        # One client with everything: how others' data is spread is not known here.
        alone = config.override(
            **{
                "federation.clients": 1,
                "federation.samples": None,
                "federation.partition": "iid",
                "federation.replacement": False,
                "run.evaluate_on": "test",
            }
        )
        whole = Whole(dataset.train.labels.numpy(), dataset.num_classes, config.federation.clients)
        return replace(build_setup(alone, dataset), partition=whole)

    def dataset(self, config: Config, text: str) -> AnyDataset:
        """Return the node's own data, fed to the model as the server's facts say."""
        tree = _json(text)
        inputs, labels, where = self._load()
        if tree.get("text") is True:
            return _text_set(config, validated(TextFacts, tree, "from the server"), inputs, labels)
        facts = validated(Facts, tree, "from the server")
        images, numbers = _tensors(inputs, labels, where)
        split = Split(images, numbers)
        if tuple(images.shape[1:]) != facts.shape:
            raise UserError(
                f"this node's images are {tuple(images.shape[1:])}, but the model takes "
                f"{facts.shape} (channels, height, width)"
            )
        # Nobody evaluates a test set here, but a data set has one.
        return Dataset(
            facts.name,
            split,
            split,
            facts.classes,
            facts.mean,
            facts.std,
            facts.scale,
            facts.augment,
        )

    def _load(self) -> tuple[Any, Any, str]:
        """Return the owner's inputs and labels, and where they come from."""
        if self.loader is not None:
            module, _, name = self.loader.partition(":")
            try:
                inputs, labels = getattr(importlib.import_module(module), name)()
            except Exception as error:  # the owner's code may raise anything
                raise UserError(f"loader {self.loader!r} failed: {error}") from error
            return inputs, labels, self.loader
        assert self.data is not None
        return *_arrays(Path(self.data).expanduser()), self.data


class TextFacts(Strict):
    """What the server says of a text set; checked like any other input."""

    name: str
    classes: tuple[str, ...]
    text: bool


def _text_set(config: Config, facts: TextFacts, inputs: Any, labels: Any) -> TextDataset:
    """Put a node's own texts into the tokens of the model."""
    texts = np.asarray(inputs)
    if texts.ndim != 1 or texts.dtype.kind != "U":
        raise UserError("this node's inputs are no texts, but the model reads text: give strings")
    tokenizer = models.tokenizer(config.model_name, config.model.weights, config.model.max_tokens)
    if tokenizer is None:
        raise MalformedError(f"the data is text, and model {config.model_name!r} takes images")
    pair = texts.tolist(), np.asarray(labels).tolist()
    # Nobody evaluates a test set here, but a data set has one.
    return TextDataset.from_texts(facts.name, pair, pair, tokenizer, classes=facts.classes)


class Facts(Strict):
    """What the server says of the data set; checked like any other input."""

    name: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float
    augment: str


class Whole(Partition):
    """A node's own data: all of it is the client's."""

    def indices(self, client: int) -> npt.NDArray[np.int64]:
        """Return all rows, in the order in which they are stored."""
        return np.arange(len(self._labels))

    def size(self, client: int) -> int:
        """Return how many rows there are."""
        return len(self._labels)


def read_arrays(path: Path) -> tuple[Tensor, Tensor]:
    """Read images and labels from an .npz or .safetensors file, or a folder of .npy files."""
    return _tensors(*_arrays(path), str(path))


def _arrays(path: Path) -> tuple[Any, Any]:
    """Read `inputs` and `labels`, whatever they are."""
    names = ("inputs", "labels")
    try:
        if path.is_dir():
            arrays = {n: np.load(path / f"{n}.npy", allow_pickle=False) for n in names}
        elif path.suffix == ".safetensors":
            arrays = safetensors.numpy.load_file(path)
        else:
            _check_archive(path)
            with np.load(path, allow_pickle=False) as file:
                arrays = {n: file[n] for n in names}
        missing = [repr(name) for name in names if name not in arrays]
    except KeyError as error:
        missing = [str(error)]
    except UserError:
        raise
    except Exception as error:  # numpy, zipfile and their decompressors may fail in any way
        raise UserError(f"cannot read the data {path}: {_reason(error)}") from None
    if missing:
        raise UserError(f"{path} has no array {missing[0]}: it needs inputs and labels")
    return arrays["inputs"], arrays["labels"]


def _check_archive(path: Path) -> None:
    """Refuse an .npz that is small only because it is compressed far better than data ever is."""
    if not zipfile.is_zipfile(path):
        raise UserError(f"cannot read the data {path}: it is no .npz, .safetensors or folder")
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    most = max(LARGEST_UNASKED, MOST_COMPRESSED * path.stat().st_size)
    if unpacked > most:
        raise UserError(f"{path} unpacks to {unpacked} bytes, over {most}: save it uncompressed")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _tensors(images: Any, labels: Any, where: str) -> tuple[Tensor, Tensor]:
    try:
        images, labels = torch.as_tensor(images), torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{where} gives no tensors: {error}") from None
    if images.is_complex() or labels.is_complex():
        raise UserError(f"{where} has complex numbers: give real images and class numbers")
    if images.ndim == 3:  # grey images without their channel
        images = images.unsqueeze(1)
    if images.ndim == 0 or not len(images):
        raise UserError(f"{where} has no samples: give at least one")
    return images, labels.to(torch.int64)


def _json(text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise MalformedError("the facts about the data set are not JSON")
    return tree
