"""Small problems with several parameters and a different batch at each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from deltafl.optim import DeltaSGD

from .reference import Vector

reused = partial(DeltaSGD, curvature="reused")
"""Δ-SGD for tests that give the gradients themselves, and so step without a closure."""


@dataclass(frozen=True)
class Problem:
    """A loss of several tensors on the batch of step k; gradient is the numpy view of it."""

    shapes: tuple[tuple[int, ...], ...]
    loss: Callable[[list[Tensor], int], Tensor]
    gradient: Callable[[Vector, int], Vector]

    def start(self, seed: int = 0) -> Vector:
        size = sum(int(np.prod(shape)) for shape in self.shapes)
        return np.random.default_rng(seed).normal(size=size)

    def tensors(self, flat: Vector) -> list[Tensor]:
        vector = torch.from_numpy(flat.copy())
        parts = vector.split([int(np.prod(shape)) for shape in self.shapes])
        pieces = zip(parts, self.shapes, strict=True)
        return [part.reshape(shape).clone().requires_grad_() for part, shape in pieces]


def flat(params: list[Tensor]) -> Vector:
    return torch.cat([p.detach().reshape(-1) for p in params]).numpy()


def quadratic(seed: int = 0) -> Problem:
    """1/2 (x - b_k)' A_k (x - b_k)."""
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(50, 7, 7))
    matrices = factors @ factors.transpose(0, 2, 1) / 7 + np.eye(7)
    centres = rng.normal(size=(50, 7))

    def loss(params: list[Tensor], k: int) -> Tensor:
        offset = torch.cat([p.reshape(-1) for p in params]) - torch.from_numpy(centres[k])
        return offset @ torch.from_numpy(matrices[k]) @ offset / 2

    def gradient(x: Vector, k: int) -> Vector:
        return matrices[k] @ (x - centres[k])

    return Problem(((2, 3), (1,)), loss, gradient)


def logistic(seed: int = 0) -> Problem:
    """Mean of log(1 + exp(-y (a'w + b)))."""
    rng = np.random.default_rng(seed)
    inputs, labels = rng.normal(size=(50, 16, 5)) * 2, rng.choice([-1.0, 1.0], size=(50, 16))

    def loss(params: list[Tensor], k: int) -> Tensor:
        weight, bias = params
        margin = torch.from_numpy(labels[k]) * (torch.from_numpy(inputs[k]) @ weight + bias)
        return F.softplus(-margin).mean()

    def gradient(x: Vector, k: int) -> Vector:
        margin = labels[k] * (inputs[k] @ x[:5] + x[5])
        slope = -labels[k] / (1 + np.exp(margin)) / 16
        return np.concatenate([inputs[k].T @ slope, [slope.sum()]])

    return Problem(((5,), (1,)), loss, gradient)


def network(seed: int = 0) -> Problem:
    """Cross entropy of tanh networks; its gradient is autograd's."""
    rng = np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.normal(size=(50, 8, 4)))
    labels = torch.from_numpy(rng.integers(3, size=(50, 8)))

    def loss(params: list[Tensor], k: int) -> Tensor:
        inner, bias, outer = params
        return F.cross_entropy(torch.tanh(inputs[k] @ inner + bias) @ outer, labels[k])

    def gradient(x: Vector, k: int) -> Vector:
        params = problem.tensors(x)
        return flat(list(torch.autograd.grad(loss(params, k), params)))

    problem = Problem(((4, 6), (6,), (6, 3)), loss, gradient)
    return problem


PROBLEMS = {"quadratic": quadratic, "logistic": logistic, "network": network}
