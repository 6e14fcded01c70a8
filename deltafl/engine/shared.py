"""Memory that the main process and its workers share.

It has no name in any file system, so the kernel frees it with the last process that holds it,
however that process ends.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltafl.errors import UserError

LARGE = 1 << 20  # bytes from which a tensor is worth sharing
ALIGNMENT = 64  # a cache line, and a multiple of every element size


class SharedMemory:
    """A block of bytes behind a file descriptor that can be handed to another process."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        try:
            self._map = mmap.mmap(fd, size)
        except OSError as error:
            os.close(fd)
            raise _refused(size, error) from None
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """Allocate a block; its pages are reserved now, so that no later write can fail."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("deltafl")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        try:
            os.ftruncate(fd, size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            raise _refused(size, error) from None
        return cls(fd, size)

    def close(self) -> None:
        """Let go of the descriptor; the memory goes with the last tensor that looks at it."""
        os.close(self.fd)


def _refused(size: int, error: OSError) -> UserError:
    return UserError(
        f"cannot share {size / 1e6:.0f} MB with the workers ({error.strerror}): "
        "use fewer --engine.workers, or --engine.kind inline"
    )


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a set of weights lies in a block of bytes."""

    entries: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]
    size: int

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> Layout:
        """Lay tensors out one after the other, each on a boundary of its own."""
        entries = []
        offset = 0
        for name, value in weights.items():
            entries.append((name, value.dtype, tuple(value.shape), offset))
            offset += -(-value.numel() * value.element_size() // ALIGNMENT) * ALIGNMENT
        return cls(tuple(entries), max(offset, ALIGNMENT))

    def views(self, block: Tensor, start: int = 0) -> dict[str, Tensor]:
        """Return tensors that look into the block, `start` bytes from its beginning."""
        result = {}
        for name, dtype, shape, offset in self.entries:
            begin = start + offset
            length = dtype.itemsize
            for extent in shape:
                length *= extent
            result[name] = block[begin : begin + length].view(dtype).view(shape)
        return result


@dataclass(frozen=True)
class Places:
    """Where the global weights lie, and behind them the slots for bundles of clients' weights."""

    weights: Layout
    bundle: Layout
    slots: int

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], bundle: int, slots: int) -> Places:
        """Plan `slots` places for the weights of `bundle` clients each."""
        stack = {n: v.expand(bundle, *v.shape) for n, v in weights.items()}
        return cls(Layout.of(weights), Layout.of(stack), slots)

    @property
    def size(self) -> int:
        """The bytes all of it takes."""
        return self.weights.size + self.slots * self.bundle.size

    def global_weights(self, block: Tensor) -> dict[str, Tensor]:
        """Return the place of the global weights."""
        return self.weights.views(block)

    def bundles(self, block: Tensor) -> list[dict[str, Tensor]]:
        """Return the place of a whole bundle's weights in every slot."""
        starts = (self.weights.size + number * self.bundle.size for number in range(self.slots))
        return [self.bundle.views(block, start) for start in starts]


def first_clients(bundle: Mapping[str, Tensor], clients: int) -> Mapping[str, Tensor]:
    """Return the part of a bundle's place that so many clients fill."""
    if next(iter(bundle.values())).shape[0] == clients:
        return bundle
    return {name: view[:clients] for name, view in bundle.items()}


class _Pickler(pickle.Pickler):
    """Leaves large tensors out of the pickle and names them by their number."""

    def __init__(self, file: io.BytesIO, tensors: dict[str, Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> str | None:
        if not isinstance(obj, Tensor) or obj.nbytes < LARGE:
            return None
        name = str(len(self._tensors))
        self._tensors[name] = obj
        return name


class _Unpickler(pickle.Unpickler):
    """Finds the large tensors in shared memory."""

    def __init__(self, file: io.BytesIO, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        return self._tensors[pid]


def pack(obj: object) -> tuple[bytes, Layout, SharedMemory]:
    """Pickle an object for a process of our own, its large tensors in shared memory."""
    file, tensors = io.BytesIO(), dict[str, Tensor]()
    _Pickler(file, tensors).dump(obj)
    layout = Layout.of(tensors)
    memory = SharedMemory.create(layout.size)
    copy_into(layout.views(memory.bytes), tensors)
    return file.getvalue(), layout, memory


def unpack(content: bytes, layout: Layout, memory: SharedMemory) -> Any:
    """Return the object that `pack` packed."""
    return _Unpickler(io.BytesIO(content), layout.views(memory.bytes)).load()


def copy_into(views: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Copy the values of `weights` into tensors of the same names."""
    for name, view in views.items():
        view.copy_(weights[name])
