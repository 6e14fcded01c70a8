"""Kill deltafl at random moments, start the same command again, and see whether anything is lost.

    python -m benchmarks.faults.kills --kills inline=100 workers=80 ray=20

Runs go in chains: a command is started and killed a few times, and then left to finish. After each
kill no process, shared memory or temporary file may be left; at the end the weights and every
round's row have to be those of an undisturbed run. Most commands are forked from a process that has
imported torch already, so that kills hit rounds and not imports; one in ten is a real command.
It looks into /proc and adopts orphans, so it needs Linux. Other programs should not use /dev/shm
meanwhile; or put a fresh one there: unshare -m sh -c "mount -t tmpfs tmpfs /dev/shm && python ..."
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import sklearn.datasets  # noqa: F401  (so that forked commands need not import it)
import torch._dynamo
import torch._inductor.utils  # noqa: F401

from benchmarks import machine
from benchmarks.environments import ROOT
from benchmarks.memory import tree
from deltafl.cli import main
from deltafl.tensorfile import write_atomically

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
ROUNDS = 20
TRIES = 5
NOT_STARTED = "cannot use Ray here: The current node timed out during startup"
PATIENCE = 300.0
GONE_WITHIN = {"inline": 10.0, "workers": 60.0, "ray": 120.0}
"""Seconds; a worker that has just been started imports torch before it can notice anything."""
TORCHS_OWN = "torchinductor_"  # an empty cache folder that torch makes for each user
COMMAND = """run --federation.clients 12 --federation.samples 60 --federation.participation 0.5
    --client.batch-size 8 --engine.workers 2""".split()  # noqa: SIM905
VARIATIONS = {
    "plain": ["--task", "digits-mlp", "--server.optimizer", "fedadam"],
    "stacked": ["--task", "digits-softmax"],
    "moon": ["--task", "digits-mlp", "--client.objective", "moon"],
}
WHATS = {"main": 6, "one worker": 1, "all workers": 1, "SIGINT": 1, "SIGTERM": 1}
"""What is hit, and how often in relation."""
STOPPED = "deltafl: stopped; the same command goes on where it stopped\n"


class LostError(Exception):
    """A promise was broken; the message says which."""


class NotStartedError(Exception):
    """Ray gives up on starting after half a minute, which a busy machine may need."""


@dataclass
class Kill:
    """One kill: what was hit, in which state the run was, and how long the rest of it lived."""

    engine: str
    variation: str
    checkpoint_seconds: float
    cold: bool
    what: str
    rounds_done: int
    seconds_to_gone: float


class Speed(NamedTuple):
    """How many seconds an undisturbed command takes, and its rounds after the first."""

    whole: float
    rounds: float


@dataclass
class Campaign:
    """All that has happened so far."""

    kills: list[Kill] = field(default_factory=list)
    chains: int = 0
    lost: list[str] = field(default_factory=list)


class Process:
    """A command in a process of its own, its words in files."""

    def __init__(self, words: list[str], scratch: Path, cold: bool) -> None:
        self._out, self._err = scratch.with_suffix(".out"), scratch.with_suffix(".err")
        self._status: int | None = None
        with self._out.open("wb") as out, self._err.open("wb") as err:
            if cold:
                self.pid = subprocess.Popen(
                    [sys.executable, "-m", "deltafl", *words],
                    stdout=out,
                    stderr=err,
                    env={**os.environ, "TMPDIR": str(scratch)},
                    start_new_session=True,
                ).pid
            else:
                self.pid = os.fork()
                if self.pid == 0:
                    _become(words, scratch, out.fileno(), err.fileno())

    def ended(self) -> bool:
        """Whether it has ended; whoever else has ended is buried, too."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if found[0] == self.pid:
                    self._status = os.waitstatus_to_exitcode(found[1])
        return self._status is not None

    def wait(self, seconds: float = PATIENCE) -> int:
        """Return the exit code."""
        end = time.monotonic() + seconds
        while not self.ended():
            if time.monotonic() > end:
                raise LostError(f"it did not end within {seconds:.0f} s")
            time.sleep(0.005)
        assert self._status is not None
        return self._status

    def said(self) -> tuple[str, str]:
        """Return what it wrote."""
        return self._out.read_text(), self._err.read_text()


