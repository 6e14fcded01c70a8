"""The command line that repeats a run: the inverse of what reads one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from deltafl.experiment.config import Config


def command(config: Config) -> str | None:
    """Return `deltafl run` with every option that is not as by default.

    None if the run was given data of its own in Python, which no option can name.
    """
    if config.data_sha256 is not None:
        return None
    words = ["deltafl", "run"]
    for name, value in _changes(config, Config(), Config.model_fields):
        words += [f"--{name.replace('_', '-')}", *_words(value)]
    return shlex.join(words)


def _changes(
    given: BaseModel, default: BaseModel, names: Any, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for name in names:
        value, usual = getattr(given, name), getattr(default, name)
        if isinstance(value, BaseModel):
            yield from _changes(value, usual, type(value).model_fields, f"{prefix}{name}.")
        elif value != usual:
            yield f"{prefix}{name}", value


def _words(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}={_text(item)}" for name, item in value.items()]
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    if value is True:
        return []
    if isinstance(value, float):
        short = f"{value:g}"
        return [short if float(short) == value else repr(value)]
    return [str(value).lower() if value in (False, None) else str(value)]


def _text(value: Any) -> str:
    """Return a value of a mapping so that it is read back as the same type."""
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return value
    return json.dumps(value)
