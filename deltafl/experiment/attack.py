"""Clients that send something else than what they trained, to measure what that does to a run.

An attack changes an update after the client's honest work, on its way to the server, so the one
definition of local work stays what it is. Which clients attack follows from the seed. It runs with
every engine, and no run attacks unless its configuration says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deltafl.client import Updates
from deltafl.engine import ClientTask, Engine, Evaluation, Setup
from deltafl.engine.base import Missing
from deltafl.experiment.config import FederationConfig
from deltafl.seeding import numpy_generator

HUGE = 1e30
FLIPPED = -10.0

Attack = Callable[[Updates, Mapping[str, Tensor]], Updates]
"""Turns one client's honest update, and the global weights it started from, into what it sends."""


def attackers(federation: FederationConfig, seed: int) -> frozenset[int]:
    """Return the clients that attack: a share of all, at least one."""
    if federation.attack is None:
        return frozenset()
    count = max(1, round(federation.attackers * federation.clients))
    drawn = numpy_generator(seed, "attackers").choice(federation.clients, count, replace=False)
    return frozenset(int(client) for client in drawn)


def _filled(value: float) -> Attack:
    """All numbers are one and the same."""
    return _changed(lambda sent, _: torch.full_like(sent, value))


def _changed(change: Callable[[Tensor, Tensor], Tensor]) -> Attack:
    """Every entry of real numbers is changed, knowing what it started from."""

    def attack(update: Updates, start: Mapping[str, Tensor]) -> Updates:
        weights = {
            name: change(sent, start[name].to(sent.device)) if sent.is_floating_point() else sent
            for name, sent in update.weights.items()
        }
        return replace(update, weights=weights)

    return attack


def _empty(update: Updates, _: Mapping[str, Tensor]) -> Updates:
    return replace(update, weights={})


def _no_samples(update: Updates, _: Mapping[str, Tensor]) -> Updates:
    return replace(update, samples=[0])


ATTACKS: dict[str, Attack] = {
    "nan": _filled(torch.nan),
    "inf": _filled(torch.inf),
    "huge": _filled(HUGE),
    "shape": _changed(lambda sent, _: torch.cat([sent, sent], -1)),
    "dtype": _changed(lambda sent, _: sent.to(torch.float64)),
    "empty": _empty,
    "no-samples": _no_samples,
    "sign-flip": _changed(lambda sent, start: start + FLIPPED * (sent - start)),
}


class Attacked:
    """An engine, some of whose clients attack."""

    def __init__(self, engine: Engine, attack: Attack, attackers: frozenset[int]) -> None:
        self._engine = engine
        self._attack = attack
        self._attackers = attackers

    def __enter__(self) -> Attacked:
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave the engine open: whoever opened it closes it."""

    def open(self, setup: Setup) -> None:
        """Prepare for a run."""
        self._engine.open(setup)

    def train(
        self, weights: Mapping[str, Tensor], tasks: Sequence[ClientTask]
    ) -> Iterator[Updates | Missing]:
        """Yield the updates in the order of `tasks`, a bundle with attackers one by one."""
        ahead = iter(tasks)
        for updates in self._engine.train(weights, tasks):
            count = 1 if isinstance(updates, Missing) else len(updates)
            clients = [next(ahead).client for _ in range(count)]
            if isinstance(updates, Missing) or self._attackers.isdisjoint(clients):
                yield updates
                continue
            for place, client in enumerate(clients):
                one = Updates(
                    {name: value[place : place + 1] for name, value in updates.weights.items()},
                    [updates.samples[place]],
                    [updates.metrics[place]],
                )
                yield self._attack(one, weights) if client in self._attackers else one

    def evaluate(self, weights: Mapping[str, Tensor]) -> Evaluation:
        """Evaluate the global weights; nobody attacks that."""
        return self._engine.evaluate(weights)
