"""A whole federation on this machine: a SuperLink and SuperNodes as processes, with TLS and keys.

They are real: the same programs as on many hosts, over loopback. All they write is in a temporary
folder, and a janitor process ends them and deletes it, even if this process is killed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from deltafl.engine import janitor
from deltafl.errors import UserError
from deltafl.flower import certificates
from deltafl.flower.control import Address, Control, Event, Job, LostError

START_SECONDS = 300.0
TRIES = 3
HOST = "127.0.0.1"

Process = subprocess.Popen[bytes]


class Federation:
    """A SuperLink with authenticated SuperNodes on this machine; use it as a context manager."""

    def __init__(self, nodes: Sequence[str]) -> None:
        """Prepare a node for each entry, which is what it is told beside its number."""
        self._node_configs = list(nodes)
        self.nodes: list[Process] = []
        self._stack = ExitStack()

    def __enter__(self) -> Federation:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="deltafl-federation-"))
        self._janitor = janitor.hire(self.folder)
        self._processes: list[Process] = []
        self._stack.callback(self._stop)
        self.files = certificates.write_server(self.folder, certificates.LOOPBACK)
        keys = [
            certificates.write_node_key(self.folder, f"node-{number}")
            for number in range(len(self._node_configs))
        ]
        port = free_port()
        self.address = Address(f"{HOST}:{port}", self.files.ca)
        self.superlink = self.spawn(
            "flower-superlink",
            "superlink",
            *("--host", HOST, "--port", str(port)),
            *("--ssl-ca-certfile", str(self.files.ca)),
            *("--ssl-certfile", str(self.files.certificate)),
            *("--ssl-keyfile", str(self.files.key)),
            "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
        )
        self.control = self._stack.enter_context(Control(self.address))
        end = time.monotonic() + START_SECONDS
        while not self.control.answers():
            if self.superlink.poll() is not None or time.monotonic() > end:
                raise UserError(f"the SuperLink did not start: {self.last_words('superlink')}")
            time.sleep(0.2)
        for number, (key, public) in enumerate(keys):
            self.control.register(public, f"client-{number}")
            self.nodes.append(self.start_node(number, key, self._node_configs[number]))

    def start_node(self, number: int, key: Path, told: str = "") -> Process:
        """Start the SuperNode of a client with a key."""
        memory = self.folder / f"memory-{number}"
        config = f'partition-id={number} memory="{memory}" {told}'.strip()
        return self.spawn(
            "flower-supernode",
            f"node-{number}",
            *("--superlink", self.address.superlink),
            *("--root-certificates", str(self.files.ca)),
            *("--auth-supernode-private-key", str(key)),
            *("--host", HOST, "--port", str(free_port())),
            *("--node-config", config),
        )

    def spawn(self, program: str, name: str, *words: str) -> Process:
        """Start one of Flower's programs, its output in a file of the temporary folder."""
        place = Path(sysconfig.get_path("scripts")) / program
        if not place.exists():
            raise UserError(f"{program} is not here: install deltafl with the extra flower")
        with self._log(name).open("ab") as log:
            process = subprocess.Popen(
                [str(place), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self.folder / f"home-{name}"),
                start_new_session=True,
            )
        assert self._janitor.stdin is not None
        self._janitor.stdin.write(f"{process.pid}\n")
        self._janitor.stdin.flush()
        self._processes.append(process)
        return process

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def last_words(self, name: str) -> str:
        """Return the end of a program's output, as one line."""
        try:
            text = self._log(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "it said nothing"
        return " ".join(text.split())[-600:] or "it said nothing"

    def _stop(self) -> None:
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        self._janitor.wait()
        for process in self._processes:
            process.wait()

    def running(self) -> bool:
        """Whether the SuperLink still runs."""
        return self.superlink.poll() is None


def run_here(job: Job, nodes: Sequence[str], hear: Callable[[Event], None]) -> None:
    """Run a job on a federation of this machine, and start again what dies on the way.

    A run that is lost with its SuperLink or ServerApp goes on from its folder. That is tried as
    long as there is progress.
    """
    tries = Tries(hear)
    while True:
        with Federation(nodes) as federation:
            hear({"kind": "up", "superlink": federation.address.superlink, "nodes": len(nodes)})
            while federation.running():
                try:
                    run = federation.control.submit(job)
                    if tries.follow(federation.control, run, federation.running):
                        return
                except UserError:
                    if federation.running():
                        raise
                    tries.lost("the SuperLink died")


def run_there(job: Job, address: Address, hear: Callable[[Event], None]) -> None:
    """Run a job on a federation that is already up."""
    tries = Tries(hear)
    with Control(address) as control:
        while True:
            run = control.submit(job)
            try:
                if tries.follow(control, run, lambda: True):
                    return
            except BaseException:
                control.stop(run)
                raise


class Tries:
    """Follows a run, and counts how often it was lost without a round in between."""

    def __init__(self, hear: Callable[[Event], None]) -> None:
        self._hear = hear
        self._fruitless = 0

    def follow(self, control: Control, run: int, alive: Callable[[], bool]) -> bool:
        """Hand on what a run says; return whether it has finished, or False to try again."""
        why = "the ServerApp died"
        try:
            for event in control.follow(run, alive):
                self._hear(event)
                if event.get("kind") == "error":
                    raise UserError(str(event.get("text")))
                if event.get("kind") == "finished":
                    return True
                if event.get("kind") == "round":
                    self._fruitless = 0
        except LostError as lost:
            why = str(lost)
        self.lost(why)
        return False

    def lost(self, why: str) -> None:
        """Count a run that was lost; `UserError` if that happens again and again."""
        self._fruitless += 1
        if self._fruitless >= TRIES:
            raise UserError(
                f"{why}, {TRIES} times without a finished round in between; what is done is in "
                "the run folder, and the same command goes on from it"
            )
        self._hear({"kind": "again", "text": f"{why}: going on from the last finished round"})


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs: a private home, and no calls to anybody."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    return own | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        # Flower looks for work once a second; a round here may be shorter.
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "NO_PROXY": "*",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # Flower starts its other programs by name.
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), own.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
