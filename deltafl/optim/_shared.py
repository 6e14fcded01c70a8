"""What Δ-SGD and SPS have in common: norms over many tensors, the move, and the records.

Both rules turn norms over all parameters into one step size. The norms are taken in float64,
because float32 overflows when it squares a gradient of 1e30, vanishes at 1e-30, and on the CPU
loses four digits over ten million parameters. Step sizes stay 0-dim tensors on the device, so no
step waits for the device; they become numbers only when somebody reads them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

# Elements of a tensor that are widened at a time on the CPU: the float64 copy stays in the cache,
# which makes the norm several times faster than torch's reduction with dtype=float64.
_CHUNK = 1 << 16


class StepRecord(NamedTuple):
    """Numbers of one step: the two conditions of the minimum, and what was chosen."""

    smoothness: float | None
    """First condition, gamma |dx| / (2 |dg|); inf if it said nothing, None if there was none."""
    growth: float | None
    """Second condition, sqrt(1 + delta theta) eta; None at the first step of a round."""
    eta: float
    """The step size taken."""
    theta: float | None
    """Its ratio to the one before; None for a rule that has no theta."""
    group: int = 0
    """Index of the parameter group, 0 where one step size serves all groups."""


# What torch wraps around this method, for compiled code, imports its whole compiler: a second of
# every process that builds an optimizer.
_add_param_group = inspect.unwrap(Optimizer.add_param_group)


class StepSizeOptimizer(Optimizer):
    """An optimizer that computes its step size, kept in ``group["eta"]`` and in the records.

    Set ``recording = True`` to keep a ``StepRecord`` of every step in ``records``.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self.recording = False
        self._records: list[tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, int]] = []
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "recording": self.recording, "_records": self._records}

    def _check(self, group: dict[str, Any]) -> None:
        """Raise for an option that cannot work; called for the defaults and for each group."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; its options are checked as the constructor's are."""
        _add_param_group(self, param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
            for p in group["params"]:
                if not p.is_floating_point():
                    raise RuntimeError(
                        f"{type(self).__name__} does not support {p.dtype} parameters; "
                        "give complex ones as torch.view_as_real of them"
                    )
        except Exception:
            self.param_groups.pop()
            raise
        group["lr"] = float(group["lr"])
        group["eta"] = None

    @property
    def step_sizes(self) -> tuple[float, ...]:
        """The step size each group used in the latest step."""
        return tuple(
            self._initial(group) if group["eta"] is None else float(group["eta"])
            for group in self.param_groups
        )

    def _initial(self, group: dict[str, Any]) -> float:
        """Return the step size reported for a group that has not stepped yet."""
        raise NotImplementedError

    @property
    def records(self) -> list[StepRecord]:
        """The steps recorded so far, oldest first. Reading them waits for the device."""
        return [
            StepRecord(_number(smoothness), _number(growth), float(eta), _number(theta), group)
            for smoothness, growth, eta, theta, group in self._records
        ]

    def clear_records(self) -> None:
        """Forget the steps recorded so far."""
        self._records = []


def _number(value: Tensor | None) -> float | None:
    return None if value is None else float(value)


def require(condition: bool, name: str, rule: str, value: object) -> None:
    """Raise the ValueError of a constructor check."""
    if not condition:
        raise ValueError(f"{name} must be {rule}, not {value!r}")


def require_lr(lr: float | Tensor) -> None:
    """Check a learning rate, which may come as a tensor of one element."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    require(0 < float(lr) < math.inf, "lr", "positive and finite", lr)


def require_cap(max_lr: float | None) -> None:
    """Check the largest step size allowed."""
    require(max_lr is None or max_lr > 0, "max_lr", "positive, or None for no cap", max_lr)


def require_weight_decay(weight_decay: float) -> None:
    """Check the factor of the squared norm in the loss."""
    require(
        math.isfinite(weight_decay) and weight_decay >= 0,
        "weight_decay",
        "finite and not negative",
        weight_decay,
    )


def refuse_sparse(optimizer: Optimizer) -> None:
    """Raise if any gradient is sparse, before anything has changed."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{type(optimizer).__name__} does not support sparse gradients: it needs "
                    "norms over all parameters; use dense ones (Embedding(sparse=False))"
                )


