"""The same client and server as Flower apps: a federation past one machine.

`deltafl.flower.server_app:app` and `deltafl.flower.client_app:app` are complete Flower apps, and
`deltafl federate` starts them. `deltafl.flower.library` has the parts for a Flower app of your own.
Everything here needs the extra `flower`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltafl.flower.engine import FlowerEngine, Patience
    from deltafl.flower.library import Guarded, train_with_delta_sgd

__all__ = ["FlowerEngine", "Guarded", "Patience", "train_with_delta_sgd"]

_PLACES = {
    "FlowerEngine": "engine",
    "Guarded": "library",
    "Patience": "engine",
    "train_with_delta_sgd": "library",
}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: certificates and processes do without Flower's own imports.
    if name not in _PLACES:
        raise AttributeError(f"module 'deltafl.flower' has no attribute {name!r}")
    return getattr(import_module(f"deltafl.flower.{_PLACES[name]}"), name)
