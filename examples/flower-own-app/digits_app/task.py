"""The model, and a node's part of scikit-learn's digits."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

TEST = 360


def build_model() -> nn.Module:
    """Return the network with the same initial weights everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def samples() -> tuple[Tensor, Tensor]:
    """Return all images, as rows of 64 numbers from 0 to 1, and their digits."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def batches_of(part: int, parts: int) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of a node: every so-manieth training sample."""
    images, labels = samples()
    rows = torch.arange(TEST + part, len(labels), parts)
    order = rows[torch.randperm(len(rows))]
    return [(images[batch], labels[batch]) for batch in order.split(32)]


def test_accuracy(model: nn.Module) -> float:
    """Return the share of the test samples that the model gets right."""
    images, labels = samples()
    with torch.inference_mode():
        right = model(images[:TEST]).argmax(1) == labels[:TEST]
    return float(right.float().mean())
