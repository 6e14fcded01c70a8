"""The names of the paper, and what is built for them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from deltafl.errors import UserError
from deltafl.optim import SPS, DeltaSGD, build, lookup, lr_factor, names


def weights() -> list[torch.Tensor]:
    return [torch.ones(2, requires_grad=True)]


def test_the_order_of_the_paper() -> None:
    assert names() == (
        "sgd",
        "sgd-decay",
        "sgdm",
        "sgdm-decay",
        "adam",
        "adagrad",
        "sps",
        "delta-sgd",
        "delta-sgd-reused",
    )


def test_what_the_paper_tunes() -> None:
    grids = {name: lookup(name).grid for name in names()}
    assert {grids[name] for name in names()[:4]} == {(0.01, 0.05, 0.1, 0.5)}
    assert grids["adam"] == grids["adagrad"] == (0.001, 0.01, 0.1)
    assert grids["sps"] == grids["delta-sgd"] == grids["delta-sgd-reused"] == ()


@pytest.mark.parametrize(
    ("name", "label", "cls", "options"),
    [
        ("sgd", "SGD", torch.optim.SGD, {"lr": 0.1, "momentum": 0}),
        ("sgd-decay", "SGD (↓)", torch.optim.SGD, {"lr": 0.1, "momentum": 0}),
        ("sgdm", "SGDM", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("sgdm-decay", "SGDM (↓)", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("adam", "Adam", torch.optim.Adam, {"lr": 0.001, "betas": (0.9, 0.999)}),
        ("adagrad", "Adagrad", torch.optim.Adagrad, {"lr": 0.01}),
        ("sps", "SPS", SPS, {"lr": 1.0, "c": 0.5, "f_star": 0.0, "max_lr": None}),
        (
            "delta-sgd",
            "Δ-SGD",
            DeltaSGD,
            {"lr": 0.2, "gamma": 2.0, "delta": 0.1, "theta0": 1.0, "curvature": "same-batch"},
        ),
        (
            "delta-sgd-reused",
            "Δ-SGD (reused)",
            DeltaSGD,
            {"lr": 0.2, "gamma": 2.0, "delta": 0.1, "theta0": 1.0, "curvature": "reused"},
        ),
    ],
)
def test_the_defaults(name: str, label: str, cls: type, options: dict[str, object]) -> None:
    optimizer = build(name, weights())
    assert type(optimizer) is cls
    assert lookup(name).label == label
    assert options.items() <= optimizer.param_groups[0].items()


def test_the_user_overrides() -> None:
    group = build("sgdm", weights(), lr=0.5, options={"momentum": 0.5}).param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.5, 0.5)
    assert build("delta-sgd", weights(), options={"lr": 0.7}).param_groups[0]["lr"] == 0.7
    assert lookup("sgdm").options == {"lr": 0.1, "momentum": 0.9}


@pytest.mark.parametrize(
    ("progress", "factor"),
    [(0.0, 1.0), (0.499, 1.0), (0.5, 0.1), (0.749, 0.1), (0.75, 0.01), (0.999, 0.01)],
)
def test_decay_over_the_rounds(progress: float, factor: float) -> None:
    for name in names():
        expected = factor if name.endswith("-decay") else 1.0
        assert lr_factor(lookup(name), progress) == expected
    optimizer = build("sgdm-decay", weights(), lr=0.5, progress=progress)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * factor)
    assert build("adam", weights(), progress=progress).param_groups[0]["lr"] == 0.001


@pytest.mark.parametrize("progress", [-0.1, 1.1, float("nan")])
def test_progress_is_a_fraction(progress: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        lr_factor(lookup("sgd-decay"), progress)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown optimizer 'dleta-sgd': did you mean 'delta-sgd'"):
        lookup("dleta-sgd")


@pytest.mark.parametrize("path", ["torch.optim.RAdam", "torch.optim:RAdam"])
def test_any_torch_optimizer_by_its_path(path: str) -> None:
    entry = lookup(path)
    assert (entry.name, entry.label, entry.cls) == (path, "RAdam", torch.optim.RAdam)
    assert (dict(entry.options), entry.grid, entry.decays) == ({}, (), False)
    assert build(path, weights(), lr=0.3).param_groups[0]["lr"] == 0.3
    assert build(path, weights()).param_groups[0]["lr"] == 0.001


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("torch.optim.NoSuch", "cannot be imported: .*NoSuch"),
        ("no_such_package.Thing", "cannot be imported: No module named 'no_such_package'"),
        ("torch.nn.Linear", "is not a subclass of torch.optim.Optimizer"),
        ("torch.optim.Optimizer", "is not a subclass of torch.optim.Optimizer"),
        ("torch.optim.lr_scheduler", "is not a subclass of torch.optim.Optimizer"),
        ("torch.optim.", "cannot be imported|is not a subclass"),
        (".Thing", "cannot be imported"),
        (":", "cannot be imported"),
    ],
)
def test_a_path_to_no_optimizer(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        lookup(path)
    assert "\n" not in str(caught.value)


def test_a_module_that_breaks_when_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_optimizers.py").write_text("raise RuntimeError('two\\nlines')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_optimizers", raising=False)
    with pytest.raises(UserError, match="'broken_optimizers:Mine' cannot be imported: two lines"):
        lookup("broken_optimizers:Mine")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sgd", {"momentun": 0.9}, "'sgd' has no option 'momentun': its options are lr, momentum"),
        ("delta-sgd", {"gamma": -1}, "'delta-sgd': gamma must be positive.*its options are lr"),
        ("sgdm", {"momentum": -1.0}, "'sgdm': Invalid momentum value: -1.0; its options are"),
        ("sgd-decay", {"lr": "fast"}, "'sgd-decay': .*its options are"),
        ("adam", {"params": []}, "'adam' has no option 'params'"),
    ],
)
def test_a_bad_option_is_explained(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build(name, weights(), options=options)
    assert "\n" not in str(caught.value)


def test_lr_is_given_once() -> None:
    with pytest.raises(UserError, match="lr is given twice"):
        build("sgd", weights(), lr=0.1, options={"lr": 0.2})
