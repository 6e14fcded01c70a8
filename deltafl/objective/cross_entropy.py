"""Cross entropy, the loss f_i of all the main experiments (Section 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from deltafl.models import Classifier
from deltafl.objective.base import LocalLoss


@dataclass(frozen=True)
class CrossEntropy:
    """The mean cross entropy of a batch."""

    remembers: ClassVar[bool] = False

    def start(
        self,
        model: Classifier,
        global_weights: Mapping[str, Tensor],
        memory: Mapping[str, Tensor] | None,
    ) -> LocalLoss:
        """Return the loss at the model's current weights; the other weights play no part."""

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(model(inputs), labels)

        return loss