def _become(words: list[str], scratch: Path, out: int, err: int) -> None:
    """Be the command; never returns."""
    code = 70
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
        code = main(words)
        sys.stdout.flush()
    finally:
        os._exit(code)


def workers_of(pid: int) -> list[int]:
    """Return the processes that do client work."""
    found = []
    for child in tree(pid):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"deltafl.engine.worker" in name or name.startswith(b"ray::RayDesk"):
                found.append(child)
    return found


def left_behind(scratch: Path, shared: set[str]) -> str:
    """Return what is left of a command that has ended, or nothing."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    for pid in tree(os.getpid())[1:]:
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            return f"process {pid} {name[:80]}"
    files = [path.name for path in scratch.iterdir() if not path.name.startswith(TORCHS_OWN)]
    new = {entry.name for entry in Path("/dev/shm").iterdir()} - shared
    return ", ".join([*files, *(f"/dev/shm/{name}" for name in new)])


def gone(engine: str, scratch: Path, shared: set[str]) -> float:
    """Wait until nothing is left, and return how long that took."""
    begun = time.monotonic()
    while left := left_behind(scratch, shared):
        if time.monotonic() - begun > GONE_WITHIN[engine]:
            raise LostError(f"left after {GONE_WITHIN[engine]:.0f} s: {left}")
        time.sleep(0.01)
    return time.monotonic() - begun


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the whole rows of the metrics, without what the clock said."""
    try:
        lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    except OSError:
        return []
    return [{**json.loads(line), "seconds": 0} for line in lines]


