"""Δ-SGD against Algorithm 1, against numbers done by hand, and in every odd case."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from deltafl.optim import DeltaSGD, StepRecord

from .problems import PROBLEMS, flat, reused
from .reference import delta_sgd


def parameter(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def descend_with(optimizer: DeltaSGD, *pairs: tuple[Tensor, list[float] | None]) -> None:
    """Take one step with these gradients."""
    for p, gradient in pairs:
        p.grad = None if gradient is None else torch.tensor(gradient, dtype=p.dtype)
    optimizer.step()


def test_the_same_batch_is_compared_unless_asked_otherwise() -> None:
    x = parameter(1.0)
    x.grad = torch.ones_like(x)
    with pytest.raises(TypeError, match=r'step\(closure\).*or use curvature="reused"'):
        DeltaSGD([x]).step()


class TestAlgorithm:
    @pytest.mark.parametrize("curvature", ["reused", "same-batch"])
    @pytest.mark.parametrize("foreach", [False, True])
    @pytest.mark.parametrize("name", PROBLEMS)
    @pytest.mark.parametrize(
        "constants",
        [{}, {"eta_0": 0.01, "theta_0": 5.0, "gamma": 1.6, "delta": 1.0}],
        ids=["paper", "other"],
    )
    def test_follows_the_reference(
        self, name: str, curvature: str, foreach: bool, constants: dict[str, float]
    ) -> None:
        problem, steps = PROBLEMS[name](), 15
        x, eta, theta = delta_sgd(
            problem.gradient,
            problem.start(),
            steps,
            same_batch=curvature == "same-batch",
            **constants,
        )

        params = problem.tensors(problem.start())
        names = {"eta_0": "lr", "theta_0": "theta0"}
        options = {names.get(key, key): value for key, value in constants.items()}
        optimizer = DeltaSGD(params, curvature=curvature, foreach=foreach, **options)
        optimizer.recording = True
        for k in range(steps):

            def closure(k: int = k) -> Tensor:
                optimizer.zero_grad()
                loss = problem.loss(params, k)
                loss.backward()
                return loss

            np.testing.assert_allclose(flat(params), x[k], rtol=1e-8, atol=1e-12)
            optimizer.step(closure)
        np.testing.assert_allclose(flat(params), x[steps], rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose([r.eta for r in optimizer.records], eta, rtol=1e-8)
        np.testing.assert_allclose([r.theta for r in optimizer.records], theta, rtol=1e-8)

    def test_growth_binds_on_a_flat_parabola(self) -> None:
        """f = x^2 / 2 from 1: x_1 = 0.8; |dx| = |dg| = 0.2, so smoothness is gamma / 2 = 1."""
        x = parameter(1.0)
        optimizer = reused([x])
        optimizer.recording = True
        descend_with(optimizer, (x, [1.0]))
        assert x.item() == pytest.approx(0.8, rel=1e-15)
        descend_with(optimizer, (x, [0.8]))
        growth = math.sqrt(1.1) * 0.2
        assert x.item() == pytest.approx(0.8 - growth * 0.8, rel=1e-15)
        first, second = optimizer.records
        assert first == StepRecord(None, None, 0.2, 1.0)
        assert second == pytest.approx((1.0, growth, growth, math.sqrt(1.1), 0), rel=1e-14)

    def test_smoothness_binds_on_a_steep_parabola(self) -> None:
        """f = 5 x^2 from 1: x_1 = -1; |dx| = 2, |dg| = 20, so eta_1 = 1/L = 0.1 lands at 0."""
        x = parameter(1.0)
        optimizer = reused([x])
        optimizer.recording = True
        etas = []
        for _ in range(5):
            descend_with(optimizer, (x, [10 * x.item()]))
            etas.append(optimizer.step_size)
        assert x.item() == pytest.approx(0.0, abs=1e-15)
        # At 0 the point still moved by 1, so eta stays 1/L; then nothing moves and it grows.
        grown = math.sqrt(1.1) * 0.1
        again = math.sqrt(1 + 0.1 * math.sqrt(1.1)) * grown
        assert etas[:4] == pytest.approx([0.2, 0.1, 0.1, grown], rel=1e-12)
        assert etas[4] == pytest.approx(again, rel=1e-12)

    def test_norms_run_over_all_parameters(self) -> None:
        """Moves (0.6, 0.8), gradient differences (3, 4): 2 * 1 / (2 * 5) = 0.2."""
        x, y = parameter(0.0), parameter(0.0)
        optimizer = reused([x, y], lr=1.0)
        optimizer.recording = True
        descend_with(optimizer, (x, [0.6]), (y, [-0.8]))
        descend_with(optimizer, (x, [3.6]), (y, [3.2]))
        assert optimizer.records[1].smoothness == pytest.approx(0.2, rel=1e-14)

    def test_same_batch_uses_the_true_difference_of_the_points(self) -> None:
        """Somebody moves the point between two steps, as a server does that averages."""
        x = parameter(1.0)
        optimizer = DeltaSGD([x], lr=0.5, curvature="same-batch")
        optimizer.recording = True

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (x**4).sum() / 4
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            x.fill_(3.0)
        optimizer.step(closure)
        assert optimizer.records[1].smoothness == pytest.approx(2 / (27 - 1), rel=1e-14)


class TestOddCases:
    def test_without_a_change_of_gradient_it_grows(self) -> None:
        x = parameter(1.0)
        optimizer = reused([x])
        optimizer.recording = True
        for _ in range(2):
            descend_with(optimizer, (x, [1.0]))
        assert optimizer.records[1].smoothness == math.inf
        assert optimizer.step_size == pytest.approx(math.sqrt(1.1) * 0.2, rel=1e-15)

    def test_without_a_move_it_grows(self) -> None:
        x = parameter(1.0)
        optimizer = reused([x])
        optimizer.recording = True
        for gradient in (0.0, 1.0):
            descend_with(optimizer, (x, [gradient]))
        assert optimizer.records[1].smoothness == math.inf
        assert optimizer.step_size == pytest.approx(math.sqrt(1.1) * 0.2, rel=1e-15)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_non_finite_gradients_reach_the_parameters_but_not_the_step_size(
        self, bad: float
    ) -> None:
        x = parameter(1.0, 2.0)
        optimizer = reused([x])
        descend_with(optimizer, (x, [1.0, 1.0]))
        descend_with(optimizer, (x, [bad, 1.0]))
        assert not math.isfinite(x[0].item())
        assert math.isfinite(x[1].item())
        growth = math.sqrt(1.1) * 0.2
        assert optimizer.step_size == pytest.approx(growth, rel=1e-15)
        # The gradient after it differs from an infinite one: no curvature either.
        descend_with(optimizer, (x, [1.0, 1.0]))
        assert optimizer.step_size == pytest.approx(
            math.sqrt(1 + 0.1 * math.sqrt(1.1)) * growth, rel=1e-14
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_step_size_never_leaves_the_numbers_of_its_type(self, dtype: torch.dtype) -> None:
        limits = torch.finfo(dtype)
        x = parameter(1.0, dtype=dtype)
        optimizer = reused([x], lr=limits.max / 1.05)
        for _ in range(3):
            descend_with(optimizer, (x, [0.0]))
        assert optimizer.step_size == limits.max
        optimizer = reused([x], lr=limits.tiny)
        for gradient in (1.0, limits.max**0.4):
            descend_with(optimizer, (x, [gradient]))
        assert optimizer.step_size == limits.tiny

    def test_one_step_uses_eta_0(self) -> None:
        x = parameter(1.0)
        optimizer = reused([x], lr=0.3)
        assert optimizer.step_size == 0.3
        descend_with(optimizer, (x, [1.0]))
        assert x.item() == 0.7
        assert optimizer.step_size == 0.3

    def test_the_cap_holds_for_every_step_size(self) -> None:
        x = parameter(1.0)
        optimizer = reused([x], max_lr=0.15)
        assert optimizer.step_size == 0.15
        for _ in range(3):
            descend_with(optimizer, (x, [1.0]))
            assert optimizer.step_size == 0.15
        assert x.item() == pytest.approx(1 - 3 * 0.15)

    @pytest.mark.parametrize("size", [1e30, 1e-30])
    def test_huge_and_tiny_gradients_in_float32(self, size: float) -> None:
        """The rule sees the ratio of two norms whose squares float32 cannot hold."""
        x = torch.zeros(1000, requires_grad=True)
        optimizer = reused([x], lr=0.1)
        optimizer.recording = True
        for factor in (1.0, 1.5):
            x.grad = torch.full_like(x, factor * size)
            optimizer.step()
        assert optimizer.records[1].smoothness == pytest.approx(0.2, rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("foreach", [False, True])
    def test_low_precision_rounds_the_move_only(self, dtype: torch.dtype, foreach: bool) -> None:
        torch.manual_seed(0)
        start, gradients = torch.randn(300).to(dtype), torch.randn(3, 300).to(dtype)
        low, wide = start.clone().requires_grad_(), start.double().requires_grad_()
        optimizer = reused([low], foreach=foreach)
        exact = reused([wide])
        for gradient in gradients:
            with torch.no_grad():
                wide.copy_(low)
            low.grad, wide.grad = gradient.clone(), gradient.double()
            optimizer.step()
            exact.step()
            assert optimizer.param_groups[0]["eta"].dtype == torch.float32
            assert optimizer.step_size == pytest.approx(exact.step_size, rel=1e-6)
            assert torch.equal(low, wide.to(dtype))

    def test_the_step_size_of_float64_parameters_is_float64(self) -> None:
        x, y = parameter(1.0), parameter(1.0, dtype=torch.float32)
        optimizer = reused([y, x])
        descend_with(optimizer, (x, [1.0]), (y, [1.0]))
        assert optimizer.param_groups[0]["eta"].dtype == torch.float64
        assert optimizer.step_size == 0.2

    def test_norms_skip_parameters_without_a_gradient_in_both_steps(self) -> None:
        x, y = parameter(0.0), parameter(0.0)
        optimizer = reused([x, y], lr=0.1)
        optimizer.recording = True
        descend_with(optimizer, (x, [1.0]), (y, None))
        descend_with(optimizer, (x, [3.0]), (y, [7.0]))  # only x: 2 * 0.1 / (2 * 2)
        descend_with(optimizer, (x, None), (y, [9.0]))  # only y: 2 * 0.05 * 7 / (2 * 2)
        descend_with(optimizer, (x, [5.0]), (y, None))  # neither: it grows
        smoothness = [record.smoothness for record in optimizer.records]
        assert smoothness[1:] == pytest.approx([0.05, 0.175, math.inf], rel=1e-14)
        assert "previous_gradient" in optimizer.state[x]
        assert y not in optimizer.state

    def test_a_parameter_without_gradient_is_not_moved_by_weight_decay(self) -> None:
        x, y = parameter(1.0), parameter(1.0)
        optimizer = reused([x, y], weight_decay=0.5)
        descend_with(optimizer, (x, [1.0]), (y, None))
        assert y.item() == 1.0

    @pytest.mark.parametrize("scope", ["global", "group"])
    def test_a_step_without_any_gradient_is_no_step(self, scope: str) -> None:
        x = parameter(1.0)
        optimizer = reused([x], scope=scope)
        optimizer.recording = True
        twin_x = parameter(1.0)
        twin = reused([twin_x], scope=scope)
        descend_with(optimizer, (x, None))
        assert optimizer.step_sizes == (0.2,)
        for gradient in (1.0, 0.3):
            descend_with(optimizer, (x, [gradient]))
            descend_with(optimizer, (x, None))
            descend_with(twin, (twin_x, [gradient]))
        assert torch.equal(x, twin_x)
        assert optimizer.step_sizes == twin.step_sizes
        assert len(optimizer.records) == 2

    def test_a_group_without_gradients_keeps_its_step_size_but_no_memory(self) -> None:
        x, y = parameter(1.0), parameter(1.0)
        optimizer = reused([{"params": [x]}, {"params": [y]}], scope="group")
        optimizer.recording = True
        descend_with(optimizer, (x, [1.0]), (y, [1.0]))
        descend_with(optimizer, (x, [1.0]), (y, None))
        assert optimizer.step_sizes == pytest.approx((math.sqrt(1.1) * 0.2, 0.2))
        assert y not in optimizer.state
        descend_with(optimizer, (x, [1.0]), (y, [5.0]))
        assert optimizer.records[-1].group == 1
        assert optimizer.records[-1].smoothness == math.inf

    def test_gradients_zeroed_in_place_are_remembered(self) -> None:
        x = parameter(0.0)
        optimizer = reused([x], lr=0.1)
        optimizer.recording = True
        for gradient in (1.0, 3.0, 4.0):
            descend_with(optimizer, (x, [gradient]))
            optimizer.zero_grad(set_to_none=False)
        # 2 * 0.1 * 1 / (2 * 2), then 2 * 0.05 * 3 / (2 * 1)
        smoothness = [record.smoothness for record in optimizer.records[1:]]
        assert smoothness == pytest.approx([0.05, 0.15], rel=1e-14)

    def test_sparse_gradients_are_refused_before_anything_changes(self) -> None:
        x, table = parameter(1.0), torch.ones(3, 2, requires_grad=True)
        optimizer = reused([x, table])
        x.grad = torch.ones_like(x)
        table.grad = torch.ones(3, 2).to_sparse()
        with pytest.raises(RuntimeError, match=r"sparse gradients.*sparse=False"):
            optimizer.step()
        assert x.item() == 1.0
        assert optimizer.param_groups[0]["eta"] is None

    def test_complex_parameters_are_refused(self) -> None:
        with pytest.raises(RuntimeError, match=r"complex64.*view_as_real"):
            reused([torch.zeros(2, dtype=torch.complex64, requires_grad=True)])

    def test_tensors_with_no_elements_count_for_nothing(self) -> None:
        x, empty = parameter(1.0), torch.zeros(0, 3, dtype=torch.float64, requires_grad=True)
        optimizer = reused([empty, x])
        optimizer.recording = True
        for gradient in (1.0, 3.0):
            empty.grad = torch.zeros_like(empty)
            descend_with(optimizer, (x, [gradient]))
        assert optimizer.records[1].smoothness == pytest.approx(0.1, rel=1e-14)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lr": 0.0}, "lr must be positive"),
            ({"lr": -1.0}, "lr must be positive"),
            ({"lr": math.inf}, "lr must be positive and finite"),
            ({"lr": math.nan}, "lr must be positive and finite"),
            ({"gamma": 0.0}, "gamma must be positive"),
            ({"delta": -0.1}, "delta must be finite and not negative"),
            ({"theta0": 0.0}, "theta0 must be positive"),
            ({"max_lr": 0.0}, "max_lr must be positive"),
            ({"weight_decay": -1.0}, "weight_decay must be"),
            ({"curvature": "both"}, "curvature must be 'reused' or 'same-batch', not 'both'"),
            ({"scope": "layer"}, "scope must be 'global' or 'group', not 'layer'"),
        ],
    )
    def test_what_cannot_work_is_refused(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DeltaSGD([parameter(1.0)], **options)
        optimizer = reused([parameter(1.0)])
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [parameter(1.0)], **options})
        assert len(optimizer.param_groups) == 1

    @pytest.mark.parametrize("key", ["gamma", "delta", "theta0", "max_lr"])
    def test_one_step_size_has_one_rule(self, key: str) -> None:
        def groups() -> list[dict[str, object]]:
            return [{"params": [parameter(1.0)]}, {"params": [parameter(1.0)], key: 0.7}]

        with pytest.raises(ValueError, match=rf'same {key}.*use scope="group"'):
            reused(groups())
        assert len(reused(groups(), scope="group").step_sizes) == 2

    def test_maximize_goes_up(self) -> None:
        x, y = parameter(1.0), parameter(1.0)
        up, down = reused([x], maximize=True), reused([y])
        for gradient in (1.0, 0.4, -3.0):
            descend_with(up, (x, [-gradient]))
            descend_with(down, (y, [gradient]))
        assert torch.equal(x, y)
        assert up.step_size == down.step_size

    @pytest.mark.parametrize("curvature", ["reused", "same-batch"])
    @pytest.mark.parametrize("foreach", [False, True])
    @pytest.mark.parametrize("maximize", [False, True])
    def test_weight_decay_is_part_of_the_loss(
        self, curvature: str, foreach: bool, maximize: bool
    ) -> None:
        problem = PROBLEMS["logistic"]()
        one, two = problem.tensors(problem.start()), problem.tensors(problem.start())
        sign = -1 if maximize else 1
        inside = DeltaSGD(
            one, weight_decay=0.3, curvature=curvature, foreach=foreach, maximize=maximize
        )
        outside = DeltaSGD(two, curvature=curvature)
        inside.recording = outside.recording = True
        for k in range(10):

            def decayed(k: int = k) -> Tensor:
                inside.zero_grad()
                loss = sign * problem.loss(one, k)
                loss.backward()
                return loss

            def regularised(k: int = k) -> Tensor:
                outside.zero_grad()
                loss = problem.loss(two, k) + 0.15 * sum((p**2).sum() for p in two)
                loss.backward()
                return loss

            inside.step(decayed)
            outside.step(regularised)
            np.testing.assert_allclose(flat(one), flat(two), rtol=1e-9)
        for ours, theirs in zip(inside.records[1:], outside.records[1:], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)

    def test_a_tensor_as_lr_is_read_once(self) -> None:
        x = parameter(1.0)
        optimizer = reused([x], lr=torch.tensor([0.5]))
        assert optimizer.param_groups[0]["lr"] == 0.5

    def test_a_scheduler_moves_eta_0(self) -> None:
        x = parameter(1.0)
        optimizer = reused([x], lr=0.4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        descend_with(optimizer, (x, [1.0]))
        scheduler.step()
        assert optimizer.step_size == 0.4
        optimizer.reset()
        assert optimizer.step_size == 0.2
        descend_with(optimizer, (x, [1.0]))
        assert x.item() == pytest.approx(1 - 0.4 - 0.2)

    def test_an_lr_that_became_zero_is_refused_where_it_is_read(self) -> None:
        x = parameter(1.0)
        optimizer = reused([x])
        descend_with(optimizer, (x, [1.0]))
        optimizer.param_groups[0]["lr"] = 0.0
        descend_with(optimizer, (x, [1.0]))
        optimizer.reset()
        with pytest.raises(ValueError, match="lr must be positive"):
            descend_with(optimizer, (x, [1.0]))


class TestGroups:
    def test_groups_of_equal_lr_are_one_vector(self) -> None:
        problem = PROBLEMS["network"]()
        one, many = problem.tensors(problem.start()), problem.tensors(problem.start())
        together, apart = reused(one), reused([{"params": [p]} for p in many])
        for k in range(10):
            for params, optimizer in ((one, together), (many, apart)):
                optimizer.zero_grad()
                problem.loss(params, k).backward()
                optimizer.step()
        np.testing.assert_allclose(flat(one), flat(many), rtol=1e-10)
        assert apart.step_sizes == pytest.approx((together.step_size,) * 3, rel=1e-10)

    @pytest.mark.parametrize("curvature", ["reused", "same-batch"])
    def test_different_lr_is_a_change_of_variables(self, curvature: str) -> None:
        """Group i with ratio s is the plain rule in u = x / sqrt(s)."""
        problem = PROBLEMS["logistic"]()
        ratio = 0.25
        x = problem.tensors(problem.start())
        scaled = DeltaSGD(
            [{"params": [x[0]], "lr": 0.2}, {"params": [x[1]], "lr": 0.2 * ratio}],
            curvature=curvature,
        )
        u = problem.tensors(problem.start())
        with torch.no_grad():
            u[1].div_(math.sqrt(ratio))
        plain = DeltaSGD(u, lr=0.2, curvature=curvature)
        for k in range(15):

            def in_x(k: int = k) -> Tensor:
                scaled.zero_grad()
                loss = problem.loss(x, k)
                loss.backward()
                return loss

            def in_u(k: int = k) -> Tensor:
                plain.zero_grad()
                loss = problem.loss([u[0], u[1] * math.sqrt(ratio)], k)
                loss.backward()
                return loss

            scaled.step(in_x)
            plain.step(in_u)
            assert scaled.step_size == pytest.approx(plain.step_size, rel=1e-9)
            assert scaled.step_sizes[1] == pytest.approx(ratio * plain.step_size, rel=1e-9)
            np.testing.assert_allclose(x[1].detach(), u[1].detach() * math.sqrt(ratio), rtol=1e-9)

    def test_the_cap_bounds_the_group_that_steps_farthest(self) -> None:
        x, y = parameter(0.0), parameter(0.0)
        optimizer = reused([{"params": [x], "lr": 0.1}, {"params": [y], "lr": 1.0}], max_lr=0.5)
        assert optimizer.step_sizes == pytest.approx((0.05, 0.5))
        descend_with(optimizer, (x, [1.0]), (y, [1.0]))
        assert optimizer.step_sizes == pytest.approx((0.05, 0.5))

    def test_scope_group_is_one_optimizer_each(self) -> None:
        problem = PROBLEMS["network"]()
        one, many = problem.tensors(problem.start()), problem.tensors(problem.start())
        scoped = reused([{"params": [p]} for p in one], scope="group")
        scoped.recording = True
        separate = [reused([p]) for p in many]
        for k in range(10):
            scoped.zero_grad()
            problem.loss(one, k).backward()
            scoped.step()
            for optimizer in separate:
                optimizer.zero_grad()
            problem.loss(many, k).backward()
            for optimizer in separate:
                optimizer.step()
        np.testing.assert_array_equal(flat(one), flat(many))
        assert scoped.step_sizes == tuple(optimizer.step_size for optimizer in separate)
        assert [record.group for record in scoped.records[:4]] == [0, 1, 2, 0]
        with pytest.raises(RuntimeError, match="step_sizes"):
            _ = scoped.step_size

    def test_a_group_added_later_joins_the_common_step_size(self) -> None:
        x, y = parameter(0.0), parameter(0.0)
        optimizer = reused([x], lr=0.1)
        optimizer.recording = True
        descend_with(optimizer, (x, [1.0]))
        optimizer.add_param_group({"params": [y], "lr": 0.2})
        descend_with(optimizer, (x, [3.0]), (y, [50.0]))
        assert optimizer.records[1].smoothness == pytest.approx(0.05, rel=1e-14)
        assert optimizer.step_sizes == pytest.approx((0.05, 0.1))
        assert y.item() == pytest.approx(-0.1 * 50)

    def test_a_group_added_later_starts_its_own_step_size(self) -> None:
        x, y = parameter(0.0), parameter(0.0)
        optimizer = reused([x], lr=0.1, scope="group")
        descend_with(optimizer, (x, [1.0]))
        optimizer.add_param_group({"params": [y], "lr": 0.7})
        descend_with(optimizer, (x, [3.0]), (y, [1.0]))
        assert optimizer.step_sizes == pytest.approx((0.05, 0.7))


class TestRecordsAndReset:
    def test_records_are_kept_only_while_recording(self) -> None:
        x = parameter(1.0)
        optimizer = reused([x])
        descend_with(optimizer, (x, [1.0]))
        assert optimizer.records == []
        optimizer.recording = True
        descend_with(optimizer, (x, [2.0]))
        optimizer.recording = False
        descend_with(optimizer, (x, [3.0]))
        (record,) = optimizer.records
        assert record.smoothness == pytest.approx(0.2 * 1 / 1, rel=1e-14)
        assert record.growth == pytest.approx(math.sqrt(1.1) * 0.2, rel=1e-14)
        assert record.eta == min(record.smoothness, record.growth)
        assert record.theta == pytest.approx(record.eta / 0.2)
        optimizer.clear_records()
        assert optimizer.records == []

    @pytest.mark.parametrize("curvature", ["reused", "same-batch"])
    def test_reset_starts_a_round(self, curvature: str) -> None:
        problem = PROBLEMS["network"]()
        params, fresh = problem.tensors(problem.start()), problem.tensors(problem.start(1))

        def run(optimizer: DeltaSGD, tensors: list[Tensor]) -> None:
            for k in range(6):

                def closure(k: int = k) -> Tensor:
                    optimizer.zero_grad()
                    loss = problem.loss(tensors, k)
                    loss.backward()
                    return loss

                optimizer.step(closure)

        optimizer = DeltaSGD(params, curvature=curvature)
        optimizer.recording = True
        run(optimizer, params)
        optimizer.reset()
        assert optimizer.step_size == 0.2
        assert len(optimizer.records) == 6
        with torch.no_grad():
            for p, q in zip(params, fresh, strict=True):
                p.copy_(q)
        run(optimizer, params)
        new = DeltaSGD(fresh, curvature=curvature)
        run(new, fresh)
        np.testing.assert_array_equal(flat(params), flat(fresh))
        assert optimizer.step_size == new.step_size
