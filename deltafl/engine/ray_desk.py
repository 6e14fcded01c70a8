"""What a Ray actor does: the work of bundles of clients, from weights in the object store.

It does not import Ray: an actor is this class, made remote by `deltafl.engine.ray_cluster`.
"""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec

import torch

from deltafl.client import ClientMetrics
from deltafl.engine import process
from deltafl.engine.base import ClientTask
from deltafl.engine.out_of_band import Buffer, as_tensor, unpack
from deltafl.engine.shared import Layout, copy_into
from deltafl.engine.workbench import Workbench
from deltafl.errors import UserError
from deltafl.models import Classifier
from deltafl.version import __version__

Reply = tuple[Buffer, Sequence[int], Sequence[ClientMetrics]]
Given = ParamSpec("Given")


def tools(model: Classifier) -> dict[str, object]:
    """Return what has to be the same wherever a run's clients run, or their bits differ."""
    return {
        "deltafl": __version__,
        "torch": torch.__version__,
        "compiled kernels": model.native,
    }


@lru_cache(maxsize=64)
def bundle_layout(weights: Layout, clients: int) -> Layout:
    """Return where the weights of so many clients lie in one buffer, side by side."""
    return Layout.of(
        {
            name: torch.empty((clients, *shape), dtype=dtype, device="meta")
            for name, dtype, shape, _ in weights.entries
        }
    )


def _answering(
    method: Callable[Concatenate[RayDesk, Given], object],
) -> Callable[Concatenate[RayDesk, Given], tuple[bool, object]]:
    """Answer (True, result) or (False, error): an error is an answer, a dead actor gives none."""

    @wraps(method)
    def answer(desk: RayDesk, /, *args: Given.args, **kwargs: Given.kwargs) -> tuple[bool, object]:
        try:
            return True, method(desk, *args, **kwargs)
        except Exception as error:
            return False, error

    return answer


class RayDesk:
    """A workbench that reads weights from buffers and answers with buffers."""

    def __init__(self, module_path: Sequence[str]) -> None:
        """Prepare for work on one thread; modules are looked for where the main process does."""
        sys.path += [folder for folder in module_path if folder not in sys.path]
        process.prepare()
        # The data lies in memory that all actors of a node share, and nothing here writes to it.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)

    @_answering
    def open(
        self, content: bytes, buffers: Sequence[Buffer], expected: Mapping[str, object]
    ) -> None:
        """Take up a run that `out_of_band.pack` packed."""
        vars(self).pop("_bench", None)  # the last run goes before the next one needs its memory
        setup = unpack(content, buffers)
        process.keep_freed(one_shape=setup.dataset.shape is not None)
        bench = Workbench(setup)
        ours = tools(bench.model)
        for name, wanted in expected.items():
            if ours[name] != wanted:
                raise UserError(
                    f"{name}: {ours[name]} on node {platform.node()}, {wanted} here: "
                    "all nodes need the same to compute the same"
                )
        self._bench = bench
        self._layout = Layout.of(bench.model.state_dict())

    @_answering
    def train(self, weights: Buffer | None, bundles: Sequence[Sequence[ClientTask]]) -> list[Reply]:
        """Run bundles of clients; the weights of each come back in one buffer.

        No weights are those of the last call: most calls of a round need not fetch them.
        """
        self._take(weights)
        return [self._train(bundle) for bundle in bundles]

    def _train(self, bundle: Sequence[ClientTask]) -> Reply:
        for task in bundle:
            _require(task.recall)
            _require(task.remember and task.remember.parent)
        updates = self._bench.train(self._weights, bundle)
        layout = bundle_layout(self._layout, len(bundle))
        block = torch.empty(layout.size, dtype=torch.uint8)
        copy_into(layout.views(block), updates.weights)
        return block.numpy(), updates.samples, updates.metrics

    @_answering
    def evaluate(
        self, weights: Buffer | None, chunks: Sequence[tuple[int, int]]
    ) -> list[tuple[int, float]]:
        """Evaluate some chunks of the test set."""
        self._take(weights)
        return [self._bench.evaluate(self._weights, *chunk) for chunk in chunks]

    def _take(self, weights: Buffer | None) -> None:
        if weights is not None:
            self._weights = self._layout.views(as_tensor(weights))


def _require(path: Path | None) -> None:
    """Refuse what was written where this node cannot see it."""
    if path is not None and not path.exists():
        raise UserError(
            f"node {platform.node()} does not see {path}: clients that remember need a run folder "
            "that all nodes share, so give one as --out"
        )
