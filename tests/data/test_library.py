from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from deltafl import data
from deltafl.data import cache, sources
from deltafl.data import digits as reader
from deltafl.data.catalog import CATALOG
from deltafl.data.entry import Apt, Entry
from deltafl.data.parts import PARTS, Parts
from deltafl.errors import UserError

Writer = Callable[..., None]


@pytest.fixture
def raw(data_folder: Path, tiny_parts: Parts, write_idx: Writer) -> Path:
    """Raw files of the tiny set in the writable data folder."""
    write_idx(data_folder / "tiny", tiny_parts)
    return data_folder / "tiny"


def offer(monkeypatch: pytest.MonkeyPatch, *routes: sources.Route) -> None:
    monkeypatch.setattr(sources, "routes", lambda _: list(routes))


def unreachable(entry: Entry) -> tuple[Parts, str]:
    raise UserError(f"no connection for {entry.name}")


def test_load_decodes_raw_files_once_and_stores_them(raw: Path, tiny: Entry) -> None:
    first = data.load("tiny", download=False)
    for path in raw.glob("*ubyte"):
        path.unlink()
    again = data.load("tiny", download=False)
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert again.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert (again.name, again.classes, again.mean, again.shape) == (
        "tiny",
        ("a", "b", "c"),
        (0.5,),
        (1, 5, 4),
    )


