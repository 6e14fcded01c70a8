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


def _misfit(
    update: Mapping[str, Tensor], reference: Mapping[str, Tensor], leading: int = 0
) -> str | None:
    """Return what of the names, shapes (but for leading axes) and dtypes does not fit."""
    if missing := [name for name in reference if name not in update]:
        return f"missing {_some(missing)}"
    if extra := [name for name in update if name not in reference]:
        return f"unexpected {_some(extra)}"
    for name, wanted in reference.items():
        given = update[name]
        shape = given.shape[leading:]
        if shape != wanted.shape:
            return f"{name!r} has shape {tuple(shape)}, not {tuple(wanted.shape)}"
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
        # Entries of a dtype lie in a row: one operation on all is faster than one on each.
        self._rows: dict[torch.dtype, list[str]] = {}
        for name, tensor in reference.items():
            self._rows.setdefault(tensor.dtype, []).append(name)
        self._sums: dict[torch.dtype, Tensor] = {}
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
        stack = {name: value.unsqueeze(0) for name, value in weights.items()}
        for fault in self.add_all(stack, [weight]).values():
            raise ValueError(f"this update cannot be averaged: {fault}")

    def add_all(self, stack: Mapping[str, Tensor], weights: Sequence[float]) -> dict[int, str]:
        """Add clients whose weights lie side by side along a leading axis.

        Returns why clients were refused, by their place; the others are added.
        """
        if (fault := _misfit(stack, self._reference, leading=1)) is not None:
            return dict.fromkeys(range(len(weights)), fault)
        # Relative to the first: equal weights are exactly 1 each, so they give the bits of the
        # plain average, and the unit of the weights cancels exactly.
        unit = self._first if self._count else weights[0]
        sums = self._weighted(stack, [weight / unit for weight in weights])
        refused: dict[int, str] = {}
        # A sum of finite float32 numbers is finite in float64: only a broken client breaks it.
        if not all(math.isfinite(total.sum()) for total in sums.values()):
            refused = self._broken(stack, len(weights))
            good = [place for place in range(len(weights)) if place not in refused]
            if not good:
                return refused
            weights = [weights[place] for place in good]
            unit = self._first if self._count else weights[0]
            kept = {name: value[good] for name, value in stack.items()}
            sums = self._weighted(kept, [weight / unit for weight in weights])
        self._first = unit
        for dtype, total in sums.items():
            if dtype in self._sums:
                self._sums[dtype].add_(total)
            else:
                self._sums[dtype] = total
        self._total += sum(weight / unit for weight in weights)
        self._count += len(weights)
        return refused

    def _weighted(
        self, stack: Mapping[str, Tensor], shares: list[float]
    ) -> dict[torch.dtype, Tensor]:
        """Return the sums over the clients, each entry in float64, in a tensor of their own."""
        equal = shares.count(1.0) == len(shares)
        sums = {}
        for dtype, names in self._rows.items():
            row = torch.cat([stack[name].reshape(len(shares), -1) for name in names], 1)
            values = row.to(torch.float64)
            if not equal:
                # A product and a sum, each rounded: a fused one may round vector and tail apart.
                values = values * torch.tensor(shares, dtype=torch.float64).unsqueeze(1)
            sums[dtype] = values[0] if len(shares) == 1 else values.sum(0)
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
        average: Weights = {}
        for dtype, names in self._rows.items():
            mean = _cast(self._sums[dtype] / self._total, dtype)
            parts = torch.split(mean, [self._reference[name].numel() for name in names])
            for name, part in zip(names, parts, strict=True):
                average[name] = part.view(self._reference[name].shape)
        return {name: average[name] for name in self._reference}


def _cast(mean: Tensor, dtype: torch.dtype) -> Tensor:
    return (mean if dtype.is_floating_point else mean.round()).to(dtype)
