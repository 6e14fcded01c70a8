from __future__ import annotations

from pathlib import Path

from deltafl.experiment.memory import ClientMemory


def write(memory: ClientMemory, client: int, round_: int) -> None:
    memory.remember(client, round_).write_bytes(b"x")
    memory.kept(client, round_)


def recalled(memory: ClientMemory, client: int, round_: int) -> str | None:
    path = memory.recall(client, round_)
    return path and path.name


def test_a_round_sees_the_last_version_before_it(tmp_path: Path):
    memory = ClientMemory(tmp_path / "memory", 0)
    assert recalled(memory, 3, 1) is None
    for round_ in (1, 4):
        write(memory, 3, round_)
    assert recalled(memory, 3, 4) == "3-1.safetensors"
    assert recalled(memory, 3, 5) == "3-4.safetensors"
    assert recalled(memory, 2, 5) is None


def test_reopened_after_a_round_later_versions_never_happened(tmp_path: Path):
    memory = ClientMemory(tmp_path, 0)
    for client, round_ in ((0, 1), (0, 2), (0, 5), (1, 4)):
        write(memory, client, round_)
    (tmp_path / ".0-6.safetensors.tmp").write_bytes(b"half")
    again = ClientMemory(tmp_path, 3)
    assert recalled(again, 0, 4) == "0-2.safetensors"
    assert recalled(again, 1, 4) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0-1.safetensors",
        "0-2.safetensors",
    ]


def test_forgetting_keeps_what_the_checkpoint_needs(tmp_path: Path):
    memory = ClientMemory(tmp_path, 0)
    for client, round_ in ((0, 1), (0, 2), (0, 5), (1, 1)):
        write(memory, client, round_)
    memory.forget(3)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["0-2.safetensors", "0-5.safetensors", "1-1.safetensors"]
    assert recalled(memory, 0, 4) == "0-2.safetensors"
