"""Federated learning whose clients tune their own step sizes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deltafl.errors import UserError
from deltafl.optim import SPS, DeltaSGD
from deltafl.version import __version__

if TYPE_CHECKING:
    from deltafl.data import Dataset
    from deltafl.experiment import Comparison, Config, Result, compare, run, tune

__all__ = [
    "SPS",
    "Comparison",
    "Config",
    "Dataset",
    "DeltaSGD",
    "Result",
    "UserError",
    "__version__",
    "compare",
    "run",
    "tune",
]

# Loaded when first asked for: whoever only wants the optimizer, and every worker process, does
# without pandas and pydantic.
_LAZY = {
    "Comparison": "deltafl.experiment",
    "Config": "deltafl.experiment",
    "Dataset": "deltafl.data",
    "Result": "deltafl.experiment",
    "compare": "deltafl.experiment",
    "run": "deltafl.experiment",
    "tune": "deltafl.experiment",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'deltafl' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
