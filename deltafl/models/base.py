"""What every model of the package is: a representation, and a linear layer on top of it."""

from __future__ import annotations

from torch import Tensor, nn


class Classifier(nn.Module):
    """A model in two halves, so that an objective can look at what lies between them.

    MOON contrasts representations; an objective that needs both the representation and the
    logits calls the two halves itself and pays for one forward pass.
    """

    def represent(self, inputs: Tensor) -> Tensor:
        """Return the input of the last linear layer, [N, D], before any dropout on it."""
        raise NotImplementedError

    def classify(self, representation: Tensor) -> Tensor:
        """Return the logits, [N, classes], of a representation."""
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of a batch."""
        return self.classify(self.represent(inputs))
