"""The models of the workloads in plain torch, for the systems that are not deltafl.

Layers and their names are those of deltafl's models, so that all start from the same weights.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F


class CNN(nn.Module):
    """Two convolutions and two linear layers with dropout, for 28x28 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.channel_dropout = nn.Dropout2d(0.5)
        self.hidden = nn.Linear(320, 50)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(50, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of a batch."""
        maps = F.relu(F.max_pool2d(self.conv1(inputs), 2))
        maps = F.relu(F.max_pool2d(self.channel_dropout(self.conv2(maps)), 2))
        hidden = F.relu(self.hidden(maps.flatten(1)))
        logits: Tensor = self.head(self.dropout(hidden))
        return logits


class Softmax(nn.Module):
    """Softmax regression on 8x8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.head(inputs.flatten(1))
        return logits


class MLP(nn.Module):
    """One hidden layer of 64 units on 8x8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.head(F.relu(self.hidden(inputs.flatten(1))))
        return logits


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, maps: Tensor) -> Tensor:
        """Return the maps of the next block."""
        return F.relu(self.branch(maps) + self.shortcut(maps))


class ResNet18(nn.Module):
    """ResNet-18 of width 64 with batch norm, for 32x32 colour images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
        )
        widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
        self.blocks = nn.Sequential(*(Block(i, o, 1 if i == o else 2) for i, o in pairwise(widths)))
        self.head = nn.Linear(512, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.head(self.blocks(self.stem(inputs)).mean(dim=(2, 3)))
        return logits


NETS = {"cnn": CNN, "softmax": Softmax, "mlp": MLP, "resnet18": ResNet18}
