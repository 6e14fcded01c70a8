"""What the server does with the aggregate of the clients' weights, their average or a robust one.

`average` (FedAvg, Algorithm 1) and `weighted-average` take it as it is. The others treat
x_t - aggregate as a gradient and step an optimizer on it (Reddi et al. 2021; the paper's appendix
"Additional experiments using FedAdam", which keeps PyTorch's defaults): `fedadam`, `fedyogi`,
`fedadagrad`, and `fedavgm`, which is SGD with momentum (Hsu et al. 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

from deltafl.errors import UserError, unknown
from deltafl.server.aggregate import Average
from deltafl.server.check import not_finite, problem
from deltafl.server.collect import Collector
from deltafl.server.large import LargeAverage, is_large
from deltafl.server.robust import MEAN, Robust, Rule
from deltafl.server.weights import Weights
from deltafl.server.yogi import Yogi

Weighting = Literal["equal", "samples"]
WEIGHTINGS: tuple[Weighting, ...] = ("equal", "samples")

_AVERAGES: dict[str, Weighting] = {"average": "equal", "weighted-average": "samples"}


@dataclass(frozen=True)
class _Recipe:
    """How to make a torch optimizer, its defaults, and the state it keeps of a parameter."""

    make: Callable[[list[Tensor], float, Mapping[str, float]], Optimizer]
    lr: float
    options: Mapping[str, float]
    state: tuple[str, ...]


def _adam(parameters: list[Tensor], lr: float, options: Mapping[str, float]) -> Optimizer:
    return Adam(parameters, lr, (options["beta1"], options["beta2"]), options["eps"])


def _yogi(parameters: list[Tensor], lr: float, options: Mapping[str, float]) -> Optimizer:
    return Yogi(parameters, lr, (options["beta1"], options["beta2"]), options["eps"])


def _adagrad(parameters: list[Tensor], lr: float, options: Mapping[str, float]) -> Optimizer:
    return Adagrad(
        parameters,
        lr,
        initial_accumulator_value=options["initial_accumulator"],
        eps=options["eps"],
    )


def _momentum(parameters: list[Tensor], lr: float, options: Mapping[str, float]) -> Optimizer:
    if not 0 <= options["momentum"] < 1:  # torch refuses the negative ones only
        raise ValueError(f"Invalid momentum value: {options['momentum']}")
    return SGD(parameters, lr, momentum=options["momentum"])


_OPTIMIZERS: dict[str, _Recipe] = {
    "fedadam": _Recipe(
        _adam,
        lr=1e-3,
        options={"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
        state=("step", "exp_avg", "exp_avg_sq"),
    ),
    "fedyogi": _Recipe(
        _yogi,
        lr=1e-2,
        options={"beta1": 0.9, "beta2": 0.99, "eps": 1e-3},
        state=("exp_avg", "exp_avg_sq"),
    ),
    "fedadagrad": _Recipe(
        _adagrad,
        lr=1e-2,
        options={"initial_accumulator": 0.0, "eps": 1e-10},
        state=("step", "sum"),
    ),
    "fedavgm": _Recipe(_momentum, lr=1.0, options={"momentum": 0.9}, state=("momentum_buffer",)),
}


def names() -> tuple[str, ...]:
    """Return the names of the servers."""
    return (*_AVERAGES, *_OPTIMIZERS)


class Server:
    """The global weights, and the rule that turns a round's average into the next ones.

    A round is `collector = start_round()`, `collector.add(...)` for each client in the order of
    clients, and `finish_round(collector.result())`. Everything is elementwise, in the order of
    the names of the weights, so the bits do not depend on the number of threads.
    """

    def __init__(
        self,
        name: str,
        weights: Mapping[str, Tensor],
        trainable: Collection[str],
        *,
        lr: float | None = None,
        options: Mapping[str, float] | None = None,
        weighting: Weighting | None = None,
        aggregate: str = MEAN,
        aggregate_options: Mapping[str, float] | None = None,
    ) -> None:
        """Start from `weights`, which are copied.

        Args:
            name: One of `names()`.
            weights: The global weights, every entry of the model's state_dict, on the CPU.
            trainable: The entries an optimizer steps; the others take their average.
            lr: The optimizer's learning rate; None is its default.
            options: `beta1`, `beta2` and `eps` of `fedadam` and `fedyogi`, `eps` and
                `initial_accumulator` of `fedadagrad`, `momentum` of `fedavgm`.
            weighting: Whether clients count the same or by their samples; None is the
                server's own way: by samples for `weighted-average`, the same for the others.
            aggregate: One of `aggregates()`: the mean, or a rule for clients that may be bad.
            aggregate_options: `attackers`, the share of the clients to guard against, and
                `mixing`, of the robust rules.
        """
        if name not in names():
            raise unknown("server", name, names())
        if weighting is not None and weighting not in WEIGHTINGS:
            raise unknown("weighting", weighting, WEIGHTINGS)
        if strangers := sorted(set(trainable) - set(weights)):
            raise ValueError(f"trainable names that are not among the weights: {strangers}")
        self._name = name
        self._rule = Rule.read(aggregate, aggregate_options)
        # By name, because safetensors returns the entries of a checkpoint in any order.
        self._weights = {entry: weights[entry].clone() for entry in sorted(weights)}
        self._large = is_large(self._weights)
        self._parameters: dict[str, Tensor] = {}
        self._optimizer: Optimizer | None = None
        if name in _AVERAGES:
            self._weighting = _AVERAGES[name]
            if weighting not in (None, self._weighting):
                other = next(entry for entry in _AVERAGES if entry != name)
                raise UserError(f"server {name!r} cannot weight by {weighting!r}: use {other!r}")
            if lr is not None or options:
                raise UserError(f"server {name!r} has no learning rate and no options: remove them")
        else:
            self._weighting = weighting or "equal"
        if self._rule is not None and self._weighting == "samples":
            raise UserError(
                f"aggregate {aggregate!r} lets every client count the same, since a bad one would "
                "claim many samples: do not weight by samples with it"
            )
        if name in _AVERAGES:
            return
        # The optimizer changes tensors in place; those it changes are nobody else's.
        self._parameters = {
            entry: tensor.clone() for entry, tensor in self._weights.items() if entry in trainable
        }
        self._optimizer = _optimizer(name, list(self._parameters.values()), lr, options or {})

    @property
    def weights(self) -> Weights:
        """The global weights by name. A round replaces the tensors, and never writes into them."""
        return dict(self._weights)

    def client_weight(self, samples: int) -> float:
        """Return what a client with that many samples weighs in the average; without any, 0."""
        return float(samples) if self._weighting == "samples" or samples < 1 else 1.0

    def start_round(self) -> Collector:
        """Return what takes the clients' weights, in the order of clients, and aggregates them."""
        if self._rule is not None:
            return Robust(self._weights, self._rule)
        return (LargeAverage if self._large else Average)(self._weights)

    def fault(self) -> str | None:
        """Return what of the weights or of the optimizer's state is not finite, if anything is.

        Updates are finite, but an optimizer's step on them need not be.
        """
        return not_finite(self._weights) or not_finite(self._state())

    def finish_round(self, average: Mapping[str, Tensor]) -> None:
        """Move the global weights by the aggregate of a round."""
        if (fault := problem(average, self._weights)) is not None:
            raise ValueError(f"this average does not fit the global weights: {fault}")
        following = {entry: average[entry].clone() for entry in self._weights}
        if self._optimizer is not None:
            for entry, parameter in self._parameters.items():
                parameter.grad = parameter - average[entry]
            self._optimizer.step()
            self._optimizer.zero_grad()
            for entry, parameter in self._parameters.items():
                following[entry] = parameter.detach().clone()
        self._weights = following

    def state_tensors(self) -> dict[str, Tensor]:
        """Return a copy of the optimizer's state, `<kind>/<parameter>` to tensor.

        Together with the weights it is all a server needs to go on as if never stopped.
        """
        return {entry: tensor.clone() for entry, tensor in self._state().items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up a state that `state_tensors` returned; the weights come by the constructor."""
        state = self._state()
        if (fault := problem(tensors, state)) is not None:
            raise UserError(
                f"the saved state is not one of server {self._name!r} for this model: {fault}; "
                "resume with the configuration of the saved run, or start it anew"
            )
        for entry, tensor in state.items():
            tensor.copy_(tensors[entry])

    def _state(self) -> dict[str, Tensor]:
        """Return the optimizer's own state tensors."""
        if self._optimizer is None:
            return {}
        return {
            f"{kind}/{entry}": self._optimizer.state[parameter][kind]
            for kind in _OPTIMIZERS[self._name].state
            for entry, parameter in self._parameters.items()
        }


def _optimizer(
    name: str, parameters: list[Tensor], lr: float | None, options: Mapping[str, float]
) -> Optimizer:
    """Return the named optimizer with all of its state in place."""
    recipe = _OPTIMIZERS[name]
    for option, value in options.items():
        if option not in recipe.options:
            raise unknown(f"option of server {name!r}", option, recipe.options)
        if not math.isfinite(value):
            raise UserError(f"{option} {value} of server {name!r} is wrong: use a finite number")
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise UserError(f"lr {lr} of server {name!r} is wrong: use more than 0")
    try:
        optimizer = recipe.make(
            parameters, recipe.lr if lr is None else lr, {**recipe.options, **options}
        )
    except ValueError as error:
        raise UserError(f"server {name!r}: {error}; choose another value") from None
    # torch makes some of its state in the first step, from zeros. Made here, a checkpoint has
    # the same entries from the start, and one that lacks some cannot pass for a fresh one.
    for parameter in parameters:
        for kind in recipe.state:
            fresh = torch.zeros(()) if kind == "step" else torch.zeros_like(parameter)
            optimizer.state[parameter].setdefault(kind, fresh)
    return optimizer
