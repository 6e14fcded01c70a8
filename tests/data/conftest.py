from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from deltafl.data import idx
from deltafl.data.catalog import CATALOG
from deltafl.data.entry import Entry
from deltafl.data.parts import PARTS, Parts, sha256


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The writable data folder, with nothing of this machine's in reach."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("DELTAFL_DATA", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture
def tiny_parts() -> Parts:
    generator = np.random.default_rng(7)
    return {
        "train-images": generator.integers(256, size=(6, 1, 5, 4), dtype=np.uint8),
        "train-labels": np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8),
        "test-images": generator.integers(256, size=(3, 1, 5, 4), dtype=np.uint8),
        "test-labels": np.array([2, 1, 0], dtype=np.uint8),
    }


@pytest.fixture
def tiny(tiny_parts: Parts, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """A set of six training images in the catalog, which comes as IDX files."""
    entry = Entry(
        name="tiny",
        classes=("a", "b", "c"),
        shape=(1, 5, 4),
        train=6,
        test=3,
        mean=(0.5,),
        std=(0.25,),
        scale=255.0,
        augment="none",
        licence="none",
        citation="nobody",
        digests={part: sha256(tiny_parts[part]) for part in PARTS},
        forms=(idx.Idx(train=6, test=3, size=(5, 4)),),
        folders=("tiny", "tiny/raw"),
    )
    monkeypatch.setitem(CATALOG, "tiny", entry)
    return entry


class IdxWriter:
    """Writes a set as IDX files, byte by byte as the format says."""

    @staticmethod
    def content(array: np.ndarray) -> bytes:
        array = array[:, 0] if array.ndim == 4 else array
        header = bytes([0, 0, 8, array.ndim])
        return header + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()

    def __call__(self, folder: Path, parts: Parts, *, gz: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for part, name in idx.FILES.items():
            content = self.content(parts[part])
            if gz:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


@pytest.fixture
def write_idx() -> IdxWriter:
    return IdxWriter()