class Chain:
    """A run that is killed a few times and then finishes."""

    def __init__(self, engine: str, dice: random.Random, home: Path, speed: dict[str, Speed]):
        self.engine = engine
        self.dice = dice
        self.home = home
        self.speed = speed
        self.variation = dice.choice(list(VARIATIONS))
        self.checkpoint_seconds = dice.choice([0.0, 5.0])
        self.folder = home / "run"
        self.words = [*COMMAND, *VARIATIONS[self.variation], "--run.rounds", str(ROUNDS)]
        self.words += ["--engine.kind", engine, "--out", str(self.folder)]
        self.words += ["--run.checkpoint-seconds", str(self.checkpoint_seconds)]

    def go(self, kills: int, campaign: Campaign, expected: dict[str, Any]) -> None:
        """Kill so many times, then let it finish and compare."""
        for _ in range(kills):
            with contextlib.suppress(NotStartedError):
                campaign.kills.append(self._kill())
            if (self.folder / "summary.json").exists():
                break
        for _ in range(TRIES):
            process, scratch, shared = self._start(cold=False)
            with contextlib.suppress(NotStartedError):
                self._expect(process, {0}, "")
                break
            gone(self.engine, scratch, shared)
        gone(self.engine, scratch, shared)
        self._compare(expected)

    def _compare(self, expected: dict[str, Any]) -> None:
        if not (self.folder / "summary.json").exists():
            raise LostError(f"Ray did not start {TRIES} times")
        summary = json.loads((self.folder / "summary.json").read_text())
        if summary["weights_sha256"] != expected["weights_sha256"]:
            raise LostError("other weights")
        if rows(self.folder) != expected["rows"]:
            raise LostError("other metrics")
        names = sorted(path.name for path in self.folder.iterdir())
        if names != ["checkpoint.safetensors", "config.toml", "metrics.jsonl", "summary.json"]:
            raise LostError(f"files {names}")

    def _start(self, cold: bool) -> tuple[Process, Path, set[str]]:
        shared = {entry.name for entry in Path("/dev/shm").iterdir()}
        scratch = Path(tempfile.mkdtemp(prefix="s", dir=self.home))
        return Process(self.words, scratch, cold), scratch, shared

    def _kill(self) -> Kill:
        cold = self.dice.random() < 0.1
        known = [what for what in WHATS if self.engine != "inline" or "worker" not in what]
        what = self.dice.choices(known, [WHATS[one] for one in known])[0]
        begun = self._another_round()
        process, scratch, shared = self._start(cold)
        if what != "main" or self.dice.random() < 0.7:  # into the rounds
            self._until(process, begun)
            time.sleep(self.dice.uniform(0, self.speed[self.engine].rounds))
        else:
            time.sleep(self.dice.uniform(0, self.speed[self.engine].whole))
        done = len(rows(self.folder))
        if what == "main":
            _send(process.pid, signal.SIGKILL)
            self._expect(process, {-9, 0}, "")
        elif "worker" in what:
            found = workers_of(process.pid)
            self.dice.shuffle(found)
            for pid in found[: 1 if what == "one worker" else None]:
                _send(pid, signal.SIGKILL)
            self._expect(process, {0}, "")
        else:
            number = signal.Signals[what]
            _send(process.pid, number)
            self._expect(process, {128 + number, 0}, STOPPED, number)
        seconds = gone(self.engine, scratch, shared)
        return Kill(self.engine, self.variation, self.checkpoint_seconds, cold, what, done, seconds)

    def _another_round(self) -> Callable[[], bool]:
        """Return what tells when a command that starts now has recorded a round.

        It replaces the metrics by those of the checkpoint's rounds first.
        """
        metrics = self.folder / "metrics.jsonl"
        old = metrics.stat().st_ino if metrics.exists() else None
        sizes: list[int] = []

        def told() -> bool:
            with contextlib.suppress(FileNotFoundError):
                now = metrics.stat()
                if now.st_ino != old:
                    sizes.append(now.st_size)
            return bool(sizes) and sizes[-1] > sizes[0]

        return told

    def _until(self, process: Process, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not (process.ended() or condition() or time.monotonic() > end):
            time.sleep(0.002)

    def _expect(self, process: Process, codes: set[int], words: str, number: int = 0) -> None:
        """Compare the end of a process; after its run has ended it dies of a signal as any does."""
        code = process.wait()
        said = process.said()[1]
        if code == 2 and NOT_STARTED in said:
            raise NotStartedError
        if number and (self.folder / "summary.json").exists():
            codes = codes | {-number}
        if code not in codes or said != (words if code > 0 else ""):
            raise LostError(f"exit code {code} after {len(rows(self.folder))} rounds: {said}")


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def undisturbed(home: Path, engine: str, variation: str) -> tuple[dict[str, Any], Speed]:
    """Run a variation in peace; return its outcome and how long it took."""
    home.mkdir(parents=True)
    chain = Chain(engine, random.Random(0), home, {})
    chain.words = [*COMMAND, *VARIATIONS[variation], "--run.rounds", str(ROUNDS)]
    chain.words += ["--engine.kind", engine, "--out", str(chain.folder)]
    for _ in range(TRIES):
        begun = time.monotonic()
        process, *_ = chain._start(cold=False)
        code = process.wait()
        seconds = time.monotonic() - begun
        if code == 0:
            break
    else:
        raise SystemExit(process.said()[1])
    summary = json.loads((chain.folder / "summary.json").read_text())
    outcome = {"weights_sha256": summary["weights_sha256"], "rows": rows(chain.folder)}
    lines = (chain.folder / "metrics.jsonl").read_text().splitlines()
    later = sum(
        json.loads(line)["seconds"] for line in lines[1:]
    )  # the first one waits for imports
    return outcome, Speed(seconds, later)


def written(campaign: Campaign, command: str, begun: float, *, done: bool) -> str:
    """Return the campaign as Markdown."""
    about = machine.hardware()
    lines = [
        f"`{command}`, {'' if done else 'not finished yet, '}"
        f"{(time.time() - begun) / 60:.0f} minutes, on {about['cpu']}, {about['cores']} cores, "
        f"load average at the end {machine.load()[0]:.1f}: {len(campaign.kills)} kills in "
        f"{campaign.chains} chains, {len(campaign.lost)} broken promises.",
        "",
        "| engine | what was hit | n | before round 1, between, after the last | gone after, s: "
        "median (largest) |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    counts = Counter((kill.engine, kill.what) for kill in campaign.kills)
    for (engine, what), count in sorted(counts.items()):
        found = [k for k in campaign.kills if (k.engine, k.what) == (engine, what)]
        times = [k.seconds_to_gone for k in found]
        early = sum(k.rounds_done == 0 for k in found)
        late = sum(k.rounds_done >= ROUNDS for k in found)
        lines.append(
            f"| {engine} | {what} | {count} | {early}, {count - early - late}, {late} | "
            f"{statistics.median(times):.2f} ({max(times):.2f}) |"
        )
    return "\n".join([*lines, *(f"\nBroken: {one}" for one in campaign.lost)]) + "\n"


def run(wanted: dict[str, int], seed: int, out: Path, scratch: Path) -> int:
    """Kill until every engine has had its share, and write the report after every chain."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    dice = random.Random(seed)
    begun = time.time()
    shares = " ".join(f"{name}={count}" for name, count in wanted.items())
    command = f"python -m benchmarks.faults.kills --kills {shares} --seed {seed}"
    campaign = Campaign()
    base = Path(tempfile.mkdtemp(prefix="dk-", dir=scratch))
    try:
        expected, speed = {}, {}
        for variation in VARIATIONS:
            expected[variation], speed["inline"] = undisturbed(
                base / variation, "inline", variation
            )
        for engine in wanted.keys() - {"inline"}:
            speed[engine] = undisturbed(base / engine, engine, "plain")[1]
        print(f"undisturbed: {speed}", flush=True)
        while True:
            so_far = Counter(kill.engine for kill in campaign.kills)
            short = [engine for engine, count in wanted.items() if so_far[engine] < count]
            if not short:
                break
            engine = dice.choice(short)
            home = base / f"c{campaign.chains}"
            home.mkdir()
            chain = Chain(engine, dice, home, speed)
            try:
                chain.go(dice.randint(1, 4), campaign, expected[chain.variation])
            except LostError as error:
                name = f"{engine}, {chain.variation}, chain {campaign.chains}: {error}"
                campaign.lost.append(" ".join(name.split()))
                for pid in tree(os.getpid())[1:]:
                    _send(pid, signal.SIGKILL)
            campaign.chains += 1
            shutil.rmtree(home, ignore_errors=True)
            print(
                f"{len(campaign.kills)} of {sum(wanted.values())} kills, {campaign.chains} chains, "
                f"{len(campaign.lost)} broken {campaign.lost[-1:]}",
                flush=True,
            )
            _write(out, campaign, written(campaign, command, begun, done=False))
    finally:
        shutil.rmtree(base, ignore_errors=True)
    _write(out, campaign, written(campaign, command, begun, done=True))
    return 1 if campaign.lost else 0


def _write(out: Path, campaign: Campaign, text: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out.with_suffix(".md"), text.encode())
    content = json.dumps(asdict(campaign), indent=1) + "\n"
    write_atomically(out.with_suffix(".json"), content.encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", nargs="+", default=["inline=100", "workers=80", "ray=20"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results" / "faults" / "kills", help="without its suffix"
    )
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"), help="short, for Ray")
    given = parser.parse_args()
    shares = (word.partition("=") for word in given.kills)
    sys.exit(
        run({name: int(count) for name, _, count in shares}, given.seed, given.out, given.scratch)
    )
