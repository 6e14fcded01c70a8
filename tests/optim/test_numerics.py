"""Numerics of Δ-SGD: odd losses, gradients and types, in both ways to see the curvature.

Whatever happens, every step's size is finite, positive and recorded; what else happens is in the
table of docs/reliability.md, "Numerics of Δ-SGD", row by row as here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltafl import Config, Dataset, run
from deltafl.optim import DeltaSGD, StepRecord

Mode = Literal["reused", "same-batch"]
GROWTH = math.sqrt(1.1)
"""What the second condition allows the second step, with the defaults."""


@pytest.fixture(params=["reused", "same-batch"])
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


def descend(
    mode: Mode,
    params: list[Tensor],
    loss_of: Callable[[int], Tensor],
    steps: int = 6,
    after: Callable[[], object] = lambda: None,
    **options: float,
) -> list[StepRecord]:
    """Take steps on loss_of(0), loss_of(1), ..., and return the records, which are all in order.

    `after` runs after each backward pass.
    """
    optimizer = DeltaSGD(params, curvature=mode, **options)
    optimizer.recording = True
    for step in range(steps):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(step)
            loss.backward()
            after()
            return loss

        optimizer.step(closure)
    records = optimizer.records
    assert len(records) == steps
    for record in records:
        assert math.isfinite(record.eta)
        assert record.eta > 0
        assert record.theta is not None
        assert math.isfinite(record.theta)
    return records


def leaf(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def grows_freely(records: list[StepRecord]) -> bool:
    """Whether the first condition said nothing at any step, so that only the second decided."""
    return all(
        record.smoothness == math.inf and record.eta == record.growth for record in records[1:]
    )


def test_no_gradient_difference(mode: Mode) -> None:
    x = leaf(1.0, 2.0)
    records = descend(mode, [x], lambda _: (3 * x).sum())
    assert grows_freely(records)
    assert records[1].eta == pytest.approx(0.2 * GROWTH)


def test_zero_gradient(mode: Mode) -> None:
    x = leaf(1.0, 2.0)
    records = descend(mode, [x], lambda _: (0 * x).sum())
    assert grows_freely(records)
    assert x.tolist() == [1.0, 2.0]


def test_a_zero_gradient_in_between(mode: Mode) -> None:
    """It moves nothing. Reused, the gradient turned by its own length: the step stays at most."""
    x = leaf(1.0)
    records = descend(mode, [x], lambda k: (0.0 if k == 1 else 0.5) * (x**2).sum(), steps=4)
    if mode == "reused":
        assert records[1].eta == pytest.approx(records[0].eta)
    else:
        assert records[1].smoothness == math.inf
    assert records[3].eta < 1.0


def test_repeated_batches_make_both_ways_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(8, 3, generator=generator), torch.randn(8, generator=generator)
    etas = {}
    for mode in ("reused", "same-batch"):
        x = leaf(0.1, -0.2, 0.3, dtype=torch.float64)
        loss_of = lambda _, x=x: ((inputs.double() @ x - targets) ** 2).mean()  # noqa: E731
        etas[mode] = [record.eta for record in descend(mode, [x], loss_of, steps=12)]
    assert etas["reused"] == pytest.approx(etas["same-batch"], rel=1e-9)


def test_one_sample(mode: Mode) -> None:
    """Curvature 9 in one direction: the step size is at most one over it, and the loss falls."""
    x = leaf(1.0, 1.0)
    sample = torch.tensor([3.0, 0.0])
    records = descend(mode, [x], lambda _: 0.5 * (sample @ x - 1) ** 2, steps=8)
    assert records[1].eta == pytest.approx(1 / 9, rel=1e-5)
    assert float((sample @ x.detach() - 1) ** 2) < 1e-6
    assert x[1].item() == 1.0


def test_constant_labels(mode: Mode) -> None:
    """The loss falls towards zero, where it is ever flatter: the step size grows, no faster."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    inputs, labels = torch.randn(16, 4).abs(), torch.zeros(16, dtype=torch.int64)
    losses = []

    def loss_of(_: int) -> Tensor:
        loss = F.cross_entropy(model(inputs), labels)
        losses.append(loss.item())
        return loss

    records = descend(mode, list(model.parameters()), loss_of, steps=200)
    assert losses[-1] < 0.01 < losses[0]
    assert records[-1].eta > 1
    # theta = sqrt(1 + 0.1 theta) is 1.05125: the growth of a rule that nothing holds back.
    ratios = [second.eta / first.eta for first, second in pairwise(records)]
    assert max(ratios) < 1.0513


def test_a_cap_holds_the_growth(mode: Mode) -> None:
    x = leaf(1.0)
    records = descend(mode, [x], lambda _: (0 * x).sum(), steps=300, max_lr=0.5)
    assert records[-1].eta == 0.5


