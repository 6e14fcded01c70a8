"""One process's tools for client work: the data, the model and the objective of a run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from deltafl import client, models, tensorfile
from deltafl.client import ClientUpdate
from deltafl.engine.base import ClientTask, Setup
from deltafl.models import Classifier
from deltafl.seeding import derive


def build_model(setup: Setup) -> Classifier:
    """Return the run's model with its initial weights, which follow from the seed alone."""
    return models.build(
        setup.model,
        shape=setup.dataset.shape,
        classes=setup.dataset.num_classes,
        width=setup.width,
        norm=setup.norm,
        seed=derive(setup.seed, "model"),
    )


class Workbench:
    """Does the work of any client of a run, one at a time, in this process."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.model = build_model(setup).to(setup.device)

    def train(self, weights: Mapping[str, Tensor], task: ClientTask) -> ClientUpdate:
        """Run one client's round."""
        setup = self._setup
        index = setup.partition.indices(task.client)
        update = client.train(
            self.model,
            setup.work,
            weights,
            setup.dataset.samples(setup.dataset.train, index),
            None if task.recall is None else tensorfile.load(task.recall)[0],
            derive(setup.seed, "client", task.round, task.client),
            task.progress,
        )
        if task.remember is not None:
            tensorfile.save(task.remember, update.weights)
        return update

    def evaluate(self, weights: Mapping[str, Tensor], start: int, stop: int) -> tuple[int, float]:
        """Return how many of a chunk are right, and the chunk's summed loss."""
        dataset, held_out = self._setup.dataset, self._setup.held_out
        if held_out is None:
            samples = dataset.samples(dataset.test, torch.arange(start, stop))
        else:
            samples = dataset.samples(dataset.train, held_out[start:stop])
        inputs, labels = samples.batch(torch.arange(stop - start))
        with client.one_thread(), torch.inference_mode():
            self.model.load_state_dict(weights)
            self.model.eval()
            logits = self.model(inputs.to(self._setup.device))
            labels = labels.to(logits.device)
            loss = F.cross_entropy(logits, labels, reduction="none").double().sum()
            return int((logits.argmax(1) == labels).sum()), float(loss)
