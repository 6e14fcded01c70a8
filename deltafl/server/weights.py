"""The weights a server holds, and how they are read off a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]
"""Every entry of a model's state_dict, parameters and buffers, on the CPU."""


def weights_of(model: nn.Module) -> Weights:
    """Return a copy of a model's weights that further training does not change."""
    # Contiguous, because safetensors writes nothing else.
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
    }


def trainable_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that training changes: no buffers, nothing frozen."""
    return tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
