"""Who holds what in the federations of some runs, as far as their data is on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deltafl import data
from deltafl.data.dataset import AnyDataset
from deltafl.errors import UserError
from deltafl.experiment.config import OWN_DATA, Config
from deltafl.experiment.federation import build_partition, hold_out
from deltafl.report.groups import arrange, federations
from deltafl.report.runs import RunView

SHOWN = 100
"""Clients in a picture, as in the paper's."""
MOST_DRAWN = 10**7
"""Samples of all clients in a picture; the paper's hold 50,000 together."""


class Holdings(NamedTuple):
    """How many samples of each class the first clients hold."""

    classes: Sequence[str]
    counts: Sequence[Sequence[int]]
    clients: int
    """How many clients there are, shown or not."""


class Partitions:
    """The holdings of federations, each worked out once. Nothing is ever downloaded."""

    def __init__(self) -> None:
        self._datasets: dict[str, AnyDataset | str] = {}
        self._known: dict[str, Holdings | str] = {}

    def of(self, runs: Sequence[RunView]) -> dict[str, Holdings | str]:
        """Return the holdings by `federation_key`, or a sentence that says why there are none.

        Of each setting the federation of one seed is enough for a picture.
        """
        for config in federations(arrange(runs)).values():
            key = federation_key(config)
            if key not in self._known:
                self._known[key] = self._holdings(config)
        return dict(self._known)

    def _holdings(self, config: Config) -> Holdings | str:
        dataset = self._dataset(config)
        if isinstance(dataset, str):
            return dataset
        try:
            rows = None
            if config.run.evaluate_on == "validation":
                rows, _ = hold_out(config, dataset)
            shown = range(min(SHOWN, config.federation.clients))
            partition = build_partition(config, dataset, rows)
            # A client may draw any number with replacement, and whoever looks has to wait.
            if sum(map(partition.size, shown)) > MOST_DRAWN:
                return f"Its clients hold too much to be dealt again (over {MOST_DRAWN} samples)."
            counts = partition.counts(shown)
        except UserError as error:
            return f"This federation cannot be dealt again: {error}."
        return Holdings(dataset.classes, counts.tolist(), config.federation.clients)

    def _dataset(self, config: Config) -> AnyDataset | str:
        name = config.dataset_name
        if config.data_sha256 is not None or name == OWN_DATA:
            return "Its data was given in Python, and is not kept with the run."
        if name not in data.names():
            return f"There is no data set called {name}."
        if name not in self._datasets:
            try:
                self._datasets[name] = data.load(name, download=False)
            except UserError:
                self._datasets[name] = (
                    f"The data set {name} is not on this machine; "
                    f"`deltafl data get {name}` brings it here."
                )
        return self._datasets[name]


def federation_key(config: Config) -> str:
    """Return what a partition depends on, as text."""
    federation = config.federation.model_dump_json(exclude={"participation"})
    held_out = config.run.evaluate_on == "validation"
    return f"{config.dataset_name} {config.data_sha256} {federation} {config.run.seed} {held_out}"