def test_growth_without_end_stays_finite(mode: Mode) -> None:
    x = leaf(1.0)
    records = descend(mode, [x], lambda _: (0 * x).sum(), steps=400, lr=1e30)
    assert records[-1].eta == torch.finfo(torch.float32).max


def test_a_huge_first_gradient(mode: Mode) -> None:
    """Measured right although its square overflows, and the next steps are not lost."""
    x = leaf(1.0, 1.0)
    records = descend(mode, [x], lambda k: (1e30 if k == 0 else 1.0) * (x**2).sum() / 2)
    assert torch.isfinite(x).all()
    # Reused: a step of 0.2 times 1e30, and a gradient that went from 1e30 to -2e29.
    wanted = 0.2 / 1.2 if mode == "reused" else 1.0
    assert records[1].smoothness == pytest.approx(wanted, rel=1e-5)


def test_gradients_so_large_that_the_step_is_not_finite(mode: Mode) -> None:
    """The parameters are lost, as with any optimizer, but not the step size."""
    x = leaf(1.0)
    descend(mode, [x], lambda _: 3e38 * x.sum(), lr=1e3)
    assert not torch.isfinite(x).all()


def test_tiny_gradients(mode: Mode) -> None:
    """At 1e-30 the curvature is seen as at 1: the first condition is one over 1e-30."""
    x = leaf(1.0, -1.0)
    records = descend(mode, [x], lambda _: 0.5 * 1e-30 * (x**2).sum(), lr=1e29)
    assert records[1].smoothness == pytest.approx(1e30, rel=1e-3)
    y = leaf(1.0, -1.0)
    usual = descend(mode, [y], lambda _: 0.5 * (y**2).sum(), lr=0.1)
    assert [r.eta * 1e-30 for r in records] == pytest.approx([r.eta for r in usual], rel=1e-3)
    # With the usual eta_0 the point does not move in float32.
    z = leaf(1.0, -1.0)
    descend(mode, [z], lambda _: 0.5 * 1e-30 * (z**2).sum())
    assert z.tolist() == [1.0, -1.0]


def test_gradients_below_the_smallest_number(mode: Mode) -> None:
    x = leaf(1.0)
    records = descend(mode, [x], lambda _: 1e-44 * x.sum())
    assert grows_freely(records)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_types(mode: Mode, dtype: torch.dtype) -> None:
    """The step size is float32, or float64 with float64; only the move is rounded to the type."""
    x = leaf(1.0, -2.0, dtype=dtype)
    records = descend(mode, [x], lambda _: (x**2).sum(), steps=10)
    tolerance = 0.1 if dtype.itemsize == 2 else 1e-5
    assert records[1].smoothness == pytest.approx(0.5, rel=tolerance)
    assert float((x.detach().double() ** 2).sum()) < 0.1
    if dtype == torch.float64:
        assert records[1].eta == 0.2 * math.sqrt(1 + 0.1)
    else:
        assert records[1].eta == pytest.approx(0.2 * math.sqrt(1 + 0.1), rel=1e-6)


def test_a_move_that_bfloat16_cannot_show_lets_the_step_size_grow(mode: Mode) -> None:
    """256 - 0.02 is 256: the point and the gradient stay, until the step is long enough."""
    x = leaf(256.0, dtype=torch.bfloat16)
    records = descend(mode, [x], lambda _: 0.1 * x.float().sum(), steps=80)
    assert grows_freely(records)
    assert x.item() < 256


def test_loss_scaling_that_is_undone_changes_nothing(mode: Mode) -> None:
    """A scaled loss whose gradients are scaled back before the step, as GradScaler's unscale_."""
    results = []
    for scale in (1.0, 2.0**16):
        x = leaf(1.0, -2.0)

        def undo(x: Tensor = x, scale: float = scale) -> None:
            assert x.grad is not None
            x.grad.div_(scale)

        loss_of = lambda _, x=x, scale=scale: scale * (x**4).sum()  # noqa: E731
        records = descend(mode, [x], loss_of, after=undo, lr=0.01)
        results.append(([record.eta for record in records], x.tolist()))
    assert results[0] == results[1]


def test_loss_scaling_that_is_not_undone_is_another_loss(mode: Mode) -> None:
    """The first step is `scale` times too long, and the rule then sees `scale` times the bend."""
    x = leaf(1.0, -2.0)
    records = descend(mode, [x], lambda _: 1024.0 * 0.5 * (x**2).sum(), lr=0.2)
    assert records[1].smoothness == pytest.approx(1 / 1024, rel=1e-5)


