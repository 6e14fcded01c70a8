from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from deltafl.engine import janitor

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
command = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(command, start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def wait_until(condition, seconds=15.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(janitor, "PATIENCE_SECONDS", 0.5)


def test_stubborn_processes_and_their_children_are_ended(impatient):
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    with process:
        child = int(process.stdout.readline())
        pid = process.pid
        assert janitor.family({pid}) >= {pid, child}
        janitor.end({pid: janitor.started(pid)})
        assert janitor.started(pid) is None
        assert janitor.started(child) is None


def test_a_number_that_somebody_else_has_now_is_left_alone(impatient):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        janitor.end({process.pid: "an earlier time"})
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_the_folder_goes_when_the_parent_does(tmp_path, how):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "secret").write_text("key")
    parent = f"""
import subprocess, sys, time
work = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
keeper = subprocess.Popen(
    [sys.executable, "-I", {janitor.__file__!r}, {str(folder)!r}],
    stdin=subprocess.PIPE, text=True, start_new_session=True)
keeper.stdin.write(f"{{work.pid}}\\n"); keeper.stdin.flush()
print(work.pid, flush=True)
if {how!r} == "closed":
    keeper.stdin.close(); keeper.wait(); work.wait()
else:
    time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True
    ) as process:
        work = int(process.stdout.readline())
        if how == "killed":
            time.sleep(0.3)  # until the janitor listens
            os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not folder.exists())
        wait_until(lambda: janitor.started(work) is None)
