"""The same bits, whichever engine, number of workers or interruption, for every choice there is.

Every client optimizer, objective and server takes its turn, with the fast path and without it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deltafl import Config, objective, optim, run, server, tensorfile
from deltafl.engine import InlineEngine, WorkersEngine

CHOICES = [
    *({"client.optimizer": name} for name in optim.names()),
    *({"client.objective": name} for name in objective.names() if name != "cross-entropy"),
    *({"server.optimizer": name} for name in server.names() if name != "average"),
    {"task": "digits-softmax", "model.width": None},  # its clients are stacked
]


def name_of(choice: dict[str, str]) -> str:
    return next(iter(choice.values()))


class StopAfter:
    """Stops a run as a signal does, in time for a checkpoint."""

    def __init__(self, round_: int) -> None:
        self._round = round_

    def started(self, config, done):
        self.began_after = done

    def finished_round(self, report):
        if report.round == self._round:
            raise KeyboardInterrupt

    def finished(self, summary):
        pass


def config_of(choice: dict[str, str], fast: bool) -> Config:
    config = Config.model_validate(
        {
            "task": "digits-mlp",
            "model": {"width": 16},
            "federation": {"clients": 5, "samples": (10, 40), "participation": 0.8, "alpha": 0.5},
            "client": {"batch_size": 8},
            "run": {"rounds": 3, "checkpoint_seconds": 3600, "record_step_sizes": True},
            "engine": {"kind": "inline", "fast": fast},
        }
    )
    return config.override(**choice)


def rows(result):
    return [{**row, "seconds": 0} for row in result.metrics]


@pytest.fixture(scope="module")
def engines():
    """Workers take a second or two to start: all choices share them."""
    with WorkersEngine(1) as one, WorkersEngine(2) as two:
        yield {"one worker": one, "inline": InlineEngine(), "two workers": two}


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize("choice", CHOICES, ids=name_of)
def test_every_engine_and_every_way_there(engines, tmp_path: Path, choice, fast):
    assert_same_bits(engines, tmp_path, config_of(choice, fast))


def assert_same_bits(engines, tmp_path: Path, config: Config) -> None:
    """Run whole on the last engine, and in pieces on all of them, one after the other."""
    expected = run(config)
    *others, last = engines.values()
    results = [run(config, engine=last)]
    for place, engine in enumerate(others, start=1):
        stop = StopAfter(place)
        with pytest.raises(KeyboardInterrupt):
            run(config, out=tmp_path, engine=engine, listeners=[stop])
        assert stop.began_after == place - 1
    results.append(run(config, out=tmp_path, engine=last))
    for result in results:
        assert result.summary["weights_sha256"] == expected.summary["weights_sha256"]
        assert rows(result) == rows(expected)


@pytest.mark.parametrize("choice", CHOICES, ids=name_of)
def test_the_fast_path_is_the_plain_one_within_its_tolerance(tmp_path: Path, choice):
    """The documented tolerance is of one round: after more, training amplifies the rounding."""
    weights = []
    for fast in (True, False):
        config = config_of(choice, fast).override(**{"run.rounds": 1})
        run(config, out=tmp_path / str(fast))
        weights.append(tensorfile.load(tmp_path / str(fast) / "checkpoint.safetensors")[0])
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.federation
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
def test_ray_is_no_exception(tmp_path: Path, fast):
    pytest.importorskip("ray")
    from deltafl.engine import RayEngine

    with RayEngine(2) as ray, WorkersEngine(2) as workers:
        engines = {"inline": InlineEngine(), "two workers": workers, "ray": ray}
        for choice in CHOICES:
            assert_same_bits(engines, tmp_path / name_of(choice), config_of(choice, fast))
