"""The catalog, and what holds for every model in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deltafl import models
from deltafl.errors import UserError

SMALL = {
    "softmax": {"shape": (1, 8, 8)},
    "mlp": {"shape": (1, 8, 8)},
    "cnn": {"shape": (1, 28, 28)},
    "resnet18": {"shape": (3, 16, 16), "width": 4, "norm": "group"},
    "resnet50": {"shape": (3, 16, 16), "width": 4, "norm": "group"},
}
TEXT = ("minilm", "distilbert", "transformer")  # see tests/text
REPRESENTATION = {"softmax": 64, "mlp": 64, "cnn": 50, "resnet18": 32, "resnet50": 128}


def small(name, seed=0):
    return models.build(name, classes=7, seed=seed, **SMALL[name])


def images(name, count=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *SMALL[name]["shape"], generator=generator)


def test_the_tests_cover_the_catalog():
    assert [name for name in models.names() if name not in TEXT] == list(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_shapes_and_gradients(name):
    model = small(name)
    representation = model.represent(images(name))
    assert representation.shape == (3, REPRESENTATION[name])
    logits = model.classify(representation)
    assert logits.shape == (3, 7)
    logits.square().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", SMALL)
def test_forward_is_classify_of_represent(name):
    model = small(name).eval()
    batch = images(name)
    assert torch.equal(model(batch), model.classify(model.represent(batch)))


@pytest.mark.parametrize("name", SMALL)
def test_the_representation_is_what_the_last_linear_layer_sees(name):
    model = small(name).eval()
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    seen = []
    last.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    batch = images(name)
    model(batch)
    assert torch.equal(seen[0], model.represent(batch))


@pytest.mark.parametrize("name", SMALL)
def test_the_seed_alone_decides_the_weights(name):
    torch.manual_seed(3)
    first = small(name, seed=5).state_dict()
    torch.manual_seed(4)
    second = small(name, seed=5).state_dict()
    other = small(name, seed=6).state_dict()
    assert all(torch.equal(first[entry], second[entry]) for entry in first)
    assert any(not torch.equal(first[entry], other[entry]) for entry in first)


def test_building_leaves_the_global_random_state_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    small("cnn")
    assert torch.equal(torch.get_rng_state(), before)


def test_two_models_of_one_seed_share_nothing():
    first, second = small("mlp"), small("mlp")
    with torch.no_grad():
        first.head.weight.add_(1)
    assert not torch.equal(first.head.weight, second.head.weight)


def test_a_classifier_of_ones_own_needs_both_halves():
    class Half(models.Classifier):
        def represent(self, inputs):
            return inputs

    with pytest.raises(NotImplementedError):
        Half()(torch.zeros(1, 2))
    with pytest.raises(NotImplementedError):
        models.Classifier()(torch.zeros(1, 2))


def test_softmax_is_an_affine_map_of_the_pixels():
    model = small("softmax")
    batch = images("softmax")
    expected = batch.reshape(3, 64) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(batch), expected)


def test_mlp_by_hand():
    model = models.build("mlp", shape=(1, 1, 2), classes=2, width=2, seed=0)
    with torch.no_grad():
        model.hidden.weight.copy_(torch.tensor([[1.0, 1.0], [-1.0, 0.0]]))
        model.hidden.bias.copy_(torch.tensor([0.0, 1.0]))
        model.head.weight.copy_(torch.tensor([[1.0, 2.0], [0.0, -1.0]]))
        model.head.bias.copy_(torch.tensor([0.5, 0.0]))
    # hidden = relu(3 + 2, -3 + 1) = (5, 0)
    assert model(torch.tensor([[[[3.0, 2.0]]]])).tolist() == [[5.5, 0.0]]


def test_mlp_width():
    model = models.build("mlp", shape=(1, 8, 8), classes=10, width=32, seed=0)
    assert sum(p.numel() for p in model.parameters()) == 64 * 32 + 32 + 32 * 10 + 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet81"}, r"unknown model 'resnet81': did you mean 'resnet18'\?"),
        ({"name": "softmax", "width": 3}, "'softmax' has no width: .* mlp or resnet18"),
        ({"name": "cnn", "width": 3}, "'cnn' has no width"),
        ({"name": "mlp", "norm": "group"}, "'mlp' has no norm: .* resnet18 or resnet50"),
        ({"name": "resnet18", "norm": "layer"}, "unknown norm 'layer': .*batch, group"),
        ({"name": "mlp", "width": 0}, "width 0 of model 'mlp'"),
        ({"name": "mlp", "shape": (1, 0, 8)}, r"shape \(1, 0, 8\)"),
        ({"name": "mlp", "classes": 1}, "cannot tell 1 classes apart"),
        ({"name": "cnn", "shape": (1, 15, 28)}, "at least 16x16 pixels, not 15x28: use 'mlp'"),
    ],
)
def test_what_cannot_be_built_is_said_in_a_line(arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        models.build(**{"shape": (1, 28, 28), "classes": 10, "seed": 0, **arguments})
    assert "\n" not in str(caught.value)
