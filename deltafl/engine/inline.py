"""The plain engine: every client in this process, one after the other.

It is the slow, obvious reference of every other engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from deltafl.client import Updates
from deltafl.engine import process
from deltafl.engine.base import ClientTask, Evaluation, Setup, bundles, chunks, total
from deltafl.engine.workbench import Workbench, bundle_size


class InlineEngine:
    """Runs client work where it is called."""

    def __enter__(self) -> InlineEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def open(self, setup: Setup) -> None:
        """Set up the workbench of a run."""
        process.keep_freed(one_shape=setup.one_shape)
        self._bench = Workbench(setup)
        self._bundle = bundle_size(setup, self._bench.model)
        self._chunks = chunks(setup.evaluated)

    def train(
        self, weights: Mapping[str, Tensor], tasks: Sequence[ClientTask]
    ) -> Iterator[Updates]:
        """Yield the clients' updates in the order of `tasks`."""
        for bundle in bundles(tasks, self._bundle):
            yield self._bench.train(weights, bundle)

    def evaluate(self, weights: Mapping[str, Tensor]) -> Evaluation:
        """Evaluate the global weights on all samples held for that."""
        parts = [self._bench.evaluate(weights, *chunk) for chunk in self._chunks]
        return total(parts, self._chunks[-1][1])
