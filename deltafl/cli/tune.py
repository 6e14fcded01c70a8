"""`deltafl tune`: the grid search for learning rates on one task (Section 4, Hyperparameters)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tomli_w
from pydantic import Field
from rich.table import Table

from deltafl import optim
from deltafl.cli.command import Command, config_of, console
from deltafl.cli.progress import RunProgress
from deltafl.experiment import Comparison, Config, tune
from deltafl.experiment.comparison import best_rates
from deltafl.tensorfile import write_atomically


class TuneOptions(Config):
    """The one task to tune on, and what is tuned."""

    optimizers: Annotated[list[str], Field(min_length=1)] = Field(
        [name for name in optim.names() if optim.lookup(name).grid],
        description="client optimizers to tune",
    )
    seeds: list[int] = Field([], description="seeds; none given: --run.seed")
    out: Path = Field(Path("runs/tune"), description="folder of the runs and of the result")


def execute(options: TuneOptions) -> None:
    """Run the grids, show them, and write the best learning rates."""
    with RunProgress(console) as progress:
        comparison = tune(
            config_of(options),
            optimizers=options.optimizers,
            seeds=options.seeds,
            out=options.out,
            watcher=progress,
        )
    rates = best_rates(comparison)
    place = options.out / "learning-rates.toml"
    write_atomically(place, tomli_w.dumps({"learning_rates": rates}).encode())
    console.print(_table(comparison, rates))
    for line in comparison.diverged():
        console.print(line, soft_wrap=True, markup=False)
    console.print(
        f"learning rates {place}: give it to deltafl compare --learning-rates",
        soft_wrap=True,
        markup=False,
    )


def _table(comparison: Comparison, rates: dict[str, float]) -> Table:
    finals = comparison.finals()
    table = Table(caption="validation accuracy (a tenth of the training set, held out)")
    columns = sorted(finals["lr"].unique())
    for title in ("Optimizer", *(f"lr {rate:g}" for rate in columns)):
        table.add_column(title, justify="left" if title == "Optimizer" else "right")
    means = finals.groupby(["optimizer", "lr"])["final_accuracy"].mean()
    for name, best in rates.items():
        label = optim.lookup(name).label
        cells = []
        for rate in columns:
            cell = f"{means[label, rate]:.1%}" if (label, rate) in means.index else "–"
            cells.append(f"[bold green]{cell}[/]" if rate == best else cell)
        table.add_row(label, *cells)
    return table


COMMAND = Command(
    "tune",
    "Search the learning rates of the client optimizers on one task, on held-out training data. "
    "The result is a file for deltafl compare.",
    TuneOptions,
    execute,
    (
        "deltafl tune --task cifar10-resnet18 --federation.alpha 0.1 --run.rounds 200",
        "deltafl tune --optimizers sgd adam --out runs/tune",
    ),
    positional="[CONFIG.toml]",
)
