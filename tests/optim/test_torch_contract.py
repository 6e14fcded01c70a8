"""The contract of torch.optim, driven by the machinery torch tests its own optimizers with."""

# ruff: noqa: PT009 - torch's assertEqual compares tensors inside nested state

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LinearLR, StepLR

from deltafl.optim import SPS, DeltaSGD

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_device_type import instantiate_device_type_tests
    from torch.testing._internal.common_optimizers import (
        ErrorOptimizerInput,
        OptimizerInfo,
        OptimizerInput,
        get_error_inputs_for_all_optims,
        optims,
    )
    from torch.testing._internal.common_utils import TestCase


def configuration(desc: str, **kwargs: Any) -> OptimizerInput:
    return OptimizerInput(params=None, kwargs=kwargs, desc=desc)


def delta_sgd_inputs(device: str, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
    return [
        configuration("default"),
        configuration("lr", lr=0.01),
        configuration("tensor lr", lr=torch.tensor(0.001)),
        configuration("weight decay", weight_decay=0.5),
        configuration("maximize", weight_decay=0.1, maximize=True),
        configuration("cap", max_lr=0.05),
        configuration("theory", gamma=1.0, delta=1.0, theta0=3.0),
        configuration("scope", scope="group"),
        configuration("scope, weight decay", scope="group", weight_decay=0.1),
        configuration("reused", curvature="reused"),
        configuration("reused, weight decay", curvature="reused", weight_decay=0.5),
        configuration("reused, cap", curvature="reused", max_lr=0.05),
        configuration("reused, scope", curvature="reused", scope="group"),
    ]


def sps_inputs(device: str, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
    return [
        configuration("default"),
        configuration("multiplier", lr=0.1),
        configuration("tensor lr", lr=torch.tensor(0.5)),
        configuration("c", c=2.0),
        configuration("cap", max_lr=0.05),
        configuration("weight decay", weight_decay=0.1),
    ]


def error_inputs(device: str, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
    return [
        *get_error_inputs_for_all_optims(device, dtype),
        ErrorOptimizerInput(
            configuration("lr", lr=-1.0), error_type=ValueError, error_regex="lr must be positive"
        ),
        ErrorOptimizerInput(
            configuration("decay", weight_decay=-1.0),
            error_type=ValueError,
            error_regex="weight_decay must be",
        ),
    ]


SCHEDULERS: list[Callable[[Optimizer], Any]] = [
    lambda optimizer: StepLR(optimizer, gamma=0.9, step_size=10),
    lambda optimizer: LinearLR(optimizer, start_factor=0.4, total_iters=5),
    lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=4, eta_min=1e-3),
]


def info(cls: type[Optimizer], inputs: Callable[..., list[OptimizerInput]]) -> OptimizerInfo:
    return OptimizerInfo(
        cls,
        optim_inputs_func=inputs,
        optim_error_inputs_func=error_inputs,
        scheduler_inputs=SCHEDULERS,
        supported_impls=("foreach",),
        supports_complex=False,
        step_requires_closure=True,
    )


INFOS = [info(DeltaSGD, delta_sgd_inputs), info(SPS, sps_inputs)]


class Regression:
    """Least squares in a weight and a bias, with the closure of one optimizer."""

    def __init__(self, device: str, dtype: torch.dtype, *, maximize: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = Parameter(torch.randn(6, 4, generator=generator).to(device, dtype))
        self.bias = Parameter(torch.randn(6, generator=generator).to(device, dtype))
        self.inputs = torch.randn(20, 4, generator=generator).to(device, dtype)
        self.sign = -1 if maximize else 1

    @property
    def params(self) -> list[Parameter]:
        return [self.weight, self.bias]

    def loss(self) -> Tensor:
        outputs = self.inputs @ self.weight.T + self.bias
        return ((outputs - 1) ** 2).mean()

    def step(self, optimizer: Optimizer) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss()
            (self.sign * loss).backward()
            return loss

        return optimizer.step(closure)


def cases(
    optim_info: OptimizerInfo, device: str, dtype: torch.dtype
) -> Iterator[tuple[dict[str, Any], Regression]]:
    for case in optim_info.optim_inputs_func(device, dtype):
        for foreach in (False, True):
            kwargs = {**case.kwargs, "foreach": foreach}
            yield kwargs, Regression(device, dtype, maximize=kwargs.get("maximize", False))


class TestTorchContract(TestCase):
    @optims(INFOS, dtypes=[torch.float32])
    def test_bad_arguments(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for error in optim_info.optim_error_inputs_func(device, dtype):
            case = error.optimizer_error_input
            params = [Parameter(torch.ones(1, 1))] if case.params is None else case.params
            with pytest.raises(error.error_type, match=error.error_regex):
                optim_info.optim_cls(params, **case.kwargs)

    @optims(INFOS, dtypes=[torch.float32, torch.float64])
    def test_goes_in_the_right_direction(
        self, device: str, dtype: torch.dtype, optim_info: Any
    ) -> None:
        for scheduler in (None, *optim_info.scheduler_inputs):
            for kwargs, problem in cases(optim_info, device, dtype):
                optimizer = optim_info.optim_cls(problem.params, **kwargs)
                schedule = scheduler(optimizer) if scheduler else None
                before = problem.loss().item()
                for _ in range(20):
                    problem.step(optimizer)
                    if schedule:
                        schedule.step()
                assert problem.loss().item() < before, str(kwargs)

    @optims(INFOS, dtypes=[torch.float32, torch.bfloat16])
    def test_groups_with_their_own_options(
        self, device: str, dtype: torch.dtype, optim_info: Any
    ) -> None:
        for kwargs, problem in cases(optim_info, device, dtype):
            kwargs["lr"] = 1e-2
            groups = [
                {"params": [problem.weight], "weight_decay": 0.01},
                {"params": [problem.bias], "lr": 1e-3},
            ]
            optimizer = optim_info.optim_cls(groups, **kwargs)
            before = problem.loss().item()
            for _ in range(20):
                problem.step(optimizer)
            assert problem.loss().item() < before, str(kwargs)

    @optims(INFOS, dtypes=[torch.float32])
    def test_foreach_matches_forloop(
        self, device: str, dtype: torch.dtype, optim_info: Any
    ) -> None:
        for case in optim_info.optim_inputs_func(device, dtype):
            results = []
            for foreach in (False, True):
                problem = Regression(device, dtype)
                optimizer = optim_info.optim_cls(problem.params, **case.kwargs, foreach=foreach)
                for _ in range(7):
                    problem.step(optimizer)
                results.append((problem, optimizer))
            (one, first), (two, second) = results
            for p, q in zip(one.params, two.params, strict=True):
                assert torch.equal(p, q), case.desc
                self.assertEqual(first.state[p], second.state[q], rtol=0, atol=0)

    @optims(INFOS, dtypes=[torch.float32])
    def test_nothing_happens_without_gradients(
        self, device: str, dtype: torch.dtype, optim_info: Any
    ) -> None:
        for kwargs, problem in cases(optim_info, device, dtype):
            optimizer = optim_info.optim_cls(problem.params, **kwargs)
            before = copy.deepcopy(problem.params)
            for p in problem.params:
                p.grad = None
            optimizer.step(lambda: torch.ones(()))
            self.assertEqual(problem.params, before, rtol=0, atol=0)
            assert len(optimizer.state) == 0
            if not kwargs.get("weight_decay"):
                for p in problem.params:
                    p.grad = torch.zeros_like(p)
                for _ in range(3):
                    optimizer.step(lambda: torch.ones(()))
                self.assertEqual(problem.params, before, rtol=0, atol=0)

    @optims(INFOS, dtypes=[torch.float32])
    def test_state_dict_is_deterministic(
        self, device: str, dtype: torch.dtype, optim_info: Any
    ) -> None:
        for kwargs, problem in cases(optim_info, device, dtype):
            optimizer = optim_info.optim_cls(problem.params, **kwargs)
            for _ in range(5):
                problem.step(optimizer)
            twin = copy.deepcopy(problem)
            resumed = optim_info.optim_cls(twin.params, **kwargs)
            state = copy.deepcopy(optimizer.state_dict())
            resumed.load_state_dict(state)
            self.assertEqual(resumed.state_dict(), state, rtol=0, atol=0)
            for _ in range(5):
                problem.step(optimizer)
                twin.step(resumed)
                self.assertEqual(problem.params, twin.params, rtol=0, atol=0)
            # Loading copies: the state dict above is not changed by the steps since.
            again = optim_info.optim_cls(twin.params, **kwargs)
            again.load_state_dict(state)
            self.assertEqual(again.state_dict(), state, rtol=0, atol=0)

    @optims(INFOS, dtypes=[torch.float32])
    def test_save_and_load(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for kwargs, problem in cases(optim_info, device, dtype):
            optimizer = optim_info.optim_cls(problem.params, **kwargs)
            for _ in range(3):
                problem.step(optimizer)
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
            self.assertEqual(loaded, optimizer.state_dict(), rtol=0, atol=0)

    @optims(INFOS, dtypes=[torch.float32])
    def test_loads_into_and_from_named_parameters(
        self, device: str, dtype: torch.dtype, optim_info: Any
    ) -> None:
        for named_source in (False, True):
            problem = Regression(device, dtype)
            named = list(zip(("weight", "bias"), problem.params, strict=True))
            source = optim_info.optim_cls(named if named_source else problem.params)
            problem.step(source)
            target = optim_info.optim_cls(problem.params if named_source else named)
            target.load_state_dict(source.state_dict())
            names = target.param_groups[0]["param_names"]
            assert names == ["weight", "bias"]
            problem.step(target)

    @optims(INFOS, dtypes=[torch.float32])
    def test_state_dict_hooks(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        problem = Regression(device, dtype)
        optimizer = optim_info.optim_cls(problem.params, lr=0.3)
        problem.step(optimizer)

        def with_a_note(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, "note": "kept"}

        def with_another_lr(_: Optimizer, state: dict[str, Any]) -> None:
            state["param_groups"] = copy.deepcopy(state["param_groups"])
            state["param_groups"][0]["lr"] = 0.7

        optimizer.register_state_dict_post_hook(with_a_note)
        optimizer.register_load_state_dict_pre_hook(with_another_lr)
        state = optimizer.state_dict()
        assert state["note"] == "kept"
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.7

    @optims(INFOS, dtypes=[torch.float32])
    def test_a_deep_copy_has_every_attribute(
        self, device: str, dtype: torch.dtype, optim_info: Any
    ) -> None:
        for kwargs, problem in cases(optim_info, device, dtype):
            optimizer = optim_info.optim_cls(problem.params, **kwargs)
            problem.step(optimizer)
            public = {name for name in vars(optimizer) if not name.startswith("_")}
            duplicate = copy.deepcopy(optimizer)
            assert {n for n in vars(duplicate) if not n.startswith("_")} == public
            assert duplicate.step_sizes == optimizer.step_sizes

    @optims(INFOS, dtypes=[torch.float32])
    def test_any_memory_layout(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        """A transposed parameter, channels last, gradients laid out otherwise: the same numbers."""
        for case in optim_info.optim_inputs_func(device, dtype):
            results = []
            for changed in (False, True):
                generator = torch.Generator().manual_seed(0)
                images = torch.randn(2, 3, 4, 5, generator=generator)
                matrix = torch.randn(4, 6, generator=generator)
                if changed:
                    images = images.contiguous(memory_format=torch.channels_last)
                    matrix = matrix.T.contiguous().T
                params = [Parameter(images), Parameter(matrix)]
                optimizer = optim_info.optim_cls(params, **case.kwargs)
                for _ in range(4):
                    for p in params:
                        p.grad = torch.randn(p.shape, generator=generator)
                    optimizer.step(lambda: torch.ones(()))
                results.append(params)
            for p, q in zip(*results, strict=True):
                assert torch.equal(p, q), case.desc


instantiate_device_type_tests(TestTorchContract, globals(), only_for="cpu")
