"""How a process that does clients' work sets itself up, wherever it runs."""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

# What one step of training frees, the next one needs again. By default glibc hands large pieces
# back to the system, which costs a page fault for every 4 kB of them at every step. These are the
# numbers of <malloc.h>, and the variables by which a user decides otherwise.
KEEP_ALL = {
    "MALLOC_TRIM_THRESHOLD_": (-1, 128 << 20),
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20),
}
# Where every step has another shape, pieces of several MB fit the next step only in part, and what
# is kept grows beyond what any step needs: 300 MB for MiniLM. Those go back at once.
KEEP_SMALL = KEEP_ALL | {"MALLOC_MMAP_THRESHOLD_": (-3, 4 << 20)}


def prepare() -> None:
    """Compute on one thread, let others go first, and keep memory that is freed."""
    torch.set_num_threads(1)
    if hasattr(os, "SCHED_BATCH"):  # who wakes up for work lets the one who sends it finish first
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    keep_freed()


def keep_freed(*, one_shape: bool = True) -> None:
    """Tell glibc what to keep, unless the user has: most of all where steps have one shape."""
    with contextlib.suppress(OSError, AttributeError):  # there is no glibc
        mallopt = ctypes.CDLL(None).mallopt
        for variable, (parameter, value) in (KEEP_ALL if one_shape else KEEP_SMALL).items():
            if variable not in os.environ:
                mallopt(parameter, value)


def give_back() -> None:
    """Hand all freed memory to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
