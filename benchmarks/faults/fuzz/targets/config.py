"""Configurations, as `deltafl compare x.toml` and the reader of a run folder read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.fuzz.target import Target
from deltafl.cli.command import config_of, read
from deltafl.cli.compare import CompareOptions
from deltafl.experiment.config import RecordedConfig, read_toml, validated
from deltafl.report.command import command

WORDS = (
    *(b"task", b"federation", b"client", b"server", b"run", b"engine", b"model", b"out"),
    *(b"optimizers", b"seeds", b"alphas", b"tasks", b"options", b"objective", b"samples", b"lr"),
    *(b"digits-mlp", b"delta-sgd", b"moon", b"fedadam", b"inf", b"nan", b"'../..'", b"1e400"),
    *(b'"os:system"', b'"antigravity.fly"', b"address", b"learning_rates", b"0x7fffffffffffffff"),
)

WHOLE = """
task = "digits-mlp"
optimizers = ["sgd", "delta-sgd"]
alphas = [1.0, 0.1]
seeds = [0, 1]
out = "runs/x"
[federation]
clients = 20
samples = [70, 80]
participation = 0.2
[client]
batch_size = 16
objective = "fedprox"
objective_options = {mu = 0.1}
[client.options]
gamma = 2.0
[server]
optimizer = "fedadam"
lr = 1e-3
[run]
rounds = 60
device = "cpu"
[engine]
kind = "ray"
address = "127.0.0.1:6379"
"""


def _run(content: bytes, folder: Path) -> None:
    place = folder / "x.toml"
    place.write_bytes(content)
    shown = validated(RecordedConfig, read_toml(place), "in x.toml")
    _use(shown)
    options = read(CompareOptions, [str(place)], "[CONFIG.toml]")
    config = config_of(options)
    _use(config)
    # What is written is read back as the same, and names one folder below another.
    place.write_text(config.to_toml(), encoding="utf-8")
    assert config_of(read(CompareOptions, [str(place)], "[CONFIG.toml]")) == config
    assert Path(config.run_name).name == config.run_name
    assert not options.out.is_absolute()
    assert ".." not in options.out.parts


def _use(config: RecordedConfig) -> None:
    assert config.hash
    command(config)
    config.to_toml()


def _seeds() -> Sequence[bytes]:
    return [
        WHOLE.encode(),
        b'task = "digits-softmax"\n',
        b'[client]\noptimizer = "os:system"\n',
        b'out = "/tmp/elsewhere"\n',
        b"[run]\nseed = 9223372036854775808\n",
        b"a = " + b"[" * 200,
        b'data_sha256 = "\\u0000\\ud7ff"\n',
    ]


TARGET = Target("config", "TOML configurations", _run, _seeds, words=WORDS)
