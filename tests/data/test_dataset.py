from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch

from deltafl.data import Dataset, Samples, Split
from deltafl.errors import UserError


def images(count: int, *, channels: int = 2, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, channels, 3, 4), generator=generator, dtype=torch.uint8)


def dataset(**changes: object) -> Dataset:
    whole = Dataset(
        name="own",
        train=Split(images(6), torch.tensor([0, 1, 2, 0, 1, 2])),
        test=Split(images(2, seed=1), torch.tensor([2, 0])),
        classes=("a", "b", "c"),
        mean=(0.5, 0.25),
        std=(0.25, 0.5),
    )
    return dataclasses.replace(whole, **changes)


def other_shape(count: int) -> Split:
    return Split(torch.zeros(count, 2, 5, 5, dtype=torch.uint8), torch.zeros(count).long())


def reopen_as_changed() -> Dataset:
    return dataset(name="reopened")


def test_samples_are_the_chosen_rows_normalised() -> None:
    whole = dataset()
    samples = whole.samples(whole.train, np.array([4, 1, 4]))
    assert len(samples) == 3
    assert samples.labels.tolist() == [1, 1, 1]
    raw = whole.train.inputs[[4, 1, 4]].float() / 255
    expected = torch.stack([(raw[:, 0] - 0.5) / 0.25, (raw[:, 1] - 0.25) / 0.5], dim=1)
    assert torch.equal(samples.inputs, expected)
    assert samples.inputs.dtype == torch.float32
    assert whole.train.inputs.dtype == torch.uint8


@pytest.mark.parametrize("index", [[1, 0], torch.tensor([1, 0]), np.array([1, 0])])
def test_an_index_may_be_a_list_a_tensor_or_an_array(index: object) -> None:
    whole = dataset()
    assert whole.samples(whole.test, index).labels.tolist() == [0, 2]  # type: ignore[arg-type]


def test_without_an_index_all_rows_come_and_the_stored_images_stay() -> None:
    floats = Split(torch.ones(2, 2, 3, 4), torch.tensor([2, 0]))
    whole = dataset(test=floats, scale=1.0)
    assert len(whole.samples(whole.train)) == 6
    assert whole.samples(whole.test).inputs[0, 0, 0, 0] == 2.0
    assert torch.equal(floats.inputs, torch.ones(2, 2, 3, 4))


def test_a_batch_is_rows_in_the_order_asked() -> None:
    samples = Samples(torch.arange(4.0).view(4, 1, 1, 1), torch.tensor([3, 2, 1, 0]))
    inputs, labels = samples.batch(torch.tensor([2, 0]))
    assert inputs.flatten().tolist() == [2.0, 0.0]
    assert labels.tolist() == [1, 3]


def test_shape_classes_and_black() -> None:
    whole = dataset()
    assert whole.shape == (2, 3, 4)
    assert whole.num_classes == 3
    zeros = dataset(test=Split(torch.zeros(1, 2, 3, 4, dtype=torch.uint8), torch.tensor([0])))
    black = zeros.samples(zeros.test).inputs[0, :, 0, 0]
    torch.testing.assert_close(black, torch.tensor(whole.black))


def test_a_set_of_own_tensors_pickles_by_value() -> None:
    copy = pickle.loads(pickle.dumps(dataset()))
    assert torch.equal(copy.train.inputs, dataset().train.inputs)
    assert copy.test.labels.tolist() == [2, 0]
    assert (copy.name, copy.classes, copy.mean, copy.scale) == (
        "own",
        ("a", "b", "c"),
        (0.5, 0.25),
        255.0,
    )


def test_a_referring_set_pickles_as_the_call_and_a_changed_copy_by_value() -> None:
    referring = dataset().referring_to(reopen_as_changed)
    assert referring.name == "own"
    assert pickle.loads(pickle.dumps(referring)).name == "reopened"
    assert len(pickle.dumps(referring)) < 200
    changed = dataclasses.replace(referring, augment="crop-flip")
    assert pickle.loads(pickle.dumps(changed)).augment == "crop-flip"


def test_from_tensors_measures_what_is_left_out() -> None:
    train = images(50), torch.arange(50) % 5
    whole = Dataset.from_tensors("own", train, (images(3), torch.tensor([0, 6, 1])))
    assert whole.scale == 255.0
    assert whole.classes == ("0", "1", "2", "3", "4", "5", "6")
    inputs = whole.samples(whole.train).inputs
    torch.testing.assert_close(inputs.mean((0, 2, 3)), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs.std((0, 2, 3), correction=0), torch.ones(2))


def test_from_tensors_takes_floats_constants_and_what_is_given() -> None:
    constant = torch.full((4, 1, 2, 2), 0.5), torch.tensor([0, 1, 0, 1])
    whole = Dataset.from_tensors("own", constant, constant, classes=["x", "y"], mean=[0.25])
    assert (whole.scale, whole.classes, whole.mean, whole.std) == (1.0, ("x", "y"), (0.25,), (1.0,))
    assert torch.equal(whole.samples(whole.train).inputs, torch.full((4, 1, 2, 2), 0.25))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Split(torch.zeros(2, 3, 4), torch.zeros(2).long()), "four axes"),
        (lambda: Split(torch.zeros(2, 1, 3, 4), torch.zeros(2)), "int64 class number"),
        (lambda: Split(torch.zeros(2, 1, 3, 4), torch.zeros(3).long()), "2 images but 3 labels"),
        (lambda: dataset(classes=("a", "b")), "training labels run from 0 to 2"),
        (lambda: dataset(mean=(0.5,)), "1 means and 2 deviations for 2 channels"),
        (lambda: dataset(std=(0.5, 0.0)), "positive std"),
        (lambda: dataset(scale=float("nan")), "finite numbers"),
        (lambda: dataset(test=other_shape(2)), "the same C,H,W"),
        (
            lambda: Dataset.from_tensors("own", *[(images(0), torch.zeros(0).long())] * 2),
            "no training images",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(build: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build()  # type: ignore[operator]
    assert "\n" not in str(caught.value)
