"""Data sets by name: find them on this machine, or bring them here, and open them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deltafl.data import cache, sources
from deltafl.data.catalog import CATALOG
from deltafl.data.dataset import AnyDataset, Dataset
from deltafl.data.entry import Apt, Entry, Form
from deltafl.data.parts import Parts
from deltafl.data.places import folders
from deltafl.data.text import library as texts
from deltafl.data.text.catalog import TEXTS
from deltafl.data.text.dataset import Tokenizer
from deltafl.data.text.entry import TextEntry
from deltafl.errors import UserError, unknown


@dataclass(frozen=True)
class Status:
    """One row of the list of data sets: what a set is, and whether it is on this machine."""

    name: str
    classes: int
    train: int
    test: int
    bytes: int
    here: bool
    where: str
    licence: str
    citation: str
    part: str | None = None
    """What is missing of it here, in words; None where the whole set is here, or nothing."""


def names() -> tuple[str, ...]:
    """Return the names `load` knows."""
    return (*CATALOG, *TEXTS)


def load(name: str, *, download: bool = True, tokenizer: Tokenizer | None = None) -> AnyDataset:
    """Open a data set, bringing it to this machine first if it is not here and `download`.

    The contents are checked against the catalog's checksums every time. A text set is in the
    tokens of the model whose `tokenizer` is given; without one it is text to read.
    """
    if name in TEXTS:
        if tokenizer is None:
            return texts.load_texts(TEXTS[name], download=download)
        return texts.load(TEXTS[name], tokenizer, download=download)
    entry = _entry(name)
    if tokenizer is not None:
        raise UserError(
            f"data set {name} holds images, and the model reads text: use {' or '.join(TEXTS)}"
        )
    return _load_images(entry, download=download)


def _load_images(entry: Entry, *, download: bool) -> Dataset:
    if entry.builtin is not None:
        # Small, and slow to import: it travels to worker processes by value.
        return entry.dataset(_built_in(entry))
    folder = _stored(entry) or _bring(entry, download=download)
    return _open(entry, folder, hashed=True)


def reopen(name: str, folder: str) -> Dataset:
    """Open a set that another process has checked, as a pickled data set does."""
    entry = _entry(name)
    if cache.complete(Path(folder), entry):
        return _open(entry, Path(folder), hashed=False)
    # Another machine, with folders of its own.
    return _load_images(entry, download=True)


def get(name: str) -> Status:
    """Bring a set to this machine, or bring it again if what is here is damaged."""
    if name in TEXTS:
        texts.get(TEXTS[name])
        return _text_status(TEXTS[name])
    entry = _entry(name)
    if entry.builtin is None:
        folder = _stored(entry)
        try:
            if folder is None:
                _bring(entry, download=True)
            else:
                cache.read(folder, entry, hashed=True)
        except UserError as error:
            if folder is None:
                raise
            _say(f"{error}; getting it again now")
            _bring(entry, download=True)
    return _status(entry)


def verify(name: str) -> Status:
    """Check every byte of a set on this machine; raise UserError if it is damaged or not here."""
    if name in TEXTS:
        texts.verify(TEXTS[name])
        return _text_status(TEXTS[name])
    entry = _entry(name)
    if entry.builtin is not None:
        _built_in(entry)
    else:
        folder = _stored(entry)
        if folder is None:
            raise UserError(f"data set {name} is not here: run `deltafl data get {name}`")
        cache.read(folder, entry, hashed=True)
    return _status(entry)


def status() -> list[Status]:
    """Return one row for each set of the catalog; opens nothing large."""
    images = [_status(entry) for entry in CATALOG.values()]
    return images + [_text_status(entry) for entry in TEXTS.values()]


def _entry(name: str) -> Entry:
    if name not in CATALOG:
        raise unknown("data set", name, names())
    return CATALOG[name]


def _built_in(entry: Entry) -> Parts:
    assert entry.builtin is not None
    parts = entry.builtin()
    entry.check(parts, "scikit-learn")
    return parts


def _open(entry: Entry, folder: Path, *, hashed: bool) -> Dataset:
    parts = cache.read(folder, entry, hashed=hashed)
    return entry.dataset(parts).referring_to(partial(reopen, entry.name, str(folder)))


def _stored(entry: Entry) -> Path | None:
    return next((folder for folder in folders() if cache.complete(folder, entry)), None)


def _raw(entry: Entry) -> list[tuple[Path, Form]]:
    """Return every place on this machine with raw files of the set, and the form they have."""
    places = [folder / below for folder in folders() for below in entry.folders]
    if isinstance(entry.registry, Apt):
        places.append(Path("/") / entry.registry.folder)
    return [(place, form) for place in places for form in entry.forms if form.here(place)]


def _bring(entry: Entry, *, download: bool) -> Path:
    """Decode the set from the first source that has it, store it, and return the folder."""
    home = folders()[0]
    routes: list[sources.Route] = [partial(_read, form, place) for place, form in _raw(entry)]
    if download:
        routes += sources.routes(entry)
    if routes:
        cache.prepare(home, entry)
    failures: list[str] = []
    for number, route in enumerate(routes, start=1):
        try:
            parts, origin = route(entry)
            entry.check(parts, origin)
        except UserError as error:
            failures.append(str(error))
            if number < len(routes):
                _say(f"{entry.name}: {error}; trying the next source")
        else:
            cache.write(home, entry, parts, origin)
            return home
    reasons = f" ({'; '.join(failures)})" if failures else ""
    advice = f"put its files into {home / entry.name}"
    if not download:
        advice = f"run `deltafl data get {entry.name}`"
    raise UserError(f"data set {entry.name} is not here{reasons}: {advice}")


def _read(form: Form, place: Path, entry: Entry) -> tuple[Parts, str]:
    return form.read(place), str(place)


def _status(entry: Entry) -> Status:
    here, where = True, "built in"
    if entry.builtin is None:
        folder = _stored(entry)
        raw = [] if folder else _raw(entry)
        if folder:
            where = str(folder / entry.name)
        elif raw:
            where = f"raw files in {raw[0][0]}"
        else:
            here, where = False, "not here"
    return Status(
        name=entry.name,
        classes=len(entry.classes),
        train=entry.train,
        test=entry.test,
        bytes=entry.bytes,
        here=here,
        where=where,
        licence=entry.licence,
        citation=entry.citation,
    )


def _text_status(entry: TextEntry) -> Status:
    found = entry.find(folders())
    edition, place = found or (entry.whole, None)
    sizes = [] if place is None else [(place / file.name).stat().st_size for file in edition.files]
    return Status(
        name=entry.name,
        classes=len(entry.classes),
        train=edition.train,
        test=edition.test,
        bytes=sum(sizes),
        here=found is not None,
        where="not here" if place is None else str(place),
        licence=entry.licence,
        citation=entry.citation,
        part=edition.part,
    )


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
