"""The records of a folder as runs of the page that `deltafl report` writes."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from deltafl.paper.records import Record, Records, Steps
from deltafl.report.runs import RunView, StepTrace


def views(folder: Path) -> list[RunView]:
    """Return every recorded run in a folder."""
    return [_view(record) for record in Records(folder).all()]


def _view(record: Record) -> RunView:
    config = record.configuration()
    summary = {
        "final_test_accuracy": record.final,
        "best_test_accuracy": record.best,
        "rounds": config.run.rounds,
        "refused_updates": record.refused,
        "seconds": record.seconds,
        "weights_sha256": record.weights_sha256,
        "finished": record.finished,
        "native_kernels": record.native_kernels,
        "versions": record.versions,
    }
    return RunView(
        config,
        record.curve,
        summary,
        steps=_traces(record.steps) if record.steps else (),
        seconds=record.seconds,
        refused=record.refused,
        name=config.run_name,
        scale=record.scale,
    )


def _traces(steps: Steps) -> list[StepTrace]:
    traces = []
    for round_, places in groupby(range(len(steps.round)), key=steps.round.__getitem__):
        here = list(places)
        part = slice(here[0], here[-1] + 1)
        traces.append(
            StepTrace(round_, here[0], steps.smoothness[part], steps.growth[part], steps.eta[part])
        )
    return traces
