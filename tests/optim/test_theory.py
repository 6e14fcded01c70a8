r"""The convex analysis (Appendix, "Proof of Algorithm 1 for convex case") holds in numbers.

The setting: full batch, one local step (K = 1), every client in every round (p = 1), gamma = 1,
delta = 1, and each client carries its step size over the rounds (it never restarts). With
A_t^i = eta_t^i theta_t^i and B_t^i = eta_t^i (1 + theta_t^i) the lemma (eq:lyapunov) says

    |x_{t+1} - x*|^2 + 1/2m sum |x_{t+1}^i - x_t^i|^2 + 2/m sum B_t^i (f_i(x_t^i) - f_i(x*))
      <= |x_t - x*|^2 + 1/2m sum |x_t^i - x_{t-1}^i|^2 + 2/m sum A_t^i (f_i(x_{t-1}^i) - f_i(x*)).

Where the proof needs care, and what is tested therefore:

- It uses x_t^i both for the point where client i takes its step (equal to the average x_t) and for
  the point its previous step led to (x_{t-1}^i - eta_{t-1}^i grad f_i). They are the same point if
  there is one client, or if clients follow their own trajectories. Then the lemma holds for any
  point x*, with the mean of |x_t^i - x*|^2 in the place of |x_t - x*|^2
  (``test_lyapunov_on_their_own``).
- For clients that restart from the average we read x_t^i as the point of the step in f_i, and as
  the point the step led to in the moves. So read, it holds on our problems if x* minimises every
  f_i, as the last sentence of the theorem asks (``test_lyapunov_averaged``), and fails if x* only
  minimises the average (``test_without_a_common_minimiser_the_lemma_fails``). Losses that are flat
  in a direction can break it all the same: see ``tests/paper/test_theory.py``.
- The rate needs eta_t^i >= 1 / (2 L), which the growth condition allows only if eta_0 is not
  smaller than that; the proof takes eta_0 = 1, and so do we, with L > 1/2. It divides by the sum of
  step sizes client by client, which needs f_i(x~) >= f_i(x*): again a minimiser of every f_i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deltafl.optim import DeltaSGD

from .reference import Vector

Loss = Callable[[Tensor], Tensor]


@dataclass
class Client:
    """A loss, the points where its steps started, where they led to, and their step sizes."""

    loss: Loss
    optimizer: DeltaSGD
    x: Tensor
    starts: list[Vector] = field(default_factory=list)
    ends: list[Vector] = field(default_factory=list)

    def step(self) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            value = self.loss(self.x)
            value.backward()
            return value

        self.starts.append(self.x.detach().numpy().copy())
        self.optimizer.step(closure)
        self.ends.append(self.x.detach().numpy().copy())

    def value(self, x: Vector) -> float:
        return self.loss(torch.from_numpy(x)).item()


def quadratics(rng: np.random.Generator, m: int, minimiser: Vector | None) -> list[Loss]:
    """Convex quadratics of very different curvature, some of them flat in some directions."""

    def one() -> Loss:
        factor = torch.from_numpy(rng.normal(size=(5, 4)) * np.exp(rng.normal()))
        factor = torch.cat([factor, torch.eye(4, dtype=torch.float64)[:2] * 2])
        centre = torch.from_numpy(rng.normal(size=4) if minimiser is None else minimiser)
        return lambda x: (factor @ (x - centre)).square().sum() / 2

    return [one() for _ in range(m)]


def logistic(rng: np.random.Generator, m: int, minimiser: Vector | None) -> list[Loss]:
    """Logistic losses; with both labels on every input, a'x = a'x* minimises each of them."""

    def one() -> Loss:
        inputs = torch.from_numpy(rng.normal(size=(10, 4)) * 3)
        if minimiser is None:
            labels = torch.from_numpy(rng.choice([-1.0, 1.0], size=10))
            return lambda x: F.softplus(-labels * (inputs @ x)).mean()
        shift = inputs @ torch.from_numpy(minimiser)
        return lambda x: (F.softplus(inputs @ x - shift) + F.softplus(shift - inputs @ x)).mean()

    return [one() for _ in range(m)]


PROBLEMS = {"quadratics": quadratics, "logistic": logistic}


def clients_of(losses: list[Loss], start: Vector, eta_0: float) -> list[Client]:
    clients = []
    for loss in losses:
        x = torch.from_numpy(start.copy()).requires_grad_()
        optimizer = DeltaSGD([x], lr=eta_0, gamma=1.0, delta=1.0, curvature="same-batch")
        optimizer.recording = True
        clients.append(Client(loss, optimizer, x))
    return clients


def run(clients: list[Client], rounds: int, *, average: bool) -> None:
    for _ in range(rounds):
        for client in clients:
            client.step()
        if average:
            mean = torch.stack([client.x.detach() for client in clients]).mean(0)
            for client in clients:
                client.x.data.copy_(mean)


def steps_of(client: Client) -> tuple[list[float], list[float]]:
    """Return eta_t and theta_t; theta_0 is not used by the theory."""
    records = client.optimizer.records
    return [record.eta for record in records], [record.theta for record in records]


def squared(vector: Vector) -> float:
    return float(vector @ vector)


def excess(clients: list[Client], star: Vector, t: int, *, average: bool) -> tuple[float, float]:
    """Return by how much round t violates the lemma (negative: it holds), and its scale."""
    left = right = 0.0
    for client in clients:
        eta, theta = (values[t] for values in steps_of(client))
        best = client.value(star)
        left += squared(client.ends[t] - client.starts[t]) / 2
        left += 2 * eta * (1 + theta) * (client.value(client.starts[t]) - best)
        right += squared(client.ends[t - 1] - client.starts[t - 1]) / 2
        right += 2 * eta * theta * (client.value(client.starts[t - 1]) - best)
        if not average:
            left += squared(client.ends[t] - star)
            right += squared(client.starts[t] - star)
    left, right = left / len(clients), right / len(clients)
    if average:
        left += squared(np.mean([client.ends[t] for client in clients], axis=0) - star)
        right += squared(clients[0].starts[t] - star)
    return left - right, abs(left) + abs(right)


def assert_lemma(clients: list[Client], star: Vector, *, average: bool) -> None:
    for t in range(1, len(clients[0].starts)):
        gap, scale = excess(clients, star, t, average=average)
        assert gap <= 1e-12 * scale, f"round {t}: {gap} above"


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("eta_0", [1e-6, 0.05, 1.0])
def test_lyapunov_on_their_own(problem: str, m: int, eta_0: float) -> None:
    """Each client on its own trajectory, from any eta_0, against any point x*."""
    rng = np.random.default_rng(m)
    for _ in range(4):
        losses = PROBLEMS[problem](rng, m, None)
        clients = clients_of(losses, rng.normal(size=4) * 3, eta_0)
        run(clients, 25, average=False)
        for star in rng.normal(size=(3, 4)):
            assert_lemma(clients, star, average=False)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("m", [2, 5])
@pytest.mark.parametrize("eta_0", [1e-6, 0.05, 1.0])
def test_lyapunov_averaged(problem: str, m: int, eta_0: float) -> None:
    """Algorithm 1 as the server runs it, with x* a minimiser of every client's loss."""
    rng = np.random.default_rng(m)
    for _ in range(4):
        star = rng.normal(size=4)
        losses = PROBLEMS[problem](rng, m, star)
        clients = clients_of(losses, rng.normal(size=4) * 3, eta_0)
        run(clients, 25, average=True)
        assert_lemma(clients, star, average=True)


