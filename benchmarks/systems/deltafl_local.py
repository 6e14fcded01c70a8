"""Only the local work of deltafl's clients, half of a round's clients in each of two processes.

It is what a round would take without messages, sampling and aggregation.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.systems.gate import Gate, arguments
from deltafl import Config
from deltafl.engine import ClientTask
from deltafl.engine.workbench import Workbench
from deltafl.experiment.federation import build_setup, sample_clients


def work(fields: dict[str, Any], part: int, parts: int, link: Connection) -> None:
    """Do every `parts`-th client of the rounds whose numbers arrive."""
    torch.set_num_threads(1)
    config = Config().override(**fields)
    bench = Workbench(build_setup(config))
    weights = {name: value.clone() for name, value in bench.model.state_dict().items()}
    link.send(None)
    while True:
        number = link.recv()
        for client in sample_clients(config, number)[part::parts]:
            bench.train(weights, [ClientTask(client, number, 0.0)])
        link.send(None)


def main() -> None:
    """Run the local work of rounds of a configuration given as {dotted field: value}."""
    spec = arguments()
    parts = spec["processes"]
    context = multiprocessing.get_context("spawn")
    links = []
    gate = Gate()
    for part in range(parts):
        ours, theirs = context.Pipe()
        given = (spec["config"], part, parts, theirs)
        context.Process(target=work, args=given, daemon=True).start()
        links.append(ours)
    for link in links:
        link.recv()
    gate.open()
    while True:
        for link in links:
            link.send(gate.done + 1)
        for link in links:
            link.recv()
        gate.tick()


if __name__ == "__main__":
    main()
