from __future__ import annotations

import math

import pytest
import torch

from deltafl.server import Yogi


def take(optimizer, parameter, gradient):
    parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
    optimizer.step()


def test_by_hand():
    x = torch.zeros(1, dtype=torch.float64)
    yogi = Yogi([x], lr=1.0, betas=(0.5, 0.75), eps=0.5)
    # v starts at 0.25. Up: g^2 = 4 > v, v = 0.25 + 0.25 * 4 = 1.25; m = 1.
    take(yogi, x, [2.0])
    first = -1 / (math.sqrt(1.25) + 0.5)
    assert x.item() == pytest.approx(first, rel=1e-15)
    # Down: g^2 = 1 < v, v = 1.25 - 0.25 = 1; m = 0.5 * 1 - 0.5 * 1 = 0: no step.
    take(yogi, x, [-1.0])
    assert yogi.state[x]["exp_avg_sq"].item() == 1.0
    assert yogi.state[x]["exp_avg"].item() == 0.0
    assert x.item() == pytest.approx(first, rel=1e-15)
    # Equal: g^2 = v: v stays; m = 0.5.
    take(yogi, x, [1.0])
    assert yogi.state[x]["exp_avg_sq"].item() == 1.0
    assert x.item() == pytest.approx(first - 0.5 / 1.5, rel=1e-15)


def test_defaults_of_reddi_et_al():
    yogi = Yogi([torch.zeros(1)])
    assert yogi.defaults == {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-3}
    assert yogi.state[yogi.param_groups[0]["params"][0]]["exp_avg_sq"].item() == pytest.approx(1e-6)


def test_small_gradients_shrink_the_second_moment_slower_than_adam():
    x = torch.zeros(1)
    yogi = Yogi([x])
    take(yogi, x, [10.0])
    peak = yogi.state[x]["exp_avg_sq"].item()
    for _ in range(100):
        take(yogi, x, [0.01])
    assert yogi.state[x]["exp_avg_sq"].item() == pytest.approx(peak, rel=1e-3)


def test_a_parameter_without_gradient_stays():
    x, y = torch.zeros(1), torch.zeros(1)
    yogi = Yogi([x, y])
    take(yogi, x, [1.0])
    assert x.item() != 0
    assert y.item() == 0


def test_groups_have_their_own_settings():
    x, y = torch.zeros(1), torch.zeros(1)
    yogi = Yogi([{"params": [x], "eps": 0.1}], lr=1.0)
    yogi.add_param_group({"params": [y], "lr": 0.0, "eps": 0.2})
    assert yogi.state[x]["exp_avg_sq"].item() == pytest.approx(0.01)
    assert yogi.state[y]["exp_avg_sq"].item() == pytest.approx(0.04)
    x.grad, y.grad = torch.ones(1), torch.ones(1)
    yogi.step()
    assert x.item() < 0
    assert y.item() == 0


def test_a_closure_minimises_a_quadratic():
    x = torch.tensor([3.0], requires_grad=True)
    yogi = Yogi([x], lr=0.1)

    def closure():
        yogi.zero_grad()
        loss = (x - 1).square().sum()
        loss.backward()
        return loss.item()

    assert yogi.step(closure) == 4.0
    for _ in range(300):
        loss = yogi.step(closure)
    assert loss < 1e-4


def test_state_dict_round_trip_continues_bit_for_bit():
    gradients = [[1.0], [-0.3], [0.2], [5.0]]
    whole = torch.zeros(1)
    yogi = Yogi([whole])
    for gradient in gradients:
        take(yogi, whole, gradient)

    half = torch.zeros(1)
    yogi = Yogi([half])
    for gradient in gradients[:2]:
        take(yogi, half, gradient)
    resumed = Yogi([half])
    resumed.load_state_dict(yogi.state_dict())
    for gradient in gradients[2:]:
        take(resumed, half, gradient)
    assert torch.equal(whole, half)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "learning rate: -1.0"),
        ({"lr": math.nan}, "learning rate: nan"),
        ({"betas": (1.0, 0.9)}, "index 0: 1.0"),
        ({"betas": (0.9, -0.1)}, "index 1: -0.1"),
        ({"eps": 0.0}, "epsilon value: 0.0"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        Yogi([torch.zeros(1)], **settings)
