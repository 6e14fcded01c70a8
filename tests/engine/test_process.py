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
SHAPES = """
import resource
import torch
from deltafl.engine import process

process.prepare()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work(floats):
    before = faults()
    for _ in range(50):
        torch.zeros(floats)
    return faults() - before
for one_shape in (True, False, True):
    process.keep_freed(one_shape=one_shape)
    process.give_back()
    work(2 << 20), work(1 << 18)
    print(work(2 << 20), work(1 << 18))
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is told")
def test_large_pieces_go_back_where_steps_differ_in_shape():
    done = subprocess.run(
        [sys.executable, "-c", SHAPES],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    large, small = zip(*(map(int, line.split()) for line in done.stdout.splitlines()), strict=True)
    assert [faults > PAGES for faults in large] == [False, True, False]
    assert max(small) < PAGES / 50