def test_without_a_common_minimiser_the_lemma_fails() -> None:
    """(x - 1)^2 / 2 and x^2 / 2 with eta_0 = 1: after one round the average is x* for good.

    The average does not move again, so the step sizes can only grow, and the moves of the
    clients, whose gradients do not vanish at x*, grow with them.
    """
    losses: list[Loss] = [lambda x: (x - 1).square().sum() / 2, lambda x: x.square().sum() / 2]
    star = np.array([0.5])
    clients = clients_of(losses, np.array([0.0]), 1.0)
    run(clients, 7, average=True)
    assert clients[0].starts[-1] == pytest.approx(star)
    assert excess(clients, star, 6, average=True)[0] > 1


def smoothness(loss: Loss, points: list[Vector]) -> float:
    """Return the largest curvature of a loss at some points, a bound for these problems."""
    hessians = (
        torch.autograd.functional.hessian(loss, torch.from_numpy(point)) for point in points
    )
    return max(torch.linalg.matrix_norm(hessian, 2).item() for hessian in hessians)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(("m", "average"), [(1, False), (4, False), (4, True)])
def test_rate(problem: str, m: int, average: bool) -> None:
    """The bound 2 D L^2 / (2 L t + 1) on the mean loss of the weighted points x~_t."""
    rng = np.random.default_rng(m)
    star = rng.normal(size=4)
    losses = PROBLEMS[problem](rng, m, star)
    clients = clients_of(losses, rng.normal(size=4) * 3, 1.0)
    run(clients, 40, average=average)
    # Quadratics are equally curved everywhere; logistic losses most where a'x = a'x*.
    bound_of_curvature = max(smoothness(loss, [star]) for loss in losses)
    assert bound_of_curvature > 1 / 2

    first = 0.0
    for client in clients:
        eta, theta = steps_of(client)
        first += squared(client.ends[0] - client.starts[0]) / 2
        first += 2 * eta[1] * theta[1] * (client.value(client.starts[0]) - client.value(star))
        if not average:
            first += squared(client.starts[1] - star)
    constant = first / m + (squared(clients[0].starts[1] - star) if average else 0.0)

    for t in range(1, 40):
        gap = 0.0
        for client in clients:
            eta, theta = steps_of(client)
            weights = [
                eta[k] * (1 + theta[k]) - (eta[k + 1] * theta[k + 1] if k < t else 0.0)
                for k in range(1, t + 1)
            ]
            assert min(weights) >= -1e-12
            total = sum(eta[1 : t + 1]) + eta[1] * theta[1]
            assert sum(weights) == pytest.approx(total)
            assert min(eta[1 : t + 1]) >= 1 / (2 * bound_of_curvature) * (1 - 1e-9)
            point = np.average(client.starts[1 : t + 1], axis=0, weights=weights)
            gap += (client.value(point) - client.value(star)) / m
        bound = 2 * constant * bound_of_curvature**2 / (2 * bound_of_curvature * t + 1)
        assert gap <= bound
