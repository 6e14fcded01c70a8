"""The Ray engine: one actor a CPU of a cluster, each with one thread.

The data set is put into Ray's object store once a run and the global weights once a round, each in
flat buffers that all actors of a node look into; a bundle of clients comes back as one buffer. An
actor or node that dies is replaced and its clients run again; since a client's work depends on
nothing but its inputs, the bits stay the same. Without an address the cluster is a local one that
only this machine can reach, and that ends with the engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
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

import torch
from torch import Tensor

from deltafl.client import Updates
from deltafl.engine import janitor
from deltafl.engine.base import ClientTask, Evaluation, Setup, bundles, chunks, total
from deltafl.engine.out_of_band import as_tensor, pack
from deltafl.engine.ray_desk import RayDesk, Reply, bundle_layout, tools
from deltafl.engine.shared import Layout, copy_into
from deltafl.engine.workbench import build_model, bundle_size
from deltafl.engine.workers import available_cores
from deltafl.errors import UserError

# A finished bundle waits in the object store until all before it are taken; more places than
# actors keep the actors busy when clients differ in size.
PLACES_PER_ACTOR = 4
# An actor that has its next job already need not wait for the main process to wake up.
JOBS_AHEAD = 2
# What is below so many bytes Ray sends along with a message, and what is larger goes through the
# object store, which costs more than another message. So answers are made to stay below it.
MESSAGE = 100 << 10
OWN_MESSAGE = 1 << 20
FILLED = 0.9  # the rest of a message is for metrics and the like
MAX_TRIES = 3
CONNECT_SECONDS = 10
START_SECONDS = 300
# Ray's sockets lie 64 characters below its folder, and a socket's path has at most 107.
LONGEST_FOLDER = 40

# How Ray behaves where it has no options for it. Here: take the loopback address, as on macOS,
# and so listen on no other; and there: do not try for minutes to reach what is no cluster.
LOCAL = {"ENABLE_RAY_CLUSTER": False}
REMOTE = {"NUM_REDIS_GET_RETRIES": 2}


@dataclass(eq=False)
class Piece:
    """A bundle of clients, or a chunk of the test set: the least that is worked on at once."""

    order: int
    content: Any
    tries: int = 0


@dataclass(eq=False)
class Stream:
    """What is to be done with some weights: pieces that wait, and answers that came early."""

    method: str
    weights: Any
    waiting: deque[Piece]
    largest: int
    """How many pieces a call may have."""
    answers: dict[int, tuple[bool, Any]] = field(default_factory=dict)

    def next_pieces(self, actors: int) -> list[Piece]:
        """Take what the next call is about: many pieces at first, and fewer towards the end.

        A message costs about a millisecond of processor time at either end, whatever is in it.
        """
        size = min(self.largest, -(-len(self.waiting) // (2 * actors)))
        pieces = [self.waiting.popleft()]
        while len(pieces) < size and not (pieces[0].tries or self.waiting[0].tries):
            pieces.append(self.waiting.popleft())
        return pieces

    def put_back(self, pieces: Sequence[Piece]) -> None:
        """Let pieces wait again, in their old order."""
        self.waiting = deque(sorted([*self.waiting, *pieces], key=lambda piece: piece.order))


@dataclass(eq=False)
class Job:
    """A call of an actor: what it is about, and where its answer will be."""

    pieces: list[Piece]
    reference: Any


@dataclass(eq=False)
class Actor:
    """An actor and the jobs it has, the one it is doing first."""

    handle: Any
    opening: Any = None
    """The answer to come before it can work on the run; None once it has come."""
    jobs: deque[Job] = field(default_factory=deque)
    holds: Any = None
    """The weights it was given last."""

    def give(self, stream: Stream, pieces: list[Piece]) -> None:
        """Call the actor; it works on its calls one after the other."""
        news = None if stream.weights is self.holds else stream.weights
        call = getattr(self.handle, stream.method).remote
        self.jobs.append(Job(pieces, call(news, [piece.content for piece in pieces])))
        self.holds = stream.weights

    @property
    def next_answer(self) -> Any:
        """The answer it will give next, or None if none is to come."""
        if self.opening is None and self.jobs:
            return self.jobs[0].reference
        return self.opening


class _Run:
    """What all actors share of a run, and the weights they were given last."""

    def __init__(self, ray: Any, setup: Setup, inline: int) -> None:
        model = build_model(setup)
        self._ray = ray
        self._inline = inline
        # A copy no longer refers to files, which other nodes may not have.
        content, buffers = pack(replace(setup, dataset=setup.dataset.by_value()))
        self.content = content
        self.buffers = _put(ray, buffers)
        self.tools = tools(model)
        self.layout = Layout.of(model.state_dict())
        self.bundle = bundle_size(setup, model)
        self.chunks = chunks(setup.evaluated)
        self._block: Tensor | None = None
        self._reference: Any = None

    def broadcast(self, weights: Mapping[str, Tensor]) -> Any:
        """Put the weights into the object store, unless they are what lies there already.

        In a cluster of this machine alone small ones go with the messages, which is quicker.
        """
        block = torch.zeros(self.layout.size, dtype=torch.uint8)
        copy_into(self.layout.views(block), weights)
        if self._block is None or not torch.equal(block, self._block):
            small = block.nbytes <= self._inline
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
        self._run: _Run | None = None

    def __enter__(self) -> RayEngine:
        with contextlib.ExitStack() as stack:
            cpus = self._workers or available_cores()
            self._ray, self._own = stack.enter_context(_connected(self._address, cpus))
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
        with contextlib.suppress(Exception):  # it may be gone, or Ray itself
            self._ray.kill(actor.handle)

    def open(self, setup: Setup) -> None:
        """Put the run into the object store and send the actors there."""
        if torch.device(setup.device).type != "cpu":
            raise UserError("the actors of a Ray cluster compute on CPUs: use --run.device cpu")
        self._run = None  # its buffers go before the next ones come
        self._run = _Run(self._ray, setup, int(FILLED * OWN_MESSAGE) if self._own else 0)
        for actor in self._actors:
            self._send(actor)

    def _send(self, actor: Actor) -> None:
        run = self._opened()
        actor.holds = None
        actor.opening = actor.handle.open.remote(run.content, run.buffers, run.tools)

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
        room = FILLED * (OWN_MESSAGE if self._own else MESSAGE)
        largest = max(1, int(room) // (run.bundle * run.layout.size))
        replies: Iterator[Reply] = self._stream("train", weights, given, largest)
        for buffer, samples, metrics in replies:
            layout = bundle_layout(run.layout, len(samples))
            yield Updates(layout.views(as_tensor(buffer)), samples, metrics)

    def evaluate(self, weights: Mapping[str, Tensor]) -> Evaluation:
        """Evaluate the global weights on all samples held for that."""
        every = self._opened().chunks
        return total(list(self._stream("evaluate", weights, every, len(every))), every[-1][1])

    def _stream(
        self, method: str, weights: Mapping[str, Tensor], contents: Sequence[Any], largest: int
    ) -> Iterator[Any]:
        """Yield the results of all pieces in order, whichever actor finishes first.

        Pieces are handed out in order, so the next one in order is always at work or done.
        """
        pieces = deque(Piece(order, content) for order, content in enumerate(contents))
        stream = Stream(method, self._opened().broadcast(weights), pieces, largest)
        for actor in self._actors:
            actor.jobs.clear()  # of a stream that was interrupted
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
        """Give the next pieces to idle actors, then to busy ones ahead, while there are places.

        The last pieces are not given ahead: they go to whoever is idle first.
        """
        ready = [actor for actor in self._actors if actor.opening is None]
        places = taken + PLACES_PER_ACTOR * len(ready) * stream.largest
        for ahead in range(JOBS_AHEAD):
            for actor in ready:
                waiting = stream.waiting
                if len(waiting) <= ahead * len(ready) or waiting[0].order >= places:
                    return
                if len(actor.jobs) <= ahead:
                    actor.give(stream, stream.next_pieces(len(ready)))

    def _collect(self, stream: Stream) -> None:
        """Wait for at least one answer or death, and note the answers."""
        coming = {
            actor.next_answer: place
            for place, actor in enumerate(self._actors)
            if actor.next_answer is not None
        }
        # Actors that wait for a free CPU do not matter while others work.
        working = any(actor.jobs for actor in self._actors)
        patience = None if working else START_SECONDS
        done, _ = self._ray.wait(list(coming), timeout=patience)
        if not done:
            raise UserError(
                f"no actor could start within {START_SECONDS} s: the CPUs of the Ray cluster are "
                "taken, or its nodes are gone; see ray status"
            )
        for reference in done:
            actor = self._actors[coming[reference]]
            try:
                ok, answer = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError:
                raise  # not a death, but a fault of ours
            except self._ray.exceptions.RayError as error:
                self._replace(coming[reference], error, stream)
                continue
            if actor.opening is not None:
                if not ok:
                    raise answer
                actor.opening, self._stillborn = None, 0
                continue
            orders = [piece.order for piece in actor.jobs.popleft().pieces]
            found = [(True, one) for one in answer] if ok else [(False, answer)] * len(orders)
            stream.answers.update(zip(orders, found, strict=True))

    def _replace(self, place: int, reason: Exception, stream: Stream) -> None:
        """Put a new actor where one has died, and let its pieces wait again."""
        dead = self._actors[place]
        self._end(dead)
        self._actors[place] = self._hire()
        self._send(self._actors[place])
        why = str(reason).strip().splitlines()[-1].strip()
        if not dead.jobs:
            self._stillborn += 1
            if self._stillborn >= MAX_TRIES * len(self._actors):
                raise UserError(f"actors end before they begin: {why}")
            return
        for piece in dead.jobs[0].pieces:
            piece.tries += 1
            if piece.tries >= MAX_TRIES:
                training = stream.method == "train"
                what = f"client {piece.content[0].client}" if training else "the evaluation"
                raise UserError(f"actors died {MAX_TRIES} times on {what}: {why}")
        stream.put_back([piece for job in dead.jobs for piece in job.pieces])


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
def _connected(address: str | None, cpus: int) -> Iterator[tuple[Any, bool]]:
    """Yield Ray, connected to a cluster: the given one, or a local one with so many CPUs.

    Also yields whether the cluster was started for this.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nobody is told that Ray runs
    try:
        import ray  # noqa: PLC0415  (an extra, and slow to import)
    except ImportError:
        raise UserError("the ray engine needs Ray: pip install 'deltafl[ray]'") from None
    if ray.is_initialized():  # whoever connected this process keeps the connection
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            raise UserError(f"this process is connected to Ray at {here} already, not {address}")
        yield ray, False
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
                "_system_config": {
                    "max_direct_call_object_size": OWN_MESSAGE,
                    "worker_niceness": 0,  # the actors are what this is about
                },
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
        yield ray, address is None


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
