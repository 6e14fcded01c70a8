from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from deltafl import models


def build(shape=(1, 28, 28), classes=10):
    return models.build("cnn", shape=shape, classes=classes, seed=0)


def test_parameters_of_the_paper_cnn():
    # conv 5x5: 25*10+10 and 250*20+20; linear: 320*50+50 and 50*10+10.
    assert sum(p.numel() for p in build().parameters()) == 260 + 5020 + 16050 + 510


@pytest.mark.parametrize(
    ("shape", "flat"),
    [((1, 28, 28), 320), ((3, 32, 32), 500), ((1, 16, 16), 20), ((1, 16, 28), 80)],
)
def test_other_image_sizes(shape, flat):
    model = build(shape).eval()
    assert model.hidden.in_features == flat
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


def test_eval_is_the_plain_composition():
    model = build().eval()
    batch = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    maps = F.relu(F.max_pool2d(F.conv2d(batch, model.conv1.weight, model.conv1.bias), 2))
    maps = F.relu(F.max_pool2d(F.conv2d(maps, model.conv2.weight, model.conv2.bias), 2))
    hidden = F.relu(maps.reshape(4, 320) @ model.hidden.weight.T + model.hidden.bias)
    expected = hidden @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(batch), expected)


def test_dropout_of_training_drops_whole_channels_of_the_second_convolution():
    model = build().train()
    seen = []
    model.channel_dropout.register_forward_hook(lambda module, args, output: seen.append(output))
    model(torch.randn(8, 1, 28, 28, generator=torch.Generator().manual_seed(0)))
    zeros = (seen[0] == 0).flatten(2)
    whole = zeros.all(dim=2)
    assert torch.equal(whole, zeros.any(dim=2))
    assert 0 < int(whole.sum()) < whole.numel()


def test_the_representation_is_before_the_last_dropout():
    model = build().train()
    model.channel_dropout.eval()  # leaves the last dropout as the only randomness
    batch = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    representation = model.represent(batch)
    assert torch.equal(representation, model.represent(batch))
    assert not torch.equal(model.classify(representation), model.classify(representation))
