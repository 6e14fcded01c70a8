"""Many runs of one experiment: client optimizers compared, and learning rates tuned.

Every run has a folder named after its configuration, so a comparison that is started again skips
what is done and resumes what is half done.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deltafl import engine as engines
from deltafl import optim
from deltafl.errors import UserError
from deltafl.experiment.config import Config, read_toml
from deltafl.experiment.execute import DivergedError, Listener, Result, divergence, run
from deltafl.untrusted import brief

if TYPE_CHECKING:
    import pandas as pd


class Watcher(Listener, Protocol):
    """A listener that also hears of the runs of a comparison."""

    def planned(self, configs: Sequence[Config]) -> None:
        """So many runs are ahead."""

    def finished_run(self, result: Result) -> None:
        """A run is over, or was found finished."""


@dataclass(frozen=True)
class Comparison:
    """The results of several runs, as tables to draw and to print."""

    results: tuple[Result, ...]

    def finals(self) -> pd.DataFrame:
        """Return a row a run: task, alpha, optimizer, lr, seed, final_accuracy."""
        return _frame(
            _setting(r.config) | {"final_accuracy": r.final_test_accuracy} for r in self.results
        )

    def diverged(self) -> list[str]:
        """Return a line for every run whose global weights diverged; it counts as they score."""
        return [
            f"{r.config.run_name}: {divergence(r)}" for r in self.results if "diverged" in r.summary
        ]

    def curves(self) -> pd.DataFrame:
        """Return a row a run and evaluated round."""
        return _frame(
            _setting(r.config) | {"round": row["round"], "test_accuracy": row["test_accuracy"]}
            for r in self.results
            for row in r.metrics
            if row["test_accuracy"] is not None
        )


def _frame(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd  # noqa: PLC0415  (slow to import, and no single run needs it)

    return pd.DataFrame(rows)


def compare(
    config: Config,
    *,
    optimizers: Sequence[str] = (),
    tasks: Sequence[str] = (),
    alphas: Sequence[float] = (),
    seeds: Sequence[int] = (),
    learning_rates: Mapping[str, float] | None = None,
    out: Path | str = "runs",
    watcher: Watcher | None = None,
) -> Comparison:
    """Run every optimizer in every setting; what is not given is as in `config`.

    `learning_rates` are those found by `tune`, by the name of the optimizer.
    """
    rates = learning_rates or {}
    names = optimizers or [config.client.optimizer]
    configs = [
        config.override(
            **{
                "task": task,
                "federation.alpha": alpha,
                "client.optimizer": name,
                "client.lr": rates.get(name, config.client.lr),
                "run.seed": seed,
            }
        )
        for task, alpha, name, seed in itertools.product(
            tasks or [config.task],
            alphas or [config.federation.alpha],
            names,
            seeds or [config.run.seed],
        )
    ]
    _check(configs)
    return run_all(configs, out, watcher)


def tune(
    config: Config,
    *,
    optimizers: Sequence[str],
    seeds: Sequence[int] = (),
    out: Path | str = "runs",
    watcher: Watcher | None = None,
) -> Comparison:
    """Run every learning rate of the optimizers' grids on one task.

    A tenth of the training set is held out to judge them by: what is tuned on is not reported.
    """
    configs = [
        config.override(
            **{
                "client.optimizer": name,
                "client.lr": rate,
                "run.seed": seed,
                "run.evaluate_on": "validation",
            }
        )
        for name in optimizers
        for rate in optim.lookup(name).grid
        for seed in seeds or [config.run.seed]
    ]
    if not configs:
        raise UserError(f"{', '.join(optimizers)} have no learning rate to tune: name others")
    _check(configs)
    return run_all(configs, out, watcher)


def best_rates(comparison: Comparison) -> dict[str, float]:
    """Return the learning rate with the best mean accuracy, by the name of the optimizer."""
    rows = [(r.config.client.optimizer, r.config.client.lr, r) for r in comparison.results]
    frame = _frame(
        {"name": name, "lr": lr, "accuracy": r.final_test_accuracy} for name, lr, r in rows
    )
    means = frame.groupby(["name", "lr"], sort=False)["accuracy"].mean().reset_index()
    best = means.loc[means.groupby("name", sort=False)["accuracy"].idxmax()]
    return dict(zip(best["name"], best["lr"].astype(float), strict=True))


def read_rates(path: Path) -> dict[str, float]:
    """Read the learning rates that `deltafl tune` wrote."""
    rates = read_toml(path).get("learning_rates")
    if not isinstance(rates, dict):
        raise UserError(f"{path} has no [learning_rates]: give the file that deltafl tune wrote")
    for name, rate in rates.items():
        if "." not in name and ":" not in name:  # an import path is not followed for a file
            optim.lookup(name)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1e6:
            raise UserError(
                f"learning_rates.{name} in {path} is {brief(rate)}: give a positive number"
            )
    return {name: float(rate) for name, rate in rates.items()}


def run_all(configs: Sequence[Config], out: Path | str, watcher: Watcher | None) -> Comparison:
    """Run configurations one after the other on one engine, each in a folder of its own."""
    if watcher is not None:
        watcher.planned(configs)
    chosen = configs[0].engine
    results = []
    with engines.build(chosen.kind, chosen.workers, chosen.address) as engine:
        for config in configs:
            try:
                result = run(
                    config,
                    out=Path(out) / config.run_name,
                    engine=engine,
                    listeners=[watcher] if watcher is not None else (),
                )
            except DivergedError as diverged:  # also a result: what not to choose
                result = diverged.result
            results.append(result)
            if watcher is not None:
                watcher.finished_run(result)
    return Comparison(tuple(results))


def _check(configs: Sequence[Config]) -> None:
    """Refuse, before anything is computed, what a table could not tell apart or build."""
    seen = set()
    for config in configs:
        names = tuple(str(value) for value in _setting(config).values())
        if names in seen:
            raise UserError(
                f"two runs of {', '.join(names)} (task, alpha, optimizer, lr, seed) are asked for: "
                "name each once"
            )
        seen.add(names)
        client = config.client
        placeholder = [torch.zeros((), requires_grad=True)]
        optim.build(client.optimizer, placeholder, lr=client.lr, options=client.options)


def _setting(config: Config) -> dict[str, object]:
    iid = config.federation.partition == "iid"
    return {
        "task": config.task,
        "alpha": None if iid else config.federation.alpha,
        "optimizer": optim.lookup(config.client.optimizer).label,
        "lr": config.client.lr,
        "seed": config.run.seed,
    }
