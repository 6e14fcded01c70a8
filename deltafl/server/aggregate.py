"""The average of the clients' weights: x_{t+1} = 1/|S_t| sum_i x_i (Algorithm 1, line 13)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deltafl.server.weights import Weights


def problem(update: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> str | None:
    """Return why an update cannot be averaged into `reference`, or None if it can.

    An update needs the names, shapes and dtypes of the reference, and finite values only: one
    NaN of one client would be in the global weights for ever.
    """
    if (fault := _misfit(update, reference)) is not None:
        return fault
    if broken := [name for name, given in update.items() if not torch.isfinite(given).all()]:
        return f"non-finite values in {_some(broken)}"
    return None


def _misfit(update: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> str | None:
    """Return what of the names, shapes and dtypes does not fit."""
    if missing := [name for name in reference if name not in update]:
        return f"missing {_some(missing)}"
    if extra := [name for name in update if name not in reference]:
        return f"unexpected {_some(extra)}"
    for name, wanted in reference.items():
        given = update[name]
        if given.shape != wanted.shape:
            return f"{name!r} has shape {tuple(given.shape)}, not {tuple(wanted.shape)}"
        if given.dtype != wanted.dtype:
            return f"{name!r} has dtype {given.dtype}, not {wanted.dtype}"
    return None


def _some(names: list[str]) -> str:
    """Return the first names and how many more there are: a model has hundreds."""
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


class Average:
    """A weighted average that takes one update after the other, and keeps none of them.

    The sums are in float64 and in the order of the calls, so the caller who adds in the order of
    clients gets the same bits wherever the clients ran. Integer entries (BatchNorm counts its
    batches) are averaged and rounded to the nearest, halves to the even; so a boolean one is
    true if more than half of the weight says so.
    """

    def __init__(self, reference: Mapping[str, Tensor]) -> None:
        """Start with no update; `reference` says which names, shapes and dtypes fit."""
        self._reference = dict(reference)
        self._sums = {
            name: torch.zeros_like(tensor, dtype=torch.float64)
            for name, tensor in reference.items()
        }
        self._first = 0.0
        self._total = 0.0
        self._count = 0

    def __len__(self) -> int:
        """Return how many updates were added."""
        return self._count

    def add(self, weights: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add a client's weights. `ValueError` for those `problem` finds fault with."""
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"the weight of an update must be finite and above 0, not {weight}")
        if (fault := problem(weights, self._reference)) is not None:
            raise ValueError(f"this update cannot be averaged: {fault}")
        # Relative to the first: equal weights are exactly 1 each, so they give the bits of the
        # plain average, and the unit of the weights cancels exactly.
        if not self._count:
            self._first = weight
        share = weight / self._first
        for name, total in self._sums.items():
            # A product and a sum, each rounded: a fused one may round vector and tail apart.
            total.add_(weights[name].to(total) * share)
        self._total += share
        self._count += 1

    def add_all(self, stack: Mapping[str, Tensor], weights: Sequence[float]) -> dict[int, str]:
        """Add clients whose weights lie side by side along a leading axis.

        Returns why clients were refused, by their place; the others are added. One client gives
        the bits of `add`.
        """
        first = {name: value[0] for name, value in stack.items()}
        if (fault := _misfit(first, self._reference)) is not None:
            return dict.fromkeys(range(len(weights)), fault)
        unit = self._first if self._count else weights[0]
        sums = self._weighted(stack, [weight / unit for weight in weights])
        refused: dict[int, str] = {}
        # A sum of finite float32 numbers is finite in float64: only a broken client breaks it.
        if not all(torch.isfinite(total).all() for total in sums.values()):
            refused = self._broken(stack, len(weights))
            good = [place for place in range(len(weights)) if place not in refused]
            if not good:
                return refused
            weights = [weights[place] for place in good]
            unit = self._first if self._count else weights[0]
            kept = {name: value[good] for name, value in stack.items()}
            sums = self._weighted(kept, [weight / unit for weight in weights])
        self._first = unit
        for name, total in self._sums.items():
            total.add_(sums[name])
        self._total += sum(weight / unit for weight in weights)
        self._count += len(weights)
        return refused

    def _weighted(self, stack: Mapping[str, Tensor], shares: list[float]) -> dict[str, Tensor]:
        """Return the sums over the clients, each entry in float64."""
        factors = torch.tensor(shares, dtype=torch.float64)
        equal = shares.count(1.0) == len(shares)
        sums = {}
        for name, reference in self._reference.items():
            values = stack[name].to(torch.float64)
            if not equal:
                values = values * factors.view(-1, *[1] * reference.ndim)
            sums[name] = values.sum(0)
        return sums

    def _broken(self, stack: Mapping[str, Tensor], clients: int) -> dict[int, str]:
        """Return the clients with values that are not finite, and where they are."""
        finite = {
            name: torch.isfinite(stack[name]).view(clients, -1).all(1).tolist()
            for name in self._reference
        }
        faults = {
            place: [name for name, good in finite.items() if not good[place]]
            for place in range(clients)
        }
        return {
            place: f"non-finite values in {_some(where)}"
            for place, where in faults.items()
            if where
        }

    def result(self) -> Weights:
        """Return the average, each entry in its own dtype. `ValueError` if there is nothing."""
        if not self._count:
            raise ValueError("there is no update to average: add one first")
        return {
            name: _cast(total / self._total, self._reference[name].dtype)
            for name, total in self._sums.items()
        }


def _cast(mean: Tensor, dtype: torch.dtype) -> Tensor:
    return (mean if dtype.is_floating_point else mean.round()).to(dtype)
