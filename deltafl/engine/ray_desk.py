"""What a Ray actor does: it is this class, made remote by `deltafl.engine.ray_cluster`.

Ray brings the run, and the weights of a round where they are large. Clients and what comes of them
travel over a link to the main process, because a call of Ray costs a millisecond at either end.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from deltafl.client import ClientMetrics
from deltafl.engine import process
from deltafl.engine.base import ClientTask, Setup
from deltafl.engine.link import Link, Offer
from deltafl.engine.out_of_band import Buffer, as_tensor, unpack
from deltafl.engine.shared import Layout, copy_into
from deltafl.engine.workbench import Workbench
from deltafl.errors import UserError
from deltafl.models import Classifier
from deltafl.version import __version__

Reply = tuple[Buffer, Sequence[int], Sequence[ClientMetrics]]


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


class RayDesk:
    """A workbench that is handed work over a link, and answers with buffers."""

    def __init__(self, module_path: Sequence[str]) -> None:
        """Prepare for work on one thread; modules are looked for where the main process does."""
        sys.path += [folder for folder in module_path if folder not in sys.path]
        process.prepare()
        # The data lies in memory that all actors of a node share, and nothing here writes to it.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)

    def open(
        self, content: bytes, buffers: Sequence[Buffer], expected: Mapping[str, object], key: bytes
    ) -> tuple[bool, object]:
        """Take up a run that `out_of_band.pack` packed: (True, where to connect) or (False, why).

        An error is an answer; an actor that is dead gives none.
        """
        vars(self).pop("_bench", None)  # the last run goes before the next one needs its memory
        try:
            self._take_up(unpack(content, buffers), expected)
        except Exception as error:
            return False, error
        from ray.util import get_node_ip_address  # noqa: PLC0415  (an extra)

        self._link: Link | None = None
        self._offer = Offer(get_node_ip_address(), key)
        return True, self._offer.address

    def _take_up(self, setup: Setup, expected: Mapping[str, object]) -> None:
        process.keep_freed(one_shape=setup.one_shape)
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

    def work(self, weights: Buffer | None = None) -> None:
        """Do what comes over the link, until None says that Ray brings the next weights."""
        if weights is not None:
            self._take(weights)
        if self._link is None:
            self._link = self._offer.accept()
        with contextlib.suppress(OSError, EOFError):  # whoever hung up opens this again, or ends it
            while (message := self._link.receive()) is not None:
                method, content = message
                if method == "take":
                    self._take(content)
                else:
                    self._link.send(self._answer(method, content))

    def _take(self, weights: Buffer) -> None:
        self._weights = self._layout.views(as_tensor(weights))

    def _answer(self, method: str, content: Any) -> tuple[bool, object]:
        try:
            return True, getattr(self, method)(content)
        except Exception as error:
            return False, error

    def train(self, bundle: Sequence[ClientTask]) -> Reply:
        """Run a bundle of clients; their weights come back in one buffer."""
        for task in bundle:
            _require(task.recall)
            _require(task.remember and task.remember.parent)
        updates = self._bench.train(self._weights, bundle)
        layout = bundle_layout(self._layout, len(bundle))
        block = torch.empty(layout.size, dtype=torch.uint8)
        copy_into(layout.views(block), updates.weights)
        return block.numpy(), updates.samples, updates.metrics

    def evaluate(self, chunk: tuple[int, int]) -> tuple[int, float]:
        """Evaluate a chunk of the test set."""
        return self._bench.evaluate(self._weights, *chunk)


def _require(path: Path | None) -> None:
    """Refuse what was written where this node cannot see it."""
    if path is not None and not path.exists():
        raise UserError(
            f"node {platform.node()} does not see {path}: clients that remember need a run folder "
            "that all nodes share, so give one as --out"
        )
