from __future__ import annotations

import torch
from torch import nn

from deltafl.optim import DeltaSGD
from deltafl.paper.authors import FreshMasks


def step_sizes(cls: type[DeltaSGD], dropout: float) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 1))
    optimizer = cls(model.parameters(), curvature="same-batch")
    optimizer.recording = True
    inputs, targets = torch.randn(64, 8), torch.randn(64, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    for _ in range(6):
        optimizer.step(closure)
    return [record.eta for record in optimizer.records]


def test_other_masks_shrink_the_step_size():
    same, fresh = step_sizes(DeltaSGD, 0.5), step_sizes(FreshMasks, 0.5)
    assert min(fresh) < 0.5 * min(same)


def test_without_dropout_there_is_no_difference():
    assert step_sizes(FreshMasks, 0.0) == step_sizes(DeltaSGD, 0.0)
