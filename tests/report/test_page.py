from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from deltafl import data
from deltafl.cli import main
from deltafl.cli.command import config_of, read
from deltafl.cli.run import RunOptions
from deltafl.errors import UserError
from deltafl.experiment import Config
from deltafl.report.command import command
from deltafl.report.figures import MAX_POINTS
from deltafl.report.groups import arrange
from deltafl.report.page import MAX_STEPS, content, embedded, page
from deltafl.report.partitions import Holdings, Partitions, federation_key
from deltafl.report.runs import RecordedConfig, RunReader, RunView, StepTrace, read_runs

Visit = Callable[..., Page]


def view(accuracy: float = 0.5, **changes: Any) -> RunView:
    """A finished run of three rounds that ends at an accuracy."""
    config = Config().override(**{"run.rounds": 3} | changes)
    curve = [(1, 0.1), (2, 0.2), (3, accuracy)]
    return RunView(config, curve, {"final_test_accuracy": accuracy, "rounds": 3})


# --- reading ---------------------------------------------------------------------------------


def test_runs_are_found_below_a_folder_as_they_are(comparison: Path) -> None:
    runs, warnings = read_runs(comparison)
    assert warnings == []
    assert len(runs) == 9
    for run in runs:
        summary = json.loads((comparison / run.name / "summary.json").read_text())
        assert run.final == summary["final_test_accuracy"]
        assert run.done == 4
        assert [round_ for round_, _ in run.curve] == [1, 2, 3, 4]
        assert run.curve[-1][1] == run.final
        assert len(run.losses) == 4
    (recorded,) = (run for run in runs if run.steps)
    assert [trace.round for trace in recorded.steps] == [1, 2, 3, 4]
    assert recorded.steps[1].start == len(recorded.steps[0].eta)


def test_a_run_folder_itself_and_one_that_is_half_done(comparison: Path, tmp_path: Path) -> None:
    source = next(comparison.glob("*delta-sgd*"))
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "config.toml").write_bytes((source / "config.toml").read_bytes())
    lines = (source / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0] + lines[1] + lines[2][:20])
    ((run,), warnings) = read_runs(folder)
    assert (run.name, run.done, run.summary, warnings) == ("half", 2, None, [])
    assert content([run])["lines"][0]["going"] == [[2, 4]]


BREAK = {
    "config.toml": ["task = 3", "[client]\nepocs = 1", "[[[", "\udcff"],
    "metrics.jsonl": [
        "nonsense\n",
        '{"round": 1}\n',
        '{"round": 1, "test_accuracy": 96.2}\n',
        '{"round": 1, "test_accuracy": NaN}\n',
        '{"round": 2, "test_accuracy": 0.1}\n{"round": 1, "test_accuracy": 0.1}\n',
        '{"round": 1, "test_accuracy": 0.1, "steps": {"3": {"eta": 1}}}\n',
    ],
    "summary.json": ["[", "3", "{}", '{"final_test_accuracy": "high", "rounds": 1}'],
}


@pytest.mark.parametrize(
    ("file", "text"), [(file, text) for file, texts in BREAK.items() for text in texts]
)
def test_a_broken_run_is_skipped_with_a_line_that_names_it(
    file: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("good", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text('task = "digits-mlp"\n')
        (tmp_path / name / "metrics.jsonl").write_text('{"round": 1, "test_accuracy": 0.5}\n')
    (tmp_path / "broken" / file).write_text(text, errors="surrogateescape")
    runs, (warning,) = read_runs(tmp_path)
    assert [run.name for run in runs] == ["good"]
    assert "broken" in warning
    assert "\n" not in warning
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert warning in capsys.readouterr().err
    (tmp_path / "good" / "config.toml").unlink()
    assert main(["report", str(tmp_path)]) == 2
    captured = capsys.readouterr().err
    assert captured.count("\n") == 1
    assert str(tmp_path / "broken") in captured


def test_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "no run that can be shown" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "missing")]) == 2
    assert "missing is not a folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--live", "--out", "x.html"]) == 2
    assert "leave out --out" in capsys.readouterr().err
    with pytest.raises(UserError, match="nothing to show"):
        page([])


