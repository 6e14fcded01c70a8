"""`deltafl run`: one experiment."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from deltafl.cli.command import Command, config_of, console, refusals
from deltafl.cli.tracking import TRACK, Watching
from deltafl.experiment import Config, run


class RunOptions(Config):
    """The configuration, and where the run goes."""

    out: Path | None = Field(None, description="the run's folder; none: runs/NAME-HASH")
    track: list[str] = TRACK


def execute(options: RunOptions) -> None:
    """Run, or resume, and say where everything is."""
    config = config_of(options)
    folder = options.out or Path("runs") / config.run_name
    with Watching(console, options.track, lambda _: folder) as watching:
        result = run(config, out=folder, listeners=[watching])
    summary = result.summary
    console.print(
        f"{config.task}, {config.client.optimizer}: {config.run.evaluate_on} accuracy "
        f"{summary['final_test_accuracy']:.2%} after {summary['rounds']} rounds "
        f"({summary['seconds']:.1f} s){refusals(summary)}",
        soft_wrap=True,
        markup=False,
    )
    console.print(f"weights_sha256 {summary['weights_sha256']}", soft_wrap=True)
    console.print(f"run folder {folder}", soft_wrap=True, markup=False)


COMMAND = Command(
    "run",
    "Run one federated experiment. Started again, it goes on where it stopped; a finished run is "
    "not run again. CONFIG.toml holds any of the options below; the command line wins.",
    RunOptions,
    execute,
    (
        "deltafl run",
        "deltafl run --task fmnist-cnn --federation.alpha 0.1 --run.rounds 60 --out runs/first",
        "deltafl run --task fmnist-cnn --client.optimizer sgd --client.lr 0.05",
        "deltafl run --client.objective fedprox --client.objective-options mu=0.1",
        "deltafl run experiment.toml --run.seed 1",
        "deltafl run --track tensorboard --run.record-step-sizes",
    ),
    positional="[CONFIG.toml]",
)
