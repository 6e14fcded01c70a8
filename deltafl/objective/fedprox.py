"""FedProx: a proximal term that keeps a client near the global weights.

Li et al. 2020, in the paper's Table 2b and the appendix "Additional experiments using FedProx":

    f_i(x) + mu/2 |x - x_t|^2

over the trainable parameters, with the global weights x_t of the round's start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from deltafl.errors import UserError
from deltafl.models import Classifier
from deltafl.objective.base import LocalLoss


@dataclass(frozen=True)
class FedProx:
    """Cross entropy and the proximal term; mu = 1 is the default of the authors' code."""

    mu: float = 1.0

    remembers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mu) and self.mu >= 0):
            raise UserError(f"mu {self.mu} of objective 'fedprox' is wrong: use 0 or more")

    def start(
        self,
        model: Classifier,
        global_weights: Mapping[str, Tensor],
        memory: Mapping[str, Tensor] | None,
    ) -> LocalLoss:
        """Return the loss around `global_weights`, which are copied: the model may share them."""
        anchors = {
            name: global_weights[name].detach().to(parameter.device, copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            parameters = dict(model.named_parameters())
            squares = [
                (parameters[name] - anchor).square().sum() for name, anchor in anchors.items()
            ]
            proximal = torch.stack(squares).sum()
            return F.cross_entropy(model(inputs), labels) + self.mu / 2 * proximal

        return loss
