"""The Ray engine: one actor a CPU of a cluster, each with one thread.

Ray finds places for the actors, notices when they die, and brings them what is large: the data set
once a run and the global weights once a round, in flat buffers that all actors of a node look into.
Clients, and small weights, go to each actor over a link, and a bundle of clients comes back as one
buffer. An actor or node that dies is replaced and its clients run again; since a client's work
depends on nothing but its inputs, the bits stay the same. Without an address the cluster is a local
one that only this machine can reach, and that ends with the engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltafl.client import Updates
from deltafl.engine import janitor
from deltafl.engine.base import ClientTask, Evaluation, Setup, bundles, chunks, total
from deltafl.engine.link import CONNECT_SECONDS, KEY_BYTES, Link
from deltafl.engine.out_of_band import as_tensor, pack
from deltafl.engine.ray_desk import RayDesk, Reply, bundle_layout, tools
from deltafl.engine.shared import Layout, copy_into
from deltafl.engine.workbench import build_model, bundle_size
from deltafl.engine.workers import available_cores
from deltafl.errors import UserError

# A finished bundle waits in the main process until all before it are taken. So many bytes of them,
# and a few of each actor however large they are, keep the actors busy when clients differ in size.
WAITING_BYTES = 64 << 20
PLACES_PER_ACTOR = 4
# An actor that has its next job already need not wait for the main process to wake up.
JOBS_AHEAD = 2
# Weights of so many bytes still go to every actor over its link. Larger ones go to every node once,
# through Ray's object store, which takes some milliseconds.
SMALL = 100 << 10
MAX_TRIES = 3
START_SECONDS = 300
LOOK_SECONDS = 0.2  # how often Ray is asked while nobody answers
REASON_SECONDS = 5
# Ray's sockets lie 64 characters below its folder, and a socket's path has at most 107.
LONGEST_FOLDER = 40

# How Ray behaves where it has no options for it. Here: take the loopback address, as on macOS,
# and so listen on no other; and there: do not try for minutes to reach what is no cluster.
LOCAL = {"ENABLE_RAY_CLUSTER": False}
REMOTE = {"NUM_REDIS_GET_RETRIES": 2}


@dataclass(eq=False)
class Job:
    """A bundle of clients, or a chunk of the test set, and its place in the order."""

    order: int
    content: Any
    tries: int = 0


@dataclass(eq=False)
class Stream:
    """What is to be done with some weights: jobs that wait, and answers that came early."""

    method: str
    weights: Any
    waiting: deque[Job]
    answers: dict[int, tuple[bool, Any]] = field(default_factory=dict)


@dataclass(eq=False)
class Actor:
    """An actor and the jobs it has, the one it is doing first."""

    handle: Any
    call: Any = None
    """What Ray was last asked to let it do: to open the run, or to work on it."""
    link: Link | None = None
    """None until it has opened the run."""
    holds: Any = None
    """The weights it was given last."""
    jobs: deque[Job] = field(default_factory=deque)

    def work(self, link: Link) -> None:
        """Let it do what comes over a link."""
        self.link = link
        self.call = self.handle.work.remote()

    def take(self, weights: Any) -> None:
        """Give it weights for the next jobs: a buffer, or where it lies in the object store."""
        if weights is not self.holds:
            self.holds = weights
            if isinstance(weights, np.ndarray):
                self._send(("take", weights))
            else:
                self._send(None)
                self.call = self.handle.work.remote(weights)

    def give(self, method: str, job: Job) -> None:
        """Give it a job; it does one after the other."""
        self.jobs.append(job)
        self._send((method, job.content))

    def _send(self, message: object) -> None:
        assert self.link is not None
        with contextlib.suppress(OSError):  # that it is dead is noticed when it does not answer
            self.link.send(message)


class _Run:
    """What all actors share of a run, and the weights they were given last."""

    def __init__(self, ray: Any, setup: Setup) -> None:
        model = build_model(setup)
        self._ray = ray
        # A copy no longer refers to files, which other nodes may not have.
        content, buffers = pack(replace(setup, dataset=setup.dataset.by_value()))
        self.content = content
        self.buffers = _put(ray, buffers)
        self.tools = tools(model)
        self.layout = Layout.of(model.state_dict())
        self.bundle = bundle_size(setup, model)
        self.chunks = chunks(setup.evaluated)
        self.places = WAITING_BYTES // (self.bundle * self.layout.size)
        self._block: Tensor | None = None
        self._reference: Any = None

    def broadcast(self, weights: Mapping[str, Tensor]) -> Any:
        """Return what brings the weights to the actors; large ones are put where they lie once."""
        block = torch.zeros(self.layout.size, dtype=torch.uint8)
        copy_into(self.layout.views(block), weights)
        if self._block is None or not torch.equal(block, self._block):
            small = block.nbytes <= SMALL
            self._reference = block.numpy() if small else _put(self._ray, block.numpy())
            self._block = block
        return self._reference


class RayEngine:
    """Spreads the clients of a round over the actors of a Ray cluster."""

    def __init__(self, workers: int = 0, address: str | None = None) -> None:
        """Take `workers` actors, or one a CPU of the cluster at `address` or on this machine."""
        self._workers = workers
        self._address = address
        self._actors: list[Actor] = []
        self._stillborn = 0
        self._key = secrets.token_bytes(KEY_BYTES)
        self._run: _Run | None = None

    def __enter__(self) -> RayEngine:
        with contextlib.ExitStack() as stack:
            cpus = self._workers or available_cores()
            self._ray = stack.enter_context(_connected(self._address, cpus))
            self._links = stack.enter_context(selectors.DefaultSelector())
            stack.callback(self._dismiss)
            self._remote = self._ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(RayDesk)
            count = self._workers or int(self._ray.cluster_resources().get("CPU", 0))
            if count == 0:
                raise UserError("the Ray cluster has no CPUs: join a node that has some")
            # Started before anything else, so that they import torch while the data is loaded.
            self._actors = [self._hire() for _ in range(count)]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _hire(self) -> Actor:
        return Actor(self._remote.remote([path for path in sys.path if path]))

    def _dismiss(self) -> None:
        """Let go of all actors and of what they share."""
        for actor in self._actors:
            self._end(actor)
        self._actors, self._run = [], None

    def _end(self, actor: Actor) -> None:
        self._hang_up(actor)
        with contextlib.suppress(Exception):  # it may be gone, or Ray itself
            self._ray.kill(actor.handle)

    def open(self, setup: Setup) -> None:
        """Put the run into the object store and send the actors there."""
        if torch.device(setup.device).type != "cpu":
            raise UserError("the actors of a Ray cluster compute on CPUs: use --run.device cpu")
        self._run = None  # its buffers go before the next ones come
        self._run = _Run(self._ray, setup)
        for actor in self._actors:
            self._send(actor)

    def _send(self, actor: Actor) -> None:
        """Let an actor open the run, as soon as it has done what it is doing."""
        run = self._opened()
        self._hang_up(actor)
        actor.jobs.clear()
        actor.call = actor.handle.open.remote(run.content, run.buffers, run.tools, self._key)

    def _hang_up(self, actor: Actor) -> None:
        if actor.link is not None:
            self._links.unregister(actor.link)
            actor.link.close()
        actor.link = actor.holds = None

    def _opened(self) -> _Run:
        if self._run is None:
            raise RuntimeError("open the engine for a run before using it")
        return self._run

    def train(
        self, weights: Mapping[str, Tensor], tasks: Sequence[ClientTask]
    ) -> Iterator[Updates]:
        """Yield the clients' updates in the order of `tasks`."""
        run = self._opened()
        given = bundles([_absolute(task) for task in tasks], run.bundle)
        replies: Iterator[Reply] = self._stream("train", weights, given)
        for buffer, samples, metrics in replies:
            layout = bundle_layout(run.layout, len(samples))
            yield Updates(layout.views(as_tensor(buffer)), samples, metrics)

    def evaluate(self, weights: Mapping[str, Tensor]) -> Evaluation:
        """Evaluate the global weights on all samples held for that."""
        every = self._opened().chunks
        return total(list(self._stream("evaluate", weights, every)), every[-1][1])

    def _stream(
        self, method: str, weights: Mapping[str, Tensor], contents: Sequence[Any]
    ) -> Iterator[Any]:
        """Yield the answers to all jobs in order, whichever actor finishes first.

        Jobs are handed out in order, so the next one in order is always at work or done.
        """
        jobs = deque(Job(order, content) for order, content in enumerate(contents))
        stream = Stream(method, self._opened().broadcast(weights), jobs)
        for actor in self._actors:
            if actor.jobs:  # of a stream that was interrupted, perhaps within an answer
                self._send(actor)
            elif actor.link is not None:
                actor.take(stream.weights)
        try:
            for order in range(len(contents)):
                while order not in stream.answers:
                    self._hand_out(stream, order)
                    self._collect(stream)
                self._hand_out(stream, order + 1)
                ok, answer = stream.answers.pop(order)
                if not ok:
                    raise answer
                yield answer
        except (Exception, GeneratorExit):
            # Whoever stopped listening, the actors finish what they have begun.
            while any(actor.jobs for actor in self._actors):
                self._collect(stream)
            raise

    def _hand_out(self, stream: Stream, taken: int) -> None:
        """Give the next jobs to idle actors, then to busy ones ahead, while there are places.

        The last jobs are not given ahead: they go to whoever is idle first.
        """
        linked = [actor for actor in self._actors if actor.link is not None]
        places = taken + max(self._opened().places, PLACES_PER_ACTOR * len(linked))
        for ahead in range(JOBS_AHEAD):
            for actor in linked:
                waiting = stream.waiting
                if len(waiting) <= ahead * len(linked) or waiting[0].order >= places:
                    return
                if len(actor.jobs) <= ahead:
                    actor.give(stream.method, waiting.popleft())

    def _collect(self, stream: Stream) -> None:
        """Wait a moment for an answer, an arrival or a death, and note the answers."""
        # Actors that wait for a free CPU do not matter while others work.
        working = any(actor.jobs for actor in self._actors)
        answered = self._links.select(LOOK_SECONDS) if working else []
        for key, _ in answered:
            self._receive(key.data, stream)
        # Ray knows who has opened the run and, where nobody answers, who does not work any more.
        calls = {a.call: a for a in self._actors if a.link is None or not answered}
        if not calls:
            return
        count, patience = (len(calls), 0) if working else (1, START_SECONDS)
        over, _ = self._ray.wait(list(calls), num_returns=count, timeout=patience)
        if not (over or working):
            raise UserError(
                f"no actor could start within {START_SECONDS} s: the CPUs of the Ray cluster are "
                "taken, or its nodes are gone; see ray status"
            )
        for reference in over:
            actor = calls[reference]
            if actor.link is None:
                self._welcome(actor, stream)
            else:
                self._replace(actor, stream)

    def _receive(self, actor: Actor, stream: Stream) -> None:
        """Note an answer, or replace who gives none any more."""
        assert actor.link is not None
        try:
            answer = actor.link.receive()
        except (OSError, EOFError):
            self._replace(actor, stream)
            return
        self._stillborn = 0
        stream.answers[actor.jobs.popleft().order] = answer

    def _welcome(self, actor: Actor, stream: Stream) -> None:
        """Connect to an actor that has opened the run, or replace one that has died over it."""
        try:
            ok, answer = self._ray.get(actor.call)
            link = Link.to(answer, self._key) if ok else None
        except self._ray.exceptions.RayTaskError:
            raise  # not a death, but a fault of ours
        except (self._ray.exceptions.RayError, OSError):
            self._replace(actor, stream)
            return
        if link is None:
            raise answer
        self._links.register(link, selectors.EVENT_READ, actor)
        actor.work(link)
        actor.take(stream.weights)

    def _replace(self, dead: Actor, stream: Stream) -> None:
        """Put a new actor where one has died, and let its jobs wait again."""
        if dead.jobs:
            dead.jobs[0].tries += 1
            hopeless = dead.jobs[0].tries >= MAX_TRIES
        else:
            self._stillborn += 1
            hopeless = self._stillborn >= MAX_TRIES * len(self._actors)
        why = self._reason(dead) if hopeless else ""
        self._end(dead)
        actor = self._actors[self._actors.index(dead)] = self._hire()
        self._send(actor)
        if hopeless and not dead.jobs:
            raise UserError(f"actors end before they begin: {why}")
        if hopeless:
            training = stream.method == "train"
            what = f"client {dead.jobs[0].content[0].client}" if training else "the evaluation"
            raise UserError(f"actors died {MAX_TRIES} times on {what}: {why}")
        again = sorted([*stream.waiting, *dead.jobs], key=lambda job: job.order)
        stream.waiting = deque(again)

    def _reason(self, dead: Actor) -> str:
        """Return Ray's last word on why an actor died."""
        try:
            self._ray.get(dead.call, timeout=REASON_SECONDS)
        except self._ray.exceptions.RayError as error:
            return str(error).strip().splitlines()[-1].strip()
        return "the main process has lost the connection to it"


