"""Notices that the global weights are no longer a model, who did it, and what was good last.

They are not if a number of them or of the server's state is not finite, if their loss is beyond all
measure, or if no client can train from them. Weights that are only bad are a result like any other:
a method that fails on a task, or attackers whom the average believes, make a run's accuracy poor,
and the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import Field
from torch import Tensor

from deltafl.client import ClientMetrics
from deltafl.experiment.config import Strict

# So often in a row no update may be usable before the global weights count as broken.
STUCK_ROUNDS = 3
# SGD with a step size of a million leaves a loss of 4e5, one client of twenty that sends 1e12 one
# of 2e23: what fails is far below this, and what is broken far above.
LARGEST_LOSS = 1e12


class Snapshot(NamedTuple):
    """A state to go back to. A round replaces the weights, so they need no copy."""

    round: int
    weights: Mapping[str, Tensor]
    server: Mapping[str, Tensor]


class Farthest(NamedTuple):
    """The longest update of some rounds."""

    round: int
    client: int
    length: float
    """How far the client went from the global weights."""
    step_size: float
    """Its mean step size."""


@dataclass(frozen=True)
class Divergence:
    """That the global weights are broken, and the update that most likely did it."""

    reason: str
    good_round: int
    """The newest round whose weights were found good; 0: those at the start."""
    farthest: Farthest | None
    """Who went farthest since then; None if no update was used in this process."""

    def row(self) -> dict[str, Any]:
        """Return it as in metrics.jsonl and summary.json."""
        row: dict[str, Any] = {"reason": self.reason, "good_round": self.good_round}
        if self.farthest is not None:
            # Three digits: engines that join clients otherwise may sum otherwise.
            short = float(f"{self.farthest.length:.3g}")
            row |= self.farthest._replace(length=short)._asdict()
        return row


class Known(Strict):
    """What a checkpoint tells of a lookout, beside the good weights themselves."""

    good: int = Field(ge=0, description="the newest round that was found good")
    candidate: int | None = Field(None, ge=0, description="a later one whose loss is sensible")
    farthest: Farthest | None = None
    stuck: int = Field(0, ge=0, lt=STUCK_ROUNDS)


class Lookout:
    """Follows the rounds of a run."""

    def __init__(self, start: Snapshot) -> None:
        self.good = start
        self._candidate: Snapshot | None = None
        self._farthest: Farthest | None = None
        self._stuck = 0

    @classmethod
    def resumed(cls, good: Snapshot, known: Known, now: Snapshot) -> Lookout:
        """Go on from what a checkpoint tells, as if never stopped."""
        lookout = cls(good)
        if known.candidate is not None:  # since then no update has changed the weights
            lookout._candidate = now._replace(round=known.candidate)
        lookout._farthest, lookout._stuck = known.farthest, known.stuck
        return lookout

    def known(self) -> Known:
        """Return what a checkpoint has to tell."""
        candidate = None if self._candidate is None else self._candidate.round
        return Known(
            good=self.good.round, candidate=candidate, farthest=self._farthest, stuck=self._stuck
        )

    def used(
        self, round_: int, metrics: Mapping[int, ClientMetrics], lengths: Sequence[float]
    ) -> None:
        """Hear which clients' updates a round uses, and how long they are.

        So clients could train from the weights before: if their loss was sensible, they were good.
        """
        self._stuck = 0
        if self._candidate is not None:
            self.good, self._candidate, self._farthest = self._candidate, None, None
        length, client = max(zip(lengths, metrics, strict=True), key=lambda pair: pair[0])
        if self._farthest is None or length > self._farthest.length:
            self._farthest = Farthest(round_, client, length, metrics[client].step_size)

    def unusable(self, example: str) -> str | None:
        """Hear that updates came and none could be used; return the fault if that is too often."""
        self._stuck += 1
        if self._stuck < STUCK_ROUNDS:
            return None
        return f"no update of {STUCK_ROUNDS} rounds in a row could be used ({example})"

    def sensible(self, snapshot: Snapshot) -> None:
        """Hear of new weights whose loss is that of a model."""
        self._candidate = snapshot

    def divergence(self, reason: str) -> Divergence:
        """Return what is known of the cause."""
        return Divergence(reason, self.good.round, self._farthest)
