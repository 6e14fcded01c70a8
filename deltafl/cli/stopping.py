"""SIGINT and SIGTERM: a run finishes its round and saves it; a second signal stops it at once.

A signal that is ignored, as SIGINT is by `nohup command &`, stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], None]
HINT = b"deltafl: stopping after this round; once more stops at once\n"


class Stopped(KeyboardInterrupt):
    """Somebody asked the process to stop, by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def at_once() -> contextlib.AbstractContextManager[None]:
    """Raise `Stopped` where the process is when a signal comes."""
    return _handling(_stop)


def _stop(number: int, _frame: object) -> None:
    raise Stopped(number)


class AfterRound:
    """Holds a first signal back until somebody asks for it; use it as a context manager."""

    def __init__(self) -> None:
        self._asked: int | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> AfterRound:
        self._stack.enter_context(_handling(self._note))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _note(self, number: int, _frame: object) -> None:
        if self._asked is not None:
            raise Stopped(number)
        self._asked = number
        if sys.stderr is not None and sys.stderr.isatty():
            os.write(2, HINT)  # Python's own stream may be in the middle of a line

    def check(self) -> None:
        """Raise `Stopped` if a signal has come."""
        if self._asked is not None:
            raise Stopped(self._asked)


@contextlib.contextmanager
def _handling(handler: Handler) -> Iterator[None]:
    """Handle both signals, unless they are ignored or this is not the main thread."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            there = signal.getsignal(number)
            if there not in (signal.SIG_IGN, None):  # None: it is not Python's
                before[number] = there
                signal.signal(number, handler)
    try:
        yield
    finally:
        for number, there in before.items():
            signal.signal(number, there)
