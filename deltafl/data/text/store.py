"""The tokens of a set on disk: six .npy files and a manifest, mapped into memory, not read.

A store belongs to one edition of a set and one tokenizer, whose checksums name it. The manifest
comes last: a folder without it is not a store. Two processes that write the same one at once
replace files by equal files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deltafl.data.parts import mapped, sha256
from deltafl.data.text.dataset import TextDataset, TextSplit, Tokenizer, encode
from deltafl.data.text.entry import SPLITS, Edition, TextEntry
from deltafl.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS: dict[str, type[np.signedinteger[Any]]] = {
    "tokens": np.int32,
    "ends": np.int64,
    "labels": np.int64,
}
LARGEST_MANIFEST = 65_536


def place_of(home: Path, entry: TextEntry, edition: Edition, tokenizer: Tokenizer) -> Path:
    """Return where the tokens of an edition lie below the data folder."""
    about = f"{FORMAT} {edition.checksums} {tokenizer.key}"
    return home / entry.name / f"tokens-{hashlib.sha256(about.encode()).hexdigest()[:16]}"


def write(place: Path, entry: TextEntry, edition: Edition, raw: Path, tokenizer: Tokenizer) -> None:
    """Tokenise the files of an edition, which must have been verified, and store the tokens."""
    with _progress(entry.name, edition.train + edition.test) as advance:
        splits = {
            which: encode(*edition.rows(raw, which, len(entry.classes)), tokenizer, advance)
            for which in SPLITS
        }
    arrays = {
        f"{which}-{kind}": getattr(split, kind).numpy()
        for which, split in splits.items()
        for kind in ARRAYS
    }
    manifest = {
        "format": FORMAT,
        "name": entry.name,
        "files": edition.checksums,
        "tokenizer": tokenizer.key,
        "sha256": {name: sha256(array.view(np.uint8)) for name, array in arrays.items()},
    }
    try:
        place.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that the files can be renamed into place.
        workshop = Path(tempfile.mkdtemp(prefix=".tokens-", dir=place))
        try:
            for name, array in arrays.items():
                np.save(workshop / f"{name}.npy", array, allow_pickle=False)
            (workshop / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            for name in [*(f"{name}.npy" for name in arrays), MANIFEST]:
                (workshop / name).replace(place / name)
        finally:
            shutil.rmtree(workshop, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot store the tokens of {entry.name} in {place} ({error.strerror or error}): "
            "free some space, or set DELTAFL_DATA to another folder"
        ) from error


def read(place: Path, entry: TextEntry, edition: Edition, pad: int, *, hashed: bool) -> TextDataset:
    """Map a store, or raise UserError naming the damaged file; contents only when `hashed`."""
    manifest = _manifest(place)
    splits = []
    for which, count in zip(SPLITS, (edition.train, edition.test), strict=True):
        arrays = {kind: _map(place / f"{which}-{kind}.npy", ARRAYS[kind]) for kind in ARRAYS}
        for kind, array in arrays.items():
            path = place / f"{which}-{kind}.npy"
            if kind != "tokens" and len(array) != count:
                raise _damaged(path, f"has {len(array)} rows where {count} belong")
            known = manifest["sha256"].get(path.stem)
            if hashed and sha256(array.view(np.uint8)) != known:
                raise _damaged(path, "has been altered (checksum mismatch)")
        ends = arrays["ends"]
        if count and int(ends[-1]) != len(arrays["tokens"]):
            raise _damaged(place / f"{which}-tokens.npy", "does not end where the last text does")
        if count and not (ends[0] > 0 and (ends[1:] > ends[:-1]).all()):
            raise _damaged(place / f"{which}-ends.npy", "has texts that end before they begin")
        splits.append(TextSplit(*(torch.from_numpy(array) for array in arrays.values())))
    found = TextDataset(entry.name, splits[0], splits[1], entry.classes, pad, edition.part)
    return found.referring_to(partial(_reopen, place, entry, edition, pad))


def _reopen(place: Path, entry: TextEntry, edition: Edition, pad: int) -> TextDataset:
    """Open a store that another process has checked, as a pickled data set does."""
    return read(place, entry, edition, pad, hashed=False)


def complete(place: Path) -> bool:
    """Say whether there is a store."""
    return (place / MANIFEST).is_file()


def _manifest(place: Path) -> dict[str, Any]:
    path = place / MANIFEST
    try:
        with path.open("rb") as stream:
            manifest = json.loads(stream.read(LARGEST_MANIFEST))
        if manifest["format"] != FORMAT or not isinstance(manifest["sha256"], dict):
            raise ValueError("of another version")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, f"cannot be read ({error})") from error
    return dict(manifest)


def _map(path: Path, kind: type[np.signedinteger[Any]]) -> np.ndarray[Any, Any]:
    try:
        array = mapped(path)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if array.ndim != 1 or array.dtype != kind:
        raise _damaged(path, f"is not a row of {np.dtype(kind).name}")
    return array.view(np.ndarray)


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: {what}: delete {path.parent}, it is made again from the texts")


class _progress:  # noqa: N801  (used as a function)
    """A bar for the texts that are done, where somebody looks."""

    def __init__(self, name: str, texts: int) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(f"{name}: texts to tokens", total=texts)

    def __enter__(self) -> Callable[[int], None]:
        self._bar.start()
        return lambda texts: self._bar.advance(self._task, texts)

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
