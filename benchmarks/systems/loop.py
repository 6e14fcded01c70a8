"""The hand-written loop: federated averaging in one process, as one would write it in an hour."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.systems.gate import Gate, arguments
from benchmarks.systems.local import Federation


def main() -> None:
    """Run rounds of federated averaging on so many threads."""
    spec = arguments()
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    federation = Federation.read(spec["folder"], channels_last=spec["channels_last"])
    net = federation.net()
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=federation.lr)
    current = [parameter.detach().clone() for parameter in parameters]

    def accuracy(_done: int) -> float:
        put(net, current)
        return federation.accuracy(net)

    gate = Gate(accuracy)
    gate.open()
    while True:
        clients = federation.clients(gate.done)
        total = [torch.zeros_like(value) for value in current]
        for client in clients:
            put(net, current)
            federation.train(net, optimizer, client)
            add(total, net)
        for value, summed in zip(current, total, strict=True):
            torch.div(summed, len(clients), out=value)
        gate.tick()


@torch.no_grad()
def put(net: nn.Module, values: list[Tensor]) -> None:
    """Copy values into the parameters of a model."""
    for parameter, value in zip(net.parameters(), values, strict=True):
        parameter.copy_(value)


@torch.no_grad()
def add(total: list[Tensor], net: nn.Module) -> None:
    """Add the parameters of a model to a sum."""
    for summed, parameter in zip(total, net.parameters(), strict=True):
        summed.add_(parameter)


if __name__ == "__main__":
    main()
