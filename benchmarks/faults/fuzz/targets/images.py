"""The raw files of data sets: IDX, CIFAR's archive, strips of PNG, labels, residuals."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.faults.fuzz.target import Target
from deltafl.data import cifar, idx

SIZE = (2, 3, 4)
PNG = cifar.PngStrips(per_file=2)
RESIDUALS = cifar.Residuals(train=1, test=1)
BINARY = cifar.Binary("x.tar.gz", "x", (("train.bin", 1),), (("test.bin", 1),), label_bytes=1)
PICTURE = bytes(3073)


def _idx(content: bytes, folder: Path) -> None:
    for name in ("plain", "packed.gz"):
        place = folder / name
        place.write_bytes(content)
        if name == "plain" or content[:2] == b"\x1f\x8b":
            idx.read_idx(place, SIZE)


def _idx_seeds() -> Sequence[bytes]:
    whole = struct.pack(">BBBB3I", 0, 0, 8, 3, *SIZE) + bytes(24)
    return [whole, gzip.compress(whole), whole[:-1], gzip.compress(whole)[:-3]]


def archive(members: dict[str, bytes], **links: str) -> bytes:
    """Return a gzipped tar archive of files and symbolic links."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for name, leads_to in links.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, leads_to
            tar.addfile(link)
    return content.getvalue()


def unpacked_too(run: Callable[[bytes, Path], None]) -> Callable[[bytes, Path], None]:
    """Compress what is not: a fuzzer cannot change a byte inside a gzip stream."""

    def both(content: bytes, folder: Path) -> None:
        run(content if content[:2] == b"\x1f\x8b" else gzip.compress(content, 1), folder)

    return both


def _archive(content: bytes, folder: Path) -> None:
    (folder / BINARY.archive).write_bytes(content)
    BINARY.read(folder)


def _archive_seeds() -> Sequence[bytes]:
    whole = archive({"x/train.bin": PICTURE, "x/test.bin": PICTURE})
    linked = archive({"x/test.bin": PICTURE}, **{"x/train.bin": "/etc/passwd"})
    return [whole, gzip.decompress(whole), gzip.decompress(linked)]


def _png(content: bytes, folder: Path) -> None:
    place = folder / "x.png"
    place.write_bytes(content)
    PNG.strip(place)


def _png_seeds() -> Sequence[bytes]:
    pictures = []
    for mode in ("RGB", "P"):
        content = io.BytesIO()
        Image.new(mode, (1024, 2)).save(content, "PNG")
        pictures.append(content.getvalue())
    # A bomb: the header says that there are 10^10 pixels.
    vast = b"IHDR" + struct.pack(">II", 100_000, 100_000) + pictures[0][24:29]
    bomb = pictures[0][:12] + vast + struct.pack(">I", zlib.crc32(vast)) + pictures[0][33:]
    return [*pictures, bomb]


def _labels(content: bytes, folder: Path) -> None:
    place = folder / "labels.json"
    place.write_bytes(content)
    assert cifar.read_labels(place, 3).dtype == np.uint8


def _labels_seeds() -> Sequence[bytes]:
    return [json.dumps(labels).encode() for labels in ([1, 2, 3], [1, 2], [1, 2, 256], {"a": 1})]


def _residuals(content: bytes, folder: Path) -> None:
    for name in (RESIDUALS.TRAIN, RESIDUALS.TEST):
        (folder / name).write_bytes(content)
    RESIDUALS.read(folder)


def _residuals_seeds() -> Sequence[bytes]:
    whole = bytes(2 + cifar.PIXELS)
    return [whole, gzip.compress(whole), gzip.compress(bytes(10_000_000))]


IDX = Target("idx", "IDX files of the MNIST family, gzipped or not", _idx, _idx_seeds)
ARCHIVE = Target("archive", "CIFAR's tar archive, gzipped", unpacked_too(_archive), _archive_seeds)
STRIP = Target("png", "CIFAR as strips of PNG", _png, _png_seeds, words=(b"IHDR", b"IDAT", b"zTXt"))
LABELS = Target("labels", "CIFAR's labels as JSON", _labels, _labels_seeds)
DELTAS = Target("residuals", "CIFAR as residuals", unpacked_too(_residuals), _residuals_seeds)
