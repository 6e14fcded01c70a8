"""A part of a recipe: `--only fmnist-cnn alpha=0.1 delta-sgd,sgd seed=0`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltafl import optim
from deltafl.errors import UserError, unknown
from deltafl.experiment import Config
from deltafl.paper.recipes import ITEMS

_KEYS = ("task", "alpha", "optimizer", "seed")


@dataclass(frozen=True)
class Only:
    """Which runs are wanted; an empty set wants all."""

    tasks: frozenset[str] = frozenset()
    alphas: frozenset[float] = frozenset()
    optimizers: frozenset[str] = frozenset()
    seeds: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, words: Sequence[str]) -> Only:
        """Read words such as alpha=0.1,1 or, for tasks and optimizers, the name alone."""
        found: dict[str, list[str]] = {key: [] for key in _KEYS}
        tasks = {case.task for item in ITEMS.values() for case in item.cases}
        for word in words:
            key, equals, values = word.partition("=")
            if equals and key not in _KEYS:
                raise unknown("key of --only", key, _KEYS)
            for value in (values if equals else word).split(","):
                found[key if equals else _kind(value, tasks)].append(value)
        for value in found["task"]:
            if value not in tasks:
                raise unknown("task", value, tasks)
        for value in found["optimizer"]:
            optim.lookup(value)
        return cls(
            frozenset(found["task"]),
            frozenset(_number("alpha", value) for value in found["alpha"]),
            frozenset(found["optimizer"]),
            frozenset(int(_number("seed", value)) for value in found["seed"]),
        )

    def wants(self, config: Config) -> bool:
        """Whether a run is in this part."""
        return (
            (not self.tasks or config.task in self.tasks)
            and (not self.alphas or config.federation.alpha in self.alphas)
            and (not self.optimizers or config.client.optimizer in self.optimizers)
            and (not self.seeds or config.run.seed in self.seeds)
        )


def _kind(value: str, tasks: set[str]) -> str:
    if value in tasks:
        return "task"
    if value in optim.names():
        return "optimizer"
    raise UserError(
        f"--only {value!r} is neither a task nor an optimizer of the paper: "
        "write alpha=0.1, seed=0, task=fmnist-cnn or optimizer=delta-sgd"
    )


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UserError(f"--only {key}={value}: give a number") from None
