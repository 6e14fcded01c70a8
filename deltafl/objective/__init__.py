"""What a client minimises: the catalog of objectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from deltafl.errors import UserError, unknown
from deltafl.objective.base import LocalLoss, Objective
from deltafl.objective.cross_entropy import CrossEntropy
from deltafl.objective.fedprox import FedProx
from deltafl.objective.moon import Moon

__all__ = ["CrossEntropy", "FedProx", "LocalLoss", "Moon", "Objective", "build", "names"]

_OBJECTIVES: dict[str, type[CrossEntropy | FedProx | Moon]] = {
    "cross-entropy": CrossEntropy,
    "fedprox": FedProx,
    "moon": Moon,
}


def names() -> tuple[str, ...]:
    """Return the names `build` knows."""
    return tuple(_OBJECTIVES)


def build(name: str, options: Mapping[str, float] | None = None) -> Objective:
    """Return an objective.

    Args:
        name: One of `names()`.
        options: `mu` for `fedprox`; `mu` and `temperature` for `moon`; what is left out has
            its default.
    """
    if name not in _OBJECTIVES:
        raise unknown("objective", name, _OBJECTIVES)
    kind = _OBJECTIVES[name]
    accepted = [field.name for field in fields(kind)]
    for option in options or {}:
        if not accepted:
            raise UserError(f"objective {name!r} has no option {option!r}: leave it out")
        if option not in accepted:
            raise unknown(f"option of objective {name!r}", option, accepted)
    return kind(**(options or {}))
