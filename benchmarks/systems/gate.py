"""The child's end of the protocol: run rounds when told to, and say how long each took.

The parent writes a line of JSON for each wish, {"rounds": n} or {"accuracy": true}, and closes the
pipe to end the program. Everything that libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Gate:
    """Lets a program through one block of rounds after the other."""

    def __init__(
        self,
        accuracy: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Measure by a clock; by time.process_time, what a round costs this process alone."""
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._accuracy = accuracy
        self._clock = clock
        self._seconds: list[float] = []
        self._last = 0.0
        self.block = 0
        self.done = 0

    def open(self, **about: object) -> None:
        """Say that the next thing is a round, and wait until one is wanted."""
        self._say(ready=about)
        self._wait()

    def tick(self) -> bool:
        """Note the end of a round. At the end of a block wait for the next one: then True."""
        now = self._clock()
        self._seconds.append(now - self._last)
        self._last = now
        self.done += 1
        if len(self._seconds) < self.block:
            return False
        self._say(seconds=self._seconds)
        self._wait()
        return True

    def _wait(self) -> None:
        for line in sys.stdin:
            wish: dict[str, Any] = json.loads(line)
            if "rounds" in wish:
                self.block, self._seconds = int(wish["rounds"]), []
                self._last = self._clock()
                return
            self._say(accuracy=None if self._accuracy is None else self._accuracy(self.done))
        raise SystemExit(0)

    def _say(self, **answer: object) -> None:
        self._answers.write(json.dumps(answer) + "\n")


def arguments() -> dict[str, Any]:
    """Return what the parent asks for: one JSON object on the command line."""
    spec: dict[str, Any] = json.loads(sys.argv[1])
    return spec
