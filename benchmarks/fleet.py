"""The systems that items choose from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.federation import CORES, files
from benchmarks.session import System

SLOW = 3600.0
"""Seconds to wait for a round of a large model."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def deltafl(fields: Mapping[str, Any], name: str = "deltafl", **spec: object) -> System:
    """Return deltafl on a configuration."""
    return System(name, "deltafl_rounds", {"config": dict(fields), **spec}, timeout=SLOW)


def deltafl_on_ray(fields: Mapping[str, Any], name: str = "deltafl on Ray") -> System:
    """Return deltafl on a local Ray cluster, started for every block."""
    spec = {"config": {**fields, "engine.kind": "ray"}}
    return System(name, "deltafl_rounds", spec, lasting=False)


def deltafl_on_nodes(
    fields: Mapping[str, Any], nodes: int, cpus: int, name: str | None = None, **spec: object
) -> System:
    """Return deltafl on several Ray nodes of this machine, started for every block."""
    name = name or f"{nodes} node{'s' * (nodes > 1)}, {cpus} CPU{'s' * (cpus > 1)} each"
    spec |= {"config": dict(fields), "nodes": nodes, "cpus": cpus}
    return System(name, "ray_nodes", spec, lasting=False)


def local_work(fields: Mapping[str, Any]) -> System:
    """Return only the local work of deltafl's clients."""
    spec = {"config": dict(fields), "processes": CORES}
    return System("local work alone", "deltafl_local", spec, ONE_THREAD)


def loop(fields: Mapping[str, Any], threads: int, *, channels_last: bool = False) -> System:
    """Return the hand-written loop in one process."""
    name = f"loop, {threads} thread{'s' * (threads > 1)}" + ", channels_last" * channels_last
    spec = {"folder": str(files(fields)), "threads": threads, "channels_last": channels_last}
    return System(name, "loop", spec, {variable: str(threads) for variable in ONE_THREAD})


def loop_processes(fields: Mapping[str, Any], *, channels_last: bool = False) -> System:
    """Return the hand-written loop on two processes."""
    name = f"loop, {CORES} processes" + ", channels_last" * channels_last
    spec = {"folder": str(files(fields)), "processes": CORES, "channels_last": channels_last}
    return System(name, "loop_processes", spec, ONE_THREAD)


def pfl(fields: Mapping[str, Any]) -> System:
    """Return pfl on two processes; its model is channels_last, as fast as plain torch gets."""
    spec = {"folder": str(files(fields))}
    return System(f"pfl, {CORES} processes", "pfl_rounds", spec, ONE_THREAD, peer="pfl")


def flower(fields: Mapping[str, Any]) -> System:
    """Return Flower's simulation with two actors and the same model, started for every block."""
    spec = {"folder": str(files(fields)), "processes": CORES}
    name = f"Flower on Ray, {CORES} actors"
    return System(name, "flower_rounds", spec, ONE_THREAD, peer="flower", lasting=False)


def text_loop(fields: Mapping[str, Any]) -> System:
    """Return a plain transformers loop over the samples of one client."""
    spec = {"config": dict(fields)}
    return System("transformers, padded to 128", "text_loop", spec, ONE_THREAD, timeout=SLOW)


def resnet_steps(*, channels_last: bool, compiled: bool, steps: int, batch: int) -> System:
    """Return bare steps of ResNet-18 in plain torch."""
    name = f"{'channels_last' if channels_last else 'NCHW'} {'compiled' if compiled else 'eager'}"
    spec = {"channels_last": channels_last, "compile": compiled, "steps": steps, "batch": batch}
    return System(name, "resnet_steps", spec, ONE_THREAD)
