from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from deltafl.data import augmentation, crop_flip
from deltafl.errors import UserError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def every_outcome(image: Tensor, fill: list[float]) -> list[Tensor]:
    """All crops of the padded image, plain and mirrored, the slow and obvious way."""
    channels, height, width = image.shape
    outcomes = []
    padded = torch.tensor(fill).view(-1, 1, 1).repeat(1, height + 8, width + 8)
    padded[:, 4 : 4 + height, 4 : 4 + width] = image
    for top in range(9):
        for left in range(9):
            crop = padded[:, top : top + height, left : left + width]
            outcomes += [crop, crop.flip(2)]
    assert outcomes[0].shape == (channels, height, width)
    return outcomes


def test_each_image_becomes_one_of_its_crops_and_all_of_them_occur() -> None:
    image = torch.randn(3, 6, 5, generator=seeded(1))
    fill = [-1.0, 2.0, 0.5]
    outcomes = torch.stack(every_outcome(image, fill))
    changed = crop_flip(image.expand(4000, 3, 6, 5), seeded(), fill)
    same = (changed.unsqueeze(1) == outcomes.unsqueeze(0)).flatten(2).all(2)
    assert (same.sum(1) == 1).all()
    counts = same.sum(0)
    # 162 outcomes, as likely as one another: about 25 of each in 4000.
    assert counts.min() > 0
    assert counts.max() < 25 + 6 * 5


def test_images_are_changed_independently_of_one_another() -> None:
    image = torch.randn(1, 8, 8, generator=seeded(1))
    changed = crop_flip(image.expand(16, 1, 8, 8), seeded())
    assert len({tuple(one.flatten().tolist()) for one in changed}) > 8


def test_the_generator_decides_everything_and_the_input_stays() -> None:
    images = torch.randn(7, 3, 8, 9, generator=seeded(1))
    before = images.clone()
    first, again = crop_flip(images, seeded(5)), crop_flip(images, seeded(5))
    assert torch.equal(first, again)
    assert torch.equal(images, before)
    assert not torch.equal(first, crop_flip(images, seeded(6)))
    assert first.dtype == images.dtype
    assert first.is_contiguous()


def test_no_images_stay_no_images() -> None:
    assert crop_flip(torch.empty(0, 3, 8, 8), seeded()).shape == (0, 3, 8, 8)


def test_catalog() -> None:
    images = torch.randn(4, 3, 8, 8, generator=seeded(1))
    assert augmentation("none")(images, seeded()) is images
    by_name = pickle.loads(pickle.dumps(augmentation("crop-flip", (1.0, 2.0, 3.0))))
    expected = crop_flip(images, seeded(), (1.0, 2.0, 3.0))
    assert torch.equal(by_name(images, seeded()), expected)


def test_unknown_names_and_wrong_fills_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'crop-flip'"):
        augmentation("cropflip")
    with pytest.raises(UserError, match="2 padding values for 3 channels"):
        crop_flip(torch.zeros(1, 3, 8, 8), seeded(), (0.0, 1.0))
