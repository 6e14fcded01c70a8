"""Where client work runs: in this process, or in workers of one thread each."""

from __future__ import annotations

from deltafl.engine.base import ClientTask, Engine, Evaluation, Setup
from deltafl.engine.inline import InlineEngine
from deltafl.engine.workers import WorkersEngine

__all__ = [
    "ClientTask",
    "Engine",
    "Evaluation",
    "InlineEngine",
    "Setup",
    "WorkersEngine",
    "build",
]


def build(kind: str, workers: int = 0) -> Engine:
    """Return the engine of that name; it starts when it is entered."""
    return InlineEngine() if kind == "inline" else WorkersEngine(workers)
