from __future__ import annotations

import pytest
import torch

from deltafl import run
from deltafl.cli import main
from deltafl.client import LocalWork, train
from deltafl.data.text import dataset as text_data
from deltafl.engine import WorkersEngine
from deltafl.engine.workbench import build_model
from deltafl.experiment.federation import build_setup
from deltafl.flower.node import Node
from deltafl.flower.wire import facts_of
from deltafl.objective import CrossEntropy


@pytest.fixture(scope="module")
def two_workers():
    with WorkersEngine(2) as engine:
        yield engine


@pytest.mark.parametrize(
    ("optimizer", "objective"),
    [
        ("delta-sgd", "cross-entropy"),
        ("delta-sgd-reused", "fedprox"),
        ("adam", "moon"),
        ("sps", "cross-entropy"),
    ],
)
def test_engines_agree_bit_for_bit(small_text, texts, two_workers, optimizer, objective):
    config = small_text.override(
        **{
            "client.optimizer": optimizer,
            "client.objective": objective,
            "federation.participation": 1.0,
        }
    )
    inline = run(config, dataset=texts)
    workers = run(config, dataset=texts, engine=two_workers)
    assert workers.summary["weights_sha256"] == inline.summary["weights_sha256"]
    assert [row["test_loss"] for row in workers.metrics] == [
        row["test_loss"] for row in inline.metrics
    ]


def test_it_learns(small_text, texts):
    config = small_text.override(
        **{
            "run.rounds": 6,
            "client.optimizer": "adam",
            "client.lr": 0.01,
            "client.epochs": 3,
            "federation.participation": 1.0,
            "federation.alpha": 100.0,
        }
    )
    assert run(config, dataset=texts).final_test_accuracy > 0.5  # a third is chance


class Crash(Exception):
    """Stands for whatever ends a process."""


class CrashAfterOne:
    def started(self, config, done):
        self.began_after = done

    def finished_round(self, report):
        if report.round == 1:
            raise Crash

    def finished(self, summary):
        pass


def test_a_resumed_run_ends_with_the_same_bits(small_text, texts, tmp_path):
    config = small_text.override(**{"client.objective": "moon", "federation.participation": 1.0})
    whole = run(config, dataset=texts)
    with pytest.raises(Crash):
        run(config, dataset=texts, out=tmp_path / "run", listeners=[CrashAfterOne()])
    watcher = CrashAfterOne()
    watcher.finished_round = lambda report: None
    resumed = run(config, dataset=texts, out=tmp_path / "run", listeners=[watcher])
    assert watcher.began_after == 1
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_dropout_follows_the_clients_seed(small_text, texts):
    setup = build_setup(small_text, texts)
    model = build_model(setup)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    samples = texts.samples(texts.train, setup.partition.indices(0))
    work = LocalWork(CrossEntropy(), "sgd", batch_size=8)

    def trained(seed):
        torch.randn(seed + 1)  # the state around a client must not matter
        updates = train(model, work, weights, samples, None, seed, 0.0)
        return updates.weights["head.weight"].clone()

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


def test_the_client_sees_plain_tensors_in_about_one_length(small_text, texts, monkeypatch):
    setup = build_setup(small_text, texts)
    model = build_model(setup)
    seen = []
    forward = model.represent
    monkeypatch.setattr(
        model, "represent", lambda inputs: (seen.append(inputs), forward(inputs))[1]
    )
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    samples = texts.samples(texts.train, setup.partition.indices(0))
    updates = train(model, setup.work, weights, samples, None, 0, 0.0)
    assert all(type(value) is torch.Tensor for value in updates.weights.values())
    assert len(seen) == 2 * 5 - 1  # 40 samples in batches of 8; the first step has one gradient
    assert {inputs["input_ids"].shape[0] for inputs in seen} == {8}


def test_a_part_of_the_data_is_told_of(toy, tiny_distilbert, small_text, tmp_path, capsys):
    config = small_text.override(**{"task": "toy-transformer", "federation.samples": 15})
    result = run(config, out=tmp_path / "run")
    assert result.summary["data"] == "a part, 90 of 900 rows"


def test_a_checkpoint_of_another_part_is_refused(toy, small_text, tmp_path, monkeypatch):
    import dataclasses

    from deltafl.data.text.catalog import TEXTS
    from deltafl.errors import UserError

    config = small_text.override(**{"task": "toy-transformer", "federation.samples": 15})
    with pytest.raises(Crash):
        run(config, out=tmp_path / "run", listeners=[CrashAfterOne()])
    part = dataclasses.replace(toy.editions[1], part="another part")
    monkeypatch.setitem(TEXTS, "toy", dataclasses.replace(toy, editions=(toy.editions[0], part)))
    with pytest.raises(UserError, match="trained on a part, 90 of 900 rows"):
        run(config, out=tmp_path / "run")


def test_a_few_test_samples_are_drawn_from_the_seed(small_text, texts):
    config = small_text.override(**{"run.test_samples": 25})
    rows = build_setup(config, texts).test_rows
    assert len(set(rows.tolist())) == 25
    assert rows.tolist() == build_setup(config, texts).test_rows.tolist()
    other = build_setup(config.override(**{"run.seed": 1}), texts).test_rows
    assert rows.tolist() != other.tolist()
    assert build_setup(small_text.override(**{"run.test_samples": 99}), texts).test_rows is None
    accuracy = run(config, dataset=texts).final_test_accuracy
    assert accuracy * 25 == pytest.approx(round(accuracy * 25))


def test_evaluation_does_not_depend_on_how_texts_are_put_together(
    small_text, texts, two_workers, monkeypatch
):
    config = small_text.override(**{"run.rounds": 1})
    together = run(config, dataset=texts)
    monkeypatch.setattr(text_data, "EVALUATION_BATCH", 1)
    alone = run(config, dataset=texts)
    assert alone.final_test_accuracy == together.final_test_accuracy
    assert alone.summary["final_test_loss"] == pytest.approx(
        together.summary["final_test_loss"], rel=1e-5
    )


def test_augmentations_are_for_images(toy, tiny_distilbert, capsys):
    words = ["--task", "toy-transformer", "--model.weights", str(tiny_distilbert)]
    words += ["--federation.clients", "9", "--engine.kind", "inline"]
    assert main(["run", *words, "--client.augment", "crop-flip"]) == 2
    assert "is for images" in capsys.readouterr().err


def test_a_node_trains_on_texts_of_its_own(small_text, texts, tmp_path):
    import numpy as np

    place = tmp_path / "mine.npz"
    np.savez(place, inputs=np.array(["oil price", "goal of the season"]), labels=[0, 1])
    setup = Node(0, data=str(place)).setup(small_text, facts_of(texts))
    assert len(setup.dataset.train) == 2
    assert setup.partition.size(0) == 2
    images = tmp_path / "images.npz"
    np.savez(images, inputs=np.zeros((2, 1, 8, 8)), labels=[0, 1])
    from deltafl.errors import UserError

    with pytest.raises(UserError, match="give strings"):
        Node(0, data=str(images)).setup(small_text, facts_of(texts))
