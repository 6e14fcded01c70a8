"""What the systems that are not deltafl share: the federation's files, and plain local training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.systems.nets import NETS

Net = TypeVar("Net", bound=nn.Module)


@dataclass(frozen=True)
class Federation:
    """The data in memory, who holds which rows, and who takes part in which round."""

    inputs: Tensor
    labels: Tensor
    rows: Tensor
    schedule: list[list[int]]
    model: str
    lr: float
    batch: int
    steps: int
    folder: Path
    channels_last: bool

    @classmethod
    def read(cls, folder: str | Path, *, channels_last: bool = False) -> Federation:
        """Map the files that the benchmark wrote; choose how models lie in memory."""
        folder = Path(folder)
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        return cls(
            _mapped(folder / "inputs.npy"),
            _mapped(folder / "labels.npy"),
            _mapped(folder / "rows.npy"),
            np.load(folder / "schedule.npy").tolist(),
            folder=folder,
            channels_last=channels_last,
            **about,
        )

    def net(self) -> nn.Module:
        """Return the model with its initial weights."""
        net = NETS[self.model]()
        with np.load(self.folder / "initial.npz") as initial:
            net.load_state_dict({name: torch.from_numpy(initial[name]) for name in initial.files})
        # One line that whoever writes a loop by hand may know: convolutions like it better.
        return in_format(net, torch.channels_last) if self.channels_last else net

    def clients(self, number: int) -> list[int]:
        """Return the clients of a round, counted from 0."""
        return self.schedule[number % len(self.schedule)]

    def train(self, net: nn.Module, optimizer: torch.optim.Optimizer, client: int) -> None:
        """Do one client's local steps."""
        held = self.rows[client]
        order = held[torch.randperm(len(held))]
        for step in range(self.steps):
            index = order[step * self.batch : (step + 1) * self.batch]
            optimizer.zero_grad()
            F.cross_entropy(net(self.inputs[index]), self.labels[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def accuracy(self, net: nn.Module) -> float:
        """Return the share of the test set that is right."""
        inputs = _mapped(self.folder / "test_inputs.npy")
        labels = _mapped(self.folder / "test_labels.npy")
        net.eval()
        with torch.inference_mode():
            right = 0
            for start in range(0, len(labels), 500):
                chunk = slice(start, start + 500)
                right += int((net(inputs[chunk]).argmax(1) == labels[chunk]).sum())
        net.train()
        return right / len(labels)


def in_format(net: Net, form: torch.memory_format) -> Net:
    """Return the model with its weights in a memory format."""
    net.to(memory_format=form)  # type: ignore[call-overload]
    return net


def _mapped(path: Path) -> Tensor:
    return torch.from_numpy(np.load(path, mmap_mode="c"))
