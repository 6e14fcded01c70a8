"""Processes that do clients' work compute on one thread and keep what they free."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import os, resource
import torch
from deltafl.engine import process

process.prepare()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    for _ in range(50):
        torch.zeros(1 << 20)
work()
before = faults()
work()
print(torch.get_num_threads(), os.sched_getscheduler(0) == os.SCHED_BATCH, faults() - before)
"""
PAGES = 50 * (4 << 20) // 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is told")
@pytest.mark.parametrize("decided", [{}, {"MALLOC_MMAP_THRESHOLD_": "1000000"}])
def test_freed_memory_is_kept_unless_the_user_decides_otherwise(decided):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **decided, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    threads, batch, faults = done.stdout.split()
    assert (threads, batch) == ("1", "True")
    assert (int(faults) > PAGES / 2) == bool(decided)
