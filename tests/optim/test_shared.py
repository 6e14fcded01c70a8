"""Norms over lists of tensors, on every path."""

from __future__ import annotations

import math

import pytest
import torch

from deltafl.optim import _shared

CPU = torch.device("cpu")


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Sizes below, at and above a chunk, none and one."""
    torch.manual_seed(0)
    shapes = [(3, 5), (_shared._CHUNK,), (0,), (), (3, _shared._CHUNK), (_shared._CHUNK - 1,)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("foreach", [False, True])
def test_norm_and_distance(dtype: torch.dtype, foreach: bool) -> None:
    left, right = tensors(dtype), [tensor / 3 for tensor in tensors(dtype)]
    wide = torch.cat([tensor.reshape(-1) for tensor in left]).double()
    gap = wide - torch.cat([tensor.reshape(-1) for tensor in right]).double()
    norm = _shared.norm(left, CPU, foreach=foreach)
    distance = _shared.distance(left, right, CPU, foreach=foreach)
    assert norm.dtype == distance.dtype == torch.float64
    assert norm.item() == pytest.approx(math.sqrt((wide**2).sum().item()), rel=1e-12)
    assert distance.item() == pytest.approx(math.sqrt((gap**2).sum().item()), rel=1e-12)


def test_no_tensors_have_the_norm_zero() -> None:
    assert _shared.norm([], CPU, foreach=False).item() == 0.0


@pytest.mark.parametrize("foreach", [False, True])
def test_the_accelerator_path_agrees(foreach: bool) -> None:
    """Its operations also run on the CPU."""
    left = [tensor for tensor in tensors() if tensor.numel()]
    right = [tensor / 3 for tensor in left]
    norms = _shared._accelerator_norms(left, foreach=foreach)
    assert _shared.combine(norms).item() == pytest.approx(
        _shared.norm(left, CPU, foreach=foreach).item(), rel=1e-12
    )
    gaps = _shared._differences(left, right, foreach=foreach)
    assert _shared.combine(_shared._accelerator_norms(gaps, foreach=foreach)).item() == (
        pytest.approx(_shared.distance(left, right, CPU, foreach=foreach).item(), rel=1e-6)
    )


@pytest.mark.parametrize("size", [1e30, 1e-30, 1.0])
def test_the_path_without_float64_keeps_its_range(size: float) -> None:
    tensor = torch.tensor([3.0, -4.0]) * size
    assert _shared._scaled_norm(tensor).item() == pytest.approx(5 * size, rel=1e-6)
    assert _shared._scaled_norm(torch.zeros(3)).item() == 0.0


def test_float64_is_used_where_the_device_has_it() -> None:
    assert _shared.accumulator(CPU) == _shared.accumulator(torch.device("cuda")) == torch.float64
    assert _shared.accumulator(torch.device("mps")) == torch.float32


def test_foreach_is_chosen_as_torch_does() -> None:
    group = {"params": [torch.ones(1, requires_grad=True)], "foreach": None}
    assert not _shared.uses_foreach(group)  # the CPU has no foreach kernels
    assert _shared.uses_foreach({**group, "foreach": True})
