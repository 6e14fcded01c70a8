from __future__ import annotations

import dataclasses
import json

import pytest

from deltafl.errors import UserError
from deltafl.experiment import run
from deltafl.paper.cells import Result, best_of, results, verdict
from deltafl.paper.numbers import Number
from deltafl.paper.only import Only
from deltafl.paper.recipes import ITEMS, Case
from deltafl.paper.records import Record, Records, record
from deltafl.paper.scale import LAPTOP, PAPER
from deltafl.paper.tables import coverage, to_csv, to_latex, to_markdown, to_rich


def made(config, final: float, scale: str = "paper") -> Record:
    return Record(
        fingerprint=config.fingerprint,
        task=config.task,
        scale=scale,
        config=config.changes,
        final=final,
        tail=final,
        best=final,
        refused=0,
        seconds=1.0,
        weights_sha256="0" * 64,
        finished="2026-01-01T00:00:00Z",
        hardware="test",
        native_kernels=True,
        versions={"deltafl": "0"},
        curve=[(1, final)],
    )


@pytest.fixture(scope="module")
def fmnist() -> list[Case]:
    return [case for case in ITEMS["table-7"].cases if case.task == "fmnist-cnn"]


def test_a_record_keeps_what_a_run_found(small):
    config = small.override(**{"run.rounds": 20, "run.eval_every": 2})
    result = run(config)
    row = record(result, "laptop")
    assert row.fingerprint == config.fingerprint
    assert row.configuration().identity == config.identity
    assert row.final == result.final_test_accuracy == row.curve[-1][1]
    assert row.tail == pytest.approx(row.curve[-1][1])  # round 20 alone lies past round 18
    assert [round_ for round_, _ in row.curve] == list(range(2, 21, 2))
    assert row.steps is None


def test_a_part_of_the_data_is_told_below_the_table():
    item = ITEMS["table-2a-minilm"]
    rows = [made(config, 0.5, "laptop") for _, config in item.runs(LAPTOP, {})]
    rows = [row.model_copy(update={"data": "a part"}) for row in rows if "agnews" in row.task]
    cells = [
        Result(case, "laptop", (row,), 1, item.theirs(case))
        for case, row in zip(item.cases, rows, strict=False)
    ]
    text = to_markdown(item, cells)
    assert "agnews-minilm: trained on a part." in text
    assert "DistilBERT" in text
    assert "trained on" not in to_markdown(ITEMS["table-1"], [])


def test_step_sizes_are_those_of_the_first_client_of_a_round(small):
    config = small.override(**{"run.record_step_sizes": True})
    result = run(config)
    steps = record(result, "laptop").steps
    first = [next(iter(row["steps"].values())) for row in result.metrics]
    assert steps.round == [row + 1 for row, s in enumerate(first) for _ in s["eta"]]
    assert steps.eta == pytest.approx([eta for s in first for eta in s["eta"]], rel=1e-3)


def test_records_are_found_again_and_the_newest_counts(tmp_path, small):
    records = Records(tmp_path / "results")
    assert records.get(small.fingerprint) is None
    records.add(made(small, 0.5))
    records.add(made(small, 0.6))
    records.add(made(small.override(**{"run.seed": 1}), 0.7))
    again = Records(tmp_path / "results")
    assert again.get(small.fingerprint).final == 0.6
    assert len(list(again.all())) == 2
    lines = (tmp_path / "results" / "digits-softmax-paper.jsonl").read_text().splitlines()
    assert len(lines) == 2


