"""All randomness derives from a seed and a path of names, such as (seed, "batches", round, client).

Whoever runs a client, in whatever process and order, draws the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive(seed: int, *path: int | str) -> int:
    """Return a 63-bit seed for one purpose; different paths give independent streams."""
    text = "/".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(seed: int, *path: int | str) -> np.random.Generator:
    """Return a numpy generator of its own for one purpose."""
    return np.random.Generator(np.random.PCG64(derive(seed, *path)))


def torch_generator(seed: int, *path: int | str) -> torch.Generator:
    """Return a CPU torch generator of its own for one purpose."""
    return torch.Generator().manual_seed(derive(seed, *path))
