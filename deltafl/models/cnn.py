"""The CNN of the MNIST and Fashion-MNIST tasks (Section 4, "Datasets and models").

Two convolutional and two fully connected layers with dropout and ReLU.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from deltafl import kernels
from deltafl.errors import UserError
from deltafl.models.base import Classifier

SMALLEST = 16
"""The smallest height and width that leaves a pixel after both convolutions and poolings."""


def _pooled(size: int) -> int:
    """Return what two rounds of (5x5 convolution, 2x2 max-pool) leave of a height or width."""
    for _ in range(2):
        size = (size - 4) // 2
    return size


class CNN(Classifier):
    """The paper's shallow CNN, for images of 16x16 pixels and more."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < SMALLEST:
            raise UserError(
                f"model 'cnn' needs images of at least {SMALLEST}x{SMALLEST} pixels, "
                f"not {height}x{width}: use 'mlp' or 'softmax'"
            )
        self.conv1 = nn.Conv2d(channels, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.channel_dropout = nn.Dropout2d(0.5)
        self.hidden = nn.Linear(20 * _pooled(height) * _pooled(width), 50)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(50, classes)

    @property
    def native(self) -> bool:
        """Whether the convolutions run in compiled kernels."""
        return self.fast and kernels.available()

    def represent(self, inputs: Tensor) -> Tensor:
        """Return the 50 activations of the first fully connected layer, before dropout."""
        maps = self._fused(inputs) if self.fast else self._plain(inputs)
        hidden: Tensor = self.hidden(maps.flatten(1))
        return hidden.relu()

    def _plain(self, inputs: Tensor) -> Tensor:
        maps = F.max_pool2d(self.conv1(inputs), 2).relu()
        return F.max_pool2d(self.channel_dropout(self.conv2(maps)), 2).relu()

    def _fused(self, inputs: Tensor) -> Tensor:
        """Compute what `_plain` does, with the same dropout masks, up to rounding."""
        first, second, p = self.conv1, self.conv2, self.channel_dropout.p
        assert first.bias is not None
        assert second.bias is not None
        maps = kernels.conv_pool_relu(inputs, first.weight, first.bias)
        scale = None
        if self.training:
            scale = kernels.dropout2d_scale(len(maps), second.out_channels, p, like=maps)
        return kernels.conv_pool_relu(maps, second.weight, second.bias, scale)

    def classify(self, representation: Tensor) -> Tensor:
        """Return the logits of those activations, dropout in between."""
        logits: Tensor = self.head(self.dropout(representation))
        return logits
