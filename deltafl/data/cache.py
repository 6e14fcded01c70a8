"""The decoded store: four .npy files and a manifest a set, mapped into memory, not read.

Files appear whole or not at all, the manifest last: a folder without it is not a stored set.
Two processes that store the same set at once replace files by equal files.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from deltafl.data.entry import Entry
from deltafl.data.files import exists
from deltafl.data.parts import PARTS, Bytes, Parts, mapped
from deltafl.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1
# A manifest is under a kilobyte; whatever is larger is not one.
LARGEST_MANIFEST = 65_536


def complete(folder: Path, entry: Entry) -> bool:
    """Say whether a data folder holds every file of the stored set; opens none of them."""
    names = [MANIFEST, *(f"{part}.npy" for part in PARTS)]
    return all(exists(folder / entry.name / name) for name in names)


def read(folder: Path, entry: Entry, *, hashed: bool) -> Parts:
    """Map a stored set, or raise UserError naming the damaged file.

    Sizes, shapes and types are always checked; the contents only when `hashed`.
    """
    manifest = _manifest(folder, entry)
    if manifest.get("sha256") != dict(entry.digests):
        raise _damaged(folder / entry.name / MANIFEST, entry, "lists other contents")
    parts = {part: _map(folder / entry.name / f"{part}.npy", part, entry) for part in PARTS}
    if hashed:
        for part, array in parts.items():
            if not entry.matches(part, array):
                path = folder / entry.name / f"{part}.npy"
                raise _damaged(path, entry, "has been altered (checksum mismatch)")
    return parts


def prepare(folder: Path, entry: Entry) -> None:
    """Raise UserError if a set cannot be stored in a folder: better before it is fetched."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _unstorable(folder, entry, error.strerror or str(error)) from error
    if not os.access(folder, os.W_OK):
        raise _unstorable(folder, entry, "it may not be written to")
    if free < entry.bytes:
        raise _unstorable(folder, entry, f"{entry.bytes} bytes needed, {free} free")


def write(folder: Path, entry: Entry, parts: Parts, origin: str) -> None:
    """Store a set, which must have been checked, in a data folder."""
    manifest = {
        "format": FORMAT,
        "name": entry.name,
        "source": origin,
        "sha256": dict(entry.digests),
    }
    prepare(folder, entry)
    try:
        # In the same folder, so that the files can be renamed into place.
        workshop = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=folder))
        try:
            for part in PARTS:
                np.save(workshop / f"{part}.npy", parts[part], allow_pickle=False)
            (workshop / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            (folder / entry.name).mkdir(exist_ok=True)
            for name in [*(f"{part}.npy" for part in PARTS), MANIFEST]:
                (workshop / name).replace(folder / entry.name / name)
        finally:
            shutil.rmtree(workshop, ignore_errors=True)
    except OSError as error:
        raise _unstorable(folder, entry, error.strerror or str(error)) from error


def _manifest(folder: Path, entry: Entry) -> dict[str, Any]:
    path = folder / entry.name / MANIFEST
    try:
        with path.open("rb") as stream:
            manifest = json.loads(stream.read(LARGEST_MANIFEST))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, entry, f"cannot be read ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _damaged(path, entry, "is not a manifest this version knows")
    return manifest


def _map(path: Path, part: str, entry: Entry) -> Bytes:
    try:
        array = mapped(path)
    except ValueError as error:
        raise _damaged(path, entry, str(error)) from error
    if (
        array.shape != entry.part_shape(part)
        or array.dtype != np.uint8
        or not array.flags.c_contiguous
    ):
        raise _damaged(path, entry, f"is not {entry.part_shape(part)} bytes")
    return array.view(np.ndarray)


def _unstorable(folder: Path, entry: Entry, why: str) -> UserError:
    return UserError(
        f"cannot store data set {entry.name} in {folder} ({why}): "
        "free some space, or set DELTAFL_DATA to another folder"
    )


def _damaged(path: Path, entry: Entry, what: str) -> UserError:
    return UserError(f"{path}: {what}: delete it and run `deltafl data get {entry.name}` again")
