"""Inputs that once broke something, kept so that they never do again."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "regressions"


def regressions(name: str) -> list[bytes]:
    """Return the inputs that once broke a target."""
    return [path.read_bytes() for path in sorted((FOLDER / name).glob("*"))]
