from __future__ import annotations

from deltafl.experiment import run
from deltafl.paper.records import Records, record
from deltafl.paper.views import views
from deltafl.report.runs import read_runs


def test_a_record_shows_what_its_run_folder_shows(tmp_path, small):
    config = small.override(**{"run.record_step_sizes": True})
    result = run(config, out=tmp_path / "runs" / "one")
    Records(tmp_path / "results").add(record(result, "laptop"))
    [recorded] = views(tmp_path / "results")
    [[read], warnings] = read_runs(tmp_path / "runs")
    assert warnings == []
    assert recorded.config.identity == read.config.identity
    assert [tuple(point) for point in recorded.curve] == [tuple(point) for point in read.curve]
    assert recorded.final == read.final
    assert recorded.done == read.done == 3
    assert recorded.scale == "laptop"
    assert [(t.round, t.start, len(t.eta)) for t in recorded.steps] == [
        (t.round, t.start, len(t.eta)) for t in read.steps
    ]


def test_a_folder_without_records_has_no_views(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert views(tmp_path) == []