def _absolute(task: ClientTask) -> ClientTask:
    """Name a client's files so that they are found from any folder."""
    if task.recall is None and task.remember is None:
        return task
    return task._replace(
        recall=task.recall and task.recall.absolute(),
        remember=task.remember and task.remember.absolute(),
    )


def _put(ray: Any, value: object) -> Any:
    try:
        return ray.put(value)
    except ray.exceptions.RayError as error:
        raise UserError(f"Ray's object store does not take the data: {error}") from None


@contextlib.contextmanager
def _connected(address: str | None, cpus: int) -> Iterator[Any]:
    """Yield Ray, connected to a cluster: the given one, or a local one with so many CPUs."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nobody is told that Ray runs
    try:
        import ray  # noqa: PLC0415  (an extra, and slow to import)
    except ImportError:
        raise UserError("the ray engine needs Ray: pip install 'deltafl[ray]'") from None
    if ray.is_initialized():  # whoever connected this process keeps the connection
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            raise UserError(f"this process is connected to Ray at {here} already, not {address}")
        yield ray
        return
    with contextlib.ExitStack() as stack:
        before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        if address is None:
            folder = stack.enter_context(_private_folder())
            # Whatever Ray starts is known by it, should nobody be left to stop Ray.
            os.environ[janitor.MARK] = str(folder)
            stack.callback(os.environ.pop, janitor.MARK, None)
            options: dict[str, Any] = {
                "address": "local",
                "num_cpus": cpus,
                "include_dashboard": False,
                "_temp_dir": str(folder),
                # The actors are what this is about.
                "_system_config": {"worker_niceness": 0},
            }
        else:
            _reach(address)
            options = {"address": address}
        stack.callback(_on_sigterm, before)  # as soon as Ray is down, whatever it has put there
        stack.callback(ray.shutdown)
        try:
            constants = LOCAL if address is None else REMOTE
            services = ray._private.services
            patience = {"get_node": patiently(services.get_node)}
            with (
                warnings.catch_warnings(),
                _patched(ray._private.ray_constants, constants),
                _patched(services, patience),
            ):
                warnings.filterwarnings("ignore", "Tip: In future versions of Ray", FutureWarning)
                ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
        except Exception as error:
            where = "here" if address is None else f"at {address}"
            raise UserError(f"cannot use Ray {where}: {error}") from None
        # Ray has put handlers of its own there; the last of them ends the process with a core dump.
        _on_sigterm(_leave if before is signal.SIG_DFL else before)
        yield ray


def _reach(address: str) -> None:
    """Say quickly that there is nothing at an address: Ray itself takes its time."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"no Ray cluster answers at {address} ({reason}): see ray status") from None


def patiently(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Give a node that starts longer than Ray's thirty seconds, which a busy machine may need."""

    def get(*given: Any, **more: Any) -> Any:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                return get_node(*given, **more)
            except RuntimeError:  # it is not there yet
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    return get


@contextlib.contextmanager
def _patched(module: Any, values: Mapping[str, object]) -> Iterator[None]:
    """Change constants of a module for a while."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def _on_sigterm(handler: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _leave(number: int, _frame: object) -> None:
    """End the process in order, so that Ray and its folder go with it."""
    sys.exit(128 + number)


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """Yield a folder that nobody else can read; it goes, however this process ends."""
    long = len(tempfile.gettempdir()) > LONGEST_FOLDER - len("/deltafl-ray-12345678")
    folder = Path(tempfile.mkdtemp(prefix="deltafl-ray-", dir="/tmp" if long else None))
    keeper = janitor.hire(folder)
    try:
        yield folder
    finally:
        keeper.communicate()  # closes its input, and waits for it
