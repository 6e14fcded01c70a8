"""Nothing a configuration, a checkpoint, a record or an archive says leads out of its folder."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from deltafl import Config, UserError, run, tensorfile
from deltafl.cli import main
from deltafl.data import sources
from deltafl.experiment.comparison import read_rates
from deltafl.experiment.memory import ClientMemory
from deltafl.experiment.run_folder import CHECKPOINT, RunFolder
from deltafl.paper.records import Records
from deltafl.report.runs import read_runs
from deltafl.untrusted import inside, read_plain

OUTSIDE = ["../x", "a/../../x", "/tmp/x", "a\0b", "~/x", "a/" * 3000, "b" * 5000]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory inside a folder in which nothing else may appear."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_that_leads_out_is_noticed(tmp_path: Path, path: str) -> None:
    if path[0] in "ab" and ".." not in path and "\0" not in path and os.name == "posix":
        # Too long is not outside, but nothing can be there.
        with pytest.raises(OSError, match="too long"):
            (tmp_path / path).stat()
    else:
        assert not inside(Path(path), tmp_path)


def test_links_are_followed_before_a_path_is_judged(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "away").symlink_to(tmp_path)
    (tmp_path / "in" / "round").symlink_to("round")
    assert inside(Path("fine/new"), tmp_path / "in")
    assert not inside(Path("away/x"), tmp_path / "in")
    assert not inside(Path("round/x"), tmp_path / "in")


@pytest.mark.parametrize("path", ["../x", "/tmp/deltafl-escaped", "a\\u0000b", "link/x"])
@pytest.mark.parametrize("name", ["out", "learning_rates"])
def test_a_configuration_file_cannot_choose_a_place_elsewhere(here, capsys, name, path) -> None:
    (here / "link").symlink_to(here.parent)
    Path("x.toml").write_text(f'{name} = "{path}"\n')
    assert main(["compare", "x.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{name} " in line
    assert "x.toml leads out of this folder" in line
    assert f"--{name.replace('_', '-')} on the command line" in line
    assert sorted(entry.name for entry in here.parent.iterdir()) == ["here"]


@pytest.mark.parametrize(
    "text", ['optimizers = ["trap.Trap"]', '[client]\noptimizer = "trap:Trap"']
)
def test_a_configuration_file_cannot_choose_code_to_import(here, capsys, monkeypatch, text) -> None:
    Path("trap.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(here)
    Path("x.toml").write_text(text)
    assert main(["compare", "x.toml"]) == 2
    assert "is code to import: if you trust it, give --" in capsys.readouterr().err
    Path("rates.toml").write_text('[learning_rates]\n"trap.Trap" = 0.1\n')
    assert read_rates(Path("rates.toml")) == {"trap.Trap": 0.1}  # only a name, until it is run


def test_what_the_command_line_says_is_followed(here, small, capsys) -> None:
    text = small.to_toml().replace('optimizer = "delta-sgd"', 'optimizer = "trap.Trap"')
    Path("x.toml").write_text('out = "/tmp/deltafl-escaped"\n' + text)
    words = ["run", "x.toml", "--out", str(here.parent / "chosen")]
    assert main([*words, "--client.optimizer", "torch.optim.SGD", "--client.lr", "0.1"]) == 0
    assert (here.parent / "chosen" / "summary.json").exists()
    assert not Path("/tmp/deltafl-escaped").exists()


def test_a_configuration_file_cannot_choose_another_machine(here, capsys) -> None:
    Path("x.toml").write_text('[engine]\nkind = "ray"\naddress = "cluster.example:6379"\n')
    assert main(["run", "x.toml"]) == 2
    assert "is another machine" in capsys.readouterr().err


def test_a_run_folder_of_somebody_elses_imports_nothing(here, monkeypatch, small) -> None:
    Path("trap.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(here)
    Path("run").mkdir()
    text = small.to_toml().replace('optimizer = "delta-sgd"', 'optimizer = "trap.Trap"')
    Path("run", "config.toml").write_text(text)
    with pytest.raises(UserError, match=r"holds another run \(client.optimizer is 'trap.Trap'"):
        run(small, out=Path("run"))


@pytest.mark.parametrize(
    "task", ["../../x", "/tmp/x", "a\0b", "digits-mlp/../../x", "digits", "-" * 5000]
)
def test_a_task_is_a_name_of_the_catalog_or_nothing(here, capsys, task) -> None:
    with pytest.raises(UserError):
        Config.model_validate({"task": task})
    assert main(["run", "--task", task]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a\0b", "x" * 300, "", "get/../x"])
@pytest.mark.parametrize("action", ["get", "verify"])
def test_a_data_set_is_a_name_of_the_catalog_or_nothing(here, capsys, action, name) -> None:
    assert main(["data", action, name]) == 2
    assert "unknown data set" in capsys.readouterr().err


def test_an_out_that_cannot_be_is_one_line(here, capsys) -> None:
    for out in ("b" * 5000, "x/" * 3000 + "x"):
        assert main(["run", "--task", "digits-softmax", "--run.rounds", "1", "--out", out]) == 2
        assert "too long" in capsys.readouterr().err
    Path("out").symlink_to("out")
    assert main(["run", "--task", "digits-softmax", "--out", "out"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("memory", ["../../x", "/etc/passwd", "0-1.safetensors/../../x", 3, "٣-1"])
def test_a_checkpoint_names_memories_and_nothing_else(small, tmp_path, memory) -> None:
    folder = tmp_path / "run"
    run(small, out=folder)
    (folder / "summary.json").unlink()
    tensors, about = tensorfile.load(folder / CHECKPOINT)
    tensorfile.save(folder / CHECKPOINT, tensors, about | {"memories": [memory]})
    with pytest.raises(UserError, match="names what is no memory"):
        run(small, out=folder)


def test_memories_elsewhere_are_not_tidied_up(tmp_path: Path) -> None:
    elsewhere = tmp_path / "home"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("kept")
    (tmp_path / "memory").symlink_to(elsewhere)
    with pytest.raises(UserError, match="is a link"):
        ClientMemory(tmp_path / "memory", 1)
    assert (elsewhere / "precious").read_text() == "kept"


def test_a_link_laid_where_a_file_is_about_to_be_written_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / ".file.tmp").symlink_to("precious")
    (tmp_path / "file").symlink_to("precious")
    with pytest.raises(OSError) as refused:  # noqa: PT011
        tensorfile.write_atomically(tmp_path / "file", b"new")
    assert refused.value.errno == errno.ELOOP
    tensorfile.write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "precious").read_text() == "kept"
    assert not (tmp_path / "file").is_symlink()


@pytest.mark.parametrize("task", ["../../x", "/tmp/x", "a/b", "", ".hidden"])
def test_a_record_cannot_name_a_file_elsewhere(tmp_path: Path, task: str) -> None:
    (tmp_path / "mnist-cnn-laptop.jsonl").write_text(json.dumps({"task": task}) + "\n")
    with pytest.raises(UserError):
        Records(tmp_path)


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "summary.json", CHECKPOINT])
def test_a_pipe_in_a_run_folder_is_not_waited_for(small, tmp_path, name) -> None:
    folder = tmp_path / "run"
    run(small, out=folder)
    if name == CHECKPOINT:
        (folder / "summary.json").unlink()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=r"not a plain file|damaged"):
        run(small, out=folder)
    if name != CHECKPOINT:
        runs, warnings = read_runs(tmp_path)
        assert not runs
        assert name == "config.toml" or "not a plain file" in warnings[0]


def test_a_file_of_any_size_is_not_read_whole(small, tmp_path) -> None:
    run(small, out=tmp_path / "run")
    with (tmp_path / "run" / "summary.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: it takes no room
    _, warnings = read_runs(tmp_path)
    assert "1099511627776 bytes, and at most" in warnings[0]
    with pytest.raises(UserError, match="at most"):
        RunFolder(tmp_path / "run", small).summary()
    with pytest.raises(UserError, match="not a plain file"):
        read_plain(Path("/dev/zero"), 10)


def archive(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, leads_to: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, leads_to
    made.size = 3 if kind == tarfile.REGTYPE else 0
    return made


@pytest.mark.parametrize(
    "members",
    [
        [member("../escaped")],
        [member("package/../../escaped")],
        [member("link", tarfile.SYMTYPE, ".."), member("link/escaped")],
        [member("link", tarfile.LNKTYPE, "../precious")],
        [member("pipe", tarfile.FIFOTYPE)],
        [member("device", tarfile.CHRTYPE)],
        [member("n" * 300)],
        [member("package"), member("package/below-a-file")],
    ],
)
def test_an_archive_stays_inside(tmp_path: Path, members: list[tarfile.TarInfo]) -> None:
    (tmp_path / "precious").write_text("kept")
    inside_ = tmp_path / "inside"
    inside_.mkdir()
    package = archive(tmp_path / "x.tgz", *members)
    with pytest.raises(UserError, match=r"the package (cannot be unpacked|holds)"):
        sources.unpack(package, inside_, "the package")
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["inside", "precious", "x.tgz"]
    assert (tmp_path / "precious").read_text() == "kept"
    assert not any(entry.is_symlink() for entry in inside_.rglob("*"))


def test_an_absolute_name_in_an_archive_lands_inside(tmp_path: Path) -> None:
    package = archive(tmp_path / "x.tgz", member("/deltafl-escaped"))
    sources.unpack(package, tmp_path, "the package")
    assert (tmp_path / "deltafl-escaped").exists()
    assert not Path("/deltafl-escaped").exists()
