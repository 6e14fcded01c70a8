"""All updates of a round at once, read in blocks of columns: what robust rules look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from deltafl.server.aggregate import weighted_sum

# Elements of a block in float64: they stay in the cache, and rows are never widened as a whole.
_BLOCK = 1 << 20


class Stack:
    """The rows of every client, [client, entry] for each dtype, perhaps mixed with each other."""

    def __init__(self, rows: Mapping[torch.dtype, Tensor], mixing: Tensor | None = None) -> None:
        """Look at `rows`, or at the combinations of them that the rows of `mixing` say."""
        self._rows = rows
        self._mixing = mixing

    def __len__(self) -> int:
        return len(next(iter(self._rows.values())))

    def blocks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield all columns of a dtype, a block at a time, in float64."""
        for block in torch.split(self._rows[dtype], max(1, _BLOCK // len(self)), dim=1):
            wide = block.to(torch.float64)
            yield wide if self._mixing is None else self._mixing @ wide

    def numbers(self) -> Iterator[Tensor]:
        """Yield the blocks of real numbers; integers, as BatchNorm's counts, tell no distance."""
        for dtype in self.dtypes:
            if dtype.is_floating_point:
                yield from self.blocks(dtype)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the entries."""
        return tuple(self._rows)

    def mixed(self, mixing: Tensor) -> Stack:
        """Return the stack whose clients are combinations of these, a row of `mixing` each."""
        return Stack(self._rows, mixing)

    def squared_distances(self) -> Tensor:
        """Return the squared distance of any two clients."""
        total = torch.zeros(len(self), len(self), dtype=torch.float64)
        for block in self.numbers():
            # Pair by pair: by way of inner products, one client far away would drown the others.
            mode = "donot_use_mm_for_euclid_dist"
            total += torch.cdist(block, block, compute_mode=mode).square()
        return total

    def combined(self, shares: Sequence[float]) -> dict[torch.dtype, Tensor]:
        """Return the average of the clients, weighted by their shares."""
        whole = sum(shares)
        return {
            dtype: torch.cat([weighted_sum(b, shares) / whole for b in self.blocks(dtype)])
            for dtype in self.dtypes
        }
