"""The handwritten digits inside scikit-learn's wheel: 1797 images of 8x8, no network needed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deltafl.data.parts import Parts


def read() -> Parts:
    """Return the digits, every fifth image of each class held out as the test set.

    The split follows the order of the file, not a seed, so results on it compare.
    """
    rows = _rows()
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1]
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        test[np.flatnonzero(labels == label)[4::5]] = True
    return {
        "train-images": images[~test],
        "train-labels": labels[~test],
        "test-images": images[test],
        "test-labels": labels[test],
    }


def _rows() -> npt.NDArray[np.uint8]:
    """Return a row an image: its 64 pixels, then its digit.

    The file is read where it lies, because importing scikit-learn takes longer than a small run.
    """
    found = find_spec("sklearn")
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.exists():
            return np.loadtxt(file, delimiter=",", dtype=np.uint8)
    return rows_of_scikit_learn()


def rows_of_scikit_learn() -> npt.NDArray[np.uint8]:
    """Return the rows as scikit-learn itself reads them, wherever it has them."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  (slow to import)

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target]).astype(np.uint8)