def with_gradients(group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters of a group that have a gradient, and the gradients."""
    params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
    return params, [p.grad for p in params if p.grad is not None]


def uses_foreach(group: dict[str, Any]) -> bool:
    """Return whether a group runs the foreach kernels; unset, torch's own choice."""
    chosen: bool | None = group["foreach"]
    if chosen is None:
        return _default_to_fused_or_foreach(group["params"], differentiable=False)[1]
    return chosen


def scalar_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the type of the step size of some parameters: float32, or more if one has more."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def accumulator(device: torch.device) -> torch.dtype:
    """Return the type norms are accumulated in: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def loss_gradients(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    weight_decay: float,
    maximize: bool,
    foreach: bool,
) -> list[Tensor]:
    """Return the gradients of the loss to minimise: negated if maximised, and regularised."""
    if foreach:
        result = list(grads)
        if maximize and result:
            result = list(torch._foreach_neg(result))
        if weight_decay and result:
            result = list(torch._foreach_add(result, list(params), alpha=weight_decay))
        return result
    result = [-g for g in grads] if maximize else list(grads)
    if weight_decay:
        result = [g.add(p, alpha=weight_decay) for p, g in zip(params, result, strict=True)]
    return result


def norm(tensors: Sequence[Tensor], device: torch.device, *, foreach: bool) -> Tensor:
    """Return the norm of all tensors together, a 0-dim tensor on the device."""
    return _norm(tensors, None, device, foreach=foreach)


def distance(
    left: Sequence[Tensor], right: Sequence[Tensor], device: torch.device, *, foreach: bool
) -> Tensor:
    """Return the norm of left - right over all tensors together, a 0-dim tensor on the device.

    The difference is taken in float32 at least: that of two close bfloat16 gradients would
    otherwise be mostly rounding.
    """
    return _norm(left, right, device, foreach=foreach)


def combine(norms: Sequence[Tensor]) -> Tensor:
    """Return the norm of a vector whose parts have these norms, scaled so as not to overflow."""
    if len(norms) == 1:
        return norms[0]
    return _scaled_norm(torch.stack(list(norms)))


def descend(
    params: Sequence[Tensor], grads: Sequence[Tensor], eta: Tensor, *, foreach: bool
) -> None:
    """Move the parameters by -eta times the gradients, rounding once."""
    if foreach:
        _foreach_descend(params, grads, eta)
    else:
        _single_tensor_descend(params, grads, eta)


def _single_tensor_descend(params: Sequence[Tensor], grads: Sequence[Tensor], eta: Tensor) -> None:
    for p, g in zip(params, grads, strict=True):
        wide = _wide(p.dtype)
        p.sub_(g.to(wide) * eta.to(p.device, wide))


def _foreach_descend(params: Sequence[Tensor], grads: Sequence[Tensor], eta: Tensor) -> None:
    for (device, dtype), (ps, gs) in _by_device_and_dtype(params, grads):
        wide = _wide(dtype)
        moves = torch._foreach_mul([g.to(wide) for g in gs], eta.to(device, wide))
        torch._foreach_sub_(ps, moves)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which tensors of this type are subtracted and scaled."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_device_and_dtype(
    *lists: Sequence[Tensor],
) -> list[tuple[tuple[torch.device, torch.dtype], list[list[Tensor]]]]:
    if not lists[0]:
        return []
    grouped: Any = _group_tensors_by_device_and_dtype([list(tensors) for tensors in lists])
    return [(key, tensorlists) for key, (tensorlists, _) in grouped.items()]


def _norm(
    left: Sequence[Tensor],
    right: Sequence[Tensor] | None,
    device: torch.device,
    *,
    foreach: bool,
) -> Tensor:
    dtype = accumulator(device)
    on_cpu = [i for i, tensor in enumerate(left) if tensor.device.type == "cpu"]
    elsewhere = [i for i, tensor in enumerate(left) if tensor.device.type != "cpu"]
    parts = []
    if on_cpu:
        wides = map(Tensor.double, _chunks([left[i] for i in on_cpu]))
        if right is not None:
            wides = map(torch.sub, wides, _chunks([right[i] for i in on_cpu]))
        parts.append(torch.stack([torch.dot(wide, wide) for wide in wides]).sum().sqrt())
    if elsewhere:
        away = [left[i] for i in elsewhere]
        if right is not None:
            away = _differences(away, [right[i] for i in elsewhere], foreach=foreach)
        parts.extend(_accelerator_norms(away, foreach=foreach))
    if not parts:
        return torch.zeros((), dtype=dtype, device=device)
    return combine([part.to(device, dtype) for part in parts])


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Cut all elements into vectors that are not much longer than a chunk."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    # Small tensors are joined: a model has many, and each would cost as much as a full chunk.
    small = [vector for vector in flat if vector.numel() < _CHUNK]
    if small:
        yield from _cut(torch.cat(small))
    for vector in flat:
        if vector.numel() >= _CHUNK:
            yield from _cut(vector)


def _cut(vector: Tensor) -> Iterator[Tensor]:
    # split() takes longer than the norm of a small vector, so it is left out where it can be.
    if vector.numel() <= _CHUNK:
        yield vector
    else:
        yield from torch.split(vector, _CHUNK)


def _differences(left: Sequence[Tensor], right: Sequence[Tensor], *, foreach: bool) -> list[Tensor]:
    lefts = [a.to(_wide(a.dtype)) for a in left]
    rights = [b.to(_wide(b.dtype)) for b in right]
    if foreach:
        return list(torch._foreach_sub(lefts, rights))
    return [a - b for a, b in zip(lefts, rights, strict=True)]


def _accelerator_norms(tensors: Sequence[Tensor], *, foreach: bool) -> list[Tensor]:
    norms: list[Tensor] = []
    for (device, _), (same,) in _by_device_and_dtype(tensors):
        dtype = accumulator(device)
        if dtype != torch.float64:
            norms.extend(_scaled_norm(tensor.to(dtype)) for tensor in same)
        elif foreach:
            norms.extend(torch._foreach_norm(same, 2, dtype))
        else:
            norms.extend(torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in same)
    return norms


def _scaled_norm(tensor: Tensor) -> Tensor:
    """Return a norm whose squares stay in range, for a device without float64."""
    peak = tensor.abs().amax()
    scale = peak.clamp(min=torch.finfo(tensor.dtype).tiny)
    return torch.mul(scale, torch.linalg.vector_norm(tensor / scale))
