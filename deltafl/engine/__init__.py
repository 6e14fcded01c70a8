"""Where client work runs: in this process, in workers of one thread each, or on a Ray cluster."""

from __future__ import annotations

from deltafl.engine.base import ClientTask, Engine, Evaluation, Setup
from deltafl.engine.inline import InlineEngine
from deltafl.engine.ray_cluster import RayEngine
from deltafl.engine.workers import WorkersEngine

__all__ = [
    "ClientTask",
    "Engine",
    "Evaluation",
    "InlineEngine",
    "RayEngine",
    "Setup",
    "WorkersEngine",
    "build",
]


def build(kind: str, workers: int = 0, address: str | None = None) -> Engine:
    """Return the engine of that name; it starts when it is entered.

    `workers` is how many processes share the work, and `address` where a Ray cluster is.
    """
    if kind == "inline":
        return InlineEngine()
    return RayEngine(workers, address) if kind == "ray" else WorkersEngine(workers)
