"""Compiling C with the system's compiler, and the folder that keeps what was compiled."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import platformdirs

_COMPILE_SECONDS = 120


class UnavailableError(Exception):
    """Why there are no compiled kernels."""


def compiler() -> list[str]:
    """Return the command of the system's C compiler."""
    for candidate in (os.environ.get("CC"), "cc", "gcc", "clang"):
        command = shlex.split(candidate or "")
        if command and (found := shutil.which(command[0])):
            return [found, *command[1:]]
    raise UnavailableError("there is no C compiler: install gcc or clang, or name one in CC")


def compile_to(path: Path, source: bytes, command: list[str]) -> None:
    """Compile to `path`, which appears complete or not at all."""
    handle, name = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        _run([*command, "-x", "c", "-", "-o", name], source)
        built = os.open(name, os.O_RDWR)
        try:
            os.fchmod(built, 0o700)
            os.fsync(built)
        finally:
            os.close(built)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str], stdin: bytes = b"") -> str:
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, timeout=_COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"the C compiler does not run: {error}") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[0] if lines else f"exit code {done.returncode}"
        raise UnavailableError(f"the C compiler fails: {why}")
    return done.stdout.decode(errors="replace")


def key(source: bytes, command: list[str]) -> str:
    """Name a build by all it depends on: a home folder may be shared by different machines."""
    parts = [
        source,
        "\0".join(command).encode(),
        _run([command[0], "--version"]).encode(),
        _processor().encode(),
    ]
    return hashlib.sha256(b"\0\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """Identify the processor, and so what -march=native means."""
    known = "\n".join((platform.system(), platform.machine(), platform.processor()))
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        return known
    # Not all lines: the clock frequency is another one each time.
    telling = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")
    return "\n".join((known, *(line for line in lines if line.startswith(telling))))


def cache_folder() -> Path | None:
    """Return the folder of compiled kernels, or None if it cannot be written or trusted.

    Loading a library is running it. So nobody else may be able to put one there.
    """
    folder = Path(platformdirs.user_cache_dir("deltafl", appauthor=False)).absolute() / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve(strict=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            return None
        trusted = ours(folder) and all(map(_settled, folder.parents))
    except (OSError, RuntimeError):
        return None
    return folder if trusted else None


def ours(path: Path) -> bool:
    """Whether `path` exists, belongs to this user, and nobody else can write it."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return (
        not stat.S_ISLNK(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _settled(parent: Path) -> bool:
    """Whether nobody but this user and root can exchange what is inside `parent`."""
    status = parent.stat()
    if status.st_uid not in {os.geteuid(), 0}:
        return False
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return not others_write or bool(status.st_mode & stat.S_ISVTX)
