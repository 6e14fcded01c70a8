"""`deltafl partition`: who holds what, as the paper's stacked bars and as numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import Field
from rich.table import Table

from deltafl import data
from deltafl.cli.command import Command, config_of, console
from deltafl.errors import UserError
from deltafl.experiment import Config
from deltafl.experiment.config import OWN_DATA
from deltafl.experiment.federation import build_partition
from deltafl.tensorfile import write_atomically

SHOWN = 100  # clients in a picture, as in the paper's


class PartitionOptions(Config):
    """The federation to look at."""

    alphas: list[float] = Field([], description="heterogeneities; none given: --federation.alpha")
    out: Path = Field(Path("partition.svg"), description="the picture: .svg, .png, .pdf or .html")


def execute(options: PartitionOptions) -> None:
    """Draw the partition and print what it is like."""
    from deltafl import report  # noqa: PLC0415  (altair is slow to import)

    config = config_of(options)
    if config.dataset_name == OWN_DATA:
        raise UserError(f"{config.task}: data of your own is looked at in Python")
    dataset = data.load(config.dataset_name)
    panels = {}
    for alpha in options.alphas or [config.federation.alpha]:
        chosen = config.override(**{"federation.alpha": alpha})
        shown = range(min(SHOWN, chosen.federation.clients))
        counts = build_partition(chosen, dataset).counts(shown)
        iid = chosen.federation.partition == "iid"
        title = "IID" if iid else f"α = {alpha:g}"
        if title in panels:
            raise UserError(f"--alphas gives {title} twice: give each once")
        panels[title] = counts
    console.print(_numbers(panels, config.federation.clients))
    report.save(report.heterogeneity_bars(panels, dataset.classes), options.out)
    table = options.out.with_suffix(".csv")
    write_atomically(table, _counts(panels, dataset.classes).to_csv(index=False).encode())
    console.print(f"picture {options.out}, numbers {table}", soft_wrap=True, markup=False)


def _counts(panels: dict[str, npt.NDArray[np.int64]], classes: tuple[str, ...]) -> pd.DataFrame:
    frames = [
        pd.DataFrame(counts, columns=list(classes)).rename_axis("client").reset_index()
        for counts in panels.values()
    ]
    return pd.concat(frames, keys=list(panels), names=["setting"]).reset_index("setting")


def _numbers(panels: dict[str, npt.NDArray[np.int64]], clients: int) -> Table:
    shown = len(next(iter(panels.values())))
    of = f"the first {shown} of {clients}" if shown < clients else f"all {clients}"
    table = Table(caption=f"medians over {of} clients", caption_justify="left")
    for column in ("", "samples", "smallest", "largest", "classes held", "share of the top class"):
        table.add_column(column, justify="right")
    for title, counts in panels.items():
        sizes = counts.sum(1)
        table.add_row(
            title,
            f"{np.median(sizes):.0f}",
            str(sizes.min()),
            str(sizes.max()),
            f"{np.median((counts > 0).sum(1)):.0f}",
            f"{np.median(counts.max(1) / sizes):.0%}",
        )
    return table


COMMAND = Command(
    "partition",
    "Show how the training set is spread over the clients: a stacked bar a client, and a table.",
    PartitionOptions,
    execute,
    (
        "deltafl partition --task cifar10-resnet18 --alphas 1 0.1 0.01 --out partition.svg",
        "deltafl partition --federation.clients 10 --federation.partition iid --out iid.png",
    ),
    positional="[CONFIG.toml]",
)
