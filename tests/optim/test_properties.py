"""What holds for every sequence of gradients."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltafl.optim import DeltaSGD

from .problems import reused

SIZES = (3, 1, 4)
numbers = st.one_of(
    st.floats(-10, 10, width=32),
    st.floats(width=32),  # anything: subnormal, huge, not finite
    st.sampled_from([0.0, 1e30, -1e30, 1e-30]),
)
ordinary = st.floats(-10, 10, width=32).filter(lambda value: value == 0 or abs(value) > 1e-3)


def sequences(elements: st.SearchStrategy[float]) -> st.SearchStrategy[list[list[float]]]:
    step = st.lists(elements, min_size=sum(SIZES), max_size=sum(SIZES))
    return st.lists(step, min_size=1, max_size=8)


options = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-6, 10),
        "gamma": st.floats(0.1, 4),
        "delta": st.floats(0, 1),
        "theta0": st.floats(0.01, 10),
        "max_lr": st.none() | st.floats(1e-3, 1),
        "scope": st.sampled_from(["global", "group"]),
    }
)


def run(
    gradients: list[list[float]],
    order: list[int] | None = None,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float64,
    **kwargs: object,
) -> tuple[list[Tensor], DeltaSGD]:
    """Step with the gradients times a factor, the parameters given in some order."""
    params = [torch.zeros(size, dtype=dtype, requires_grad=True) for size in SIZES]
    given_order = [params[i] for i in order] if order else params
    optimizer = reused([{"params": [p]} for p in given_order], **kwargs)
    optimizer.recording = True
    for values in gradients:
        split = torch.tensor(values, dtype=dtype).split(SIZES)
        for p, gradient in zip(params, split, strict=True):
            p.grad = factor * gradient
        optimizer.step()
    return params, optimizer


@settings(deadline=None, max_examples=150)
@given(sequences(numbers), options, st.sampled_from([torch.float32, torch.float64]))
def test_the_step_size_is_finite_positive_and_below_every_bound(
    gradients: list[list[float]], kwargs: dict[str, object], dtype: torch.dtype
) -> None:
    _, optimizer = run(gradients, dtype=dtype, **kwargs)
    cap = kwargs["max_lr"]
    tolerance = 1 + 4 * torch.finfo(dtype).eps
    for record in optimizer.records:
        assert 0 < record.eta < math.inf
        assert 0 <= record.theta < math.inf
        if cap is not None:
            assert record.eta <= cap * tolerance
        if record.growth is not None:
            assert record.eta <= record.growth * tolerance
            assert record.eta <= max(record.smoothness, torch.finfo(dtype).tiny)


@settings(deadline=None, max_examples=60)
@given(sequences(ordinary), st.permutations(range(len(SIZES))))
def test_the_order_of_the_parameters_does_not_matter(
    gradients: list[list[float]], order: list[int]
) -> None:
    params, optimizer = run(gradients)
    permuted, other = run(gradients, order=order)
    torch.testing.assert_close(permuted, params)
    torch.testing.assert_close(
        [r.eta for r in other.records], [r.eta for r in optimizer.records], rtol=1e-9, atol=0
    )


@settings(deadline=None, max_examples=60)
@given(sequences(ordinary), st.floats(1e-3, 1e3), st.sampled_from(["global", "group"]))
def test_a_scaled_loss_with_eta_0_scaled_back_gives_the_same_iterates(
    gradients: list[list[float]], factor: float, scope: str
) -> None:
    """Loss times c and eta_0 / c: every step size is divided by c, no iterate changes."""
    params, optimizer = run(gradients, scope=scope)
    scaled, other = run(gradients, factor=factor, lr=0.2 / factor, scope=scope)
    torch.testing.assert_close(scaled, params)
    torch.testing.assert_close(
        [r.eta * factor for r in other.records],
        [r.eta for r in optimizer.records],
        rtol=1e-9,
        atol=0,
    )
