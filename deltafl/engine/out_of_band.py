"""Objects as a small pickle and flat buffers beside it, for a store that hands out views.

A store that several processes of a machine map (Ray's) keeps the buffers once, and what `unpack`
returns looks into them: nothing large is copied, and nothing of it may be written to.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Buffer = npt.NDArray[np.uint8]


class _Pickler(pickle.Pickler):
    """Pickles tensors as the buffers they are; arrays are pickled so by themselves."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor:
            return NotImplemented
        flat = obj.detach().contiguous().reshape(-1).view(torch.uint8)
        return _restore, (flat.numpy(), obj.dtype, tuple(obj.shape))


def pack(obj: object) -> tuple[bytes, list[Buffer]]:
    """Pickle an object of our own making, its tensors and arrays as buffers beside it."""
    file, buffers = io.BytesIO(), list[Buffer]()

    def keep(buffer: pickle.PickleBuffer) -> None:
        buffers.append(np.frombuffer(buffer.raw(), dtype=np.uint8))

    _Pickler(file, protocol=5, buffer_callback=keep).dump(obj)
    return file.getvalue(), buffers


def unpack(content: bytes, buffers: Sequence[Buffer]) -> Any:
    """Return the object that `pack` packed; it looks into the buffers."""
    return pickle.loads(content, buffers=buffers)


def as_tensor(buffer: Buffer) -> Tensor:
    """Return a tensor that looks into a buffer, which may be read-only: do not write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(buffer)


def _restore(flat: Buffer, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return as_tensor(flat).view(dtype).view(shape)
