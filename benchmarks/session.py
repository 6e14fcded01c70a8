"""A system under measurement: a program of its own that runs rounds when it is told to."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environments import QUIET, ROOT, UnavailableError, python_of


class FailedError(Exception):
    """A system did not do what it was asked; the message says why."""


@dataclass(frozen=True)
class System:
    """How to start a system."""

    name: str
    module: str
    spec: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    peer: str | None = None
    """Which virtual environment it needs; None is deltafl's own."""
    lasting: bool = True
    """Whether it waits between blocks, or is started for each: Ray does not rest when idle."""
    timeout: float = 600.0


class Session:
    """A running system. Use it as a context manager."""

    def __init__(self, system: System, watch: Callable[[int], None] | None = None) -> None:
        """Start the program; `watch` is told its process id before it has begun."""
        self.system = system
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            python = sys.executable if system.peer is None else str(python_of(system.peer))
        except UnavailableError as error:
            raise FailedError(str(error)) from None
        self._begun = time.perf_counter()
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.systems.{system.module}", json.dumps(dict(system.spec))],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT), **system.environment},
            start_new_session=True,
        )
        if watch is not None:
            watch(self._process.pid)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._answer("ready")
        self.start_seconds = time.perf_counter() - self._begun

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def run(self, rounds: int) -> list[float]:
        """Run rounds and return the seconds of each."""
        self._ask(rounds=rounds)
        return [float(value) for value in self._answer("seconds")]

    def accuracy(self) -> float | None:
        """Return the test accuracy after the rounds that have been run."""
        self._ask(accuracy=True)
        value = self._answer("accuracy")
        return None if value is None else float(value)

    def stop(self) -> None:
        """Let the program end, and end what is left of it."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=30)  # until the last descendant has let go of the pipe
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _ask(self, **wish: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(wish) + "\n")
            self._process.stdin.flush()
        except OSError:
            self._fail("it ended")

    def _answer(self, kind: str) -> Any:
        try:
            line = self._lines.get(timeout=self.system.timeout)
        except queue.Empty:
            self._fail(f"no answer within {self.system.timeout:.0f} s")
        if not line:
            self._fail("it ended")
        return json.loads(line)[kind]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _fail(self, what: str) -> Any:
        """Raise with the last words of the program."""
        self._log.seek(0)
        words = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        home = str(Path.home())
        last = words[-1].replace(str(ROOT), ".").replace(home, "~")[:200] if words else "no output"
        self.stop()
        raise FailedError(f"{what}: {last}")


@contextlib.contextmanager
def sessions(systems: list[System]) -> Iterator[dict[str, Session | str]]:
    """Start all systems that last; a system that fails is replaced by the reason."""
    running: dict[str, Session | str] = {}
    try:
        for system in systems:
            if system.lasting:
                try:
                    running[system.name] = Session(system)
                except FailedError as error:
                    running[system.name] = str(error)
        yield running
    finally:
        for session in running.values():
            if isinstance(session, Session):
                session.stop()
