"""The records of the reproduction (`results/paper/*.jsonl`), up to the page and the tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.fuzz.target import Target
from benchmarks.faults.fuzz.targets.run_folder import show
from deltafl.paper.cells import results
from deltafl.paper.recipes import ITEMS
from deltafl.paper.records import Records
from deltafl.paper.scale import SCALES
from deltafl.paper.views import views


def _run(content: bytes, folder: Path) -> None:
    (folder / "mnist-cnn-laptop.jsonl").write_bytes(content)
    records = Records(folder)
    for item in list(ITEMS.values())[:1]:
        results(item, SCALES["laptop"], records, {})
    found = views(folder)
    show(found)
    for record in records.all():
        Records(folder / "copy").add(record)


def _seeds() -> Sequence[bytes]:
    row = {
        "fingerprint": "0123456789ab",
        "task": "mnist-cnn",
        "scale": "laptop",
        "config": {"task": "mnist-cnn", "client": {"optimizer": "sgd", "lr": 0.05}},
        "final": 0.9,
        "tail": 0.9,
        "best": 0.91,
        "refused": 0,
        "seconds": 12.5,
        "weights_sha256": "ab",
        "finished": "2026-01-01T00:00:00Z",
        "hardware": "x",
        "native_kernels": True,
        "versions": {"torch": "2"},
        "curve": [[1, 0.5], [2, 0.9]],
        "steps": {"round": [1, 1], "smoothness": [None, 1.0], "growth": [1, 1], "eta": [1, 1]},
    }
    line = json.dumps(row)
    return [
        line.encode() + b"\n",
        line.replace('"mnist-cnn"', '"../../../tmp/x"', 1).encode(),
        line.replace('"laptop"', '"/x"').encode(),
        line.replace("[1, 1]", "[1]", 1).encode(),
        line.replace("12.5", "NaN").replace("[1, 0.5]", "[1e30, 2]").encode(),
        b"{}\n[]\n",
    ]


TARGET = Target(
    "records",
    "records of deltafl paper",
    _run,
    _seeds,
    words=(b'"curve"', b'"steps"', b'"config"', b'"task"', b'"../x"', b"NaN", b"1e400", b"null"),
)
