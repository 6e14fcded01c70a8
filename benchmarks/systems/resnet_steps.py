"""Bare training steps of ResNet-18 in plain torch on one thread; a round is a number of steps."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from benchmarks.systems.gate import Gate, arguments
from benchmarks.systems.local import in_format
from benchmarks.systems.nets import ResNet18


def main() -> None:
    """Step in the memory format asked for, compiled or not."""
    spec = arguments()
    steps, batch = spec["steps"], spec["batch"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    form = torch.channels_last if spec["channels_last"] else torch.contiguous_format
    net = in_format(ResNet18(), form)
    step = torch.compile(net) if spec["compile"] else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    inputs = torch.randn(steps * batch, 3, 32, 32)
    labels = torch.arange(steps * batch) % 10
    gate = Gate()
    gate.open()
    while True:
        order = torch.randperm(len(labels))
        for index in order.view(steps, batch):
            images = inputs[index].contiguous(memory_format=form)
            optimizer.zero_grad()
            F.cross_entropy(step(images), labels[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        gate.tick()


if __name__ == "__main__":
    main()