def test_reading_a_run_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "dangerous.py").write_text("raise SystemExit('imported')")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text('[client]\noptimizer = "dangerous.Optimizer"\n')
    (folder / "metrics.jsonl").write_text('{"round": 1, "test_accuracy": 0.5}\n')
    runs, warnings = read_runs(folder)
    assert warnings == []
    assert "Optimizer" in page(runs)
    assert "dangerous" not in sys.modules


def test_what_has_not_changed_is_not_read_again(
    comparison: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = RunReader(comparison)
    assert reader.refresh()
    monkeypatch.setattr("deltafl.report.runs._read", lambda *_: pytest.fail("read again"))
    assert not reader.refresh()
    assert len(reader.runs) == 9


# --- grouping --------------------------------------------------------------------------------


def labels(runs: list[RunView]) -> list[tuple[str, str, int]]:
    return [(line.setting.setup, line.optimizer, len(mine)) for line, mine in arrange(runs).items()]


def test_runs_that_differ_by_seed_alone_are_averaged() -> None:
    runs = [view(accuracy, **{"run.seed": seed}) for seed, accuracy in enumerate([0.9, 0.8])]
    (line,) = content(runs)["lines"]
    assert line["final"] == {"mean": 85.0, "std": 7.071067812, "n": 2, "below": 0.0, "best": True}
    assert line["accuracy"] == [10, 20, 85]
    assert line["accuracyDeviation"] == [0, 0, 7.0711]
    assert line["n"] == [2, 2, 2]


def test_different_things_are_never_averaged() -> None:
    runs = [
        view(**{"client.optimizer": "sgd", "client.lr": 0.1}),
        view(**{"client.optimizer": "sgd", "client.lr": 0.05, "run.seed": 1}),
        view(**{"client.optimizer": "adam", "client.lr": 0.001}),
    ]
    assert labels(runs) == [("", "SGD, lr 0.1", 1), ("", "SGD, lr 0.05", 1), ("", "Adam", 1)]
    runs = [view(), view(**{"federation.clients": 7}), view(**{"federation.clients": 8})]
    assert sorted(labels(runs)) == [
        ("clients 100", "Δ-SGD", 1),
        ("clients 7", "Δ-SGD", 1),
        ("clients 8", "Δ-SGD", 1),
    ]
    runs = [view(), view(**{"federation.samples": 450}), view(**{"client.options": {"delta": 1.0}})]
    assert sorted(labels(runs)) == [
        ("", "Δ-SGD", 1),
        ("", "Δ-SGD, delta 1", 1),
        ("samples 450", "Δ-SGD", 1),
    ]
    runs = [
        view(),
        view(**{"client.objective": "fedprox"}),
        view(**{"server.optimizer": "fedadam"}),
    ]
    assert [setting["label"] for setting in content(runs)["settings"]] == [
        "digits-mlp, α = 0.1",
        "digits-mlp, α = 0.1, fedadam",
        "digits-mlp, α = 0.1, fedprox",
    ]


def test_a_label_says_what_is_unusual_in_its_task_and_nothing_else() -> None:
    both = {"client.epochs": 2, "federation.samples": 450}
    less = {"client.epochs": 2, "federation.alpha": 1.0}
    other = {"task": "digits-softmax", "client.epochs": 2}
    changes = ({}, {"client.epochs": 2}, both, less, other)
    assert sorted(labels([view(**change) for change in changes])) == [
        ("", "Δ-SGD", 1),
        ("", "Δ-SGD", 1),  # digits-softmax, where all runs have two epochs
        ("epochs 2", "Δ-SGD", 1),
        ("epochs 2", "Δ-SGD", 1),
        ("samples 450, epochs 2", "Δ-SGD", 1),
    ]


def test_runs_of_another_scale_say_so() -> None:
    short = Config().override(**{"run.rounds": 2})
    runs = [RunView(Config(), [], {}, scale="paper"), RunView(short, [], {}, scale="laptop")]
    assert labels(runs) == [("paper scale", "Δ-SGD", 1), ("laptop scale", "Δ-SGD", 1)]


def test_what_changes_no_accuracy_makes_no_difference() -> None:
    half = RunView(Config().override(**{"run.rounds": 3}), [(1, 0.1)])
    runs = [half, view(0.7, **{"run.record_step_sizes": True, "engine.workers": 1})]
    assert labels(runs) == [("", "Δ-SGD", 1)]
    described = content(runs)
    assert described["lines"][0]["final"]["mean"] == pytest.approx(70)
    assert [run["line"] for run in described["runs"]] == [0, None]


def test_settings_run_from_alike_to_heterogeneous_and_optimizers_as_in_the_paper() -> None:
    runs = [
        view(**{"federation.alpha": 0.01}),
        view(**{"federation.alpha": 1.0}),
        view(**{"federation.alpha": 1.0, "client.optimizer": "adam"}),
        view(**{"federation.partition": "iid", "client.optimizer": "torch.optim.RAdam"}),
    ]
    described = content(runs)
    assert [s["spread"] for s in described["settings"]] == ["IID", "α = 1", "α = 0.01"]
    assert [o["name"] for o in described["optimizers"]] == ["Adam", "Δ-SGD", "RAdam"]
    assert [o["ours"] for o in described["optimizers"]] == [False, True, False]


def test_their_number_stands_beside_ours() -> None:
    described = content([view(0.9)], theirs=lambda config: 88.4 if config.task else None)
    assert described["lines"][0]["theirs"] == 88.4


def test_a_view_from_a_stored_record_needs_little() -> None:
    config = Config()
    run = RunView(config, [[10, 0.4], [20, 0.6]], {"final_test_accuracy": 0.6}, scale="laptop")
    assert (run.done, run.final) == (20, 0.6)
    assert "laptop" in page([run])


# --- what is embedded ------------------------------------------------------------------------


def test_curves_and_step_sizes_are_thinned() -> None:
    config = Config().override(**{"run.rounds": 5000})
    trace = [StepTrace(r, 8 * r, [0.1] * 8, [0.1] * 8, [0.1] * 8) for r in range(5000)]
    run = RunView(config, [(r, 0.5) for r in range(1, 5001)], steps=trace)
    described = content([run])
    rounds = described["lines"][0]["rounds"]
    assert (len(rounds), rounds[0], rounds[-1]) == (MAX_POINTS, 1, 5000)
    kept = described["runs"][0]["steps"]
    assert kept[0][0] == 0
    assert kept[-1][0] == 4999
    assert sum(len(part[4]) for part in kept) <= MAX_STEPS


def test_two_hundred_runs_of_a_hundred_points_stay_small() -> None:
    runs = [
        RunView(
            Config().override(**{"federation.alpha": 0.1 * (1 + seed % 5), "run.seed": seed}),
            [(round_, (round_ + seed) / 400) for round_ in range(1, 101)],
            {"final_test_accuracy": 0.5},
        )
        for seed in range(200)
    ]
    assert len(page(runs)) < 600_000


def test_the_data_cannot_close_its_script() -> None:
    text = embedded({"a": "</script><!--\u2028\u2029&amp;", "b": "\udcff"})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"a": "</script><!--\u2028\u2029&amp;", "b": "\udcff"}
    text.encode()


