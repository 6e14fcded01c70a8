from __future__ import annotations

import pytest

from deltafl import UserError
from deltafl.cli.arguments import parse
from deltafl.cli.command import config_of, read
from deltafl.cli.compare import CompareOptions
from deltafl.cli.run import RunOptions


def test_every_form_of_option():
    words = """--task digits-softmax --federation.samples 10 20 --federation.alpha=0.5
        --client.batch-size 8 --client.options gamma=1.5 curvature=reused
        --run.record-step-sizes --model.width none --run.seed 3""".split()  # noqa: SIM905
    config = config_of(read(RunOptions, words, ""))
    assert config.task == "digits-softmax"
    assert config.federation.samples == (10, 20)
    assert config.federation.alpha == 0.5
    assert config.client.batch_size == 8
    assert config.client.options == {"gamma": 1.5, "curvature": "reused"}
    assert config.run.record_step_sizes is True
    assert config.model.width is None
    assert config.run.seed == 3


def test_none_is_a_choice_where_it_is_one():
    words = ["--client.augment", "none", "--federation.samples", "none"]
    config = config_of(read(RunOptions, words, ""))
    assert config.client.augment == "none"
    assert config.federation.samples is None


def test_lists():
    words = ["--seeds", "0", "1", "--alphas", "1", "0.1", "--optimizers", "sgd"]
    options = read(CompareOptions, words, "")
    assert (options.seeds, options.alphas, options.optimizers) == ([0, 1], [1.0, 0.1], ["sgd"])


def test_the_command_line_wins_over_the_file(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text('task = "digits-softmax"\n[run]\nrounds = 7\nseed = 2\n')
    config = config_of(read(RunOptions, [str(file), "--run.rounds", "9"], "[CONFIG.toml]"))
    assert (config.task, config.run.rounds, config.run.seed) == ("digits-softmax", 9, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--federation.alpah", "1"],
            "unknown option --federation.alpah: did you mean --federation.alpha?",
        ),
        (["--run.rounds"], "--run.rounds needs a value"),
        (["--run.rounds", "1", "2"], "--run.rounds takes one value, not 2 (1 2)"),
        (["--run.rounds", "1", "--run.rounds", "2"], "--run.rounds is given twice: give it once"),
        (["--client.options", "gamma"], "--client.options takes name=value, not 'gamma'"),
    ],
)
def test_what_cannot_be_read(words, message):
    with pytest.raises(UserError) as caught:
        parse(RunOptions, words)
    assert str(caught.value) == message
