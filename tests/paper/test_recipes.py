from __future__ import annotations

import pytest

from deltafl import Config, data
from deltafl.errors import UserError
from deltafl.paper import recipes
from deltafl.paper.numbers import Cell, Number, published
from deltafl.paper.only import Only
from deltafl.paper.recipes import ITEMS
from deltafl.paper.scale import LAPTOP, PAPER


@pytest.mark.parametrize(
    ("cell", "number"),
    [
        (Cell("table-1", "mnist-cnn", 1.0, "sps"), Number(10.1, None)),
        (Cell("table-1", "fmnist-cnn", 0.01, "delta-sgd"), Number(80.2, None)),
        (Cell("table-1", "cifar100-resnet50", 0.1, "sgdm-decay"), Number(52.8, None)),
        (Cell("table-2a", "agnews-distilbert", 1.0, "adam"), Number(25.0, None)),
        (Cell("table-3", "cifar10-resnet18", 0.1, "sgd"), Number(80.7, None)),
        (Cell("table-4", "cifar100-resnet18", 0.1, "adagrad"), Number(1.0, None)),
        (Cell("table-5", "cifar10-resnet18", 0.1, "sps"), Number(9.57, None)),
        (Cell("table-6", "mnist-cnn", 0.01, "delta-sgd"), Number(96.9, None)),
        (Cell("table-7", "fmnist-cnn", 0.1, "delta-sgd"), Number(85.21, 1.52)),
    ],
)
def test_the_papers_numbers_are_there(cell, number):
    assert published()[cell] == number


@pytest.mark.parametrize(
    ("table", "tasks", "alphas"),
    [
        ("table-1", 5, 3),
        ("table-2a", 2, 1),
        ("table-3", 2, 1),
        ("table-4", 4, 1),
        ("table-5", 1, 1),
        ("table-6", 5, 1),
        ("table-7", 3, 1),
    ],
)
def test_every_cell_of_a_table_has_the_papers_number(table, tasks, alphas):
    cases = [case for case in ITEMS[table].cases if case.optimizer in recipes.OPTIMIZERS]
    assert len(cases) == tasks * alphas * 8
    assert all(ITEMS[table].theirs(case) is not None for case in cases)
    assert sum(cell.item == table for cell in published()) == len(cases)


def test_the_papers_scale_is_the_papers_setting():
    seen = {}
    for _, config in ITEMS["table-1"].runs(PAPER, {}):
        seen[config.dataset_name] = config.run.rounds
        assert (config.federation.clients, config.federation.samples) == (100, None)
        assert (config.federation.participation, config.client.batch_size) == (0.1, 64)
        assert (config.client.epochs, config.model.width) == (1, None)
    assert seen == {"mnist": 500, "fmnist": 1000, "cifar10": 2000, "cifar100": 2000}


def test_the_laptops_scale_cuts_rounds_and_width_only():
    theirs = [config for _, config in ITEMS["table-1"].runs(PAPER, {})]
    ours = [config for _, config in ITEMS["table-1"].runs(LAPTOP, {})]
    for large, small in zip(theirs, ours, strict=True):
        assert small.run.rounds < large.run.rounds
        assert small.federation == large.federation
        assert small.client == large.client


def test_an_ablation_shares_its_middle_value_with_the_table():
    table = {config.fingerprint for _, config in ITEMS["table-1"].runs(PAPER, {})}
    for item, variant in (("figure-4", "δ = 0.1"), ("figure-5", "E = 1")):
        shared = [c for case, c in ITEMS[item].runs(PAPER, {}) if case.variant == variant]
        assert shared
        assert {config.fingerprint for config in shared} <= table


def test_the_first_seed_of_every_cell_comes_before_the_second_of_any():
    seeds = [config.run.seed for _, config in ITEMS["table-7"].runs(PAPER, {})]
    assert seeds == sorted(seeds)
    assert set(seeds) == {0, 1, 2}


def test_given_learning_rates_replace_the_authors():
    rates = {"sgd": 0.5}
    for case, config in ITEMS["table-5"].runs(PAPER, rates):
        assert config.client.lr == (0.5 if case.optimizer == "sgd" else None)
    for case, config in ITEMS["tuning"].runs(PAPER, rates):
        assert config.client.lr == case.changes["client.lr"]
        assert config.run.evaluate_on == "validation"