@pytest.mark.parametrize("line", ["{", "[]", '{"task": "x"}', "null", '{"a":' * 5000])
def test_a_damaged_line_is_named(tmp_path, line):
    (tmp_path / "x-paper.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"x-paper\.jsonl, line 1"):
        Records(tmp_path)


def test_a_new_field_of_the_configuration_leaves_fingerprints_alone(small):
    assert small.fingerprint == small.override(**{"engine.workers": 2}).fingerprint
    assert "engine" not in small.override(**{"engine.fast": True}).changes
    assert small.override(**{"engine.fast": False}).fingerprint != small.fingerprint


class TestCells:
    @pytest.fixture
    def cells(self, tmp_path, fmnist):
        records = Records(tmp_path)
        finals = {"sgd": (0.80, 0.82, 0.84), "delta-sgd": (0.86, 0.861), "adam": (0.856,)}
        for case in fmnist:
            for seed, final in enumerate(finals.get(case.optimizer, ())):
                records.add(made(case.config(PAPER, seed, {}), final))
        return results(ITEMS["table-7"], PAPER, records, {}, Only.parse(["fmnist-cnn"]))

    def by_name(self, cells) -> dict[str, Result]:
        return {cell.case.optimizer: cell for cell in cells}

    def test_mean_deviation_and_difference(self, cells):
        cell = self.by_name(cells)["sgd"]
        assert (cell.ours, cell.std, cell.n, cell.wanted) == (82.0, 2.0, 3, 3)
        assert cell.theirs == Number(83.43, 1.78)
        assert cell.difference == pytest.approx(-1.43)

    def test_one_seed_has_no_deviation_and_none_no_mean(self, cells):
        named = self.by_name(cells)
        assert named["adam"].std is None
        assert (named["sps"].ours, named["sps"].n, named["sps"].difference) == (None, 0, None)

    def test_best_is_within_half_a_point(self, cells):
        ours, theirs = best_of(cells)
        assert {cell.case.optimizer for cell in ours} == {"delta-sgd", "adam"}
        assert {cell.case.optimizer for cell in theirs} == {"delta-sgd"}

    def test_programs_get_the_promised_keys(self, cells):
        row = json.loads(json.dumps(self.by_name(cells)["delta-sgd"].as_json()))
        assert row["ours"] == pytest.approx(86.05)
        assert {k: row[k] for k in ("task", "alpha", "optimizer", "n", "paper", "scale")} == {
            "task": "fmnist-cnn",
            "alpha": 0.1,
            "optimizer": "delta-sgd",
            "n": 2,
            "paper": 85.21,
            "scale": "paper",
        }

    def test_the_verdict_counts_settings(self, cells):
        assert verdict(cells) == (
            "Δ-SGD: best or within 0.5 points of the best in 1 of 1 settings (the paper: 1); at "
            "least the paper's accuracy less 0.5 in 1 of 1 (differences from +0.8 to +0.8 points)."
        )
        assert verdict(cells, "sgd").startswith("SGD: best or within 0.5 points of the best in 0")
        assert verdict(cells, "sps") is None

    def test_tables_show_ours_beside_theirs(self, cells):
        item = ITEMS["table-7"]
        text = to_markdown(item, cells)
        assert "| SGD | 82.0 ±2.0 / 83.4 ±1.8 / −1.4 |" in text
        assert "| Δ-SGD | **86.0 ±0.1** / **85.2 ±1.5** / +0.8 |" in text
        assert "| SPS | – / 84.6 ±1.5 / – |" in text
        assert "6 of 24 runs done" in text
        latex = to_latex(item, cells)
        assert r"\textbf{86.0 $\pm$0.1} / \textbf{85.2 $\pm$1.5} / +0.8 \\" in latex
        assert latex.count(r"\begin{tabular}") == 1
        assert "fmnist-cnn,0.1,sgd,,82.0,2.0,3,83.43,paper,82.0" in to_csv(cells)

    def test_a_narrow_terminal_gets_narrow_tables(self, cells, tmp_path):
        everything = results(ITEMS["table-7"], PAPER, Records(tmp_path), {})
        assert len(list(to_rich(ITEMS["table-7"], everything, 80))) == 3
        assert len(list(to_rich(ITEMS["table-7"], everything, 200))) == 1

    def test_coverage_says_what_is_missing(self, cells):
        assert "Missing in fmnist-cnn α = 0.1." in coverage(ITEMS["table-7"], cells)

    def test_a_cell_without_a_number_in_the_paper(self, cells):
        cell = dataclasses.replace(cells[0], theirs=None)
        assert cell.difference is None
        assert cell.as_json()["paper"] is None
