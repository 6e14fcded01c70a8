"""SPS against its formula, done by hand, and in every odd case."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deltafl.optim import SPS, StepRecord


def parameter(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def test_one_step_by_hand() -> None:
    """f = x^2 + 2 y^2 at (3, 1) is 11, its gradient (6, 4): eta = 11 / (0.5 * 52)."""
    x, y = parameter(3.0), parameter(1.0)
    optimizer = SPS([x, y])
    optimizer.recording = True
    assert optimizer.step_size == 0.0

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (x**2 + 2 * y**2).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    eta = 11 / 26
    assert loss.item() == 11
    assert optimizer.step_size == pytest.approx(eta, rel=1e-15)
    assert (x.item(), y.item()) == pytest.approx((3 - 6 * eta, 1 - 4 * eta), rel=1e-14)
    assert optimizer.records == [StepRecord(None, None, optimizer.step_size, None)]
    optimizer.clear_records()
    assert optimizer.records == []


def test_with_the_default_c_a_parabola_is_solved_in_one_step() -> None:
    """f = L/2 |x|^2 has the gradient L x: f / (0.5 L^2 |x|^2) = 1/L."""
    x = parameter(1.0, -2.0)
    optimizer = SPS([x])
    loss = 3.0 * (x**2).sum() / 2
    loss.backward()
    optimizer.step(loss=loss)
    assert optimizer.step_size == pytest.approx(1 / 3, rel=1e-15)
    torch.testing.assert_close(x.detach(), torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("loss", [2.0, torch.tensor(2.0), torch.tensor([2.0])])
def test_the_loss_can_be_given(loss: float | Tensor) -> None:
    x = parameter(1.0)
    optimizer = SPS([x], f_star=0.5, c=1.0)
    x.grad = torch.full_like(x, 2.0)
    assert optimizer.step(loss=loss) is None
    assert optimizer.step_size == 1.5 / 4


@pytest.mark.parametrize(
    ("loss", "gradient"),
    [
        (1.0, 0.0),  # zero gradient
        (-1.0, 1.0),  # below f*
        (math.nan, 1.0),
        (math.inf, 1.0),
    ],
)
def test_no_polyak_step_is_no_move(loss: float, gradient: float) -> None:
    x = parameter(1.0)
    optimizer = SPS([x])
    optimizer.recording = True
    x.grad = torch.full_like(x, gradient)
    optimizer.step(loss=loss)
    assert x.item() == 1.0
    assert optimizer.records[0].eta == 0.0


def test_a_gradient_that_is_not_finite_reaches_the_parameters() -> None:
    x = parameter(1.0, 1.0)
    optimizer = SPS([x])
    x.grad = torch.tensor([math.inf, 1.0], dtype=torch.float64)
    optimizer.step(loss=1.0)
    assert optimizer.step_size == 0.0
    assert x.isnan().tolist() == [True, False]


def test_the_step_size_stays_in_float32() -> None:
    x = parameter(1.0, dtype=torch.float32)
    optimizer = SPS([x])
    x.grad = torch.full_like(x, 1e-30)
    optimizer.step(loss=1.0)
    assert optimizer.step_size == torch.finfo(torch.float32).max
    x.grad = torch.full_like(x, 1e15)
    optimizer.step(loss=1.0)
    assert optimizer.step_size == pytest.approx(2e-30, rel=1e-6)


def test_the_cap_and_the_multiplier() -> None:
    x, y = parameter(0.0), parameter(0.0)
    optimizer = SPS([{"params": [x]}, {"params": [y], "lr": 0.1}], max_lr=0.3)
    for p in (x, y):
        p.grad = torch.ones_like(p)
    optimizer.step(loss=1.0)  # the Polyak step is 1 / (0.5 * 2) = 1
    assert optimizer.step_sizes == pytest.approx((0.3, 0.1))
    assert optimizer.step_size == pytest.approx(0.3)
    assert (x.item(), y.item()) == pytest.approx((-0.3, -0.1))


def test_weight_decay_is_part_of_the_loss() -> None:
    """Loss 1 and gradient 2 at x = 3 with decay 0.5: loss 3.25, gradient 3.5."""
    x = parameter(3.0)
    optimizer = SPS([x], weight_decay=0.5)
    x.grad = torch.full_like(x, 2.0)
    optimizer.step(loss=1.0)
    assert optimizer.step_size == pytest.approx(3.25 / (0.5 * 3.5**2), rel=1e-14)
    assert x.item() == pytest.approx(3 - optimizer.step_size * 3.5, rel=1e-14)


def test_parameters_without_a_gradient_count_for_nothing() -> None:
    x, y = parameter(1.0), parameter(5.0)
    optimizer = SPS([x, y], weight_decay=0.1)
    x.grad = torch.ones_like(x)
    alone = SPS([twin := parameter(1.0)], weight_decay=0.1)
    twin.grad = torch.ones_like(twin)
    optimizer.step(loss=1.0)
    alone.step(loss=1.0)
    assert y.item() == 5.0
    assert x.item() == twin.item()
    x.grad = None
    optimizer.recording = True
    optimizer.step(loss=1.0)
    assert optimizer.records == []


def test_it_needs_the_loss_once() -> None:
    optimizer = SPS([parameter(1.0)])
    for arguments in ({}, {"closure": lambda: 1.0, "loss": 1.0}):
        with pytest.raises(TypeError, match=r"step\(closure\).*step\(loss=loss\)"):
            optimizer.step(**arguments)
    with pytest.raises(ValueError, match=r"one number, but has shape \(3,\)"):
        optimizer.step(loss=torch.ones(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr must be"),
        ({"c": 0.0}, "c must be"),
        ({"f_star": math.inf}, "f_star must be"),
        ({"max_lr": -1.0}, "max_lr must be"),
        ({"weight_decay": math.nan}, "weight_decay must be"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SPS([parameter(1.0)], **options)


def test_groups_share_the_rule() -> None:
    with pytest.raises(ValueError, match="same f_star"):
        SPS([{"params": [parameter(1.0)]}, {"params": [parameter(1.0)], "f_star": 1.0}])


def test_sparse_gradients_and_complex_parameters_are_refused() -> None:
    table = torch.ones(3, 2, requires_grad=True)
    optimizer = SPS([table])
    table.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="SPS does not support sparse"):
        optimizer.step(loss=1.0)
    with pytest.raises(RuntimeError, match=r"SPS does not support torch\.complex64"):
        SPS([torch.zeros(2, dtype=torch.complex64, requires_grad=True)])
