"""Random changes of the training images, vectorised over a batch and drawn from one generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from deltafl.errors import UserError, unknown

Augmentation = Callable[[Tensor, torch.Generator], Tensor]

PADDING = 4


def crop_flip(images: Tensor, generator: torch.Generator, fill: Sequence[float] = (0.0,)) -> Tensor:
    """Shift each image by up to 4 pixels each way and mirror every second one, at random.

    That is a random crop of the image padded by 4, then a random horizontal flip: the usual
    augmentation of CIFAR. `fill` is the padding's value, one number or one per channel: images
    come here normalised, so the black of a raw image is not 0 but `Dataset.black`.
    """
    count, channels, height, width = images.shape
    if len(fill) not in (1, channels):
        raise UserError(
            f"crop-flip got {len(fill)} padding values for {channels} channels: "
            "give one, or one per channel"
        )
    tall, wide = height + 2 * PADDING, width + 2 * PADDING
    border = torch.tensor(fill, dtype=images.dtype, device=images.device).view(1, -1, 1, 1)
    padded = border.expand(count, channels, tall, wide).clone()
    padded[:, :, PADDING : PADDING + height, PADDING : PADDING + width] = images

    def draw(options: int) -> Tensor:
        drawn = torch.randint(options, (count, 1), generator=generator, device=generator.device)
        return drawn.to(images.device)

    top, left, mirrored = draw(2 * PADDING + 1), draw(2 * PADDING + 1), draw(2)
    rows = top + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    columns = left + torch.where(mirrored.bool(), columns.flip(0), columns)
    pixels = (rows * wide).unsqueeze(2) + columns.unsqueeze(1)
    index = pixels.view(count, 1, height * width).expand(count, channels, height * width)
    return padded.view(count, channels, tall * wide).gather(2, index).view_as(images)


def unchanged(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return the images as they are, and draw nothing."""
    return images


AUGMENTATIONS = ("none", "crop-flip")


def augmentation(name: str, fill: Sequence[float] = (0.0,)) -> Augmentation:
    """Return the augmentation called `name`; `fill` is what it pads with (see `Dataset.black`)."""
    if name == "none":
        return unchanged
    if name == "crop-flip":
        return partial(crop_flip, fill=tuple(fill))
    raise unknown("augmentation", name, AUGMENTATIONS)
