"""Yogi, an Adam whose second moment moves by the size of g^2 only (Zaheer et al. 2018).

As FedYogi uses it (Reddi et al. 2021, Algorithm 2), without bias correction:

    m = b1 m + (1 - b1) g
    v = v - (1 - b2) sign(v - g^2) g^2,     v starts at eps^2
    x = x - lr m / (sqrt(v) + eps)

Adam's v forgets at a rate that grows with v itself; Yogi's shrinks slowly however small g is, so
the step size cannot jump up after a few small gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim.optimizer import Optimizer, ParamsT


class Yogi(Optimizer):
    """The Yogi optimizer, with the defaults of Reddi et al. 2021."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-3,
    ) -> None:
        if not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"Invalid learning rate: {lr}")
        for index, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not (math.isfinite(eps) and eps > 0):
            raise ValueError(f"Invalid epsilon value: {eps}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and make their state at once: v does not start at zero."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            self.state[parameter] = {
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.full_like(parameter, group["eps"] ** 2),
            }

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; `closure`, if given, computes the gradients and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad
                first = self.state[parameter]["exp_avg"]
                second = self.state[parameter]["exp_avg_sq"]
                square = gradient * gradient
                first.mul_(beta1).add_(gradient, alpha=1 - beta1)
                second.addcmul_(torch.sign(second - square), square, value=beta2 - 1)
                parameter.addcdiv_(first, second.sqrt().add_(group["eps"]), value=-group["lr"])
        return loss