def test_the_policy_forbids_the_network() -> None:
    html = page([view()])
    policy = html.split('http-equiv="Content-Security-Policy" content="')[1].split('"')[0]
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert "unsafe" not in policy
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in html


# --- the command -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"task": "fmnist-cnn", "federation.alpha": 1.0, "run.seed": 3},
        {"federation.samples": (10, 20), "federation.replacement": True},
        {"engine.fast": False, "run.record_step_sizes": True, "run.checkpoint_seconds": 0.1 + 0.2},
        {"client.optimizer": "torch.optim.RAdam", "client.lr": 1e-5, "client.augment": "none"},
        {"client.options": {"gamma": 1.5, "curvature": "reused"}, "model.width": 7},
        {"client.options": {"weight_decay": 0, "amsgrad": True, "note": "true", "s": "a b'c"}},
        {"client.objective": "fedprox", "client.objective_options": {"mu": 0.1}},
        {"server.optimizer": "fedadam", "server.lr": 0.01, "server.options": {"eps": 1e-4}},
    ],
)
def test_the_command_of_a_run_gives_its_configuration(changes: dict[str, Any]) -> None:
    config = Config().override(**changes)
    line = command(config)
    assert line is not None
    program, name, *words = shlex.split(line)
    assert (program, name) == ("deltafl", "run")
    assert config_of(read(RunOptions, words, "")) == config
    assert len([word for word in words if word.startswith("--")]) == len(changes)


