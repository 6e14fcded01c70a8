"""What a user did that cannot work, said in one line: what, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input. The message is one line; the command line prints it and exits with 2."""


def unknown(kind: str, name: str, choices: Iterable[str]) -> UserError:
    """Return the error for a name that is in no catalog, with the nearest one suggested."""
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {name!r}: {hint}known are {', '.join(known)}")
