"""What every model of the package is: a representation, and a linear layer on top of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

PullBack = Callable[[Tensor], dict[str, Tensor]]
"""From the gradient of the logits to those of the weights."""


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

    def stacked_pullback(
        self, weights: Mapping[str, Tensor], inputs: Tensor
    ) -> tuple[Tensor, PullBack]:
        """Return the logits of `stacked`, and how a gradient goes back through it.

        This is autograd's way; a model may write out the same operations, which spares its books.
        """
        leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
        with torch.enable_grad():
            logits = self.stacked(leaves, inputs)

        def pull_back(gradient: Tensor) -> dict[str, Tensor]:
            gradients = torch.autograd.grad(logits, list(leaves.values()), gradient)
            return dict(zip(leaves, gradients, strict=True))

        return logits.detach(), pull_back

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
    return torch.baddbmm(bias.unsqueeze(2), weight, inputs)


def linear_gradients(layer: str, gradient: Tensor, inputs: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a `stacked_linear` layer's weights, given that of its outputs."""
    return {f"{layer}.bias": gradient.sum(2), f"{layer}.weight": gradient.bmm(inputs.mT)}
