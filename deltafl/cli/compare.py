"""`deltafl compare`: several client optimizers, settings and seeds, as a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from deltafl import optim
from deltafl.cli.command import Command, config_of, console
from deltafl.cli.tracking import TRACK, Watching
from deltafl.experiment import Config, compare
from deltafl.experiment.comparison import read_rates
from deltafl.tensorfile import write_atomically


class CompareOptions(Config):
    """The configuration, and what is varied."""

    optimizers: Annotated[list[str], Field(min_length=1)] = Field(
        list(optim.names()), description="client optimizers to compare"
    )
    tasks: list[str] = Field([], description="tasks; none given: --task")
    alphas: list[float] = Field([], description="heterogeneities; none given: --federation.alpha")
    seeds: list[int] = Field([], description="seeds; none given: --run.seed")
    learning_rates: Path | None = Field(None, description="the file that deltafl tune wrote")
    out: Path = Field(Path("runs/compare"), description="folder of the runs, table and picture")
    track: list[str] = TRACK


def execute(options: CompareOptions) -> None:
    """Run what is missing, then write and show the table and the picture."""
    from deltafl import report  # noqa: PLC0415  (altair is slow to import)

    rates = read_rates(options.learning_rates) if options.learning_rates else None
    with Watching(console, options.track, lambda config: options.out / config.run_name) as watching:
        comparison = compare(
            config_of(options),
            optimizers=options.optimizers,
            tasks=options.tasks,
            alphas=options.alphas,
            seeds=options.seeds,
            learning_rates=rates,
            out=options.out,
            watcher=watching,
        )
    summary = report.summarise(comparison.finals())
    figures = [options.out / f"curves.{suffix}" for suffix in ("svg", "png")]
    chart = report.accuracy_curves(comparison.curves())
    for figure in figures:
        report.save(chart, figure)
    table = report.to_markdown(summary)
    write_atomically(options.out / "table.md", table.encode())
    write_atomically(options.out / "table.csv", report.to_csv(summary).encode())
    console.print(report.to_rich(summary))
    console.print(report.sentence(summary), soft_wrap=True, markup=False)
    for line in comparison.diverged():
        console.print(line, soft_wrap=True, markup=False)
    console.print(
        f"table {options.out / 'table.md'}, picture {figures[1]}", soft_wrap=True, markup=False
    )


COMMAND = Command(
    "compare",
    "Compare client optimizers in every task, heterogeneity and seed given. Started again, it "
    "skips the runs that are done and resumes the one that is half done.",
    CompareOptions,
    execute,
    (
        "deltafl compare --alphas 1 0.1 --seeds 0 1 2",
        "deltafl compare --tasks mnist-cnn fmnist-cnn --run.rounds 20",
        "deltafl compare --optimizers sgd delta-sgd --learning-rates runs/tune/learning-rates.toml",
    ),
    positional="[CONFIG.toml]",
)
