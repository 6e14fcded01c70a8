"""A small file that would become a large one is refused before it does."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from deltafl import UserError
from deltafl.data import Dataset, cifar, sources
from deltafl.experiment import Config
from deltafl.report.partitions import Partitions
from deltafl.report.runs import RunView

BINARY = cifar.Binary("x.tar.gz", "x", (("train.bin", 1),), (("test.bin", 1),), label_bytes=1)
MEGABYTE = 1 << 20


@pytest.fixture
def measured():
    """Fails if more than a few megabytes were held at once."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * MEGABYTE


def header_bomb(path: Path, size: int) -> None:
    """Write an archive whose one header says that it goes on for `size` bytes of zeros."""
    header = tarfile.TarInfo("././@PaxHeader")
    header.type, header.size = tarfile.XHDTYPE, size
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(size // MEGABYTE):
            file.write(bytes(MEGABYTE))


def test_a_header_of_a_tar_archive_is_not_read_whole(tmp_path, measured, monkeypatch) -> None:
    header_bomb(tmp_path / BINARY.archive, 60 * MEGABYTE)
    with pytest.raises(UserError, match="unpacks to more than"):
        BINARY.read(tmp_path)
    monkeypatch.setattr(sources, "LARGEST_UNPACKED", MEGABYTE)
    with pytest.raises(UserError, match="unpacks to more than"):
        sources.unpack(tmp_path / BINARY.archive, tmp_path, "the package")


def test_a_large_member_is_not_passed_over_at_length(tmp_path, measured) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", compresslevel=1) as tar:
        large = tarfile.TarInfo("x/large")
        large.size = 15 * MEGABYTE
        tar.addfile(large, io.BytesIO(bytes(large.size)))
    del tar
    (tmp_path / BINARY.archive).write_bytes(content.getvalue())
    del content
    tracemalloc.reset_peak()
    with pytest.raises(UserError, match="unpacks to more than"):
        BINARY.read(tmp_path)


def npz(path: Path, size: int, claimed: str = "") -> None:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({claimed or size},)}}\n"
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("inputs.npy", "w") as file,
    ):
        file.write(start)
        for _ in range(size // MEGABYTE):
            file.write(bytes(MEGABYTE))


def test_an_npz_of_zeros_is_not_unpacked(tmp_path, measured, monkeypatch) -> None:
    node = pytest.importorskip("deltafl.flower.node")
    monkeypatch.setattr(node, "LARGEST_UNASKED", MEGABYTE)
    npz(tmp_path / "bomb.npz", 50 * MEGABYTE)
    with pytest.raises(UserError, match=r"bomb.npz unpacks to 5\d+ bytes, over \d+: save it"):
        node.read_arrays(tmp_path / "bomb.npz")


@pytest.mark.parametrize("claimed", ["10**15", f"{10**15}", f"{10**30}"])
def test_an_array_that_claims_to_be_vast_is_refused(tmp_path, claimed) -> None:
    node = pytest.importorskip("deltafl.flower.node")
    npz(tmp_path / "x.npz", MEGABYTE, claimed)
    with pytest.raises(UserError, match="cannot read the data"):
        node.read_arrays(tmp_path / "x.npz")


def test_a_label_does_not_ask_for_a_list_of_classes(measured) -> None:
    images, labels = torch.zeros(1, 1, 2, 2), torch.tensor([10**15])
    with pytest.raises(UserError, match="a label is 1000000000000000: use class numbers"):
        Dataset.from_tensors("own", (images, labels), (images, labels))


def test_a_report_does_not_deal_what_another_ran_on_a_large_machine() -> None:
    federation = {"clients": 10**12, "samples": 10**8, "replacement": True}
    config = Config.model_validate({"task": "digits-mlp", "federation": federation})
    (note,) = Partitions().of([RunView(config, [(1, 0.5)])]).values()
    assert "too much to be dealt again" in str(note)
    config = config.override(**{"federation.samples": 50})
    (dealt,) = Partitions().of([RunView(config, [(1, 0.5)])]).values()
    assert np.sum(dealt.counts) == 100 * 50
