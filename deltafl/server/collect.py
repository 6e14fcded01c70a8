"""A round's updates as they come: screened, and handed to what aggregates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deltafl.server import check
from deltafl.server.weights import Weights

Rows = dict[Any, Tensor]
"""The entries of clients as tables, [client, entry]: how they are cut is up to who aggregates."""


class Collector(ABC):
    """Takes the updates of a round, in the order of clients, and aggregates them.

    What `deltafl.server.check` finds fault with is refused and leaves no trace.
    """

    def __init__(self, reference: Mapping[str, Tensor]) -> None:
        """Start with no update; `reference` are the global weights, from which clients start."""
        self._reference = dict(reference)
        self._forms = check.forms(reference)
        self.lengths: list[float] = []
        """How far each update that was taken is from the global weights."""

    def __len__(self) -> int:
        """Return how many updates were taken."""
        return len(self.lengths)

    def add(self, weights: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add a client's weights. `ValueError` for those that are refused."""
        stack = {name: value.unsqueeze(0) for name, value in weights.items()}
        for fault in self.add_all(stack, [weight]).values():
            raise ValueError(f"this update cannot be used: {fault}")

    def add_all(self, stack: Mapping[str, Tensor], weights: Sequence[float]) -> dict[int, str]:
        """Add clients whose weights lie side by side along a leading axis.

        Returns why clients were refused, by their place; the others are added.
        """
        clients = len(weights)
        if (fault := check.misfit(check.forms(stack, leading=1), self._forms)) is not None:
            return dict.fromkeys(range(clients), fault)
        rows = self._rows(stack, clients)
        parts = self._distances(rows)
        lengths = [math.hypot(*own) for own in zip(*(p.tolist() for p in parts), strict=True)]
        lengths = lengths or [0.0] * clients  # of integers alone
        if refused := self._refused(stack, weights, lengths):
            good = [place for place in range(clients) if place not in refused]
            if not good:
                return refused
            rows = {key: row[good] for key, row in rows.items()}
            weights = [weights[place] for place in good]
            lengths = [lengths[place] for place in good]
        self._take(rows, weights)
        self.lengths += lengths
        return refused

    def _refused(
        self, stack: Mapping[str, Tensor], weights: Sequence[float], lengths: Sequence[float]
    ) -> dict[int, str]:
        refused = {
            place: f"its weight is {weight:g}, not finite and above 0"
            for place, weight in enumerate(weights)
            if not (math.isfinite(weight) and weight > 0)
        }
        for place, length in enumerate(lengths):
            if not math.isfinite(length):
                refused[place] = self._fault(stack, place)
        return refused

    def _fault(self, stack: Mapping[str, Tensor], place: int) -> str:
        update = {name: value[place] for name, value in stack.items()}
        return check.not_finite(update) or check.too_far(
            [value for value in update.values() if value.is_floating_point()]
        )

    def result(self) -> Weights:
        """Return the aggregate, each entry in its own dtype. `ValueError` if there is nothing."""
        if not len(self):
            raise ValueError("there is no update to aggregate: add one first")
        return self._result()

    @abstractmethod
    def _rows(self, stack: Mapping[str, Tensor], clients: int) -> Rows:
        """Return the entries of clients as tables."""

    @abstractmethod
    def _distances(self, rows: Rows) -> list[Tensor]:
        """Return how far clients are from where they started, in each of several parts."""

    @abstractmethod
    def _take(self, rows: Rows, weights: Sequence[float]) -> None:
        """Add good clients; there is at least one."""

    @abstractmethod
    def _result(self) -> Weights:
        """Return the aggregate of at least one update."""


class Joined(Collector):
    """Joins the entries of each dtype into one row a client: one operation on all is faster."""

    def __init__(self, reference: Mapping[str, Tensor]) -> None:
        """Start with no update; `reference` are the global weights."""
        super().__init__(reference)
        self._names: dict[torch.dtype, list[str]] = {}
        for name, tensor in reference.items():
            self._names.setdefault(tensor.dtype, []).append(name)
        self._start = {
            dtype: torch.cat([reference[name].reshape(-1) for name in names])
            for dtype, names in self._names.items()
            if dtype.is_floating_point
        }

    def _rows(self, stack: Mapping[str, Tensor], clients: int) -> Rows:
        return {
            dtype: torch.cat([stack[name].reshape(clients, -1) for name in names], 1)
            for dtype, names in self._names.items()
        }

    def _distances(self, rows: Rows) -> list[Tensor]:
        return [check.distances(rows[dtype], start) for dtype, start in self._start.items()]

    def _result(self) -> Weights:
        whole: Weights = {}
        for dtype, entries in self._aggregate().items():
            rounded = entries if dtype.is_floating_point else entries.round()
            names = self._names[dtype]
            sizes = [self._reference[name].numel() for name in names]
            for name, part in zip(names, torch.split(rounded.to(dtype), sizes), strict=True):
                whole[name] = part.view(self._reference[name].shape)
        return {name: whole[name] for name in self._reference}

    @abstractmethod
    def _aggregate(self) -> dict[torch.dtype, Tensor]:
        """Return the aggregate of the rows of each dtype, in float64."""
