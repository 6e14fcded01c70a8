"""The model, and a node's part of scikit-learn's digits."""

from __future__ import annotations

import numpy as np
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
    """Return the batches of a node, always in the same order."""
    images, labels = samples()
    rows = torch.arange(TEST + part, len(labels), parts)
    return [(images[batch], labels[batch]) for batch in rows.split(32)]


def to_arrays(model: nn.Module) -> list[np.ndarray]:
    """Return a model's weights as the old interface wants them."""
    return [value.numpy().copy() for value in model.state_dict().values()]


def with_arrays(arrays: list[np.ndarray]) -> nn.Module:
    """Return a model with these weights."""
    model = build_model()
    values = (torch.tensor(array) for array in arrays)
    model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))
    return model


def test_accuracy(model: nn.Module) -> float:
    """Return the share of the test samples that the model gets right."""
    images, labels = samples()
    with torch.inference_mode():
        right = model(images[:TEST]).argmax(1) == labels[:TEST]
    return float(right.float().mean())
