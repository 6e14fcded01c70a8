"""A perceptron with one hidden layer: the smallest model that is not convex."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from deltafl.models.base import Classifier, PullBack, linear_gradients, stacked_linear


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

    def stacked_pullback(
        self, weights: Mapping[str, Tensor], inputs: Tensor
    ) -> tuple[Tensor, PullBack]:
        """Return the logits of `stacked`, and how a gradient goes back through it."""
        flat = inputs.flatten(2).mT
        hidden = stacked_linear(weights, "hidden", flat).relu_()

        def pull_back(gradient: Tensor) -> dict[str, Tensor]:
            of_relu = weights["head.weight"].mT.bmm(gradient)
            of_hidden = torch.ops.aten.threshold_backward(of_relu, hidden, 0)
            return linear_gradients("head", gradient, hidden) | linear_gradients(
                "hidden", of_hidden, flat
            )

        return stacked_linear(weights, "head", hidden), pull_back

    def represent(self, inputs: Tensor) -> Tensor:
        """Return the activations of the hidden layer."""
        hidden: Tensor = self.hidden(inputs.flatten(1))
        return hidden.relu()

    def classify(self, representation: Tensor) -> Tensor:
        """Return the logits of hidden activations."""
        logits: Tensor = self.head(representation)
        return logits