def test_no_command_names_data_given_in_python() -> None:
    assert command(Config(task="own-mlp", data_sha256="0" * 64)) is None


# --- partitions ------------------------------------------------------------------------------


def test_partitions_are_worked_out_once_for_each_federation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dealt = []
    real = Partitions._holdings

    def counted(self: Partitions, config: Config) -> Holdings | str:
        dealt.append(config.federation.alpha)
        return real(self, config)

    monkeypatch.setattr(Partitions, "_holdings", counted)
    few = {"federation.clients": 5}
    runs = [
        view(**few | {"federation.alpha": alpha, "client.optimizer": name, "run.seed": seed})
        for alpha in (1.0, 0.1)
        for name in ("sgd", "adam")
        for seed in (1, 2)
    ]
    partitions = Partitions()
    found = partitions.of(runs)
    assert partitions.of(runs) == found
    assert sorted(dealt) == [0.1, 1.0]
    holdings = found[federation_key(runs[0].config)]
    assert isinstance(holdings, Holdings)
    assert (len(holdings.counts), len(holdings.classes)) == (5, 10)
    pictures = content(runs, partitions=found)["partitions"]
    assert [picture["settings"] for picture in pictures] == [[0], [1]]


def test_a_data_set_that_is_not_here_is_never_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELTAFL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("deltafl.data.sources.routes", lambda *_: pytest.fail("fetched"))
    run = view(task="cifar10-cnn")
    (reason,) = Partitions().of([run]).values()
    assert isinstance(reason, str)
    assert "deltafl data get cifar10" in reason
    odd = RunView(RecordedConfig(task="nothing-here"), [(1, 0.5)])
    (reason,) = Partitions().of([odd]).values()
    assert reason == "There is no data set called nothing."
    assert not any("nothing" in name for name in data.names())


# --- the command line ------------------------------------------------------------------------


