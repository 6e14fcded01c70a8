"""Run folders of other people: config.toml, metrics.jsonl and summary.json, up to the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

from benchmarks.faults.fuzz.target import Target, files, together
from deltafl.experiment.run_folder import CONFIG, METRICS, SUMMARY
from deltafl.report.page import _asset, document
from deltafl.report.page import content as page_content
from deltafl.report.partitions import Partitions
from deltafl.report.runs import RunView, read_runs

WORDS = (
    *(b'"round"', b'"test_accuracy"', b'"test_loss"', b'"seconds"', b'"refused"', b'"steps"'),
    *(b'"smoothness"', b'"growth"', b'"eta"', b'"final_test_accuracy"', b'"rounds"', b'"versions"'),
    *(b"</script>", b"<!--", b"NaN", b"Infinity", b"1e308", b"\\ud800", b"null", b"[client]"),
)


class Elements(HTMLParser):
    """The elements of a page, in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Note an element."""
        self.found.append(tag)


def _elements(text: str) -> list[str]:
    """Return the elements of a page, its own long style and script left out."""
    return Elements(text.replace(_asset("page.css"), "").replace(_asset("page.js"), "")).found


@cache
def _empty() -> list[str]:
    return _elements(document(page_content([])))


@cache
def _partitions() -> Partitions:
    return Partitions()


def show(runs: Sequence[RunView], warnings: Sequence[str] = ()) -> None:
    """Make the page of some runs: it has the elements of an empty one, whatever they say."""
    known = _partitions().of([run for run in runs if run.config.dataset_name == "digits"])
    if len(known) > 100:  # each is dealt once; a fuzzer thinks of many
        _partitions.cache_clear()
    text = document(page_content(runs, warnings=warnings, partitions=known))
    text.encode()
    assert _elements(text) == _empty()
    data = text.partition('type="application/json" id="data">')[2].partition("</script>")[0]
    assert data
    json.loads(data)


def _run(content: bytes, folder: Path) -> None:
    for name, part in zip((CONFIG, METRICS, SUMMARY), files(content, 3), strict=True):
        if part:
            (folder / name).write_bytes(part)
    show(*read_runs(folder))


def _seeds() -> Sequence[bytes]:
    config = '[run]\nrounds = 2\nseed = 3\n[client]\noptimizer = "</script><b>"\n'
    row = {"round": 1, "test_accuracy": 0.5, "test_loss": 1.25, "seconds": 0.1}
    steps = {"0": {"smoothness": [None, 0.5], "growth": [0.1, 0.2], "eta": [0.1, 0.2]}}
    rows = [row, row | {"round": 2, "refused": {"3": "<i>no"}, "steps": steps}]
    lines = "".join(json.dumps(one) + "\n" for one in rows)
    summary = {
        "final_test_accuracy": 0.5,
        "final_test_loss": 1.0,
        "best_test_accuracy": 0.75,
        "rounds": 2,
        "seconds": 1.5,
        "weights_sha256": "ab",
        "finished": "2026-01-01T00:00:00Z",
        "native_kernels": True,
        "versions": {"torch": "2"},
    }
    return [
        together(config, lines, json.dumps(summary)),
        together(config, lines),
        together("task = 'a-b'\n", lines.replace("0.5", "NaN"), "{}"),
        together("", lines, "[]"),
        together(config, lines.replace('"round": 2', '"round": ' + "9" * 400)),
        together("[federation]\nreplacement = true\nsamples = 100000000\n", lines),
    ]


TARGET = Target("run-folder", "config, metrics and summary of a run", _run, _seeds, words=WORDS)
