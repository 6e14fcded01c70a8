"""What no input may bring about, watched through the interpreter's audit events."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class ForbiddenError(BaseException):
    """An input made the project do something that none may; no `except Exception` hides it."""


NEVER = frozenset(
    {
        "pickle.find_class",
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.fork",
        "os.forkpty",
        "socket.connect",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.bind",
        "ctypes.dlopen",
    }
)
# Events whose first arguments name what is changed, and how many of them do.
CHANGES = {
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.truncate": 1,
    "os.chmod": 1,
    "os.chown": 1,
    "os.utime": 1,
    "os.link": 2,
    "os.symlink": 2,
    "shutil.rmtree": 1,
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Guard:
    """Forbids, while it is active, whatever reaches outside a scratch folder."""

    def __init__(self) -> None:
        self._scratch: str | None = None
        self._known: frozenset[str] = frozenset()
        self._count = 0
        sys.addaudithook(self._hear)

    @contextlib.contextmanager
    def active(self, scratch: Path) -> Iterator[None]:
        """Watch until the end of the block; the folder is given without links."""
        if len(sys.modules) != self._count:
            self._known = frozenset(name.partition(".")[0] for name in sys.modules)
            self._count = len(sys.modules)
        self._scratch = str(scratch)
        try:
            yield
        finally:
            self._scratch = None

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._scratch is None:
            return
        if event in NEVER or self._forbidden(event, arguments):
            self._scratch = None  # what reports this may open files again
            raise ForbiddenError(f"{event} {arguments!r}"[:500])

    def _forbidden(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            path, _, flags = arguments
            return bool(flags & WRITING) and not isinstance(path, int) and self._outside(path)
        if event in CHANGES:
            return any(self._outside(path) for path in arguments[: CHANGES[event]])
        if event == "import":
            top = str(arguments[0]).partition(".")[0]
            return top not in self._known and top not in sys.stdlib_module_names
        if event == "exec":  # modules are executed when they are imported; text never is
            name = getattr(arguments[0], "co_filename", "<unknown>")
            return name.startswith("<") and not name.startswith("<frozen")
        return False

    def _outside(self, path: Any) -> bool:
        assert self._scratch is not None
        place = os.path.realpath(os.fsdecode(path))  # links followed
        return place != self._scratch and not place.startswith(self._scratch + os.sep)
