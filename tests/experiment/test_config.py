from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafl import Config, UserError
from deltafl.experiment.config import read_toml, validated


def read(tree: dict) -> Config:
    return validated(Config, tree, "in x.toml")


def test_toml_keeps_everything(small):
    config = small.override(
        **{
            "client.options": {"gamma": 1.5, "curvature": "reused"},
            "client.objective": "moon",
            "client.objective_options": {"mu": 2.0},
            "federation.samples": (100, 500),
            "server.optimizer": "fedadam",
            "server.lr": 1e-05,
        }
    )
    assert read(tomllib.loads(config.to_toml())) == config


@given(
    text=st.text(max_size=20),
    number=st.floats(allow_nan=False, allow_infinity=False),
    flag=st.booleans(),
)
def test_toml_keeps_any_option(text, number, flag):
    options = {"text": text, "number": number, "flag": flag, text or "empty": 1}
    config = Config.model_validate({"client": {"options": options}})
    assert read(tomllib.loads(config.to_toml())) == config


def test_the_hash_names_what_is_computed_and_nothing_else(small):
    same = small.override(
        **{"engine.kind": "workers", "engine.workers": 7, "run.checkpoint_seconds": 60}
    )
    assert same.hash == small.hash
    assert same.run_name == small.run_name
    for path, value in {
        "engine.fast": False,
        "run.seed": 1,
        "run.rounds": 4,
        "client.lr": 0.3,
        "federation.alpha": 0.4,
        "server.optimizer": "fedadam",
        "model.width": 3,
        "task": "digits-mlp",
    }.items():
        assert small.override(**{path: value}).hash != small.hash, path


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"federatoin": {}}, ["federatoin", "federation"]),
        ({"federation": {"alhpa": 1}}, ["federation.alhpa", "alpha", "x.toml"]),
        ({"federation": {"alpha": 0}}, ["federation.alpha", "greater than 0", "x.toml"]),
        ({"federation": {"alpha": -1.5}}, ["federation.alpha", "greater than 0", "-1.5"]),
        ({"federation": {"alpha": float("nan")}}, ["federation.alpha"]),
        ({"federation": {"clients": 0}}, ["federation.clients"]),
        ({"federation": {"participation": 1.5}}, ["federation.participation", "1.5"]),
        ({"federation": {"samples": "many"}}, ["federation.samples", "many"]),
        ({"federation": 3}, ["federation", "3"]),
        ({"run": {"rounds": 2.5}}, ["run.rounds", "2.5"]),
        ({"run": {"seed": -1}}, ["run.seed"]),
        ({"client": {"optimizer": "delta-sdg"}}, ["delta-sdg", "did you mean 'delta-sgd'"]),
        ({"client": {"objective": "fedprx"}}, ["fedprx", "did you mean 'fedprox'"]),
        ({"server": {"optimizer": "fedadm"}}, ["fedadm", "did you mean 'fedadam'"]),
        ({"task": "digit-mlp"}, ["digit", "did you mean 'digits'"]),
        ({"task": "digits-mpl"}, ["mpl", "did you mean 'mlp'"]),
        ({"task": "digits"}, ["digits", "DATASET-MODEL"]),
        ({"client": {"options": {"lr": [1]}}}, ["client.options"]),
    ],
)
def test_a_wrong_value_is_one_clear_line(tree, words):
    with pytest.raises(UserError) as caught:
        read(tree)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_file_that_is_no_toml_or_not_there(tmp_path: Path):
    broken = tmp_path / "broken.toml"
    broken.write_text("a = [1,")
    with pytest.raises(UserError, match=r"broken\.toml"):
        read_toml(broken)
    with pytest.raises(UserError, match="no configuration at"):
        read_toml(tmp_path / "missing.toml")
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"broken\.toml"):
        read_toml(broken)


def test_sampled_clients_are_at_least_one(small):
    assert small.override(**{"federation.participation": 0.01}).federation.sampled == 1
    assert small.override(**{"federation.participation": 1.0}).federation.sampled == 6
