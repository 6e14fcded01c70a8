"""The client optimizers of the paper by name (Section 4, "Hyperparameters"), and how to build one.

Learning rates are defaults to start from; the paper tunes those of SGD, SGDM, Adam and Adagrad
over ``Entry.grid`` on one task and reuses them everywhere. Any other ``torch.optim.Optimizer`` is
reached by its import path.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from deltafl.errors import UserError, unknown
from deltafl.optim.delta_sgd import DeltaSGD
from deltafl.optim.sps import SPS

_SGD_GRID = (0.01, 0.05, 0.1, 0.5)
_ADAPTIVE_GRID = (0.001, 0.01, 0.1)


@dataclass(frozen=True)
class Entry:
    """One client optimizer: its class, its defaults, and what there is to tune."""

    name: str
    label: str
    """How tables and legends call it."""
    cls: type[Optimizer]
    options: Mapping[str, float | bool | str]
    grid: tuple[float, ...]
    """Learning rates the paper searches; empty if there is nothing to tune."""
    decays: bool
    """Whether the learning rate is divided by 10 at 50 % and again at 75 % of the rounds."""
    summary: str


_ENTRIES = {
    entry.name: entry
    for entry in (
        Entry("sgd", "SGD", torch.optim.SGD, {"lr": 0.1}, _SGD_GRID, False, "plain SGD"),
        Entry(
            "sgd-decay",
            "SGD (↓)",
            torch.optim.SGD,
            {"lr": 0.1},
            _SGD_GRID,
            True,
            "SGD, step size divided by 10 at 50 % and 75 % of the rounds",
        ),
        Entry(
            "sgdm",
            "SGDM",
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9},
            _SGD_GRID,
            False,
            "SGD with momentum 0.9",
        ),
        Entry(
            "sgdm-decay",
            "SGDM (↓)",
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9},
            _SGD_GRID,
            True,
            "SGD with momentum 0.9, step size divided by 10 at 50 % and 75 % of the rounds",
        ),
        Entry("adam", "Adam", torch.optim.Adam, {"lr": 0.001}, _ADAPTIVE_GRID, False, "Adam"),
        Entry(
            "adagrad",
            "Adagrad",
            torch.optim.Adagrad,
            {"lr": 0.01},
            _ADAPTIVE_GRID,
            False,
            "Adagrad",
        ),
        Entry(
            "sps",
            "SPS",
            SPS,
            {"c": 0.5, "f_star": 0.0},
            (),
            False,
            "SGD with the stochastic Polyak step size",
        ),
        Entry(
            "delta-sgd",
            "Δ-SGD",
            DeltaSGD,
            {"lr": 0.2, "gamma": 2.0, "delta": 0.1, "theta0": 1.0, "curvature": "same-batch"},
            (),
            False,
            "self-tuning SGD, gradient difference on one batch: two gradients a step",
        ),
        Entry(
            "delta-sgd-reused",
            "Δ-SGD (reused)",
            DeltaSGD,
            {"lr": 0.2, "gamma": 2.0, "delta": 0.1, "theta0": 1.0, "curvature": "reused"},
            (),
            False,
            "self-tuning SGD, gradient difference between steps: one gradient a step",
        ),
    )
}


def names() -> tuple[str, ...]:
    """Return the names in the order of the paper's tables."""
    return tuple(_ENTRIES)


def lookup(name: str) -> Entry:
    """Return the entry of a name, or one for an import path such as ``torch.optim.RAdam``."""
    if name in _ENTRIES:
        return _ENTRIES[name]
    if "." in name or ":" in name:
        cls = _imported(name)
        summary = f"{cls.__module__}.{cls.__qualname__}"
        return Entry(name, cls.__name__, cls, {}, (), False, summary)
    raise unknown("optimizer", name, _ENTRIES)


def lr_factor(entry: Entry, progress: float) -> float:
    """Return what the learning rate is multiplied with at round progress * rounds.

    The paper decays over rounds, not over the local steps of a client.
    """
    if not 0 <= progress <= 1:
        raise ValueError(f"progress must lie between 0 and 1, not {progress!r}")
    if not entry.decays or progress < 0.5:
        return 1.0
    return 0.1 if progress < 0.75 else 0.01


def build(
    name: str,
    params: ParamsT,
    *,
    lr: float | None = None,
    options: Mapping[str, Any] | None = None,
    progress: float = 0.0,
) -> Optimizer:
    """Build an optimizer: the entry's options, overridden by the user's, decayed by progress."""
    entry = lookup(name)
    given = dict(options or {})
    if lr is not None:
        if "lr" in given:
            raise UserError(f"optimizer {name!r}: lr is given twice, leave it out of the options")
        given["lr"] = lr
    constructor: Any = entry.cls
    valid = _option_names(constructor)
    hint = f"its options are {', '.join(valid)}"
    for option in given:
        if option not in valid:
            raise UserError(f"optimizer {name!r} has no option {option!r}: {hint}")
    merged = {**entry.options, **given}
    try:
        if entry.decays:
            merged["lr"] *= lr_factor(entry, progress)
        optimizer: Optimizer = constructor(params, **merged)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"optimizer {name!r}: {reason}; {hint}") from error
    return optimizer


@cache  # a client builds an optimizer every round, and signatures are slow to read
def _option_names(cls: Any) -> tuple[str, ...]:
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(parameter.name for parameter in parameters if parameter.kind in named)


def _imported(path: str) -> type[Optimizer]:
    separator = ":" if ":" in path else "."
    module, _, attribute = path.rpartition(separator)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module of the user's may raise anything when imported
        reason = " ".join(str(error).split())
        raise UserError(f"optimizer {path!r} cannot be imported: {reason}") from error
    if not (isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer):
        raise UserError(f"optimizer {path!r} is not a subclass of torch.optim.Optimizer")
    return found
