from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from deltafl.data import cache
from deltafl.data.entry import Entry
from deltafl.data.parts import PARTS, Parts
from deltafl.errors import UserError


def backing(array: np.ndarray) -> object:
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base


def test_round_trip_is_exact_and_mapped(tmp_path: Path, tiny: Entry, tiny_parts: Parts) -> None:
    assert not cache.complete(tmp_path, tiny)
    cache.write(tmp_path, tiny, tiny_parts, "a test")
    assert cache.complete(tmp_path, tiny)
    read = cache.read(tmp_path, tiny, hashed=True)
    for part in PARTS:
        np.testing.assert_array_equal(read[part], tiny_parts[part])
        assert isinstance(backing(read[part]), mmap.mmap)


def test_what_a_reader_changes_does_not_reach_the_file(
    tmp_path: Path, tiny: Entry, tiny_parts: Parts
) -> None:
    cache.write(tmp_path, tiny, tiny_parts, "a test")
    cache.read(tmp_path, tiny, hashed=True)["train-images"][:] = 0
    cache.read(tmp_path, tiny, hashed=True)


def test_the_folder_holds_the_four_arrays_and_the_manifest_and_nothing_else(
    tmp_path: Path, tiny: Entry, tiny_parts: Parts
) -> None:
    cache.write(tmp_path, tiny, tiny_parts, "a test")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    names = sorted(path.name for path in (tmp_path / "tiny").iterdir())
    assert names == sorted([*(f"{part}.npy" for part in PARTS), "manifest.json"])
    manifest = json.loads((tmp_path / "tiny" / "manifest.json").read_text())
    assert manifest == {
        "format": 1,
        "name": "tiny",
        "source": "a test",
        "sha256": dict(tiny.digests),
    }


def test_storing_again_beside_raw_files_and_mapped_readers_is_harmless(
    tmp_path: Path, tiny: Entry, tiny_parts: Parts
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "raw.txt").write_text("mine")
    cache.write(tmp_path, tiny, tiny_parts, "first")
    mapped = cache.read(tmp_path, tiny, hashed=True)
    cache.write(tmp_path, tiny, tiny_parts, "second")
    np.testing.assert_array_equal(mapped["train-images"], tiny_parts["train-images"])
    assert (tmp_path / "tiny" / "raw.txt").read_text() == "mine"


def test_many_writers_and_a_reader_at_once_do_not_disturb_one_another(
    tmp_path: Path, tiny: Entry, tiny_parts: Parts
) -> None:
    cache.write(tmp_path, tiny, tiny_parts, "first")
    with ThreadPoolExecutor(4) as pool:
        writers = [
            pool.submit(cache.write, tmp_path, tiny, tiny_parts, f"writer {number}")
            for number in range(40)
        ]
        while not all(writer.done() for writer in writers):
            cache.read(tmp_path, tiny, hashed=True)
        for writer in writers:
            writer.result()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_set_without_its_manifest_or_a_part_is_not_complete(
    tmp_path: Path, tiny: Entry, tiny_parts: Parts
) -> None:
    for name in ("manifest.json", "test-labels.npy"):
        cache.write(tmp_path, tiny, tiny_parts, "a test")
        (tmp_path / "tiny" / name).unlink()
        assert not cache.complete(tmp_path, tiny)


def save(array: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def pickled(path: Path) -> None:
    np.save(path, np.array([print], dtype=object), allow_pickle=True)


def zipped(path: Path) -> None:
    with path.open("wb") as stream:
        np.savez(stream, np.zeros(3))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]) and None,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x") and None,
    "empty": lambda path: path.write_bytes(b"") and None,
    "not npy": lambda path: path.write_bytes(b"hello" * 100) and None,
    "another shape": save(np.zeros((6, 1, 4, 5), np.uint8)),
    "another type": save(np.zeros((6, 1, 5, 4), np.int8)),
    "another order": save(np.asfortranarray(np.zeros((6, 1, 5, 4), np.uint8))),
    "a pickle": pickled,
    "a zip": zipped,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("hashed", [True, False])
def test_damage_that_shows_from_outside_is_always_noticed(
    tmp_path: Path, tiny: Entry, tiny_parts: Parts, damage: str, hashed: bool
) -> None:
    cache.write(tmp_path, tiny, tiny_parts, "a test")
    DAMAGES[damage](tmp_path / "tiny" / "train-images.npy")
    with pytest.raises(UserError, match=r"train-images.npy: .*deltafl data get tiny") as caught:
        cache.read(tmp_path, tiny, hashed=hashed)
    assert "\n" not in str(caught.value)


def test_an_altered_byte_is_noticed_when_hashed(
    tmp_path: Path, tiny: Entry, tiny_parts: Parts
) -> None:
    cache.write(tmp_path, tiny, tiny_parts, "a test")
    flip_a_bit(tmp_path / "tiny" / "test-labels.npy")
    cache.read(tmp_path, tiny, hashed=False)
    with pytest.raises(UserError, match=r"test-labels.npy: has been altered"):
        cache.read(tmp_path, tiny, hashed=True)


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"format": 2}', '{"format": 1}', "[" * 60_000, "\xff"]
)
def test_a_damaged_manifest_is_noticed(
    tmp_path: Path, tiny: Entry, tiny_parts: Parts, content: str
) -> None:
    cache.write(tmp_path, tiny, tiny_parts, "a test")
    (tmp_path / "tiny" / "manifest.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=r"manifest.json: .*deltafl data get tiny"):
        cache.read(tmp_path, tiny, hashed=False)


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, tiny: Entry, tiny_parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"189 bytes needed, 100 free.*set DELTAFL_DATA"):
        cache.write(tmp_path, tiny, tiny_parts, "a test")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_on_the_way_leaves_nothing_behind(
    tmp_path: Path, tiny: Entry, tiny_parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(UserError, match=r"No space left on device.*set DELTAFL_DATA"):
        cache.write(tmp_path, tiny, tiny_parts, "a test")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written_to_is_said(
    tmp_path: Path, tiny: Entry, tiny_parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, so the answer is given for it.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match="may not be written to"):
        cache.write(tmp_path, tiny, tiny_parts, "a test")


def test_a_folder_that_cannot_be_made_is_said(
    tmp_path: Path, tiny: Entry, tiny_parts: Parts
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot store data set tiny"):
        cache.write(tmp_path / "file" / "below", tiny, tiny_parts, "a test")
