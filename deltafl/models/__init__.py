"""What a client trains: the catalog of models.

A model is a `Classifier`: `represent` turns inputs into what the last linear layer sees, and
`classify` turns that into logits. Models of images follow from the images' shape, those of text
from pretrained weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from deltafl.errors import UserError, unknown
from deltafl.models import pretrained, text
from deltafl.models.base import Classifier
from deltafl.models.cnn import CNN
from deltafl.models.linear import Softmax
from deltafl.models.mlp import MLP
from deltafl.models.resnet import NORMS, ResNet18, ResNet50

__all__ = [
    "CNN",
    "MLP",
    "Classifier",
    "ResNet18",
    "ResNet50",
    "Softmax",
    "build",
    "names",
    "tokenizer",
]

# Each model with the options it takes.
_MODELS: dict[str, tuple[Callable[..., Classifier], frozenset[str]]] = {
    "softmax": (Softmax, frozenset()),
    "mlp": (MLP, frozenset({"width"})),
    "cnn": (CNN, frozenset()),
    "resnet18": (ResNet18, frozenset({"width", "norm"})),
    "resnet50": (ResNet50, frozenset({"width", "norm"})),
}

_TEXT_MODELS = (*pretrained.CATALOG, "transformer")
"""Pretrained encoders by name, and any other, whose weights are named."""


def names() -> tuple[str, ...]:
    """Return the names `build` knows."""
    return (*_MODELS, *_TEXT_MODELS)


def tokenizer(
    name: str, weights: str | None = None, max_tokens: int | None = None
) -> text.PretrainedTokenizer | None:
    """Return what turns text into a model's tokens; None for models of images.

    Args:
        name: One of `names()`.
        weights: A folder of pretrained weights, or a name on the hub; None is the model's own.
        max_tokens: What texts are cut to; None is 128.
    """
    if name not in _TEXT_MODELS:
        if (weights, max_tokens) != (None, None):
            option = "max_tokens" if weights is None else "weights"
            raise UserError(
                f"model {name!r} has no {option}: leave it out, or use {' or '.join(_TEXT_MODELS)}"
            )
        return None
    folder = pretrained.folder_of(name, weights)
    return text.PretrainedTokenizer(folder, max_tokens or text.MAX_TOKENS)


def build(
    name: str,
    *,
    shape: tuple[int, int, int] | None,
    classes: int,
    width: int | None = None,
    norm: str | None = None,
    weights: str | None = None,
    fast: bool = False,
    seed: int,
) -> Classifier:
    """Return a model on the CPU whose initial weights depend on its options and `seed` only.

    Args:
        name: One of `names()`.
        shape: Channels, height and width of an image; None where the data is text.
        classes: The number of classes, at least two.
        width: Hidden units of `mlp` or base channels of a ResNet; None is 64 for both.
        norm: `batch` or `group`, for a ResNet; None is `batch`.
        weights: Pretrained weights of a model of text, as for `tokenizer`.
        fast: Whether the model may compute by kernels of ours instead of torch's.
        seed: Seeds the initial weights. The global random state is left as it was.
    """
    if name not in names():
        raise unknown("model", name, names())
    make, accepted = _MODELS.get(name, (None, frozenset()))
    given = {"width": width, "norm": norm}
    options = {option: value for option, value in given.items() if value is not None}
    for option in options:
        if option not in accepted:
            takers = [other for other, (_, takes) in _MODELS.items() if option in takes]
            raise UserError(
                f"model {name!r} has no {option}: leave it out, or use {' or '.join(takers)}"
            )
    if norm is not None and norm not in NORMS:
        raise unknown("norm", norm, NORMS)
    if width is not None and width < 1:
        raise UserError(f"width {width} of model {name!r} is too small: use 1 or more")
    if make is not None and shape is None:
        raise UserError(
            f"model {name!r} takes images, and the data is text: use {' or '.join(_TEXT_MODELS)}"
        )
    if make is None and shape is not None:
        raise UserError(
            f"model {name!r} reads text, and the data is images: use {' or '.join(_MODELS)}"
        )
    if shape is not None and min(shape) < 1:
        raise UserError(
            f"shape {shape} for model {name!r} is impossible: give channels, height and width, "
            "each 1 or more"
        )
    if classes < 2:
        raise UserError(f"model {name!r} cannot tell {classes} classes apart: use 2 or more")
    # The CPU generator alone: torch.manual_seed would also reseed those of the accelerators.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        if make is None:
            model: Classifier = text.load(pretrained.folder_of(name, weights), classes)
        else:
            model = make(shape, classes, **options)
    if fast:
        model.speed_up()
    return model
