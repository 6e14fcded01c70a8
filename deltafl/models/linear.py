"""Softmax regression: one linear layer on the flattened input, the convex model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from deltafl.models.base import Classifier, PullBack, linear_gradients, stacked_linear


class Softmax(Classifier):
    """Softmax regression.

    Its representation is the flattened input itself, so MOON's contrast is a constant for it.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(math.prod(shape), classes)

    stacks = True

    def stacked(self, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return the logits of clients with weights of their own."""
        return stacked_linear(weights, "head", inputs.flatten(2).mT)

    def stacked_pullback(
        self, weights: Mapping[str, Tensor], inputs: Tensor
    ) -> tuple[Tensor, PullBack]:
        """Return the logits of `stacked`, and how a gradient goes back through it."""
        flat = inputs.flatten(2).mT
        return stacked_linear(weights, "head", flat), lambda gradient: linear_gradients(
            "head", gradient, flat
        )

    def represent(self, inputs: Tensor) -> Tensor:
        """Return the flattened input."""
        return inputs.flatten(1)

    def classify(self, representation: Tensor) -> Tensor:
        """Return the logits of a flattened input."""
        logits: Tensor = self.head(representation)
        return logits
