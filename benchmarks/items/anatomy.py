"""Where the time of a step of W's CNN goes, plain and fused, against the arithmetic alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.items.base import Item, Settings
from benchmarks.progress import Progress
from benchmarks.report import Outcome, Table
from deltafl import models
from deltafl.client import LocalWork, OptimizerSteps, Steps
from deltafl.fast.flat import FlatSteps
from deltafl.objective import CrossEntropy

BATCH = 64
# Multiply-adds of a sample: conv1, conv2, hidden, head. Backward costs twice as much, but for the
# first convolution, whose inputs need no gradient.
FORWARD = [24 * 24 * 25 * 10, 8 * 8 * 250 * 20, 320 * 50, 50 * 10]
FLOPS = 2 * BATCH * (3 * sum(FORWARD) - FORWARD[0])


def measure(settings: Settings, progress: Progress) -> Outcome:
    """Time whole steps and their parts in turns, in processor time on one thread."""
    repeats, _ = settings.choose(60, 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        parts = {f"{kind}: {name}": part for kind in KINDS for name, part in _parts(kind).items()}
        parts["matrix product of 1024"] = _product()
        times: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(repeats):
            for name, part in parts.items():
                times[name].append(_processor_time(part))
        progress.say("the parts of a step are measured")
    finally:
        torch.set_num_threads(threads)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    speed = 2 * 1024**3 / medians["matrix product of 1024"]
    anatomy = {kind: _anatomy(kind, medians) for kind in KINDS}
    limit = FLOPS / speed
    rows = [
        [kind, *(f"{1e3 * seconds:.2f}" for seconds in pieces.values())]
        for kind, pieces in anatomy.items()
    ]
    return Outcome(
        "A step of W's CNN, piece by piece",
        [Table("Milliseconds of processor time, one thread", ["path", *PIECES], rows)],
        [
            f"The arithmetic alone, {FLOPS / 1e6:.0f} MFLOP at the {speed / 1e9:.0f} GFLOPS of a "
            f"large matrix product here, would take {1e3 * limit:.2f} ms; n = {repeats}."
        ],
        {"anatomy": anatomy, "limit": limit, "gflops": speed / 1e9, "times": times},
    )


KINDS = ("plain torch", "fused")
PIECES = ("whole step", "convolutions", "pooling, dropout, relu", "optimizer", "everything else")


def _parts(kind: str) -> dict[str, Callable[[], object]]:
    fast = kind == "fused"
    model = cast(models.CNN, models.build("cnn", shape=(1, 28, 28), classes=10, seed=0, fast=fast))
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    work = LocalWork(CrossEntropy(), "sgd")

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), targets)

    steps: Steps = (FlatSteps if fast else OptimizerSteps)(model, loss_of, work, 0.0)
    blocks = model._fused if fast else model._plain
    gradient = torch.randn(BATCH, 20, 4, 4, generator=generator)
    maps = torch.randn(BATCH, 10, 12, 12, generator=generator, requires_grad=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def forward_and_backward() -> None:
        blocks(images).backward(gradient)

    def convolutions() -> None:
        first, second = model.conv1(images), model.conv2(maps)
        first.backward(torch.ones_like(first))
        second.backward(torch.ones_like(second))

    found: dict[str, Callable[[], object]] = {
        "whole": lambda: steps.step(images, labels),
        "blocks": forward_and_backward,
    }
    if not fast:
        found |= {"convolutions": convolutions, "optimizer": optimizer.step}
    return found


def _anatomy(kind: str, medians: dict[str, float]) -> dict[str, float]:
    whole, blocks = medians[f"{kind}: whole"], medians[f"{kind}: blocks"]
    if kind == "fused":
        # One operation: what it spends on convolving and on pooling cannot be told apart.
        pieces = [whole, blocks, 0.0, 0.0, whole - blocks]
    else:
        convolutions = medians[f"{kind}: convolutions"]
        optimizer = medians[f"{kind}: optimizer"]
        pieces = [whole, convolutions, blocks - convolutions, optimizer, whole - blocks - optimizer]
    return dict(zip(PIECES, pieces, strict=True))


def _product() -> Callable[[], object]:
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return lambda: left @ right


def _processor_time(part: Callable[[], object]) -> float:
    part()
    start = time.process_time()
    for _ in range(3):
        part()
    return (time.process_time() - start) / 3


ITEM = Item("anatomy", "A step of W's CNN, piece by piece", 1, measure)
