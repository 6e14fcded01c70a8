"""The package of a registry, unpacked: names, links and sizes inside are somebody else's choice."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.fuzz.target import Target
from benchmarks.faults.fuzz.targets.images import archive, unpacked_too
from deltafl.data.sources import unpack


def _run(content: bytes, folder: Path) -> None:
    inside = folder / "inside"
    inside.mkdir()
    place = folder / "x.tgz"
    place.write_bytes(content)
    try:
        unpack(place, inside, "the package")
    finally:
        assert sorted(entry.name for entry in folder.iterdir()) == ["inside", "x.tgz"]
        for entry in inside.rglob("*"):
            assert entry.resolve().is_relative_to(inside)


def _special(name: str, kind: bytes, leads_to: str = "") -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, leads_to
        tar.addfile(member)
    return content.getvalue()


def _seeds() -> Sequence[bytes]:
    return [
        gzip.decompress(archive({"package/a": b"a", "package/b/c": b"c"})),
        gzip.decompress(archive({"../../escaped": b"a"})),
        gzip.decompress(archive({"/tmp/escaped": b"a"})),
        gzip.decompress(archive({"link/escaped": b"a"}, link="/tmp")),
        _special("a", tarfile.LNKTYPE, "../../../etc/passwd"),
        _special("a", tarfile.SYMTYPE, "b"),
        _special("a", tarfile.CHRTYPE),
        _special("a", tarfile.FIFOTYPE),
        gzip.decompress(archive({"a" * 300: b"a"})),
    ]


TARGET = Target(
    "package",
    "the archive of an npm package",
    unpacked_too(_run),
    _seeds,
    words=(b"ustar\x0000", b"../", b"ustar  \x00", b"path=", b"././@LongLink", b"30 mtime="),
)
