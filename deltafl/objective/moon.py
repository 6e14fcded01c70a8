"""MOON: a contrast that pulls a client's representation to the global model's.

Li et al. 2021, in the paper's appendix "Additional experiments using MOON":

    f_i(x) + mu l,   l = -log( exp(s_glob / tau) / (exp(s_glob / tau) + exp(s_prev / tau)) )

where s_glob and s_prev are the cosines of the representation of a sample under the model being
trained with that under the global model, and with that under the client's previous model.
"""

from __future__ import annotations

import copy
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


def _frozen(model: Classifier, weights: Mapping[str, Tensor]) -> Classifier:
    """Return a copy of the model at other weights that never trains, and draws no dropout."""
    still = copy.deepcopy(model)
    still.load_state_dict(weights)
    return still.eval().requires_grad_(False)


@dataclass(frozen=True)
class Moon:
    """Cross entropy and the contrast, with mu = 1 and a temperature tau of 0.5.

    A batch costs one forward pass more for each of the two frozen models.
    """

    mu: float = 1.0
    temperature: float = 0.5

    remembers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mu) and self.mu >= 0):
            raise UserError(f"mu {self.mu} of objective 'moon' is wrong: use 0 or more")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise UserError(
                f"temperature {self.temperature} of objective 'moon' is wrong: use more than 0"
            )

    def start(
        self,
        model: Classifier,
        global_weights: Mapping[str, Tensor],
        memory: Mapping[str, Tensor] | None,
    ) -> LocalLoss:
        """Return the loss; a client without memory has the global model as its previous one."""
        if memory is None:
            # Then the two cosines are the same: l = log 2 whatever the weights, at no cost.
            def first_loss(inputs: Tensor, labels: Tensor) -> Tensor:
                return F.cross_entropy(model(inputs), labels) + self.mu * math.log(2)

            return first_loss

        global_model = _frozen(model, global_weights)
        previous_model = _frozen(model, memory)

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            representation = model.represent(inputs)
            with torch.no_grad():
                of_global = global_model.represent(inputs)
                of_previous = previous_model.represent(inputs)
            near_global = F.cosine_similarity(representation, of_global)
            near_previous = F.cosine_similarity(representation, of_previous)
            # l in the form that cannot overflow: log(1 + exp((s_prev - s_glob) / tau)).
            contrast = F.softplus((near_previous - near_global) / self.temperature).mean()
            return F.cross_entropy(model.classify(representation), labels) + self.mu * contrast

        return loss
