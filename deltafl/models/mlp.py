"""A perceptron with one hidden layer: the smallest model that is not convex."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from deltafl.models.base import Classifier, stacked_linear


class MLP(Classifier):
    """One hidden ReLU layer of `width` units on the flattened input; no dropout."""

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 64) -> None:
        super().__init__()
        self.hidden = nn.Linear(math.prod(shape), width)
        self.head = nn.Linear(width, classes)

    stacks = True

    def stacked(self, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return the logits of clients with weights of their own."""
        hidden = stacked_linear(weights, "hidden", inputs.flatten(2).mT).relu()
        return stacked_linear(weights, "head", hidden)

    def represent(self, inputs: Tensor) -> Tensor:
        """Return the activations of the hidden layer."""
        hidden: Tensor = self.hidden(inputs.flatten(1))
        return hidden.relu()

    def classify(self, representation: Tensor) -> Tensor:
        """Return the logits of hidden activations."""
        logits: Tensor = self.head(representation)
        return logits
