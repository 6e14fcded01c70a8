from __future__ import annotations

import pytest
import torch
from torch import nn

from deltafl import models


def build(name, shape=(3, 32, 32), classes=10, **options):
    return models.build(name, shape=shape, classes=classes, seed=0, **options)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("name", "count"), [("resnet18", 11_173_962), ("resnet50", 23_520_842)])
def test_parameters_of_the_cifar_networks(name, count, norm):
    model = build(name, norm=norm)
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(("name", "layers"), [("resnet18", 18), ("resnet50", 50)])
def test_the_number_in_the_name_counts_the_layers(name, layers):
    model = build(name, width=2)
    shortcuts = {id(m) for block in model.blocks for m in block.shortcut.modules()}
    weighted = [
        m
        for m in model.modules()
        if isinstance(m, nn.Conv2d | nn.Linear) and id(m) not in shortcuts
    ]
    assert len(weighted) == layers


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize(
    ("shape", "sizes"), [((3, 32, 32), [32, 16, 8, 4]), ((1, 28, 28), [28, 14, 7, 4])]
)
def test_the_stages_see_these_image_sizes(name, shape, sizes):
    model = build(name, shape, width=2)
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: seen.append(output.shape[-1]))
    model(torch.zeros(2, *shape))
    assert sorted(set(seen), reverse=True) == sizes


@pytest.mark.parametrize(("width", "groups"), [(64, 32), (16, 8), (8, 4), (24, 4), (2, 1), (3, 1)])
def test_groups_divide_every_width(width, groups):
    model = build("resnet50", width=width, norm="group")
    norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 1 + 16 * 3 + 4
    assert {m.num_groups for m in norms} == {groups}


def test_norm_defaults_to_batch_and_group_leaves_no_buffers():
    assert any(isinstance(m, nn.BatchNorm2d) for m in build("resnet18", width=2).modules())
    assert not list(build("resnet18", width=2, norm="group").buffers())


def test_a_block_whose_branch_is_silent_is_its_shortcut():
    model = build("resnet18", width=4, norm="batch").eval()
    block = model.blocks[0]  # same shape in and out: the identity
    nn.init.zeros_(block.branch[-1].weight)
    maps = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(maps), maps.relu())


def test_convolutions_start_with_he_deviations():
    model = build("resnet18")
    conv = model.blocks[0].branch[0]
    assert conv.weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)


def test_group_norm_trains_on_a_single_pixel_where_batch_norm_cannot():
    image = torch.ones(1, 3, 8, 8)  # 8, 4, 2 and at last 1 pixel
    assert build("resnet18", (3, 8, 8), width=4, norm="group")(image).isfinite().all()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        build("resnet18", (3, 8, 8), width=4, norm="batch")(image)
