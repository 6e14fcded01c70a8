"""Runs deltafl's commands in processes forked from one that has imported torch, with attacks.

A request is a line of JSON on standard input: the words of the command, and the name and arguments
of an attack, a function of this file that is called before the command begins. The answer is a line
with its exit code (negative: the signal) and what it wrote.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import sklearn.datasets  # noqa: F401  (so that forked commands need not import it)
import torch._dynamo
import torch._inductor.utils  # noqa: F401

from deltafl import tensorfile
from deltafl.cli import main
from deltafl.engine.workbench import Workbench
from deltafl.experiment import memory, rounds
from deltafl.experiment.run_folder import RunFolder
from deltafl.server import Server

NEW_MOUNTS = 0x00020000  # CLONE_NEWNS


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def when(owner, name: str, condition, act, after: bool = False) -> None:
    """Do something before, or after, a function is called with what fulfils the condition."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def attacked(*args, **kwargs):
        hit = condition(*args)
        if hit and not after:
            act(*args)
        result = plain(*args, **kwargs)
        if hit and after:
            act(*args)
        return result

    setattr(owner, name, attacked)


def die_when(owner, name: str, condition=lambda *_: True, after: bool = False) -> None:
    when(owner, name, condition, lambda *_: die(), after)


class Calls:
    """True at the n-th call."""

    def __init__(self, n: int) -> None:
        self._left = n

    def __call__(self, *_args) -> bool:
        self._left -= 1
        return self._left == 0


def cut_short(share: float, name: str, call: int) -> None:
    """Die when a part of a file has been written, under its temporary name."""

    def write_a_part(path: Path, content: bytes) -> None:
        path.with_name(f".{path.name}.tmp").write_bytes(content[: int(share * len(content))])
        die()

    count = Calls(call)
    when(
        tensorfile,
        "write_atomically",
        lambda path, _: path.name.endswith(name) and count(),
        write_a_part,
    )


def half_a_row(call: int) -> None:
    def record(folder, report):
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(report.row())[:20])
        die()

    when(RunFolder, "record", Calls(call), record)


# Where the process dies, in the order of a run; the numbers say in which round.
STAGES = {
    "while the configuration is written": lambda: cut_short(0.5, "config.toml", 1),
    "before the first round": lambda: die_when(RunFolder, "resume"),
    "before clients are sampled": lambda: die_when(rounds, "sample_clients", Calls(3)),
    "during the clients' work": lambda: die_when(Workbench, "train", Calls(8)),
    "while a memory is written": lambda: cut_short(0.5, "-3.safetensors", 2),
    "before aggregation": lambda: die_when(Server, "finish_round", Calls(3)),
    "after aggregation": lambda: die_when(Server, "finish_round", Calls(3), after=True),
    "during evaluation": lambda: die_when(Workbench, "evaluate", Calls(6)),
    "before the row of metrics": lambda: die_when(RunFolder, "record", Calls(3)),
    "within the row of metrics": lambda: half_a_row(3),
    "between metrics and checkpoint": lambda: die_when(RunFolder, "checkpoint", Calls(3)),
    "while a checkpoint is written": lambda: cut_short(0.5, "checkpoint.safetensors", 3),
    "before a checkpoint gets its name": lambda: cut_short(1, "checkpoint.safetensors", 3),
    "after a checkpoint": lambda: die_when(RunFolder, "checkpoint", Calls(3), after=True),
    "after memories are forgotten": lambda: die_when(
        memory.ClientMemory, "forget", Calls(3), after=True
    ),
    "before the summary": lambda: die_when(RunFolder, "finish"),
    "while the summary is written": lambda: cut_short(0.5, "summary.json", 1),
    "between the summary and the end": lambda: die_when(RunFolder, "tidy"),
}


def stage(name: str) -> None:
    STAGES[name]()


def limit(name: str, value: int) -> None:
    """Lower a limit of the system for this process and its children."""
    resource.setrlimit(getattr(resource, name), (value, value))


def handles_left(count: int) -> None:
    """Allow so many more open files than there are."""
    limit("RLIMIT_NOFILE", len(list(Path("/proc/self/fd").iterdir())) - 1 + count)


def no_memory_for(owner: str) -> None:
    """Refuse memory as torch does."""

    def refuse(*_):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 40000000000 bytes. Error code 12 (Cannot allocate "
            "memory)"
        )

    where = {"client": (Workbench, "train"), "server": (Server, "finish_round")}[owner]
    when(*where, Calls(2), refuse)


def small_disk(folder: str, megabytes: int) -> None:
    """Put a small disk where a folder is; only this process sees it."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    options = f"size={megabytes}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)


def full_then_freed(folder: str, kilobytes: int, words: list[str]) -> None:
    """Run a command on a disk with little room, make some, and let the same command go on there."""
    small_disk(folder, 4)
    Path(folder, "ballast").write_bytes(bytes((4096 - kilobytes) << 10))
    code = main(words)
    print(json.dumps({"first": code, "names": sorted(p.name for p in Path(folder).rglob("*"))}))
    Path(folder, "ballast").unlink()


def signals(numbers: list[int], round_: int) -> None:
    """Send signals to this process in the middle of a round."""

    def send(*_):
        for number in numbers:
            os.kill(os.getpid(), number)

    when(Server, "finish_round", Calls(round_), send)


def signal_at_start(number: int) -> None:
    when(rounds, "build_model", lambda *_: True, lambda *_: os.kill(os.getpid(), number))


def ignored_and_sent(number: int) -> None:
    signal.signal(number, signal.SIG_IGN)
    signals([number], 2)


def nothing() -> None:
    pass


def command(words: list[str], attack: list, scratch: Path) -> dict[str, object]:
    """Fork, attack, run; return how it ended."""
    out, err = scratch.with_suffix(".out"), scratch.with_suffix(".err")
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            for number, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
            name, *arguments = attack
            globals()[name](*arguments)
            code = main(words)
            sys.stdout.flush()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    alarm = threading.Timer(120, os.kill, (pid, signal.SIGKILL))
    alarm.start()
    _, status = os.waitpid(pid, 0)
    alarm.cancel()
    alarm.join()
    return {
        "code": os.waitstatus_to_exitcode(status),
        "out": out.read_text(),
        "err": err.read_text(),
        "left": sorted(p.name for p in scratch.iterdir() if "torchinductor" not in p.name),
    }


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        scratch = Path(tempfile.mkdtemp(dir=request["scratch"]))
        answer = command(request["words"], request["attack"], scratch)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
