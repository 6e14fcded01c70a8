from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deltafl.cli import COMMANDS, main

SMALL = """--task digits-softmax --federation.clients 6 --federation.samples 30
    --federation.participation 0.5 --client.batch-size 8 --run.rounds 3
    --engine.kind inline""".split()  # noqa: SIM905


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusal(capsys, *words: str) -> str:
    """Run a command that must fail, and return its one line."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err + captured.out
    return captured.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--federation.alhpa", "1"], "did you mean --federation.alpha?"),
        (["run", "--client.optimizer", "delta-sg"], "did you mean 'delta-sgd'?"),
        (["run", "--client.optimizer", "torch.optim.Nothing"], "torch.optim.Nothing"),
        (["run", "--federation.alpha", "0"], "federation.alpha"),
        (["run", "--federation.alpha", "-3"], "greater than 0"),
        (["run", "--federation.participation", "1.2"], "federation.participation"),
        (["run", "--federation.samples", "100000"], "100000"),
        (["run", "--task", "digits-cnn"], "cnn"),
        (["run", "--client.options", "gama=3"], "gama"),
        (["run", "--client.objective-options", "mu=3"], "mu"),
        (["run", "--run.device", "tpu"], "tpu"),
        (["run", "--run.device", "meta"], "meta"),
        (["run", "--client.lr", "1e300"], "client.lr"),
        (["run", "--client.options", "momentum=NaN"], "client.options"),
        (["run", "--model.width", "1000000000000"], "model.width"),
        (["run", "--federation.samples", "100000000000000"], "federation.samples"),
        (["run", "--client.optimizer", "torch.optim.SparseAdam"], "client"),
        (["compare", "--optimizers", "sgd", "sgd"], "two runs of"),
        (["compare", "--optimizers", "sgd", "--seeds", "1", "1"], "two runs of"),
        (["compare", "--optimizers", "sgd", "--client.options", "gamma=1"], "gamma"),
        (["run", "missing.toml"], "missing.toml"),
        (["rnu"], "did you mean 'run'?"),
        (["data", "fetch"], "get"),
        (["data", "get", "mnits"], "did you mean 'mnist'?"),
        (["compare", "--learning-rates", "missing.toml"], "missing.toml"),
        (["tune", "--optimizers", "delta-sgd"], "no learning rate to tune"),
        (["partition", "--out", "picture.gif"], "picture.gif"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, words, expected):
    assert expected in refusal(capsys, *words)


def test_a_table_that_cannot_be_written(capsys):
    Path("c/table.md").mkdir(parents=True)
    words = ["compare", *SMALL, "--optimizers", "sgd", "--out", "c"]
    assert "table.md" in refusal(capsys, *words)


def test_folders_with_brackets_and_modules_of_the_users_in_the_way():
    Path("queue.py").write_text("raise RuntimeError('not the one you want')")
    script = Path(sys.executable).with_name("deltafl")
    command = [str(script), "run", *SMALL[:-2], "--engine.workers", "1", "--out", "a[/b]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "run folder a[/b]" in done.stdout


def test_a_config_with_an_unknown_key(capsys):
    Path("x.toml").write_text("[client]\nepocs = 3\n")
    message = refusal(capsys, "run", "x.toml")
    assert "client.epocs" in message
    assert "did you mean 'epochs'?" in message


def test_a_damaged_checkpoint_and_another_run_in_the_folder(capsys):
    assert main(["run", *SMALL, "--out", "x"]) == 0
    assert "holds another run" in refusal(
        capsys_cleared(capsys), "run", *SMALL, "--out", "x", "--run.seed", "4"
    )
    Path("x/summary.json").unlink()
    Path("x/checkpoint.safetensors").write_bytes(b"nonsense")
    assert "x/checkpoint.safetensors is damaged" in refusal(capsys, "run", *SMALL, "--out", "x")


def capsys_cleared(capsys):
    capsys.readouterr()
    return capsys


def test_a_stray_temporary_file_is_no_obstacle():
    assert main(["run", *SMALL, "--out", "x"]) == 0
    Path("x/summary.json").unlink()
    Path("x/.summary.json.tmp").write_text("cut short")
    assert main(["run", *SMALL, "--out", "x"]) == 0
    assert json.loads(Path("x/summary.json").read_text())["rounds"] == 3
    assert not Path("x/.summary.json.tmp").exists()


def test_run_says_what_came_out_and_stays_quiet_in_a_pipe():
    command = [sys.executable, "-m", "deltafl", "run", *SMALL, "--out", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    summary = json.loads(Path("x/summary.json").read_text())
    assert f"{summary['final_test_accuracy']:.2%}" in lines[0]
    assert lines[1] == f"weights_sha256 {summary['weights_sha256']}"
    assert lines[2] == "run folder x"
    assert len(lines) == 3


def test_compare_writes_a_table_a_picture_and_a_sentence(capsys):
    words = ["compare", *SMALL, "--optimizers", "sgd", "delta-sgd", "--alphas", "1", "0.1"]
    words += ["--seeds", "0", "1", "--out", "c"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Δ-SGD" in out
    table = Path("c/table.md").read_text()
    assert "α = 0.1" in table
    assert "SGD" in table
    assert Path("c/curves.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in Path("c/curves.svg").read_text()
    folders = [path for path in Path("c").iterdir() if path.is_dir()]
    assert len(folders) == 8
    stamps = {path: path.stat().st_mtime_ns for path in Path("c").glob("*/summary.json")}
    assert main(words) == 0  # nothing is run again
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert capsys.readouterr().out == out


def test_tune_finds_rates_that_compare_can_use(capsys):
    assert main(["tune", *SMALL, "--optimizers", "sgd", "adam", "--out", "t"]) == 0
    rates = Path("t/learning-rates.toml")
    assert "sgd = " in rates.read_text()
    assert "validation accuracy" in capsys.readouterr().out
    words = ["compare", *SMALL, "--optimizers", "sgd", "--out", "c"]
    assert main([*words, "--learning-rates", str(rates)]) == 0
    config = next(Path("c").glob("*/config.toml")).read_text()
    assert "lr = " in config
    rates.write_text("[learning_rates]\nsgd = -1\n")
    assert "sgd" in refusal(capsys_cleared(capsys), *words, "--learning-rates", str(rates))


def test_partition_as_a_picture_and_numbers(capsys):
    words = ["partition", "--federation.clients", "12", "--alphas", "10", "0.01", "--out", "p.svg"]
    assert main(words) == 0
    assert "α = 0.01" in capsys.readouterr().out
    assert "<svg" in Path("p.svg").read_text()
    rows = Path("p.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 12


def test_data_list_names_every_set(capsys):
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    for name in ("digits", "mnist", "fmnist", "cifar10", "cifar100"):
        assert name in out
    assert main(["data", "verify", "digits"]) == 0


@pytest.mark.parametrize("name", [*COMMANDS, None])
def test_help_is_there(capsys, name):
    assert main(["--help"] if name is None else [name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"deltafl {name or 'COMMAND'}" in out
    if name == "run":
        assert "--federation.alpha" in out
        assert "[delta-sgd]" in out
