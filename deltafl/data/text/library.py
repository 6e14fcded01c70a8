"""Text sets by name: find their files on this machine, or bring them here, and open them."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from deltafl.data import sources
from deltafl.data.places import folders
from deltafl.data.text import store
from deltafl.data.text.dataset import Labelled, TextDataset, Texts, Tokenizer
from deltafl.data.text.entry import SPLITS, Edition, TextEntry
from deltafl.errors import UserError


def load(entry: TextEntry, tokenizer: Tokenizer, *, download: bool) -> TextDataset:
    """Open a set in the tokens of a model, which are made the first time and then kept."""
    edition, raw = _found(entry, download=download)
    home = folders()[0]
    place = store.place_of(home, entry, edition, tokenizer)
    if not store.complete(place):
        edition.verify(raw)
        store.write(place, entry, edition, raw, tokenizer)
    return store.read(place, entry, edition, tokenizer.pad, hashed=True)


def load_texts(entry: TextEntry, *, download: bool) -> Texts:
    """Open a set as people read it."""
    edition, raw = _found(entry, download=download)
    edition.verify(raw)
    splits = []
    for which in SPLITS:
        texts, labels = edition.rows(raw, which, len(entry.classes))
        splits.append(Labelled(texts, torch.tensor(labels)))
    return Texts(entry.name, splits[0], splits[1], entry.classes, edition.part)


def get(entry: TextEntry) -> None:
    """Bring the whole set here; where it cannot be had, a part that is here is kept."""
    found = entry.find(folders())
    if found is not None and found[0].part is None:
        try:
            verify(entry)
        except UserError as error:
            _say(f"{error}; getting it again now")
        else:
            return
    try:
        _bring(entry)
    except UserError as error:
        if found is None or found[0].part is None:
            raise
        _say(f"{entry.name}: {error}; {found[0].part}, is what there is")
        verify(entry)


def verify(entry: TextEntry) -> None:
    """Check every byte of the files of a set that is here, and that they are rows of it."""
    found = entry.find(folders())
    if found is None:
        raise entry.missing()
    edition, raw = found
    edition.verify(raw)
    for split in SPLITS:
        edition.rows(raw, split, len(entry.classes))


def _found(entry: TextEntry, *, download: bool) -> tuple[Edition, Path]:
    found = entry.find(folders())
    if found is None:
        if not download:
            raise entry.missing()
        found = entry.whole, _bring(entry)
    return found


def _bring(entry: TextEntry) -> Path:
    """Download the whole set into the data folder."""
    place = folders()[0] / entry.name
    files = [(file.url, file.checksum) for file in entry.whole.files if file.url is not None]
    try:
        place.mkdir(parents=True, exist_ok=True)
        sources.download(files, place)
    except UserError as error:
        raise UserError(
            f"data set {entry.name} is not here ({error}): put "
            f"{' and '.join(file.name for file in entry.whole.files)} into {place}"
        ) from error
    except OSError as error:
        raise UserError(
            f"cannot store data set {entry.name} in {place} ({error.strerror or error}): "
            "free some space, or set DELTAFL_DATA to another folder"
        ) from error
    return place


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
