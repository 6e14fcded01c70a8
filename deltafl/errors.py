"""What a user did that cannot work, said in one line: what, where, and what to do."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# What the system has run out of, and what to do.
EXHAUSTED = {
    errno.EMFILE: "raise the limit of open files (ulimit -n), or use fewer --engine.workers",
    errno.ENFILE: "the whole system has too many open files",
    errno.ENOMEM: "free memory, or use fewer --engine.workers",
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
}


class UserError(Exception):
    """Bad input. The message is one line; the command line prints it and exits with 2."""


def explained(error: OSError, where: object = None) -> str:
    """Say in one line what the system refused, where, and what to do about it."""
    place = error.filename or where
    what = f"{place}: " if place else ""
    advice = EXHAUSTED.get(error.errno or 0)
    return f"{what}{error.strerror or error}" + (f"; {advice}" if advice else "")


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turn whatever goes wrong into one line, which can also be sent to another process.

    What is meant for the user already, or what the system refuses, stays as it is.
    """
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        raise UserError(f"{what}: {str(error) or type(error).__name__}") from error


def unknown(kind: str, name: str, choices: Iterable[str]) -> UserError:
    """Return the error for a name that is in no catalog, with the nearest one suggested."""
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {name!r}: {hint}known are {', '.join(known)}")
