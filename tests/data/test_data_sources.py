from __future__ import annotations

import dataclasses
import functools
import hashlib
import http.server
import io
import os
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pooch
import pytest

from deltafl.data import idx, sources
from deltafl.data.entry import Apt, Download, Entry, Npm
from deltafl.data.parts import PARTS, Parts
from deltafl.errors import UserError


@pytest.fixture(autouse=True)
def workshops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made; whatever happens, they are gone afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


class Clients:
    """Puts shell scripts first on the PATH, in the place of the registries' clients."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def add(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clients:
    return Clients(tmp_path / "bin", monkeypatch)


@pytest.fixture
def npm_set(tiny: Entry) -> Entry:
    return dataclasses.replace(tiny, registry=Npm("tiny-data@1.0.0", "package/data"))


@pytest.fixture
def apt_set(tiny: Entry) -> Entry:
    return dataclasses.replace(tiny, registry=Apt("dataset-tiny", "usr/share/datasets/tiny"))


def pack(path: Path, folder: Path, inside: str) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, arcname=inside)
    return path


def assert_same(read: Parts, expected: Parts) -> None:
    for part in PARTS:
        np.testing.assert_array_equal(read[part], expected[part])


def test_routes_are_the_canonical_download_then_the_registry(
    tiny: Entry, npm_set: Entry, apt_set: Entry
) -> None:
    file = Download("https://example.org/a.gz", "0" * 32)
    assert sources.routes(tiny) == []
    assert sources.routes(dataclasses.replace(npm_set, downloads=(file,))) == [
        sources.canonical,
        sources.npm,
    ]
    assert sources.routes(apt_set) == [sources.apt]


def test_npm_packs_the_package_and_the_files_are_read(
    tmp_path: Path,
    npm_set: Entry,
    tiny_parts: Parts,
    clients: Clients,
    write_idx: Callable[..., None],
) -> None:
    write_idx(tmp_path / "files", tiny_parts)
    archive = pack(tmp_path / "archive.tgz", tmp_path / "files", "package/data")
    clients.add("npm", f'echo "$@" > {tmp_path}/asked; cp {archive} tiny-data-1.0.0.tgz')
    parts, origin = sources.npm(npm_set)
    assert_same(parts, tiny_parts)
    assert origin == "npm package tiny-data@1.0.0"
    assert (tmp_path / "asked").read_text().startswith("pack tiny-data@1.0.0 ")


def test_apt_downloads_the_package_and_unpacks_it_uninstalled(
    tmp_path: Path,
    apt_set: Entry,
    tiny_parts: Parts,
    clients: Clients,
    write_idx: Callable[..., None],
) -> None:
    write_idx(tmp_path / "files", tiny_parts, gz=True)
    clients.add("apt-get", 'test "$1" = download && touch dataset-tiny_1_all.deb')
    target = "$3/usr/share/datasets"
    clients.add("dpkg-deb", f"mkdir -p {target} && cp -r {tmp_path}/files {target}/tiny")
    parts, origin = sources.apt(apt_set)
    assert_same(parts, tiny_parts)
    assert origin == "Debian package dataset-tiny"


@pytest.mark.parametrize("root", [True, False])
def test_root_fetches_missing_package_lists_and_others_are_told(
    tmp_path: Path,
    apt_set: Entry,
    tiny_parts: Parts,
    clients: Clients,
    write_idx: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    root: bool,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    write_idx(tmp_path / "files", tiny_parts)
    lists = tmp_path / "lists"
    clients.add(
        "apt-get",
        f'if [ "$1" = update ]; then touch {lists}; exit; fi\n'
        f'if [ ! -e {lists} ]; then echo "E: No packages found"; echo more; exit 100; fi\n'
        "touch dataset-tiny_1_all.deb",
    )
    target = "$3/usr/share/datasets"
    clients.add("dpkg-deb", f"mkdir -p {target} && cp -r {tmp_path}/files {target}/tiny")
    if root:
        assert_same(sources.apt(apt_set)[0], tiny_parts)
    else:
        with pytest.raises(UserError, match=r"apt-get failed with code 100 \(E: No packages found"):
            sources.apt(apt_set)


def test_a_client_that_is_not_installed_is_named(
    npm_set: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="npm is not installed"):
        sources.npm(npm_set)


def test_a_client_that_hangs_is_ended_with_its_helpers(
    tmp_path: Path, npm_set: Entry, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CLIENT_SECONDS", 0.5)
    clients.add("npm", f"sleep 60 & echo $! > {tmp_path}/helper; wait")
    with pytest.raises(UserError, match=r"npm took over 0.5 seconds"):
        sources.npm(npm_set)
    helper = Path("/proc") / (tmp_path / "helper").read_text().strip() / "stat"
    for _ in range(100):
        # Ended, and perhaps not yet collected by whoever inherited it.
        if not helper.exists() or helper.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the helper outlived its client")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'npm error code E404'; echo 'npm error see the log'; exit 1", "npm error code E404"),
        ("exit 3", "failed with code 3 .no output"),
        ("true", r"brought 0 files \*.tgz"),
        ("echo no tar > a.tgz", "cannot be unpacked"),
    ],
)
def test_a_client_that_fails_is_reported_in_one_line(
    npm_set: Entry, clients: Clients, script: str, message: str
) -> None:
    clients.add("npm", script)
    with pytest.raises(UserError, match=message) as caught:
        sources.npm(npm_set)
    assert "\n" not in str(caught.value)


def test_a_package_without_the_files_is_reported(
    tmp_path: Path, npm_set: Entry, clients: Clients
) -> None:
    (tmp_path / "files").mkdir()
    archive = pack(tmp_path / "archive.tgz", tmp_path / "files", "package/data")
    clients.add("npm", f"cp {archive} a.tgz")
    with pytest.raises(UserError, match="does not hold the files of tiny"):
        sources.npm(npm_set)


def test_an_archive_cannot_write_outside_its_folder(
    tmp_path: Path, workshops: Path, npm_set: Entry, clients: Clients
) -> None:
    with tarfile.open(tmp_path / "evil.tgz", "w:gz") as tar:
        member = tarfile.TarInfo("../escaped")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"evil"))
    clients.add("npm", f"cp {tmp_path}/evil.tgz a.tgz")
    with pytest.raises(UserError, match="cannot be unpacked"):
        sources.npm(npm_set)
    assert not (workshops / "escaped").exists()


def test_an_archive_that_unpacks_to_too_much_is_refused(
    tmp_path: Path,
    npm_set: Entry,
    tiny_parts: Parts,
    clients: Clients,
    write_idx: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "LARGEST_UNPACKED", 100)
    write_idx(tmp_path / "files", tiny_parts)
    archive = pack(tmp_path / "archive.tgz", tmp_path / "files", "package/data")
    clients.add("npm", f"cp {archive} a.tgz")
    with pytest.raises(UserError, match="unpacks to more than 100 bytes"):
        sources.npm(npm_set)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server of its own: its address, and the folder it serves."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{web.server_port}", folder
        finally:
            web.shutdown()
            thread.join()


@pytest.fixture
def served(
    tiny: Entry,
    tiny_parts: Parts,
    server: tuple[str, Path],
    write_idx: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> Entry:
    """The tiny set, at an address on this machine."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    address, folder = server
    write_idx(folder, tiny_parts, gz=True)
    files = [folder / f"{name}.gz" for name in idx.FILES.values()]
    downloads = [
        Download(f"{address}/{path.name}", hashlib.md5(path.read_bytes()).hexdigest())
        for path in files
    ]
    return dataclasses.replace(tiny, downloads=tuple(downloads))


