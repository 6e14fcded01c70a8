"""The folders in which data is looked for."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def folders() -> tuple[Path, ...]:
    """Return the data folders: the first is written to, the others are only searched.

    The variable DELTAFL_DATA lists folders as PATH does; the first of them, or else the user's
    cache folder, is written to. `data` below the working directory, and `shared/data` beside it,
    which several projects may share, are searched too.
    """
    listed = os.environ.get("DELTAFL_DATA", "").split(os.pathsep)
    first = listed[0] or platformdirs.user_cache_dir("deltafl", appauthor=False)
    places = [first, *filter(None, listed[1:]), "data", "../shared/data"]
    return tuple(dict.fromkeys(Path(place).expanduser().resolve() for place in places))