def test_the_page_and_the_figures(
    comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, figures = tmp_path / "deep" / "page.html", tmp_path / "figures"
    words = ["report", str(comparison), "--out", str(out), "--figures", str(figures)]
    assert main(words) == 0
    assert f"page {out}: 9 runs" in capsys.readouterr().out.replace("\n", " ")
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    names = ("curves.svg", "curves.png", "curves.pdf", "table.md", "table.csv", "table.tex")
    assert sorted(path.name for path in figures.iterdir()) == sorted(names)
    assert "Δ-SGD" in (figures / "table.md").read_text(encoding="utf-8")


# --- in a browser ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(comparison: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "page.html"
    assert main(["report", str(comparison), "--out", str(out)]) == 0
    return out.as_uri()


def lines_in(page: Page, panel: int = 0) -> list[str | None]:
    shown = page.locator("#curves .frame").nth(panel).locator("path.line")
    return [line.get_attribute("data-line") for line in shown.all()]


def shown_values(page: Page) -> dict[tuple[str, str], str]:
    """The table's cells by (optimizer, column)."""
    columns = [head.inner_text() for head in page.locator("#table thead th").all()[1:]]
    found = {}
    for row in page.locator("#table tbody tr").all():
        name = row.locator("th").inner_text()
        for column, cell in zip(columns, row.locator("td").all(), strict=True):
            found[name, column] = cell.inner_text().split("\n")[0]
    return found


def choose_softmax(page: Page) -> None:
    page.get_by_label("Task").select_option("digits-softmax")


def test_it_draws_every_optimizer_and_the_numbers_of_the_summaries(
    visit: Visit, address: str, comparison: Path
) -> None:
    page = visit(address)
    choose_softmax(page)
    expect(page.locator("#curves .frame")).to_have_count(2)
    assert lines_in(page, 0) == lines_in(page, 1) == ["SGD", "Δ-SGD"]
    runs, _ = read_runs(comparison)
    expected = {}
    for line, mine in arrange(runs).items():
        if line.setting.task == "digits-softmax":
            a, b = (100 * float(run.final or 0) for run in mine)
            deviation = abs(a - b) / 2**0.5
            expected[line.optimizer, line.setting.spread] = f"{(a + b) / 2:.1f} ±{deviation:.1f}"
    assert shown_values(page) == expected
    caption = page.locator("#table caption")
    expect(caption).to_contain_text("digits-softmax")
    expect(page.locator("#table thead th[scope=col]")).to_have_count(3)
    expect(page.locator("#table tbody th[scope=row]")).to_have_count(2)
    expect(page.locator("#partitions .frame")).to_have_count(2)


def test_each_control_changes_what_is_shown(visit: Visit, address: str) -> None:
    page = visit(address)
    choose_softmax(page)
    expect(page.locator("#steps-section")).to_be_hidden()
    page.get_by_label("Heterogeneity").select_option("α = 0.1")
    expect(page.locator("#curves .frame")).to_have_count(1)
    expect(page.locator("#table thead th")).to_have_count(2)
    page.get_by_label("SGD", exact=True).uncheck()
    assert lines_in(page) == ["Δ-SGD"]
    expect(page.locator("#table tbody tr")).to_have_count(1)
    expect(page.locator("#runs details")).to_have_count(2)
    expect(page.get_by_role("status")).to_have_text("Shown: 1 optimizer, 1 setting, 2 runs.")
    page.get_by_label("Curve").select_option("loss")
    expect(page.locator("#curves svg")).to_contain_text("Test loss")
    page.get_by_label("Δ-SGD", exact=True).uncheck()
    expect(page.locator("#curves")).to_contain_text("Nothing is chosen")
    page.get_by_label("Task").select_option("digits-mlp")
    page.get_by_label("Δ-SGD", exact=True).check()
    expect(page.locator("#steps path.line")).to_have_count(3)


def test_the_theme_follows_the_system_until_it_is_toggled(visit: Visit, address: str) -> None:
    page = visit(address, color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    toggle = page.get_by_role("button", name="Dark")
    expect(toggle).to_have_attribute("aria-pressed", "true")
    toggle.click()
    expect(toggle).to_have_attribute("aria-pressed", "false")
    light = page.evaluate(paper)
    assert light != dark
    assert visit(address, color_scheme="light").evaluate(paper) == light


def focus_by_tab(page: Page, selector: str) -> None:
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("s => document.activeElement.matches(s)", selector):
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none"
            return
    raise AssertionError(f"{selector} is not reached by the keyboard")


def test_everything_works_by_keyboard_alone(visit: Visit, address: str) -> None:
    page = visit(address)
    focus_by_tab(page, "#theme")
    page.keyboard.press("Enter")
    expect(page.locator("#theme")).to_have_attribute("aria-pressed", "true")
    focus_by_tab(page, "#choose-task")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#table caption")).to_contain_text("digits-softmax")
    assert page.evaluate("document.activeElement.id") == "choose-task"
    focus_by_tab(page, "#optimizer-0")
    page.keyboard.press("Space")
    assert lines_in(page) == ["Δ-SGD"]
    focus_by_tab(page, "#curves .frame")
    slider = page.locator("#curves .frame").first
    page.keyboard.press("Home")
    expect(page.locator(".tip")).to_contain_text("Round 1")
    page.keyboard.press("ArrowRight")
    expect(slider).to_have_attribute("aria-valuenow", "2")
    assert "Δ-SGD" in (slider.get_attribute("aria-valuetext") or "")
    page.keyboard.press("Escape")
    expect(page.locator(".tip")).to_have_count(0)
    focus_by_tab(page, "#runs summary")
    page.keyboard.press("Enter")
    expect(page.locator("#runs details[open] pre")).to_have_count(2)


def test_a_run_shows_its_command_configuration_and_checksum(
    visit: Visit, address: str, comparison: Path
) -> None:
    page = visit(address, permissions=["clipboard-read", "clipboard-write"])
    choose_softmax(page)
    details = page.locator("#runs details").first
    details.locator("summary").click()
    folder = comparison / str(details.get_attribute("data-run"))
    summary = json.loads((folder / "summary.json").read_text())
    expect(details).to_contain_text(summary["weights_sha256"])
    expect(details).to_contain_text(summary["finished"])
    expect(details).to_contain_text(f"torch {summary['versions']['torch']}")
    config, _ = read_runs(folder)
    words = command(config[0].config)
    assert details.locator("pre").first.inner_text() == words
    assert details.locator("pre").nth(1).inner_text() == (folder / "config.toml").read_text()
    details.get_by_role("button", name="Copy").first.click()
    expect(page.get_by_role("status")).to_have_text("Command: copied.")
    assert page.evaluate("navigator.clipboard.readText()") == words


def test_a_pointer_reads_the_curves(visit: Visit, address: str) -> None:
    page = visit(address)
    choose_softmax(page)
    page.locator("#curves .frame").first.hover()
    expect(page.locator(".tip")).to_contain_text("Δ-SGD")
    page.locator("#partitions .frame").first.hover()
    expect(page.locator(".tip")).to_contain_text("samples")


@pytest.mark.parametrize("width", [360, 1280])
def test_a_narrow_page_never_scrolls_sideways(visit: Visit, address: str, width: int) -> None:
    page = visit(address, viewport={"width": width, "height": 800})
    for task in ("digits-mlp", "digits-softmax"):
        page.get_by_label("Task").select_option(task)
        for summary in page.locator("#runs summary").all():
            summary.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    svg = page.locator("#curves svg").first.bounding_box()
    assert svg is not None
    assert 250 < svg["width"] <= width


EVIL = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"


def test_what_a_run_says_never_runs(visit: Visit, tmp_path: Path) -> None:
    config = RecordedConfig.model_validate(
        {"task": f"{EVIL}-x", "client": {"optimizer": f"a.{EVIL}", "objective": EVIL}}
    )
    summary = {"final_test_accuracy": 0.5, "finished": EVIL, "versions": {EVIL: EVIL}}
    run = RunView(config, [(1, 0.5)], summary, name=EVIL, scale=EVIL)
    plain = RunView(RecordedConfig(), [(1, 0.4)], name="plain")
    key = federation_key(config)
    out = tmp_path / "evil.html"
    text = page(
        [run, plain],
        title=EVIL,
        warnings=[EVIL],
        partitions={key: Holdings([EVIL], [[3]], 1)},
        theirs=lambda _: 51.0,
    )
    out.write_text(text, encoding="utf-8")
    shown = visit(out.as_uri())
    shown.get_by_label("Task").select_option(f"{EVIL}-x")
    shown.locator("#runs summary").first.click()
    shown.locator("#curves .frame").first.hover()
    expect(shown.locator("h1")).to_have_text(EVIL)
    expect(shown.locator("#runs details[open]")).to_contain_text(EVIL)
    expect(shown.locator("img")).to_have_count(0)
    assert shown.evaluate("window.hacked") is None
    assert shown.title() == EVIL
    expect(shown.locator("#table tbody")).to_contain_text("paper 51.0 (−1.0)")
