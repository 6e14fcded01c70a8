"""What is being measured, and how long it will still take, on standard error."""

from __future__ import annotations

import sys
import time


class Progress:
    """One item's progress; `later` is the estimate for the items after it, in seconds."""

    def __init__(self, title: str, expected: float, later: float) -> None:
        self._title = title
        self._expected = expected
        self._later = later
        self._begun = time.monotonic()
        self._planned = 0
        self._done = 0
        self.say("starts")

    def plan(self, steps: int) -> None:
        """Announce further steps of about equal length."""
        self._planned += steps

    def step(self, text: str) -> None:
        """Say that a step is done."""
        self._done += 1
        self.say(text)

    def say(self, text: str) -> None:
        """Print a line with the time that is left."""
        spent = time.monotonic() - self._begun
        left = max(0.0, self._expected - spent)
        if self._done:
            left = max(left, spent / self._done * (self._planned - self._done))
        minutes = (left + self._later) / 60
        print(f"[{self._title}] {text} (about {minutes:.0f} min left)", file=sys.stderr, flush=True)