def test_tuning_searches_the_papers_grids_on_one_task():
    grid: dict[str, list[float]] = {}
    for case in ITEMS["tuning"].cases:
        assert (case.task, case.alpha) == ("cifar10-resnet18", 0.1)
        grid.setdefault(case.optimizer, []).append(case.changes["client.lr"])
    assert set(grid) == {"sgd", "sgd-decay", "sgdm", "sgdm-decay", "adam", "adagrad"}
    assert grid["sgdm"] == [0.01, 0.05, 0.1, 0.5]
    assert grid["adam"] == [0.001, 0.01, 0.1]


def test_failures_are_asked_of_ten_short_runs():
    """They are no cells of Table 1, so the paper's numbers do not stand beside them."""
    item = ITEMS["collapse"]
    seeds: dict[str, list[int]] = {}
    for case, config in item.runs(PAPER, {}):
        assert config.run.rounds == 50
        seeds.setdefault(f"{case.alpha} {case.label}", []).append(config.run.seed)
    assert len(seeds) == 7
    assert all(found == list(range(10)) for found in seeds.values())
    assert all(item.theirs(case) is None for case in item.cases)


def test_items_are_found_by_name_and_by_alias():
    assert recipes.lookup("fedadam") is recipes.lookup("table-4")
    names = [word for item in ITEMS.values() for word in (item.name, item.alias)]
    assert len(names) == len(set(names))
    with pytest.raises(UserError, match="table-1"):
        recipes.lookup("table-11")


def test_a_data_set_that_is_missing_is_named():
    case = recipes.Case("nothere-cnn", 1.0, "sgd")
    with pytest.raises(UserError, match="nothere"):
        case.config(PAPER, 0, {})


def test_the_paper_knows_its_own_settings_at_any_length():
    def theirs(**changes: object) -> float | None:
        return recipes.published_for(Config().override(**changes))

    assert theirs(task="fmnist-cnn", **{"run.rounds": 3, "run.seed": 7}) == 86.4
    assert theirs(task="mnist-cnn", **{"server.optimizer": "fedadam"}) == 97.9
    assert theirs(task="mnist-cnn", **{"federation.alpha": 0.5}) is None
    assert theirs(task="digits-mlp") is None
    assert theirs(task="fmnist-cnn", **{"client.epochs": 2}) is None


class TestOnly:
    def wanted(self, *words: str) -> set[tuple[str, float, str, int]]:
        only = Only.parse(words)
        return {
            (c.task, c.federation.alpha, c.client.optimizer, c.run.seed)
            for _, c in ITEMS["table-1"].runs(PAPER, {})
            if only.wants(c)
        }

    def test_nothing_given_wants_all(self):
        assert len(self.wanted()) == 165

    def test_words_narrow_the_choice(self):
        assert self.wanted("fmnist-cnn", "alpha=0.1", "delta-sgd,sgd", "seed=0") == {
            ("fmnist-cnn", 0.1, "delta-sgd", 0),
            ("fmnist-cnn", 0.1, "sgd", 0),
        }
        assert len(self.wanted("task=mnist-cnn", "alpha=1,0.1", "optimizer=adam")) == 2

    @pytest.mark.parametrize(
        "word", ["fmnist", "color=red", "alpha=x", "seed=one", "task=digits-mlp", "optimizer=what"]
    )
    def test_a_strange_word_is_refused(self, word):
        with pytest.raises(UserError):
            Only.parse([word])


def test_items_that_run_use_data_sets_that_exist():
    known = set(data.names())
    for item in ITEMS.values():
        for case in item.cases:
            assert case.task.partition("-")[0] in known


def test_the_papers_numbers_stand_beside_the_model_that_stands_in():
    item = ITEMS["table-2a-minilm"]
    assert len(item.cases) == 2 * 9
    numbers = {case.optimizer: item.theirs(case) for case in item.cases[:9]}
    assert numbers["adam"] == Number(25.0, None)
    assert numbers["delta-sgd-reused"] is None
    for scale, samples, rounds in ((PAPER, None, 100), (LAPTOP, 240, 6)):
        for _, config in item.runs(scale, {}):
            assert (config.federation.clients, config.federation.samples) == (50, samples)
            assert (config.client.batch_size, config.run.rounds) == (16, rounds)
            assert (config.federation.alpha, config.federation.participation) == (1.0, 0.1)