def test_the_canonical_files_are_downloaded_and_read(served: Entry, tiny_parts: Parts) -> None:
    parts, origin = sources.canonical(served)
    assert_same(parts, tiny_parts)
    assert origin.startswith("127.0.0.1:")


def test_a_download_with_another_checksum_is_refused(served: Entry) -> None:
    wrong = dataclasses.replace(served.downloads[1], md5="0" * 32)
    changed = dataclasses.replace(served, downloads=(served.downloads[0], wrong))
    with pytest.raises(UserError, match=r"train-labels-idx1-ubyte.gz is not what it was") as caught:
        sources.canonical(changed)
    assert "\n" not in str(caught.value)


def test_a_missing_file_or_server_is_one_quiet_line(
    served: Entry, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for url, reason in (
        (f"{served.downloads[0].url}.missing", "HTTPError"),
        ("http://127.0.0.1:9/file", "ConnectionError"),
    ):
        gone = dataclasses.replace(served, downloads=(Download(url, "0" * 32),))
        with pytest.raises(UserError, match=rf"no download from 127.0.0.1:\d+ \({reason}\)"):
            sources.canonical(gone)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_a_full_temporary_folder_is_not_blamed_on_the_network(
    served: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pooch, "retrieve", full)
    with pytest.raises(UserError, match=r"cannot fetch tiny in .*No space left.*TMPDIR"):
        sources.canonical(served)
