"""What a client trains: the catalog of models.

A model is a `Classifier`: `represent` turns inputs into what the last linear layer sees, and
`classify` turns that into logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from deltafl.errors import UserError, unknown
from deltafl.models.base import Classifier
from deltafl.models.cnn import CNN
from deltafl.models.linear import Softmax
from deltafl.models.mlp import MLP
from deltafl.models.resnet import NORMS, ResNet18, ResNet50

__all__ = ["CNN", "MLP", "Classifier", "ResNet18", "ResNet50", "Softmax", "build", "names"]

# Each model with the options it takes.
_MODELS: dict[str, tuple[Callable[..., Classifier], frozenset[str]]] = {
    "softmax": (Softmax, frozenset()),
    "mlp": (MLP, frozenset({"width"})),
    "cnn": (CNN, frozenset()),
    "resnet18": (ResNet18, frozenset({"width", "norm"})),
    "resnet50": (ResNet50, frozenset({"width", "norm"})),
}


def names() -> tuple[str, ...]:
    """Return the names `build` knows."""
    return tuple(_MODELS)


def build(
    name: str,
    *,
    shape: tuple[int, int, int],
    classes: int,
    width: int | None = None,
    norm: str | None = None,
    fast: bool = False,
    seed: int,
) -> Classifier:
    """Return a model on the CPU whose initial weights depend on its options and `seed` only.

    Args:
        name: One of `names()`.
        shape: Channels, height and width of an image.
        classes: The number of classes, at least two.
        width: Hidden units of `mlp` or base channels of a ResNet; None is 64 for both.
        norm: `batch` or `group`, for a ResNet; None is `batch`.
        fast: Whether the model may compute by kernels of ours instead of torch's.
        seed: Seeds the initial weights. The global random state is left as it was.
    """
    if name not in _MODELS:
        raise unknown("model", name, _MODELS)
    make, accepted = _MODELS[name]
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
    if min(shape) < 1:
        raise UserError(
            f"shape {shape} for model {name!r} is impossible: give channels, height and width, "
            "each 1 or more"
        )
    if classes < 2:
        raise UserError(f"model {name!r} cannot tell {classes} classes apart: use 2 or more")
    # The CPU generator alone: torch.manual_seed would also reseed those of the accelerators.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model = make(shape, classes, **options)
    if fast:
        model.speed_up()
    return model
