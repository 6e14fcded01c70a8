"""How much of the paper's setting a recipe computes: all of it, or what a laptop does in minutes.

Section 4, "FL setup and optimizers" and "Hyperparameters". Both scales keep what a comparison
depends on: the number of clients and their samples, who takes part, the batches, and decay at 50 %
and 75 % of the rounds. Text is the exception: a laptop's clients hold 240 samples, not 500, and
1000 test samples judge them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deltafl.errors import unknown

_TEXT = ("agnews", "dbpedia")
_TEXT_SETTING = {"federation.clients": 50, "client.batch_size": 16}


@dataclass(frozen=True)
class Scale:
    """A number of rounds for each data set, and the width of each model."""

    name: str
    summary: str
    rounds: Mapping[str, int]
    eval_every: int
    widths: Mapping[str, int] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    """What is smaller in text classification, beside the rounds."""

    def fields(self, task: str) -> dict[str, Any]:
        """Return the configuration's fields for a task."""
        dataset, _, model = task.partition("-")
        fields: dict[str, Any] = {
            "task": task,
            "run.rounds": self.rounds[dataset],
            "run.eval_every": self.eval_every,
        }
        if model in self.widths:
            fields["model.width"] = self.widths[model]
        if dataset in _TEXT:
            fields |= {**_TEXT_SETTING, **self.text}
        return fields


PAPER = Scale(
    "paper",
    "the paper's setting",
    {
        "mnist": 500,
        "fmnist": 1000,
        "cifar10": 2000,
        "cifar100": 2000,
        "agnews": 100,
        "dbpedia": 100,
    },
    eval_every=10,
)

LAPTOP = Scale(
    "laptop",
    "a tenth of the rounds for the CNN, 20 to 30 rounds for narrow ResNets, 6 for half the text",
    {
        "mnist": 50,
        "fmnist": 100,
        "cifar10": 30,
        "cifar100": 20,
        "agnews": 6,
        "dbpedia": 6,
    },
    eval_every=5,
    widths={"resnet18": 8, "resnet50": 4},
    text={"federation.samples": 240, "run.eval_every": 2, "run.test_samples": 1000},
)

SCALES = {scale.name: scale for scale in (PAPER, LAPTOP)}


def lookup(name: str) -> Scale:
    """Return a scale by its name."""
    if name not in SCALES:
        raise unknown("scale", name, SCALES)
    return SCALES[name]
