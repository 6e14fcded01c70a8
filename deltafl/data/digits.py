"""The handwritten digits inside scikit-learn's wheel: 1797 images of 8x8, no network needed."""

from __future__ import annotations

import numpy as np

from deltafl.data.parts import Parts


def read() -> Parts:
    """Return the digits, every fifth image of each class held out as the test set.

    The split follows the order of the file, not a seed, so results on it compare.
    """
    # Here, because importing scikit-learn takes longer than most uses of this module.
    from sklearn.datasets import load_digits  # noqa: PLC0415

    bunch = load_digits()
    images = bunch.images.astype(np.uint8)[:, np.newaxis]
    labels = bunch.target.astype(np.uint8)
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        test[np.flatnonzero(labels == label)[4::5]] = True
    return {
        "train-images": images[~test],
        "train-labels": labels[~test],
        "test-images": images[test],
        "test-labels": labels[test],
    }
