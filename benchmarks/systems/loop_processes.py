"""The hand-written loop on several processes of one thread each, which take clients from a queue.

The global weights and a sum of weights a process lie in shared memory. All processes meet at a
barrier before and after each round, so that none takes the end mark of another.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
from torch import Tensor

from benchmarks.systems.gate import Gate, arguments
from benchmarks.systems.local import Federation
from benchmarks.systems.loop import add, put

Queue = SimpleQueue[int | None]


def work(
    spec: dict[str, Any],
    seed: int,
    current: list[Tensor],
    total: list[Tensor],
    todo: Queue,
    together: Barrier,
) -> None:
    """Train the clients from the queue until it says that the round is over."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    federation = Federation.read(spec["folder"], channels_last=spec["channels_last"])
    net = federation.net()
    optimizer = torch.optim.SGD(net.parameters(), lr=federation.lr)
    together.wait()
    while True:
        together.wait()
        while (client := todo.get()) is not None:
            put(net, current)
            federation.train(net, optimizer, client)
            add(total, net)
        together.wait()


def shared(value: Tensor) -> Tensor:
    """Return a copy that other processes see."""
    copy: Tensor = value.clone().share_memory_()  # type: ignore[no-untyped-call]
    return copy


def main() -> None:
    """Run rounds of federated averaging on so many processes."""
    spec = arguments()
    processes = spec["processes"]
    federation = Federation.read(spec["folder"], channels_last=spec["channels_last"])
    net = federation.net()
    current = [shared(parameter.detach()) for parameter in net.parameters()]
    context = multiprocessing.get_context("spawn")
    todo, together = context.SimpleQueue(), context.Barrier(processes + 1)
    totals = [[shared(torch.zeros_like(v)) for v in current] for _ in range(processes)]

    def accuracy(_done: int) -> float:
        put(net, current)
        return federation.accuracy(net)

    gate = Gate(accuracy)
    for seed, total in enumerate(totals):
        given = (spec, seed, current, total, todo, together)
        context.Process(target=work, args=given, daemon=True).start()
    together.wait()
    gate.open()
    while True:
        clients = federation.clients(gate.done)
        for client in (*clients, *[None] * processes):
            todo.put(client)
        together.wait()
        together.wait()
        for value, *parts in zip(current, *totals, strict=True):
            torch.div(sum(parts[1:], parts[0]), len(clients), out=value)
            for part in parts:
                part.zero_()
        gate.tick()


if __name__ == "__main__":
    main()
