"""Δ-SGD: Algorithm 1 of "Adaptive Federated Learning with Auto-Tuned Clients" (Section 3).

    x_k     = x_{k-1} - eta_{k-1} g(x_{k-1})
    eta_k   = min( gamma |x_k - x_{k-1}| / (2 |g(x_k) - g(x_{k-1})|),
                   sqrt(1 + delta theta_{k-1}) eta_{k-1} )
    theta_k = eta_k / eta_{k-1}

The first condition follows the inverse of the local smoothness, the second says how fast the step
size may grow. delta is the damping of Section 4 ("Hyperparameters"); delta = 1 is equation (4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from deltafl.optim._shared import (
    StepSizeOptimizer,
    accumulator,
    combine,
    descend,
    distance,
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
from deltafl.optim.rehearsal import Rehearsal

# Elements that are exchanged at once: they stay in the cache.
_PIECE = 1 << 16

# Options that the groups of one optimizer must agree on; the second ones only if they share
# one step size.
_ALWAYS_SHARED = ("curvature", "scope")
_SHARED_IF_GLOBAL = ("gamma", "delta", "theta0", "max_lr")


class Decision(NamedTuple):
    """One evaluation of the rule: the conditions of the minimum, and what it gives."""

    smoothness: Tensor | None
    growth: Tensor | None
    eta: Tensor
    theta: Tensor


def next_step_size(
    moved: Tensor,
    turned: Tensor,
    eta: Tensor,
    theta: Tensor,
    *,
    gamma: float,
    delta: float,
    cap: float,
) -> Decision:
    """Return the step size after eta: lines 9 and 10 of Algorithm 1.

    moved is |x_k - x_{k-1}| and turned is |g(x_k) - g(x_{k-1})|. Where they tell no curvature,
    because one is zero or not finite, the first condition is infinite and the growth decides.
    """
    usable = (moved > 0) & (turned > 0) & torch.isfinite(moved) & torch.isfinite(turned)
    smoothness = torch.where(usable, gamma * moved / (2 * turned), torch.inf).to(eta.dtype)
    growth = torch.sqrt(1 + delta * theta) * eta
    chosen = _in_range(torch.minimum(smoothness, growth), cap)
    return Decision(smoothness, growth, chosen, chosen / eta)


def _in_range(eta: Tensor, cap: float) -> Tensor:
    """Keep a step size finite, positive and below the cap."""
    limits = torch.finfo(eta.dtype)
    return eta.clamp(min=limits.tiny, max=min(limits.max, cap))


class DeltaSGD(StepSizeOptimizer):
    """SGD that finds its own step size from the local smoothness (Δ-SGD, Algorithm 1).

    ```python
    optimizer = DeltaSGD(model.parameters())


    def closure():
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        return loss


    optimizer.step(closure)
    ```

    With ``curvature="reused"`` a step costs one gradient instead of two, and ``optimizer.step()``
    after ``backward()`` is enough. Its estimate is noisier: where batches differ more than steps,
    the step size only falls, so call ``reset()`` now and then, as every round of federated
    learning does.

    Args:
        params: parameters, named parameters, or groups of them, as for any torch optimizer.
        lr: eta_0, the step size of the first step and after each ``reset()``; later steps do not
            read it, so a scheduler moves eta_0 only. A tensor of one element is read once.
        gamma: amplifier of the first condition.
        delta: damping of the growth; 1 is the undamped rule of the theory.
        theta0: the ratio assumed before there is one.
        curvature: which gradients are compared.

            - ``"same-batch"``: this step's loss at the point before and at this point. Costs a
              second gradient a step and a copy of the parameters, and needs ``step(closure)``.
              The closure runs at x_{k-1} first, with the randomness that x_k will see, and
              without a trace (see ``Rehearsal``); the loss returned is that at x_k.
            - ``"reused"``: that of this step and that of the step before, each on its own batch.
              One gradient a step, kept as a copy. |x_k - x_{k-1}| is eta_{k-1} |g_{k-1}|.
        max_lr: no step size exceeds it, eta_0 included.
        scope: ``"global"``: one step size from norms over all parameters together; ``"group"``:
            each group has its own. Groups with different ``lr`` under one step size keep their
            ratio s_i = lr_i / lr_0: group i steps with s_i eta, the norms are taken in the metric
            of that step, |x|^2 = sum |x_i|^2 / s_i and |g|^2 = sum s_i |g_i|^2, and ``max_lr``
            bounds the largest s_i eta.
        weight_decay: adds weight_decay * x to the gradient before everything else, so the rule
            sees the regularised loss.
        maximize: go up instead of down.
        foreach: kernels over lists of tensors; None chooses as torch does.

    One answer for each odd case:

    - No curvature to see (the point or the gradient did not change, or a norm is not finite):
      the growth condition decides.
    - The step size is always finite and positive; it stays between the smallest normal number
      and the largest of its type, float64 if a parameter is float64, else float32.
    - Norms are accumulated in float64: gradients of 1e30 and 1e-30 in float32 are measured right,
      and bfloat16 or float16 parameters lose nothing but the rounding of the move itself.
    - A zero gradient moves nothing. Reused, the first one turns the gradient by its own length,
      so eta_k is at most gamma / 2 of eta_{k-1}; the next ones let the step size grow.
    - One step only: it uses eta_0.
    - A parameter without a gradient is not moved. Reused: the norms run over the parameters that
      had a gradient in this step and in the one before. Same batch: over those that have one in
      both evaluations. A step in which no parameter has a gradient is no step: nothing changes;
      with ``scope="group"``, a group without gradients keeps its step size.
    - A group added later takes the common step size, or starts its own with its lr; until it has
      a gradient to compare, it does not enter the norms.
    - A gradient that is not finite reaches the parameters, as in every torch optimizer; it does
      not reach the step size.
    - Sparse gradients and complex parameters raise a RuntimeError.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.2,
        *,
        gamma: float = 2.0,
        delta: float = 0.1,
        theta0: float = 1.0,
        curvature: Literal["same-batch", "reused"] = "same-batch",
        max_lr: float | None = None,
        scope: Literal["global", "group"] = "global",
        weight_decay: float = 0.0,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "gamma": gamma,
            "delta": delta,
            "theta0": theta0,
            "curvature": curvature,
            "max_lr": max_lr,
            "scope": scope,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
        }
        self._rehearsal = Rehearsal()
        _check_options(defaults)
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rehearsal = Rehearsal()

    def _check(self, group: dict[str, Any]) -> None:
        _check_options(group)
        first = self.param_groups[0]
        scoped = _SHARED_IF_GLOBAL if first["scope"] == "global" else ()
        for key in (*_ALWAYS_SHARED, *scoped):
            if group[key] != first[key]:
                raise ValueError(
                    f"all parameter groups must have the same {key}, but one has {group[key]!r} "
                    f"and the first has {first[key]!r}"
                    + ('; use scope="group"' if key in _SHARED_IF_GLOBAL else "")
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; under one step size it takes part from the next step on."""
        super().add_param_group(param_group)
        self.param_groups[-1]["theta"] = None

    def _initial(self, group: dict[str, Any]) -> float:
        groups = self.param_groups if group["scope"] == "global" else [group]
        eta_0 = min(_positive_lr(groups[0]), _cap(groups))
        return eta_0 * _scale(group, groups[0])

    @property
    def step_size(self) -> float:
        """The step size of the latest step; eta_0 before any. Reading it waits for the device."""
        if self.param_groups[0]["scope"] == "group":
            raise RuntimeError(
                'with scope="group" each parameter group has its own step size: read step_sizes'
            )
        return self.step_sizes[0]

    def reset(self) -> None:
        """Start a round: eta_0 and theta_0 again, and no memory of a point or gradient before.

        Records are kept.
        """
        self.state.clear()
        for group in self.param_groups:
            group["eta"] = group["theta"] = None

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Choose the step size, then step.

        Args:
            closure: clears the gradients, computes the loss of one fixed batch and its gradients,
                and returns the loss. Required with ``curvature="same-batch"``.
        """
        same_batch = self.param_groups[0]["curvature"] == "same-batch"
        before: dict[Tensor, Tensor] = {}
        if same_batch:
            if closure is None:
                raise TypeError(
                    'curvature="same-batch" evaluates the loss twice a step: call '
                    "step(closure) with a closure that clears the gradients, computes the loss, "
                    'calls backward() and returns the loss, or use curvature="reused"'
                )
            before = self._rehearse(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        refuse_sparse(self)
        if all(p.grad is None for group in self.param_groups for p in group["params"]):
            return loss
        if self.param_groups[0]["scope"] == "global":
            self._step_groups(0, self.param_groups, before)
        else:
            for index, group in enumerate(self.param_groups):
                self._step_groups(index, [group], before)
        return loss

    def _rehearse(self, closure: Callable[[], float]) -> dict[Tensor, Tensor]:
        """Evaluate at x_{k-1}, and return the gradients there."""
        params = [p for group in self.param_groups for p in group["params"]]
        moved = {
            p: self.state[p]["previous_point"]
            for p in params
            if "previous_point" in self.state.get(p, {})
        }
        if not moved:
            return {}
        with self._rehearsal(params), _placed_at(moved):
            with torch.enable_grad():
                closure()
            return {p: p.grad for p in params if p.grad is not None}

    def _step_groups(
        self,
        index: int,
        groups: Sequence[dict[str, Any]],
        before: Mapping[Tensor, Tensor],
    ) -> None:
        """Step the groups that share one step size, the first of which has this index."""
        first = groups[0]
        shares = [_Share(group, _scale(group, first)) for group in groups]
        params = [p for share in shares for p in share.params]
        if not params:
            self._forget(first)
            return
        device, dtype, cap = params[0].device, scalar_dtype(params), _cap(groups)
        if first["eta"] is None:
            eta_0 = torch.full((), _positive_lr(first), dtype=dtype, device=device)
            theta_0 = torch.full((), first["theta0"], dtype=dtype, device=device)
            decision = Decision(None, None, _in_range(eta_0, cap), theta_0)
        else:
            if first["curvature"] == "reused":
                moved, turned = self._reused_curvature(shares, device)
            else:
                moved, turned = self._same_batch_curvature(shares, before, device)
            decision = next_step_size(
                moved,
                turned,
                first["eta"].to(device, dtype),
                first["theta"].to(device, dtype),
                gamma=first["gamma"],
                delta=first["delta"],
                cap=cap,
            )

        for share in shares:
            self._remember(share)
            eta = decision.eta * share.scale
            descend(share.params, share.grads, eta, foreach=share.foreach)
            share.group["eta"], share.group["theta"] = eta, decision.theta
        if self.recording:
            self._records.append((*decision, index))

    def _reused_curvature(
        self, shares: Sequence[_Share], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return |x_k - x_{k-1}| and the gradient difference from the gradients of two steps."""
        moved, turned = [], []
        for share in shares:
            pairs = [
                (g, self.state[p]["previous_gradient"])
                for p, g in zip(share.params, share.grads, strict=True)
                if "previous_gradient" in self.state.get(p, {})
            ]
            if pairs:
                now, then = zip(*pairs, strict=True)
                last_eta = share.group["eta"].to(device, accumulator(device))
                length = last_eta * norm(then, device, foreach=share.foreach)
                moved.append(length / share.root)
                turned.append(distance(now, then, device, foreach=share.foreach) * share.root)
        return _total(moved, device), _total(turned, device)

    def _same_batch_curvature(
        self, shares: Sequence[_Share], before: Mapping[Tensor, Tensor], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return |x_k - x_{k-1}| and the gradient difference, between the two evaluations."""
        moved, turned = [], []
        for share in shares:
            both = [
                (p, g, self.state.get(p, {}).get("previous_point", p), before[p])
                for p, g in zip(share.params, share.grads, strict=True)
                if p in before
            ]
            if both:
                here, now, there, raw = zip(*both, strict=True)
                then = share.regularised(there, raw)
                moved.append(distance(here, there, device, foreach=share.foreach) / share.root)
                turned.append(distance(now, then, device, foreach=share.foreach) * share.root)
        return _total(moved, device), _total(turned, device)

    def _remember(self, share: _Share) -> None:
        """Keep what the next step compares with."""
        self._forget(share.group)
        same_batch = share.group["curvature"] == "same-batch"
        kind = "previous_point" if same_batch else "previous_gradient"
        for p, value in zip(share.params, share.params if same_batch else share.grads, strict=True):
            state = self.state[p]
            if kind in state:
                state[kind].copy_(value)
            else:
                state[kind] = value.detach().clone()

    def _forget(self, group: dict[str, Any]) -> None:
        """Drop the memory of parameters without a gradient: this step did not move them."""
        for p in group["params"]:
            if p.grad is None:
                self.state.pop(p, None)


class _Share:
    """The part of a step that one parameter group has."""

    def __init__(self, group: dict[str, Any], scale: float) -> None:
        self.group = group
        self.scale = scale
        self.root = scale**0.5
        self.foreach = uses_foreach(group)
        self.params, raw = with_gradients(group)
        self.grads = self.regularised(self.params, raw)

    def regularised(self, points: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the loss that is minimised."""
        return loss_gradients(
            points,
            grads,
            weight_decay=self.group["weight_decay"],
            maximize=self.group["maximize"],
            foreach=self.foreach,
        )


@contextmanager
def _placed_at(others: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Exchange the values of parameters with those of other points; then exchange them back.

    Values are copied, storage is not swapped: views, captured graphs and compiled code keep
    seeing the parameter. No third copy of all parameters is made on the way.
    """
    for p, point in others.items():
        _exchange(p, point)
    try:
        yield
    finally:
        for p, point in others.items():
            _exchange(p, point)


def _exchange(left: Tensor, right: Tensor) -> None:
    """Exchange the values of two tensors, a piece at a time."""
    pairs = [(left, right)]
    if left.numel() > _PIECE and left.is_contiguous() and right.is_contiguous():
        pieces = (torch.split(tensor.view(-1), _PIECE) for tensor in (left, right))
        pairs = list(zip(*pieces, strict=True))
    for one, other in pairs:
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def _total(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    if not norms:
        return torch.zeros((), dtype=accumulator(device), device=device)
    return combine(norms)


def _scale(group: dict[str, Any], first: dict[str, Any]) -> float:
    """Return s_i, the step size of a group relative to that of the first."""
    return 1.0 if group is first else _positive_lr(group) / _positive_lr(first)


def _cap(groups: Sequence[dict[str, Any]]) -> float:
    """Return the largest step size the first group may have, so that none exceeds max_lr."""
    max_lr: float | None = groups[0]["max_lr"]
    if max_lr is None:
        return math.inf
    return max_lr / max(_scale(group, groups[0]) for group in groups)


def _positive_lr(group: dict[str, Any]) -> float:
    """Return eta_0 of a group, which a scheduler may have changed since it was checked."""
    require_lr(group["lr"])
    return float(group["lr"])


def _check_options(options: Mapping[str, Any]) -> None:
    require_lr(options["lr"])
    for key in ("gamma", "theta0"):
        require(0 < options[key] < math.inf, key, "positive and finite", options[key])
    delta = options["delta"]
    require(0 <= delta < math.inf, "delta", "finite and not negative", delta)
    require_cap(options["max_lr"])
    require_weight_decay(options["weight_decay"])
    curvature, scope = options["curvature"], options["scope"]
    require(
        curvature in ("reused", "same-batch"), "curvature", "'reused' or 'same-batch'", curvature
    )
    require(scope in ("global", "group"), "scope", "'global' or 'group'", scope)
