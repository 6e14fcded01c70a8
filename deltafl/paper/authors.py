"""What the authors' public code does and the paper's text does not say, to measure what it changes.

Clients train on 90 % of their 500 samples, drawn with replacement; the last batch of an epoch, of
2 samples then, is a step like any other; and the two gradients of Δ-SGD see different dropout
masks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deltafl.optim import DeltaSGD

SAMPLES = {"federation.samples": 450}
REPLACEMENT = {"federation.replacement": True}
LAST_BATCH = {**SAMPLES, "client.last_batch": "keep"}
ALL = {**LAST_BATCH, **REPLACEMENT}


class FreshMasks(DeltaSGD):
    """Δ-SGD whose gradient difference also measures the difference of two dropout masks."""

    def _rehearse(self, closure: Callable[[], float]) -> dict[Tensor, Tensor]:
        def elsewhere() -> float:
            torch.rand(4099)  # moves the random state on; the rehearsal puts it back
            return closure()

        return super()._rehearse(elsewhere)
