"""Nobody is asked for anything unless the user asked for data: imports and runs need no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    "--task digits-softmax --federation.clients 4 --federation.samples 20 --run.rounds 2 "
    "--federation.participation 0.5"
)
# Python starts with this in every process, also in the workers that the engine starts.
GUARD = """
import ipaddress, os, sys

def allowed(host):
    if host is None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

def hear(event, arguments):
    if event in ("socket.connect", "socket.bind", "socket.sendto"):
        address = arguments[1]
        fine = isinstance(address, (str, bytes)) or allowed(address[0])  # a path is a local socket
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        fine = allowed(arguments[0])
    else:
        return
    if not fine:
        with open(os.environ["ATTEMPTS"], "a") as file:
            file.write(f"{event} {arguments!r}\\n")
        raise PermissionError(f"{event} {arguments!r}")

sys.addaudithook(hear)
"""
# Every module is imported, and every command runs that needs no data but the digits.
MAIN_PATHS = f"""
import importlib, pkgutil, sys
import deltafl
for module in pkgutil.walk_packages(deltafl.__path__, "deltafl."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from deltafl.cli import main
for words in (
    "run {SMALL} --engine.workers 2 --out run",
    "compare {SMALL} --optimizers sgd delta-sgd --engine.kind inline --out compare",
    "tune {SMALL} --optimizers adam --engine.kind inline --out tune",
    "report compare --figures figures",
    "partition --task digits-mlp --federation.clients 4 --federation.samples 20",
    "data list",
    "data verify digits",
    "paper list --results RESULTS",
    "paper show table-1 --results RESULTS",
):
    assert main([sys.argv[1] if word == "RESULTS" else word for word in words.split()]) == 0, words
print("all done")
"""


def run(folder: Path, *prefix: str) -> str:
    """Run the main paths in a folder; return what tried to reach somebody."""
    guard, work = folder / "guard", folder / "work"
    guard.mkdir()
    work.mkdir()
    (guard / "sitecustomize.py").write_text(GUARD)
    attempts = folder / "attempts"
    attempts.touch()
    done = subprocess.run(
        [*prefix, sys.executable, "-c", MAIN_PATHS, str(ROOT / "results" / "paper")],
        cwd=work,
        env={
            **os.environ,
            "ATTEMPTS": str(attempts),
            "DELTAFL_DATA": str(folder / "data"),
            "PYTHONPATH": os.pathsep.join([str(guard), str(ROOT)]),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("all done\n")
    return attempts.read_text()


def test_nothing_is_asked_of_anybody(tmp_path: Path) -> None:
    assert run(tmp_path) == ""


@pytest.mark.parametrize(
    "attempt",
    [
        "socket.create_connection(('192.0.2.1', 80), timeout=1)",
        "socket.getaddrinfo('data.example', 443)",
        "urllib.request.urlopen('https://data.example/')",
        "socket.socket().bind(('0.0.0.0', 0))",
    ],
)
def test_the_guard_notices(tmp_path: Path, attempt: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(GUARD)
    attempts = tmp_path / "attempts"
    done = subprocess.run(
        [sys.executable, "-c", f"import socket, urllib.request; {attempt}"],
        env={**os.environ, "ATTEMPTS": str(attempts), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert attempts.read_text()


def alone() -> list[str]:
    """Return the command that runs another in a network of its own, in which there is nothing."""
    for words in (["unshare", "-n"], ["unshare", "-rn"]):
        if (
            shutil.which(words[0])
            and not subprocess.run([*words, "true"], capture_output=True, check=False).returncode
        ):
            return words
    pytest.skip("no network of its own for a test: unshare -n needs root or user namespaces")


@pytest.mark.federation  # slow: the same as above, once more, with the kernel's word for it
def test_it_all_works_where_there_is_no_network(tmp_path: Path) -> None:
    assert run(tmp_path, *alone()) == ""
