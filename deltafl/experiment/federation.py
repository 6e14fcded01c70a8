"""From a configuration to a federation: the data, who holds what, and what every client does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from deltafl import data, models, objective
from deltafl.client import LocalWork
from deltafl.data.dataset import AnyDataset
from deltafl.data.partition import Partition, make_partition
from deltafl.engine import Setup
from deltafl.errors import UserError
from deltafl.experiment.config import OWN_DATA, Config
from deltafl.seeding import numpy_generator


def build_partition(
    config: Config, dataset: AnyDataset, rows: npt.NDArray[np.int64] | None = None
) -> Partition:
    """Spread the training set, or some rows of it, over the clients."""
    federation = config.federation
    labels = dataset.train.labels.numpy()
    partition = make_partition(
        labels if rows is None else labels[rows],
        classes=dataset.num_classes,
        clients=federation.clients,
        samples=federation.samples,
        alpha=None if federation.partition == "iid" else federation.alpha,
        replacement=federation.replacement,
        seed=config.run.seed,
    )
    return partition if rows is None else Within(dataset, rows, partition)


class Within(Partition):
    """A partition of some rows of the training set."""

    def __init__(self, dataset: AnyDataset, rows: npt.NDArray[np.int64], inner: Partition) -> None:
        super().__init__(dataset.train.labels.numpy(), dataset.num_classes, inner.clients)
        self._rows = rows
        self._inner = inner

    def indices(self, client: int) -> npt.NDArray[np.int64]:
        """Return the training rows of a client."""
        return self._rows[self._inner.indices(client)]

    def size(self, client: int) -> int:
        """Return how many rows a client holds."""
        return self._inner.size(client)


def hold_out(config: Config, dataset: AnyDataset) -> tuple[npt.NDArray[np.int64], ...]:
    """Split the training rows into those of the federation and a tenth to validate on."""
    generator = numpy_generator(config.run.seed, "validation")
    order = generator.permutation(len(dataset.train))
    tenth = max(1, len(order) // 10)
    return np.sort(order[tenth:]), np.sort(order[:tenth])


def draw_test_rows(config: Config, dataset: AnyDataset) -> npt.NDArray[np.int64] | None:
    """Return the test samples to evaluate on, where they are not all."""
    wanted, there = config.run.test_samples, len(dataset.test)
    if wanted is None or wanted >= there:
        return None
    generator = numpy_generator(config.run.seed, "test samples")
    return np.sort(generator.choice(there, wanted, replace=False))


def build_setup(config: Config, dataset: AnyDataset | None = None) -> Setup:
    """Return everything an engine needs to run the configuration's clients."""
    if dataset is None:
        if config.data_sha256 is not None or config.dataset_name == OWN_DATA:
            raise UserError(f"{config.task} runs on data of its own: give it as run(dataset=...)")
        model = config.model
        tokenizer = models.tokenizer(config.model_name, model.weights, model.max_tokens)
        dataset = data.load(config.dataset_name, tokenizer=tokenizer)
    if len(dataset.test) == 0:
        raise UserError(f"data set {dataset.name!r} has no test samples: give at least one")
    client = config.client
    rows, held_out = None, None
    if config.run.evaluate_on == "validation":
        rows, held_out = hold_out(config, dataset)
    return Setup(
        dataset=dataset,
        partition=build_partition(config, dataset, rows),
        model=config.model_name,
        width=config.model.width,
        norm=config.model.norm,
        weights=config.model.weights,
        work=LocalWork(
            objective=objective.build(client.objective, client.objective_options),
            optimizer=client.optimizer,
            lr=client.lr,
            options=client.options,
            epochs=client.epochs,
            batch_size=client.batch_size,
            keep_last=client.last_batch == "keep",
            augment=dataset.augmentation(client.augment),
            record_step_sizes=config.run.record_step_sizes,
        ),
        seed=config.run.seed,
        fast=config.engine.fast,
        device=resolve_device(config.run.device),
        held_out=held_out,
        test_rows=draw_test_rows(config, dataset),
    )


def resolve_device(name: str) -> str:
    """Return the device to run on; `auto` is CUDA where there is one, else the CPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ImportError):
        raise UserError(f"run.device {name!r} is not there: use auto or cpu") from None
    return name


def sample_clients(config: Config, round_: int) -> list[int]:
    """Return the clients of a round (line 3 of Algorithm 1), in ascending order."""
    federation = config.federation
    generator = numpy_generator(config.run.seed, "sampling", round_)
    drawn = generator.choice(federation.clients, federation.sampled, replace=False, shuffle=False)
    return sorted(int(client) for client in drawn)
