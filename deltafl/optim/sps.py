"""SPS: SGD with the stochastic Polyak step size (Section 4, footnote on the SPS baseline).

    eta = (f(x) - f*) / (c |g(x)|^2)

The paper's authors use f* = 0, c = 0.5 and no cap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from deltafl.optim._shared import (
    StepSizeOptimizer,
    accumulator,
    combine,
    descend,
    loss_gradients,
    norm,
    refuse_sparse,
    require,
    require_cap,
    require_lr,
    require_weight_decay,
    scalar_dtype,
    uses_foreach,
    with_gradients,
)


class SPS(StepSizeOptimizer):
    """SGD with the stochastic Polyak step size, from norms over all parameters together.

    The rule needs the loss: ``step(closure)``, or ``step(loss=loss)`` after ``backward()``.

    Args:
        params: parameters, named parameters, or groups of them, as for any torch optimizer.
        lr: multiplies the Polyak step, 1 being the rule itself. It gives schedulers, and groups
            that should move less, the key they expect; the rule needs no learning rate.
        c: the larger, the smaller the step.
        f_star: a lower bound of the loss.
        max_lr: no step size exceeds it.
        weight_decay: adds weight_decay * x to the gradient and weight_decay / 2 |x|^2 to the
            loss, so the rule sees the regularised loss.
        foreach: kernels over lists of tensors; None chooses as torch does.

    One answer for each odd case: without a finite Polyak step (zero gradient, or loss or gradient
    not finite) and with a loss below ``f_star``, the step size is 0. A parameter without a
    gradient is not moved; a step in which no parameter has one is no step. The step size is
    float64 if a parameter is, else float32; norms are accumulated in float64. There is no
    ``maximize``: a lower bound says nothing about going up.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        *,
        c: float = 0.5,
        f_star: float = 0.0,
        max_lr: float | None = None,
        weight_decay: float = 0.0,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "c": c,
            "f_star": f_star,
            "max_lr": max_lr,
            "weight_decay": weight_decay,
            "foreach": foreach,
        }
        _check_options(defaults)
        super().__init__(params, defaults)

    def _check(self, group: dict[str, Any]) -> None:
        _check_options(group)
        first = self.param_groups[0]
        for key in ("c", "f_star"):
            if group[key] != first[key]:
                raise ValueError(
                    f"all parameter groups must have the same {key}, but one has {group[key]!r} "
                    f"and the first has {first[key]!r}"
                )

    def _initial(self, group: dict[str, Any]) -> float:
        return 0.0

    @property
    def step_size(self) -> float:
        """The step size of the latest step, 0 before any. Reading it waits for the device.

        Of the first group, if groups differ in lr: see ``step_sizes``.
        """
        return self.step_sizes[0]

    @overload
    def step(self, closure: None = None, *, loss: float | Tensor | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, loss: None = None) -> float: ...

    @torch.no_grad()
    def step(
        self, closure: Callable[[], float] | None = None, *, loss: float | Tensor | None = None
    ) -> float | None:
        """Choose the step size, then step.

        Args:
            closure: computes the loss and its gradients, and returns the loss.
            loss: the loss whose gradients are already there, instead of a closure.
        """
        if (closure is None) == (loss is None):
            raise TypeError(
                "SPS needs the loss to choose its step size: call step(closure), or backward() "
                "and then step(loss=loss)"
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        value = torch.as_tensor(result if loss is None else loss)
        if value.numel() != 1:
            raise ValueError(f"the loss must be one number, but has shape {tuple(value.shape)}")

        refuse_sparse(self)
        self._step(value.detach().reshape(()))
        return result

    def _step(self, loss: Tensor) -> None:
        groups = [
            (group, *with_gradients(group), uses_foreach(group)) for group in self.param_groups
        ]
        everything = [p for _, params, _, _ in groups for p in params]
        if not everything:
            return
        device = everything[0].device
        loss = loss.to(device, accumulator(device))

        gradients, norms = [], []
        for group, params, grads, foreach in groups:
            decay = group["weight_decay"]
            regularised = loss_gradients(
                params, grads, weight_decay=decay, maximize=False, foreach=foreach
            )
            gradients.append(regularised)
            norms.append(norm(regularised, device, foreach=foreach))
            if decay:
                loss = loss + decay / 2 * norm(params, device, foreach=foreach).square()

        first = self.param_groups[0]
        polyak = (loss - first["f_star"]) / (first["c"] * combine(norms).square())
        polyak = torch.where(torch.isfinite(polyak), polyak, 0.0)
        dtype = scalar_dtype(everything)
        for (group, params, _, foreach), grads in zip(groups, gradients, strict=True):
            largest = torch.finfo(dtype).max if group["max_lr"] is None else group["max_lr"]
            eta = (group["lr"] * polyak).clamp(min=0, max=largest).to(dtype)
            descend(params, grads, eta, foreach=foreach)
            group["eta"] = eta
        if self.recording:
            self._records.append((None, None, first["eta"], None, 0))


def _check_options(options: Mapping[str, Any]) -> None:
    require_lr(options["lr"])
    require(0 < options["c"] < math.inf, "c", "positive and finite", options["c"])
    require(math.isfinite(options["f_star"]), "f_star", "finite", options["f_star"])
    require_cap(options["max_lr"])
    require_weight_decay(options["weight_decay"])
