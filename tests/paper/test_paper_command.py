from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltafl.cli import main


def words(tmp_path, action: str, *more: str) -> list[str]:
    return ["paper", action, *more, "--results", str(tmp_path / "results")]


def test_a_recipe_runs_once_and_is_shown_beside_the_paper(tmp_path, capsys):
    part = ["table-1", "--only", "mnist-cnn", "alpha=1", "sgd"]
    run = [*words(tmp_path, "run", *part), "--runs", str(tmp_path / "runs")]
    assert main(run) == 0
    first = capsys.readouterr().out
    assert "1 runs, 0 recorded" in first
    assert "mnist-cnn α = 1 sgd seed 0: 9" in first
    assert "(the paper: 98.3 %)" in first
    assert main(run) == 0
    assert "1 recorded" in capsys.readouterr().out

    assert main([*words(tmp_path, "show", *part), "--json"]) == 0
    [cell] = json.loads(capsys.readouterr().out)
    summary = next((tmp_path / "runs").glob("*/summary.json"))
    final = json.loads(summary.read_text())["final_test_accuracy"]
    assert cell["ours"] == pytest.approx(100 * final)
    assert (cell["paper"], cell["scale"], cell["n"]) == (98.3, "laptop", 1)

    # A record is enough: the runs may be gone.
    out = tmp_path / "tables"
    assert main([*words(tmp_path, "show", "table-1"), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {
        "table-1-laptop.md",
        "table-1-laptop.csv",
        "table-1-laptop.tex",
    }
    figures = tmp_path / "figures"
    draw = [*words(tmp_path, "figure", "table-1"), "--out", str(figures), "--formats", "svg"]
    assert main(draw) == 0
    assert "<svg" in (figures / "table-1-laptop.svg").read_text()[:200]


def test_records_are_repeated_and_those_of_other_roundings_are_found(tmp_path, capsys):
    part = ["table-1", "--only", "mnist-cnn", "alpha=1", "sgd-decay"]
    run = [*words(tmp_path, "run", *part), "--runs", str(tmp_path / "runs")]
    assert main(words(tmp_path, "verify", *part)) == 2
    assert "nothing of this is recorded" in capsys.readouterr().err
    assert main(run) == 0
    assert main(words(tmp_path, "verify", *part)) == 0
    assert "all 1 repeat" in capsys.readouterr().out

    # One test sample in ten thousand is enough to tell.
    [path] = (tmp_path / "results").iterdir()
    record = json.loads(path.read_text())
    record["curve"][0][1] = round(record["curve"][0][1] + 0.0001, 4)
    path.write_text(json.dumps(record))
    assert main(words(tmp_path, "verify", *part)) == 2
    captured = capsys.readouterr()
    assert "1 of 1 recorded runs do not repeat here" in captured.err
    assert "now" in captured.out


def test_the_list_names_every_item(tmp_path, capsys):
    assert main(words(tmp_path, "list")) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("table-7", "figure-8", "theory-convex", "moon"))


def test_a_plan_runs_nothing(tmp_path, capsys):
    plan = [*words(tmp_path, "run", "table-1"), "--plan", "--scale", "paper"]
    assert main(plan) == 0
    assert "165 runs, 0 recorded" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


def test_showing_what_was_never_run_shows_the_papers_numbers(tmp_path, capsys):
    assert main(words(tmp_path, "show", "table-5")) == 0
    text = capsys.readouterr().out
    assert "83.1" in text
    assert "0 of 8 runs done" in text


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (["run"], "needs names"),
        (["run", "table-9"], "table-9"),
        (["show", "table-1", "--scale", "huge"], "scale"),
        (["run", "table-1", "--only", "mnist"], "--only"),
        (["figure", "table-1"], "nothing of table-1 has been run"),
        (["dance"], "dance"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, wrong, hint):
    monkeypatch.chdir(tmp_path)
    assert main(["paper", *wrong]) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1


def test_the_committed_tables_are_those_of_the_committed_records(tmp_path):
    """`deltafl paper show --out results/paper/tables` makes them anew."""
    ours = Path(__file__).parents[2] / "results" / "paper"
    made = tmp_path / "tables"
    assert main(["paper", "show", "--results", str(ours), "--out", str(made)]) == 0
    committed = {path.name: path.read_bytes() for path in (ours / "tables").iterdir()}
    assert {path.name: path.read_bytes() for path in made.iterdir()} == committed
