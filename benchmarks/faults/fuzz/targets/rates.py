"""The learning rates that `deltafl tune` writes and `deltafl compare` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.fuzz.target import Target
from deltafl.experiment.comparison import read_rates


def _run(content: bytes, folder: Path) -> None:
    place = folder / "learning-rates.toml"
    place.write_bytes(content)
    rates = read_rates(place)
    assert all(0 < rate < 1e6 for rate in rates.values())


def _seeds() -> Sequence[bytes]:
    return [
        b"[learning_rates]\nsgd = 0.05\nadam = 0.01\n",
        b'[learning_rates]\n"os.path" = 1\n',
        b"learning_rates = 3\n",
        b"[learning_rates]\nsgd = nan\n",
        b"[learning_rates]\nsgd = " + b"9" * 500 + b"\n",
        b"[learning_rates]\nsgd = []\n",
    ]


TARGET = Target(
    "rates",
    "learning-rates.toml of deltafl tune",
    _run,
    _seeds,
    words=(b"learning_rates", b"sgd", b"inf", b'"a.b"', b"1e-400"),
)
