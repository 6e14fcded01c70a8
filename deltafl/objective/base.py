"""What a client minimises: the contract between a loss and the client's local work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from deltafl.models import Classifier

LocalLoss = Callable[[Any, Tensor], Tensor]
"""(inputs, labels) -> the mean loss of a batch at the model's current weights.

A pure function of the weights, the batch and the global random state: Delta-SGD calls it at
two points of one step under the same random state, and means to see only the points differ.
"""


class Objective(Protocol):
    """A loss that may look at the global weights and at the client's own last weights."""

    @property
    def remembers(self) -> bool:
        """Whether the client's weights must be kept for its next round."""
        ...

    def start(
        self,
        model: Classifier,
        global_weights: Mapping[str, Tensor],
        memory: Mapping[str, Tensor] | None,
    ) -> LocalLoss:
        """Return the loss of one client's local work in one round.

        Args:
            model: The model being trained; the loss reads its weights at every call.
            global_weights: The weights of the round's start, x_t.
            memory: The weights the client ended its last round with; None the first time, or
                when the objective does not remember.
        """
        ...
