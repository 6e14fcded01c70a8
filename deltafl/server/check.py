"""What an update must be to take part: the one set of rules, wherever it comes from.

Names, shapes and dtypes are those of the global weights, every number is finite, and the squared
distance from the global weights can be told: a client at 1e30 is as broken as one at infinity. Its
square, which norms and the server's optimizers take, is infinite in float32, and FedAdam's second
moment would stay so, and stand still, for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Form = tuple[tuple[int, ...], object]
"""The shape of an entry, and the name of its dtype or the dtype itself."""


def problem(update: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> str | None:
    """Return why an update cannot be used beside `reference`, or None if it can.

    An update needs the names, shapes and dtypes of the reference, and finite values only: one
    NaN of one client would be in the global weights for ever.
    """
    if (fault := misfit(forms(update), forms(reference))) is not None:
        return fault
    return not_finite(update)


def not_finite(weights: Mapping[str, Tensor]) -> str | None:
    """Return which entries have a value that is not finite, or None if none has."""
    broken = [name for name, given in weights.items() if not _finite(given)]
    return f"non-finite values in {some(broken)}" if broken else None


def _finite(values: Tensor) -> bool:
    """Whether all are. A finite sum says so ten times faster; another may just be too large."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


def forms(weights: Mapping[str, Tensor], leading: int = 0) -> dict[str, Form]:
    """Return the form of every entry, but for leading axes."""
    return {name: (tuple(value.shape[leading:]), value.dtype) for name, value in weights.items()}


def misfit(given: Mapping[str, Form], wanted: Mapping[str, Form]) -> str | None:
    """Return what of the names, shapes and dtypes does not fit, or None if all does."""
    if given == wanted:
        return None
    if missing := [name for name in wanted if name not in given]:
        return f"missing {some(missing)}"
    if extra := [name for name in given if name not in wanted]:
        return f"unexpected {some(extra)}"
    for name, (right_shape, right_dtype) in wanted.items():
        shape, dtype = given[name]
        if shape != right_shape:
            return f"{name!r} has shape {shape}, not {right_shape}"
        if dtype != right_dtype:
            return f"{name!r} has dtype {_plain(dtype)}, not {_plain(right_dtype)}"
    return None


def distances(rows: Tensor, start: Tensor) -> Tensor:
    """Return how far each row, a client's entries of one dtype, is from where it started.

    It is not finite for a row with a value that is not, and for one so far away that the square
    is not, in float32 or what is wider.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(rows.to(wide) - start.to(wide), dim=1)
    return norms


def too_far(rows: Sequence[Tensor]) -> str:
    """Return what is wrong with a client whose numbers are finite, but not its distance."""
    largest = max(float(row.abs().max()) for row in rows if row.numel())
    return f"values up to {largest:.1e}, whose squares overflow"


def some(names: list[str]) -> str:
    """Return the first names and how many more there are: a model has hundreds."""
    shown = ", ".join(repr(name[:80]) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
