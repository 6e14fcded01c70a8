"""One process's tools for client work: the data, the model and the objective of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from deltafl import client, models, tensorfile
from deltafl.client import Updates
from deltafl.data.dataset import AnySamples
from deltafl.engine.base import ClientTask, Setup
from deltafl.errors import told
from deltafl.fast import stacked
from deltafl.fast.flat import FlatSteps, flattens
from deltafl.fast.stacked import Rows
from deltafl.models import Classifier
from deltafl.seeding import derive

KEPT = 4_000_000
"""Numbers in a training set up to which stacked clients keep it ready to feed the model."""


def build_model(setup: Setup) -> Classifier:
    """Return the run's model with its initial weights, which follow from the seed alone."""
    return models.build(
        setup.model,
        shape=setup.dataset.shape,
        classes=setup.dataset.num_classes,
        width=setup.width,
        norm=setup.norm,
        weights=setup.weights,
        fast=setup.fast,
        seed=derive(setup.seed, "model"),
    )


class Workbench:
    """Does the work of any client of a run in this process."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.model = build_model(setup).to(setup.device)
        self._stacks = bundle_size(setup, self.model) > 1
        flat = setup.fast and flattens(self.model, setup.work)
        self._stepping = FlatSteps if flat else client.OptimizerSteps
        # Lazy partitions work a client's rows out anew each time they are asked.
        self._rows = lru_cache(maxsize=4096)(setup.partition.indices)
        # A small set is made ready once, and not a client at a time.
        split = setup.dataset.train
        small = self._stacks and split.inputs.numel() <= KEPT
        self._samples = setup.dataset.samples(split) if small else None

    def settle(self, place: Mapping[str, Tensor]) -> None:
        """Let the model live in memory that others look into: what it becomes needs no copy.

        `place` has room for one client, along a leading axis. A model stays where it is whose
        weights lie in another order, or are trained elsewhere: as a stack, or as one vector.
        """
        if self._stacks or self._stepping is FlatSteps or self._setup.device != "cpu":
            return
        entries = self.model.state_dict(keep_vars=True)
        if all(entry.is_contiguous() for entry in entries.values()):
            for name, entry in entries.items():
                entry.data = place[name][0]

    def train(self, weights: Mapping[str, Tensor], tasks: Sequence[ClientTask]) -> Updates:
        """Run the round of one bundle of clients."""
        with told(f"{_listed(tasks)} failed in round {tasks[0].round}"):
            if self._stacks:
                return self._train_stacked(weights, tasks)
            (task,) = tasks
            return self._train_one(weights, task)

    def _train_one(self, weights: Mapping[str, Tensor], task: ClientTask) -> Updates:
        setup = self._setup
        updates = client.train(
            self.model,
            setup.work,
            weights,
            setup.dataset.samples(setup.dataset.train, self._rows(task.client)),
            None if task.recall is None else tensorfile.load(task.recall)[0],
            self._seed(task),
            task.progress,
            self._stepping,
        )
        if task.remember is not None:
            tensorfile.save(task.remember, {n: v[0] for n, v in updates.weights.items()})
        return updates

    def _train_stacked(self, weights: Mapping[str, Tensor], tasks: Sequence[ClientTask]) -> Updates:
        """Train the clients that can be stacked with each other together, and keep their order."""
        work = self._setup.work
        rows = [self._rows(task.client) for task in tasks]
        shapes = {
            size: (
                client.local_steps(size, work.epochs, work.batch_size),
                min(work.batch_size, work.epochs * size),
            )
            for size in {len(held) for held in rows}
        }
        groups = defaultdict(list)
        for place, held in enumerate(rows):
            groups[shapes[len(held)]].append(place)
        parts = [
            stacked.train(
                self.model,
                work,
                weights,
                *self._held([rows[place] for place in places]),
                [self._seed(tasks[place]) for place in places],
                tasks[0].progress,
            )
            for places in groups.values()
        ]
        return _in_order(parts, list(groups.values()))

    def _held(self, rows: Sequence[Rows]) -> tuple[AnySamples, Sequence[Rows]]:
        """Return samples, and the rows of them that the clients hold who hold these of the set."""
        if self._samples is not None:
            return self._samples, rows
        ends = np.cumsum([len(held) for held in rows])
        samples = self._setup.dataset.samples(self._setup.dataset.train, np.concatenate(rows))
        return samples, np.split(np.arange(ends[-1]), ends[:-1])

    def _seed(self, task: ClientTask) -> int:
        return derive(self._setup.seed, "client", task.round, task.client)

    def evaluate(self, weights: Mapping[str, Tensor], start: int, stop: int) -> tuple[int, float]:
        """Return how many of a chunk are right, and the chunk's summed loss."""
        with told("the evaluation failed"):
            return self._evaluate(weights, start, stop)

    def _evaluate(self, weights: Mapping[str, Tensor], start: int, stop: int) -> tuple[int, float]:
        dataset, held_out, rows = self._setup.dataset, self._setup.held_out, self._setup.test_rows
        if held_out is not None:
            samples = dataset.samples(dataset.train, held_out[start:stop])
        else:
            few = torch.arange(start, stop) if rows is None else rows[start:stop]
            samples = dataset.samples(dataset.test, few)
        correct, total = 0, 0.0
        with client.one_thread(), torch.inference_mode():
            self.model.load_state_dict(weights)
            self.model.eval()
            for inputs, labels in samples.all_batches():
                logits = self.model(inputs.to(self._setup.device))
                known = labels.to(logits.device)
                loss = F.cross_entropy(logits, known, reduction="none").double().sum()
                correct += int((logits.argmax(1) == known).sum())
                total += float(loss)
        return correct, total


def _listed(tasks: Sequence[ClientTask]) -> str:
    """Name the clients of a bundle, of which there may be dozens."""
    clients = [task.client for task in tasks]
    if len(clients) == 1:
        return f"client {clients[0]}"
    return f"one of the clients {clients[0]} to {clients[-1]}"


def bundle_size(setup: Setup, model: Classifier) -> int:
    """Return how many clients of a run are worked on together; it follows from the run alone."""
    return stacked.bundle_size(model, setup.work) if setup.fast else 1


def _in_order(parts: Sequence[Updates], places: Sequence[Sequence[int]]) -> Updates:
    """Put the updates of several groups of clients back into the order of the clients."""
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate(places)).tolist()
    samples = [count for part in parts for count in part.samples]
    metrics = [metric for part in parts for metric in part.metrics]
    return Updates(
        {
            name: torch.cat([part.weights[name] for part in parts])[order]
            for name in parts[0].weights
        },
        [samples[place] for place in order],
        [metrics[place] for place in order],
    )