def test_a_gradient_scaler_and_clipping_without_a_closure() -> None:
    """GradScaler takes no closure, so it goes with the reused gradient only."""
    x = leaf(1.0, -2.0)
    optimizer = DeltaSGD([x], curvature="reused")
    optimizer.recording = True
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**70)
    for _ in range(12):
        optimizer.zero_grad()
        scaler.scale((x**2).sum() * 1e18).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([x], 1.0)
        scaler.step(optimizer)
        scaler.update()
    # The first scales overflow: those steps are left out, and the rule has not seen them.
    assert len(optimizer.records) == 8
    assert all(math.isfinite(record.eta) and record.eta > 0 for record in optimizer.records)
    assert torch.isfinite(x).all()


def test_gradient_clipping(mode: Mode) -> None:
    """The rule sees the clipped gradients: as long as both are, only the turn of direction."""
    x = leaf(30.0, 40.0)
    clip = lambda: nn.utils.clip_grad_norm_([x], 1.0)  # noqa: E731
    records = descend(mode, [x], lambda _: 50 * (x**2).sum(), after=clip, steps=5)
    # Straight to the centre: two gradients of length one and one direction differ by rounding.
    assert records[1].eta == pytest.approx(0.2 * GROWTH, rel=1e-5)
    moved = 50 - x.detach().norm().item()
    assert moved == pytest.approx(sum(record.eta for record in records), rel=1e-4)


def test_gradient_accumulation_is_the_larger_batch(mode: Mode) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 12, 3, generator=generator, dtype=torch.float64)
    targets = torch.randn(6, 12, generator=generator, dtype=torch.float64)

    def loss_at(x: Tensor, k: int, part: slice) -> Tensor:
        return ((inputs[k, part] @ x - targets[k, part]) ** 2).mean()

    whole = leaf(0.1, 0.2, 0.3, dtype=torch.float64)
    wanted = descend(mode, [whole], lambda k: loss_at(whole, k, slice(None)))
    x = leaf(0.1, 0.2, 0.3, dtype=torch.float64)

    def accumulated(k: int) -> Tensor:
        for start in (0, 4):
            (loss_at(x, k, slice(start, start + 4)) / 3).backward()
        return loss_at(x, k, slice(8, 12)) / 3

    records = descend(mode, [x], accumulated)
    assert [r.eta for r in records] == pytest.approx([r.eta for r in wanted], rel=1e-9)
    torch.testing.assert_close(x, whole)


def test_frozen_layers(mode: Mode) -> None:
    """Nothing of them moves or counts: the step sizes are those of the other layers alone."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(16, 5), torch.randint(3, (16,))
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    head = nn.Linear(4, 3)
    head.load_state_dict(model[2].state_dict())
    with torch.no_grad():
        features = model[:2](inputs)
    records = descend(
        mode, list(model.parameters()), lambda _: F.cross_entropy(model(inputs), labels)
    )
    alone = descend(
        mode, list(head.parameters()), lambda _: F.cross_entropy(head(features), labels)
    )
    assert [r.eta for r in records] == pytest.approx([r.eta for r in alone], rel=1e-6)
    assert torch.equal(model[0].weight, before)


def test_a_layer_that_thaws_takes_part_one_step_later(mode: Mode) -> None:
    first, second = leaf(1.0), leaf(1.0)

    def loss_of(k: int) -> Tensor:
        return (first**2).sum() + (100 * (second**2).sum() if k >= 2 else 0)

    records = descend(mode, [first, second], loss_of, steps=5)
    assert records[2].smoothness == pytest.approx(0.5, rel=1e-5)
    assert records[3].smoothness is not None
    assert records[3].smoothness < 0.1


@pytest.mark.parametrize("curvature", ["reused", "same-batch"])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("model", ["softmax", "mlp"])
def test_clients_with_one_sample_or_one_label(curvature: str, fast: bool, model: str) -> None:
    """The fast paths of a federation record the same kind of numbers."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(60, 1, 4, 4, generator=generator)
    images[30:] = images[0]  # some batches repeat one image, one is black
    images[1] = 0
    labels = torch.zeros(60, dtype=torch.int64)
    labels[::20] = 1
    dataset = Dataset.from_tensors("odd", (images, labels), (images[:9], labels[:9]))
    for samples, epochs in ((1, 5), (10, 3)):
        config = Config.model_validate(
            {
                "task": f"own-{model}",
                "federation": {"clients": 6, "samples": samples, "participation": 1.0},
                "client": {
                    "optimizer": "delta-sgd",
                    "options": {"curvature": curvature},
                    "batch_size": 1,
                    "epochs": epochs,
                },
                "run": {"rounds": 2, "record_step_sizes": True},
                "engine": {"kind": "inline", "fast": fast},
            }
        )
        for row in run(config, dataset=dataset).metrics:
            assert len(row["steps"]) == 6
            for steps in row["steps"].values():
                assert len(steps["eta"]) == samples * epochs
                assert all(eta is not None and 0 < eta < math.inf for eta in steps["eta"])
