from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deltafl.data import cifar, idx
from deltafl.data.parts import PARTS, Parts
from deltafl.errors import UserError

IDX = idx.Idx(train=6, test=3, size=(5, 4))
PNG = cifar.PngStrips(per_file=2)
RESIDUALS = cifar.Residuals(train=3, test=2)
CIFAR10 = cifar.Binary(
    archive="cifar-10-binary.tar.gz",
    unpacked="cifar-10-batches-bin",
    train=(("data_batch_1.bin", 2), ("data_batch_2.bin", 2)),
    test=(("test_batch.bin", 3),),
    label_bytes=1,
)
CIFAR100 = cifar.Binary(
    archive="cifar-100-binary.tar.gz",
    unpacked="cifar-100-binary",
    train=(("train.bin", 3),),
    test=(("test.bin", 2),),
    label_bytes=2,
)


def cifar_parts(train: int, test: int) -> Parts:
    generator = np.random.default_rng(3)
    return {
        "train-images": generator.integers(256, size=(train, 3, 32, 32), dtype=np.uint8),
        "train-labels": generator.integers(10, size=train, dtype=np.uint8),
        "test-images": generator.integers(256, size=(test, 3, 32, 32), dtype=np.uint8),
        "test-labels": generator.integers(10, size=test, dtype=np.uint8),
    }


def assert_same(read: Parts, expected: Parts) -> None:
    for part in PARTS:
        np.testing.assert_array_equal(read[part], expected[part])
        assert read[part].dtype == np.uint8


def records(images: np.ndarray, labels: np.ndarray, coarse: int | None = None) -> bytes:
    """The binary version, record by record."""
    prefix = b"" if coarse is None else bytes([coarse])
    return b"".join(
        prefix + bytes([int(label)]) + image.tobytes()
        for image, label in zip(images, labels, strict=True)
    )


def cifar10_files(parts: Parts) -> dict[str, bytes]:
    images, labels = parts["train-images"], parts["train-labels"]
    return {
        "data_batch_1.bin": records(images[:2], labels[:2]),
        "data_batch_2.bin": records(images[2:], labels[2:]),
        "test_batch.bin": records(parts["test-images"], parts["test-labels"]),
    }


