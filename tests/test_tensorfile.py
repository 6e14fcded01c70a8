from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltafl import UserError, tensorfile

TENSORS = {
    "a/weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "count": torch.tensor(3),
    "half": torch.tensor([0.5, -0.0], dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
}


def test_what_was_saved_comes_back(tmp_path: Path):
    path = tmp_path / "file.safetensors"
    tensorfile.save(path, TENSORS, {"round": 3, "name": "ü"})
    tensors, about = tensorfile.load(path)
    assert about == {"round": 3, "name": "ü"}
    assert tensors.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value)
    assert list(tmp_path.iterdir()) == [path]


def test_the_digest_sees_every_bit_and_no_order():
    turned = dict(reversed(TENSORS.items()))
    assert tensorfile.digest(turned) == tensorfile.digest(TENSORS)
    changes = {
        "renamed": {"b/weight": TENSORS["a/weight"]},
        "reshaped": {"a/weight": TENSORS["a/weight"].view(3, 2)},
        "retyped": {"a/weight": TENSORS["a/weight"].view(torch.int32)},
    }
    seen = {tensorfile.digest({"a/weight": TENSORS["a/weight"]})}
    seen |= {tensorfile.digest(changed) for changed in changes.values()}
    seen.add(tensorfile.digest({"a/weight": TENSORS["a/weight"].neg()}))
    assert len(seen) == 5


@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_changed_byte_is_noticed(tmp_path_factory, place, flip):
    path = tmp_path_factory.mktemp("x") / "file.safetensors"
    tensorfile.save(path, TENSORS, {"round": 3})
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= flip
    path.write_bytes(content)
    try:
        tensors, about = tensorfile.load(path)
    except UserError:
        return
    # White space in the header may turn into other white space: nothing has changed then.
    assert tensorfile.digest(tensors) == tensorfile.digest(TENSORS)
    assert about == {"round": 3}


@given(length=st.integers(0, 600))
def test_a_file_cut_short_is_noticed(tmp_path_factory, length):
    path = tmp_path_factory.mktemp("x") / "file.safetensors"
    tensorfile.save(path, TENSORS, {})
    content = path.read_bytes()
    path.write_bytes(content[: min(length, len(content) - 1)])
    with pytest.raises(UserError, match="damaged"):
        tensorfile.load(path)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch):
    path = tmp_path / "file"
    tensorfile.write_atomically(path, b"old")

    def no_space(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        tensorfile.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
