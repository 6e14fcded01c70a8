"""What every model of the package is: a representation, and a linear layer on top of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, baddbmm, nn


class Classifier(nn.Module):
    """A model in two halves, so that an objective can look at what lies between them.

    MOON contrasts representations; an objective that needs both the representation and the
    logits calls the two halves itself and pays for one forward pass.
    """

    fast = False
    """Whether to compute by the fast path, which equals the plain one up to rounding."""

    def speed_up(self) -> None:
        """Take the fast path from now on."""
        self.fast = True

    @property
    def native(self) -> bool:
        """Whether that path runs compiled kernels, whose bits are not those of torch."""
        return False

    stacks = False
    """Whether `stacked` is there: small models give it, so that many clients train at once."""

    def stacked(self, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Return the logits, [clients, classes, N], of clients with weights of their own.

        Every tensor of `weights` and `inputs` has a leading axis of clients.
        """
        raise NotImplementedError

    def represent(self, inputs: Any) -> Tensor:
        """Return the input of the last linear layer, [N, D], before any dropout on it."""
        raise NotImplementedError

    def classify(self, representation: Tensor) -> Tensor:
        """Return the logits, [N, classes], of a representation."""
        raise NotImplementedError

    def forward(self, inputs: Any) -> Tensor:
        """Return the logits of a batch: a tensor, or `Fields` of them for a model of text."""
        return self.classify(self.represent(inputs))


def stacked_linear(weights: Mapping[str, Tensor], layer: str, inputs: Tensor) -> Tensor:
    """Apply a linear layer of every client to that client's inputs, [clients, features, N].

    The samples come last, so that the weights' gradients lie in memory as the weights do.
    """
    bias, weight = weights[f"{layer}.bias"], weights[f"{layer}.weight"]
    return baddbmm(bias.unsqueeze(2), weight, inputs)
