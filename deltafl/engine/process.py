"""How a process that does clients' work sets itself up, wherever it runs."""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

# What one step of training frees, the next one needs again. By default glibc hands large pieces
# back to the system, which costs a page fault for every 4 kB of them at every step. These are the
# numbers of <malloc.h>, and the variables by which a user decides otherwise.
KEEP_FREED_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": (-1, 128 << 20),
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20),
}


def prepare() -> None:
    """Compute on one thread, let others go first, and keep memory that is freed."""
    torch.set_num_threads(1)
    if hasattr(os, "SCHED_BATCH"):  # who wakes up for work lets the one who sends it finish first
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Keep what is freed for the next step, unless the user has said otherwise."""
    with contextlib.suppress(OSError, AttributeError):  # there is no glibc
        mallopt = ctypes.CDLL(None).mallopt
        for variable, (parameter, value) in KEEP_FREED_MEMORY.items():
            if variable not in os.environ:
                mallopt(parameter, value)