def put(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def pack(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def residuals(images: np.ndarray, labels: np.ndarray) -> bytes:
    """The compressed form, from its description: R-G, G, B-G, then differences on both axes."""
    planes = images.astype(np.int64)
    planes = np.stack([planes[:, 0] - planes[:, 1], planes[:, 1], planes[:, 2] - planes[:, 1]], 1)
    planes = np.diff(np.diff(planes, axis=3, prepend=0), axis=2, prepend=0)
    pairs = np.stack([np.full_like(labels, 77), labels], axis=1)
    return gzip.compress(pairs.tobytes() + (planes % 256).astype(np.uint8).tobytes())


def write_pngs(folder: Path, parts: Parts) -> None:
    folder.mkdir(exist_ok=True)
    images = np.concatenate([parts["train-images"], parts["test-images"]])
    for number, name in enumerate((*PNG.TRAIN, *PNG.TEST)):
        strip = images[2 * number : 2 * number + 2].transpose(0, 2, 3, 1).reshape(2, 1024, 3)
        Image.fromarray(strip).save(folder / name)
    for name, part in zip(PNG.LABELS, ("train-labels", "test-labels"), strict=True):
        (folder / name).write_text(json.dumps(parts[part].tolist()))


@pytest.mark.parametrize("gz", [False, True])
def test_idx(tmp_path: Path, tiny_parts: Parts, write_idx: Callable[..., None], gz: bool) -> None:
    assert not IDX.here(tmp_path)
    write_idx(tmp_path, tiny_parts, gz=gz)
    assert IDX.here(tmp_path)
    assert_same(IDX.read(tmp_path), tiny_parts)


def test_cifar_10_binary_from_files_their_folder_or_the_archive(tmp_path: Path) -> None:
    parts = cifar_parts(4, 3)
    files = cifar10_files(parts)
    put(tmp_path / "loose", files)
    put(tmp_path / "unpacked" / "cifar-10-batches-bin", files)
    (tmp_path / "packed").mkdir()
    inside = {f"cifar-10-batches-bin/{name}": content for name, content in files.items()}
    pack(tmp_path / "packed" / CIFAR10.archive, inside)
    assert not CIFAR10.here(tmp_path)
    for place in ("loose", "unpacked", "packed"):
        assert CIFAR10.here(tmp_path / place)
        assert_same(CIFAR10.read(tmp_path / place), parts)


def test_cifar_100_binary_takes_the_fine_label(tmp_path: Path) -> None:
    parts = cifar_parts(3, 2)
    files = {
        "train.bin": records(parts["train-images"], parts["train-labels"], coarse=77),
        "test.bin": records(parts["test-images"], parts["test-labels"], coarse=77),
    }
    put(tmp_path, files)
    assert_same(CIFAR100.read(tmp_path), parts)


def test_png_strips(tmp_path: Path) -> None:
    parts = cifar_parts(10, 2)
    assert not PNG.here(tmp_path)
    write_pngs(tmp_path, parts)
    assert PNG.here(tmp_path)
    assert_same(PNG.read(tmp_path), parts)


def test_residuals(tmp_path: Path) -> None:
    parts = cifar_parts(3, 2)
    assert not RESIDUALS.here(tmp_path)
    (tmp_path / "train.delta.gz").write_bytes(
        residuals(parts["train-images"], parts["train-labels"])
    )
    (tmp_path / "test.delta.gz").write_bytes(residuals(parts["test-images"], parts["test-labels"]))
    assert RESIDUALS.here(tmp_path)
    assert_same(RESIDUALS.read(tmp_path), parts)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def spoil_start(path: Path) -> None:
    path.write_bytes(b"\xff\xff\xff\xff" + path.read_bytes()[4:])


@pytest.mark.parametrize("spoil", [shorten, lengthen, spoil_start])
def test_a_damaged_idx_file_is_named(
    tmp_path: Path,
    tiny_parts: Parts,
    write_idx: Callable[..., None],
    spoil: Callable[[Path], None],
) -> None:
    write_idx(tmp_path, tiny_parts)
    spoil(tmp_path / "t10k-images-idx3-ubyte")
    with pytest.raises(UserError, match=r"t10k-images-idx3-ubyte: .*: delete it"):
        IDX.read(tmp_path)


@pytest.mark.parametrize("spoil", [shorten, spoil_start])
def test_a_damaged_gzip_is_named(
    tmp_path: Path,
    tiny_parts: Parts,
    write_idx: Callable[..., None],
    spoil: Callable[[Path], None],
) -> None:
    write_idx(tmp_path, tiny_parts, gz=True)
    spoil(tmp_path / "train-images-idx3-ubyte.gz")
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte.gz: cannot be read"):
        IDX.read(tmp_path)


def test_a_gzip_that_would_grow_beyond_what_belongs_is_not_unpacked_whole(tmp_path: Path) -> None:
    (tmp_path / "train.delta.gz").write_bytes(gzip.compress(bytes(50_000_000)))
    with pytest.raises(UserError, match=r"holds more than 9222 bytes"):
        RESIDUALS.read(tmp_path)


def test_an_idx_file_of_another_shape_is_refused(
    tmp_path: Path, tiny_parts: Parts, write_idx: Callable[..., None]
) -> None:
    turned = {**tiny_parts, "train-images": tiny_parts["train-images"].transpose(0, 1, 3, 2)}
    write_idx(tmp_path, turned)
    with pytest.raises(UserError, match="is not an IDX file of 6 x 5 x 4 bytes"):
        IDX.read(tmp_path)


def test_a_damaged_binary_file_is_named(tmp_path: Path) -> None:
    put(tmp_path, cifar10_files(cifar_parts(4, 3)))
    shorten(tmp_path / "data_batch_2.bin")
    with pytest.raises(UserError, match=r"data_batch_2.bin: holds 6145 bytes where 6146 belong"):
        CIFAR10.read(tmp_path)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    archive = tmp_path / CIFAR10.archive
    archive.write_bytes(b"not a tar")
    with pytest.raises(UserError, match="cannot be unpacked"):
        CIFAR10.read(tmp_path)
    pack(archive, {"cifar-10-batches-bin/data_batch_1.bin": bytes(2 * 3073)})
    with pytest.raises(UserError, match=r"has no file cifar-10-batches-bin/data_batch_2.bin"):
        CIFAR10.read(tmp_path)
    pack(archive, {"cifar-10-batches-bin/data_batch_1.bin": bytes(5)})
    with pytest.raises(UserError, match=r"data_batch_1.bin: holds 5 bytes"):
        CIFAR10.read(tmp_path)
    with tarfile.open(archive, "w:gz") as tar:
        link = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "data_batch_1.bin"
        tar.addfile(link)
    with pytest.raises(UserError, match=r"has no file cifar-10-batches-bin/data_batch_1.bin"):
        CIFAR10.read(tmp_path)
    archive.write_bytes(archive.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"cifar-10-binary.tar.gz"):
        CIFAR10.read(tmp_path)


def test_a_damaged_picture_is_named(tmp_path: Path) -> None:
    write_pngs(tmp_path, cifar_parts(10, 2))
    picture = tmp_path / "data_batch_3.png"
    whole = picture.read_bytes()
    picture.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"data_batch_3.png: cannot be read as PNG"):
        PNG.read(tmp_path)
    picture.write_bytes(b"GIF89a")
    with pytest.raises(UserError, match=r"data_batch_3.png: cannot be read as PNG"):
        PNG.read(tmp_path)
    Image.new("RGB", (1024, 3)).save(picture)
    with pytest.raises(UserError, match=r"is not an RGB picture of 1024 x 2 pixels"):
        PNG.read(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2", "cannot be read as JSON"),
        ("[1, 2, 3]", "not a list of 2 labels"),
        ('{"1": 2}', "not a list of 2 labels"),
        ("[1, 256]", "not a class number"),
        ("[1, true]", "not a class number"),
        ("[1, 2.0]", "not a class number"),
        ("[" * 1000, "too large for 2 labels"),
    ],
)
def test_labels_that_are_not_class_numbers_are_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "labels.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        cifar.read_labels(path, 2)