@pytest.mark.parametrize("place", ["data/tiny", "../shared/data/tiny/raw", "../more/tiny"])
def test_raw_files_are_found_in_every_data_folder(
    data_folder: Path,
    tiny: Entry,
    tiny_parts: Parts,
    write_idx: Writer,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    more = data_folder.parent / "more"
    monkeypatch.setenv("DELTAFL_DATA", f"{data_folder}{os.pathsep}{more}")
    write_idx(Path(place), tiny_parts)
    assert len(data.load("tiny", download=False).train) == 6
    assert cache.complete(data_folder, tiny)


def test_a_stored_set_is_used_where_it_lies(
    data_folder: Path, tiny: Entry, tiny_parts: Parts
) -> None:
    shared = data_folder.parent / "shared" / "data"
    cache.write(shared, tiny, tiny_parts, "a test")
    assert len(data.load("tiny", download=False).test) == 3
    assert not data_folder.exists()


def test_folders_are_listed_like_a_path_and_default_to_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELTAFL_DATA", os.pathsep.join(["one", "/two", "", "one"]))
    beside = (tmp_path / "data", tmp_path.parent / "shared" / "data")
    assert data.folders() == (tmp_path / "one", Path("/two"), *beside)
    monkeypatch.delenv("DELTAFL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data.folders() == (tmp_path / "cache" / "deltafl", *beside)


def test_a_loaded_set_pickles_as_a_reference_to_the_mapped_files(raw: Path, tiny: Entry) -> None:
    loaded = data.load("tiny")
    message = pickle.dumps(loaded)
    assert len(message) < 300
    copy = pickle.loads(message)
    assert torch.equal(copy.train.inputs, loaded.train.inputs)
    assert pickle.dumps(copy) == message


def test_a_reference_is_not_hashed_again_but_its_outside_is_checked(raw: Path, tiny: Entry) -> None:
    message = pickle.dumps(data.load("tiny"))
    images = raw / "train-images.npy"
    content = images.read_bytes()
    images.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert len(pickle.loads(message).train) == 6
    images.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"train-images.npy"):
        pickle.loads(message)


def test_a_reference_opened_on_another_machine_loads_from_its_folders(
    raw: Path, tiny: Entry, tiny_parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = pickle.dumps(data.load("tiny"))
    other = raw.parent.parent / "other"
    raw.parent.rename(raw.parent.parent / "gone")
    cache.write(other, tiny, tiny_parts, "a test")
    monkeypatch.setenv("DELTAFL_DATA", str(other))
    assert len(pickle.loads(message).train) == 6


def test_load_and_verify_notice_an_altered_byte_and_get_brings_the_set_again(
    raw: Path, tiny: Entry, capsys: pytest.CaptureFixture[str]
) -> None:
    data.load("tiny")
    images = raw / "train-images.npy"
    content = images.read_bytes()
    images.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for check in (data.load, data.verify):
        with pytest.raises(UserError, match=r"train-images.npy: .*`deltafl data get tiny` again"):
            check("tiny")
    assert data.get("tiny").here
    assert "getting it again now" in capsys.readouterr().err
    assert data.verify("tiny").where == str(raw)
    assert images.read_bytes() == content


def test_a_deleted_file_is_brought_again_by_load(raw: Path, tiny: Entry) -> None:
    data.load("tiny")
    (raw / "test-images.npy").unlink()
    assert len(data.load("tiny").test) == 3


def test_sources_are_tried_in_order_and_failures_said_in_a_line(
    data_folder: Path,
    tiny: Entry,
    tiny_parts: Parts,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    offer(monkeypatch, unreachable, lambda _: (tiny_parts, "elsewhere"))
    assert len(data.load("tiny").train) == 6
    assert capsys.readouterr().err == ("tiny: no connection for tiny; trying the next source\n")


def test_contents_that_are_not_the_set_are_never_stored(
    data_folder: Path, tiny: Entry, tiny_parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in PARTS:
        altered = {**tiny_parts, part: tiny_parts[part] ^ 1}
        offer(monkeypatch, lambda _, altered=altered: (altered, "elsewhere"))
        with pytest.raises(UserError, match=rf"elsewhere: the {part} are not those of tiny"):
            data.load("tiny")
        assert not cache.complete(data_folder, tiny)


def test_a_source_of_another_shape_is_refused(
    data_folder: Path, tiny: Entry, tiny_parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = {**tiny_parts, "train-images": tiny_parts["train-images"].reshape(6, 1, 4, 5)}
    offer(monkeypatch, lambda _: (turned, "elsewhere"))
    with pytest.raises(UserError, match="train-images are not those of tiny"):
        data.load("tiny")


def test_damaged_raw_files_do_not_hide_another_source(
    raw: Path, tiny: Entry, tiny_parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    (raw / "train-labels-idx1-ubyte").write_bytes(b"")
    with pytest.raises(UserError, match=r"tiny is not here .*train-labels-idx1-ubyte: holds 0"):
        data.load("tiny", download=False)
    offer(monkeypatch, lambda _: (tiny_parts, "elsewhere"))
    assert len(data.load("tiny").train) == 6


def test_a_set_that_cannot_be_had_is_refused_with_every_reason(
    data_folder: Path, tiny: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="tiny is not here: run `deltafl data get tiny`"):
        data.load("tiny", download=False)
    with pytest.raises(UserError, match="tiny is not here: run `deltafl data get tiny`"):
        data.verify("tiny")
    offer(monkeypatch, unreachable, unreachable)
    with pytest.raises(UserError, match=r"is not here \(no connection.*; no connection.*put its"):
        data.get("tiny")


def test_a_folder_that_cannot_be_written_to_is_said_before_the_fetch(
    data_folder: Path, tiny: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_folder.write_text("a file in the way")

    def never(_: Entry) -> tuple[Parts, str]:
        raise AssertionError("fetched in vain")

    offer(monkeypatch, never)
    with pytest.raises(UserError, match=r"cannot store data set tiny in .*store"):
        data.load("tiny")


def test_status_says_where_each_set_is(raw: Path, tiny: Entry) -> None:
    def row() -> data.Status:
        return next(row for row in data.status() if row.name == "tiny")

    assert row().where == f"raw files in {raw}"
    data.load("tiny")
    assert row() == data.Status(
        name="tiny",
        classes=3,
        train=6,
        test=3,
        bytes=9 * 20 + 9,
        here=True,
        where=str(raw),
        licence="none",
        citation="nobody",
    )


def test_status_of_a_set_that_is_not_here(data_folder: Path, tiny: Entry) -> None:
    rows = {row.name: row for row in data.status()}
    assert not rows["tiny"].here
    assert rows["tiny"].where == "not here"
    assert rows["digits"].here


def test_unknown_names_are_refused_with_the_nearest() -> None:
    for call in (data.load, data.get, data.verify):
        with pytest.raises(UserError, match="unknown data set 'cifar1': did you mean 'cifar10'"):
            call("cifar1")


def test_names_are_the_catalogs() -> None:
    images = ("digits", "mnist", "fmnist", "cifar10", "cifar100")
    assert data.names() == (*images, "agnews", "dbpedia")


@pytest.mark.parametrize("name", ["digits", "mnist", "fmnist", "cifar10", "cifar100"])
def test_the_catalog_is_consistent(name: str) -> None:
    entry = CATALOG[name]
    assert len(set(entry.classes)) == len(entry.classes) == (100 if name == "cifar100" else 10)
    assert len(entry.mean) == len(entry.std) == entry.shape[0]
    assert set(entry.digests) == set(PARTS)
    assert all(len(digest) == 64 for digest in entry.digests.values())
    data.augmentation(entry.augment)
    # A set that is not built in can come from somewhere, in a form that is known.
    assert (entry.builtin is None) == bool(entry.forms and entry.downloads and entry.folders)


def test_digits_are_read_as_scikit_learn_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = reader.read()
    monkeypatch.setattr(reader, "find_spec", lambda name: None)
    slow = reader.read()
    assert slow.keys() == quick.keys()
    assert all(np.array_equal(part, quick[name]) for name, part in slow.items())


def test_digits_need_no_folder_and_travel_by_value(data_folder: Path) -> None:
    digits = data.load("digits", download=False)
    assert (len(digits.train), len(digits.test), digits.shape) == (1442, 355, (1, 8, 8))
    assert not data_folder.exists()
    for split in (digits.train, digits.test):
        counts = torch.bincount(split.labels).float()
        assert counts.min() / counts.max() > 0.93
    inputs = digits.samples(digits.train).inputs
    assert abs(inputs.mean()) < 1e-3
    assert abs(inputs.std() - 1) < 1e-3
    copy = pickle.loads(pickle.dumps(digits))
    assert torch.equal(copy.train.inputs, digits.train.inputs)
    assert data.get("digits").where == data.verify("digits").where == "built in"


def test_an_installed_debian_package_is_a_place_to_look(
    data_folder: Path,
    tmp_path: Path,
    tiny: Entry,
    tiny_parts: Parts,
    write_idx: Writer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = tmp_path / "usr" / "share" / "tiny"
    write_idx(installed, tiny_parts, gz=True)
    registry = Apt("dataset-tiny", str(installed.relative_to("/")))
    monkeypatch.setitem(CATALOG, "tiny", dataclasses.replace(tiny, registry=registry))
    assert len(data.load("tiny", download=False).train) == 6
