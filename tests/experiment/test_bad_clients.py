"""Clients that send what they should not, and global weights that diverge: whole runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from deltafl import UserError, run, tensorfile
from deltafl.cli import main
from deltafl.client import ClientMetrics, Updates
from deltafl.experiment import DivergedError, compare
from deltafl.experiment.attack import ATTACKS, attackers
from deltafl.experiment.config import FederationConfig

REFUSED = {
    "nan": "non-finite values in 'head.bias', 'head.weight'",
    "inf": "non-finite values in 'head.bias', 'head.weight'",
    "huge": "values up to 1.0e+30, whose squares overflow",
    "shape": "'head.bias' has shape (20,), not (10,)",
    "dtype": "'head.bias' has dtype float64, not float32",
    "empty": "missing 'head.bias', 'head.weight'",
    "no-samples": "its weight is 0, not finite and above 0",
}


def attacked(small, kind, share, **more):
    return small.override(
        **{
            "federation.clients": 20,
            "federation.participation": 1.0,
            "federation.attack": kind,
            "federation.attackers": share,
            **more,
        }
    )


def weights_in(folder: Path):
    tensors, about = tensorfile.load(folder / "checkpoint.safetensors")
    prefix = "weights/"
    found = {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
    return found, about


def test_every_attack_can_be_chosen():
    (choices, _) = get_args(FederationConfig.model_fields["attack"].annotation)
    assert set(get_args(choices)) == set(ATTACKS)
    assert set(ATTACKS) == {*REFUSED, "sign-flip"}


@pytest.mark.parametrize("share", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_used_is_refused_and_the_round_goes_on_with_the_rest(small, kind, share):
    config = attacked(small, kind, share, **{"run.rounds": 2})
    bad = attackers(config.federation, config.run.seed)
    assert len(bad) == max(1, round(20 * share))
    result = run(config)
    assert result.summary["refused_updates"] == 2 * len(bad)
    for row in result.metrics:
        assert row["refused"] == {str(client): REFUSED[kind] for client in sorted(bad)}
        assert row["clients"] == 20
    # The same bits as with any other update that is refused: nothing of it is left.
    other = run(config.override(**{"federation.attack": "nan"}))
    assert result.summary["weights_sha256"] == other.summary["weights_sha256"]


def test_who_attacks_follows_from_the_seed_and_is_part_of_the_run(small):
    config = attacked(small, "sign-flip", 0.2)
    drawn = {attackers(config.federation, seed) for seed in range(20)}
    assert len(drawn) > 10
    assert all(len(bad) == 4 for bad in drawn)
    assert attackers(config.federation, 3) == attackers(config.federation, 3)
    honest = config.override(**{"federation.attack": None, "federation.attackers": 0.0})
    assert attackers(honest.federation, 0) == frozenset()
    assert config.hash != honest.hash
    hashes = {run(c).summary["weights_sha256"] for c in (config, honest)}
    assert len(hashes) == 2


@pytest.mark.parametrize(
    "changes", [{"federation.attack": "nan"}, {"federation.attackers": 0.1}], ids=str
)
def test_half_an_attack_is_refused(small, changes):
    with pytest.raises(UserError, match="belong together"):
        small.override(**changes)


def test_a_sign_flip_is_ten_times_the_way_back(small):
    start = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}
    sent = {"w": torch.tensor([[1.5, 1.0]]), "n": torch.tensor([4])}
    update = Updates(sent, [7], [ClientMetrics(0.0, 0.0)])
    flipped = ATTACKS["sign-flip"](update, start)
    assert flipped.weights["w"].tolist() == [[-4.0, 12.0]]
    assert flipped.weights["n"].tolist() == [4]


@pytest.mark.parametrize("rule", ["mean", "geometric-median"])
def test_the_bits_are_the_same_on_every_engine(small, rule):
    config = attacked(small, "sign-flip", 0.2, **{"server.aggregate": rule, "task": "digits-mlp"})
    inline = run(config)
    workers = run(config.override(**{"engine.kind": "workers", "engine.workers": 2}))
    assert workers.summary["weights_sha256"] == inline.summary["weights_sha256"]


def test_a_round_with_no_update_left_keeps_the_weights_and_says_so(small, tmp_path, capsys):
    config = attacked(small, "nan", 0.999, **{"run.rounds": 2})
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert main(["run", str(tmp_path / "config.toml"), "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "40 updates refused, 2 rounds without any kept the old weights" in said
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["unchanged"] for row in rows] == [True, True]
    assert rows[0]["test_loss"] == rows[1]["test_loss"]


def test_three_such_rounds_are_the_end(small, tmp_path):
    config = attacked(small, "nan", 0.999, **{"run.rounds": 9})
    with pytest.raises(DivergedError, match="no update of 3 rounds in a row could be used") as end:
        run(config, out=tmp_path)
    assert end.value.result.summary["rounds"] == 3
    assert weights_in(tmp_path)[1]["round"] == 0


@pytest.mark.parametrize("aggregate", ["mean", "median"])
def test_clients_that_explode_are_refused_and_the_global_weights_stay_finite(
    small, tmp_path, aggregate
):
    config = small.override(
        **{
            "client.optimizer": "torch.optim.SGD",
            "client.options": {"lr": 1e38},
            "server.aggregate": aggregate,
        }
    )
    with pytest.raises(DivergedError, match=r"client \d, step size 1e\+38: non-finite") as end:
        run(config, out=tmp_path)
    assert end.value.result.summary["refused_updates"] == 9
    weights, _ = weights_in(tmp_path)
    assert all(torch.isfinite(value).all() for value in weights.values())


def large_in_round(round_, size):
    """An attack that is honest but for one round, told by how often it was called."""
    calls = []

    def change(update, start):
        calls.append(1)
        if len(calls) != round_:
            return update
        generator = torch.Generator().manual_seed(0)
        weights = {
            name: size * torch.randn(value.shape, generator=generator)
            for name, value in update.weights.items()
        }
        return replace(update, weights=weights)

    return change


def test_divergence_names_round_client_and_step_size_and_keeps_the_last_good_weights(
    small, tmp_path, capsys, monkeypatch
):
    # In round 3, one client sends finite numbers that are far too large.
    monkeypatch.setitem(ATTACKS, "sign-flip", large_in_round(3, 1e12))
    config = attacked(small, "sign-flip", 0.01, **{"run.rounds": 9, "task": "digits-mlp"})
    (bad,) = attackers(config.federation, config.run.seed)
    (tmp_path / "config.toml").write_text(config.to_toml())
    out = tmp_path / "run"
    command = ["run", str(tmp_path / "config.toml"), "--out", str(out)]
    assert main(command) == 2
    first = capsys.readouterr().err
    assert first.count("\n") == 1
    assert "the global weights diverged in round 3: the test loss is" in first
    assert f"client {bad} went farthest" in first
    assert "in round 3, with a mean step size of 0." in first
    assert f"{out / 'checkpoint.safetensors'} has the last good weights, of round 2" in first
    # The folder is whole, and the weights are those of a run of two rounds.
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert rows[2]["diverged"]["client"] == bad
    assert rows[2]["test_loss"] > 1e20
    weights, about = weights_in(out)
    assert about["round"] == 2
    short = run(config.override(**{"run.rounds": 2}))
    assert tensorfile.digest(weights) == short.summary["weights_sha256"]
    # Asked again, it says so again.
    assert main(command) == 2
    assert capsys.readouterr().err == first


def test_the_cause_is_found_when_evaluations_are_rare(small, monkeypatch, tmp_path):
    monkeypatch.setitem(ATTACKS, "sign-flip", large_in_round(4, 1e12))
    config = attacked(
        small, "sign-flip", 0.01, **{"run.rounds": 9, "run.eval_every": 3, "task": "digits-mlp"}
    )
    with pytest.raises(DivergedError) as end:
        run(config, out=tmp_path)
    how = end.value.result.summary["diverged"]
    assert (how["round"], how["good_round"]) == (4, 3)
    assert weights_in(tmp_path)[1]["round"] == 3


class StopAfter:
    """A listener that stops a run after a round, as Ctrl-C does."""

    def __init__(self, round_):
        self._round = round_

    def started(self, config, done):
        pass

    def finished_round(self, report):
        if report.round == self._round:
            raise KeyboardInterrupt

    def finished(self, summary):
        pass


def diverged(config, out):
    with pytest.raises(DivergedError) as end:
        run(config, out=out)
    summary = end.value.result.summary
    return {name: summary[name] for name in ("diverged", "rounds", "weights_sha256")}


def test_a_run_that_was_stopped_before_it_diverges_ends_as_if_never_stopped(
    small, monkeypatch, tmp_path
):
    late = {"run.rounds": 9, "run.eval_every": 3, "server.optimizer": "fedavgm"}
    config = attacked(small, "sign-flip", 0.01, **late)
    monkeypatch.setitem(ATTACKS, "sign-flip", large_in_round(4, 1e14))
    expected = diverged(config, tmp_path / "whole")
    assert expected["diverged"]["good_round"] == 3
    monkeypatch.setitem(ATTACKS, "sign-flip", large_in_round(4, 1e14))
    with pytest.raises(KeyboardInterrupt):
        run(config, out=tmp_path / "stopped", listeners=[StopAfter(5)])
    monkeypatch.setitem(ATTACKS, "sign-flip", lambda update, start: update)
    assert diverged(config, tmp_path / "stopped") == expected
    one, other = (
        tensorfile.load(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "stopped")
    )
    assert tensorfile.digest(one[0]) == tensorfile.digest(other[0])
    assert one[1] == other[1]


@pytest.mark.parametrize("stop", [1, 2])
def test_rounds_without_an_update_are_counted_over_a_stop(small, tmp_path, stop):
    config = attacked(small, "nan", 0.999, **{"run.rounds": 9})
    expected = diverged(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(config, out=tmp_path / "stopped", listeners=[StopAfter(stop)])
    assert diverged(config, tmp_path / "stopped") == expected


def test_a_run_killed_between_its_divergence_and_its_summary_has_ended(
    small, monkeypatch, tmp_path
):
    # Clients remember, and what they did in the good round has been forgotten by then.
    monkeypatch.setitem(ATTACKS, "sign-flip", large_in_round(5, 1e14))
    late = {"run.rounds": 9, "run.eval_every": 3, "client.objective": "moon", "task": "digits-mlp"}
    config = attacked(small, "sign-flip", 0.01, **late)
    with pytest.raises(KeyboardInterrupt):
        run(config, out=tmp_path / "run", listeners=[StopAfter(6)])
    assert not (tmp_path / "run" / "summary.json").exists()
    found = diverged(config, tmp_path / "run")
    assert (found["rounds"], found["diverged"]["good_round"]) == (6, 3)
    assert weights_in(tmp_path / "run")[1]["round"] == 3
    # A checkpoint that says so without a row that does is not believed.
    (tmp_path / "run" / "summary.json").unlink()
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    del rows[-1]["diverged"]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="does not say how the run ended in round 6"):
        run(config, out=tmp_path / "run")


def test_the_state_of_the_server_is_put_back_too(small, monkeypatch, tmp_path):
    monkeypatch.setitem(ATTACKS, "sign-flip", large_in_round(3, 1e15))
    config = attacked(small, "sign-flip", 0.01, **{"server.optimizer": "fedavgm", "run.rounds": 5})
    with pytest.raises(DivergedError):
        run(config, out=tmp_path / "long")
    run(config.override(**{"run.rounds": 2}), out=tmp_path / "short")
    long, _ = tensorfile.load(tmp_path / "long" / "checkpoint.safetensors")
    short, _ = tensorfile.load(tmp_path / "short" / "checkpoint.safetensors")
    assert "server/momentum_buffer/head.bias" in long
    assert tensorfile.digest(long) == tensorfile.digest(short)


def test_a_comparison_goes_on_and_names_the_runs_that_diverged(small, tmp_path):
    found = compare(
        small.override(**{"client.options": {}}),
        optimizers=["sgd", "adam"],
        learning_rates={"sgd": 1e5, "adam": 0.01},
        out=tmp_path,
    )
    assert len(found.results) == 2
    broken = attacked(small, "nan", 0.999, **{"run.rounds": 4})
    found = compare(broken, optimizers=["sgd"], out=tmp_path)
    (line,) = found.diverged()
    assert "no update of 3 rounds" in line
    assert 0 <= found.finals()["final_accuracy"][0] <= 0.3
    assert not math.isnan(found.finals()["final_accuracy"][0])
