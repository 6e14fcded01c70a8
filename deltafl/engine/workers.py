"""The multi-process engine: one worker a core, each with one thread.

The global weights and the clients' weights travel through shared memory, everything else through a
socket pair. A worker that dies is replaced and its client runs again; since a client's work depends
on nothing but its inputs, the bits stay the same. Workers end by themselves when the main process
does, however it ends.

Where clients are so small that they are stacked, the main process is one of the workers: it would
otherwise wait for work that takes little longer than being woken up.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection, reduction
from typing import Any

from torch import Tensor

from deltafl.client import Updates
from deltafl.engine import process
from deltafl.engine.base import ClientTask, Evaluation, Setup, bundles, chunks, total
from deltafl.engine.shared import Places, SharedMemory, copy_into, first_clients, pack
from deltafl.engine.workbench import Workbench, build_model, bundle_size
from deltafl.errors import EXHAUSTED, UserError

# A finished client waits in its slot until all before it are taken, a small one until several are
# taken together; more slots than workers keep the workers busy meanwhile.
SLOTS_PER_WORKER = 8
# ... but a large model's weights should not fill the memory for that: a worker that waits for the
# main process to add them up waits for a small part of the time that it takes to train them.
SLOT_BYTES = 256 << 20
# Weights up to which taking an answer is mostly being woken up with cold caches. Larger ones are
# added up while the workers go on.
SMALL_BYTES = 256 << 10
# A worker that has its next job already need not wait for the main process to wake up.
JOBS_AHEAD = 2
MAX_TRIES = 3


@dataclass
class Job:
    """A piece of work on its way: its place in the order, what to send, and where it writes."""

    order: int
    message: tuple[Any, ...]
    slot: int = -1
    tries: int = 0


class Worker:
    """A process, the connection to it, and the jobs it has, the one it is doing first."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        with theirs:
            self.process = subprocess.Popen(
                # -P: the folder we were started in is not where modules are looked for.
                [sys.executable, "-P", "-m", "deltafl.engine.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        self.connection = connection.Connection(ours.detach())
        self.jobs: deque[Job] = deque()

    def open(self, run: _Run) -> None:
        """Hand the worker a run's set-up and the shared memory."""
        self.send("open", run.content, run.layout, run.data.size, run.places)
        for memory in (run.data, run.memory):
            reduction.send_handle(self.connection, memory.fd, self.process.pid)

    def send(self, *message: object) -> None:
        """Send plain pickle: the connection's own would share tensors through named sockets."""
        self.connection.send_bytes(pickle.dumps(message))

    def close(self) -> None:
        """End the process and wait for it."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Run:
    """What all workers share of a run: its set-up, and places for weights."""

    def __init__(self, setup: Setup, workers: int) -> None:
        self.content, self.layout, self.data = pack(setup)
        model = build_model(setup)
        self.bundle = bundle_size(setup, model)
        self.own = Workbench(setup) if self.bundle > 1 else None
        self.places = Places.of(model.state_dict(), self.bundle, workers)
        fitting = SLOT_BYTES // self.places.bundle.size
        slots = max(workers, min(fitting, SLOTS_PER_WORKER * workers))
        self.places = replace(self.places, slots=slots)
        try:
            self.memory = SharedMemory.create(self.places.size)
        except UserError:
            self.data.close()
            raise
        self.weights = self.places.global_weights(self.memory.bytes)
        self.slots = self.places.bundles(self.memory.bytes)
        self.chunks = chunks(setup.evaluated)
        self.gathers = self.own is None and self.places.bundle.size <= SMALL_BYTES

    def close(self) -> None:
        self.data.close()
        self.memory.close()


class WorkersEngine:
    """Spreads the clients of a round over worker processes."""

    def __init__(self, workers: int = 0) -> None:
        self._count = workers or available_cores()
        self._workers: list[Worker] = []
        self._run: _Run | None = None

    def __enter__(self) -> WorkersEngine:
        # Started before anything else, so that they import torch while the data is loaded.
        try:
            for _ in range(self._count):
                self._workers.append(Worker())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []
        if self._run is not None:
            self._run.close()
            self._run = None

    def open(self, setup: Setup) -> None:
        """Send the run to the workers and lay out the shared memory for its model."""
        # Aggregating takes and frees as much memory in every round.
        process.keep_freed(one_shape=setup.one_shape)
        if self._run is not None:
            self._run.close()
            self._run = None  # there may be no memory for another
        self._run = _Run(setup, self._count)
        helpers = self._count - (self._run.own is not None)
        while len(self._workers) > helpers:
            self._workers.pop().close()
        while len(self._workers) < helpers:
            self._workers.append(Worker())
        for place in range(helpers):
            self._open(place)

    def _open(self, place: int) -> None:
        """Hand the run to a worker, or to another in its place if it has died."""
        for _ in range(MAX_TRIES):
            try:
                self._workers[place].open(self._opened())
            except OSError as error:
                if error.errno in EXHAUSTED:  # another worker would not have more of it
                    raise
                self._workers[place].close()
                self._workers[place] = Worker()
            else:
                return
        raise UserError(
            f"workers end before they begin (exit code {self._workers[place].process.poll()}): "
            "see what they say above, or use --engine.kind inline"
        )

    def train(
        self, weights: Mapping[str, Tensor], tasks: Sequence[ClientTask]
    ) -> Iterator[Updates]:
        """Yield the clients' updates in the order of `tasks`."""
        run = self._opened()
        copy_into(run.weights, weights)
        for slot, answer in self._stream(
            [("train", bundle) for bundle in bundles(tasks, run.bundle)]
        ):
            if isinstance(answer, Updates):  # of this process
                yield answer
            else:
                samples, metrics = answer
                yield Updates(first_clients(run.slots[slot], len(samples)), samples, metrics)

    def evaluate(self, weights: Mapping[str, Tensor]) -> Evaluation:
        """Evaluate the global weights on all samples held for that."""
        run = self._opened()
        copy_into(run.weights, weights)
        jobs = [("evaluate", *chunk) for chunk in run.chunks]
        return total([part for _, part in self._stream(jobs)], run.chunks[-1][1])

    def _opened(self) -> _Run:
        if self._run is None:
            raise RuntimeError("open the engine for a run before using it")
        return self._run

    def _stream(self, messages: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """Yield (slot, answer) of every message in order, whichever worker finishes first.

        Jobs are handed out in order and a job keeps its slot until it is taken, so the next one
        in order is always at work or done: waiting for it cannot block for ever.
        """
        waiting = deque(Job(order, message) for order, message in enumerate(messages))
        free = list(range(self._opened().places.slots))
        for place, worker in enumerate(self._workers):
            if worker.jobs:  # of a stream that was interrupted, perhaps within an answer
                self._replace(place, deque())
        answers: dict[int, tuple[int, Any]] = {}
        try:
            order = 0
            while order < len(messages):
                while order not in answers or self._gathers_more(waiting, free):
                    mine = self._take_one(waiting, free)
                    self._hand_out(waiting, free)
                    if mine is not None:
                        answers[mine.order] = mine.slot, self._do(mine)
                        if not waiting:  # nobody needs more
                            continue
                    self._receive(answers, waiting, wait=mine is None)
                while order in answers:
                    self._hand_out(waiting, free)
                    slot, answer = answers.pop(order)
                    yield slot, answer
                    free.append(slot)
                    order += 1
                    if waiting:  # somebody may need more meanwhile
                        self._receive(answers, waiting, wait=False)
        except (Exception, GeneratorExit):
            # Whoever stopped listening, the workers finish what they have begun.
            waiting.clear()
            while any(worker.jobs for worker in self._workers):
                for _ in self._collect(waiting):
                    pass
            raise

    def _gathers_more(self, waiting: deque[Job], free: list[int]) -> bool:
        """Whether answers stay in their slots for now.

        To take small ones as they come would interrupt a worker each time, and begin with cold
        caches. So they are taken together, when slots run out or a worker has nothing left to do.
        """
        if not self._opened().gathers:
            return False
        return all(worker.jobs for worker in self._workers) and bool(free or not waiting)

    def _take_one(self, waiting: deque[Job], free: list[int]) -> Job | None:
        """Take the next job for this process, if it is one of the workers; it holds a slot, too."""
        if self._opened().own is None or not waiting or not (waiting[0].slot >= 0 or free):
            return None
        return _take(waiting, free)

    def _do(self, job: Job) -> Any:
        """Do a job in this process."""
        run = self._opened()
        assert run.own is not None
        kind, *arguments = job.message
        return getattr(run.own, kind)(run.weights, *arguments)

    def _hand_out(self, waiting: deque[Job], free: list[int]) -> None:
        """Give the next jobs to idle workers, then one ahead to busy ones, while there are slots.

        The last jobs are not given ahead: they go to whoever is idle first.
        """
        for ahead in range(JOBS_AHEAD):
            for place, worker in enumerate(self._workers):
                if len(waiting) <= ahead * self._count:
                    return
                if len(worker.jobs) > ahead or not (waiting[0].slot >= 0 or free):
                    continue
                job = _take(waiting, free)
                worker.jobs.append(job)
                try:
                    worker.send(*job.message, job.slot)
                except OSError:
                    self._replace(place, waiting)

    def _receive(
        self, answers: dict[int, tuple[int, Any]], waiting: deque[Job], *, wait: bool
    ) -> None:
        """Note the answers that come; an error among them is raised."""
        for job, ok, answer in self._collect(waiting, wait=wait):
            if not ok:
                raise answer
            answers[job.order] = job.slot, answer

    def _collect(
        self, waiting: deque[Job], *, wait: bool = True
    ) -> Iterator[tuple[Job, bool, Any]]:
        """Wait for at least one answer or death, or only look, and yield the answers."""
        # Not connection.wait, which makes a selector of its own: it is called for every client.
        poll = select.poll()
        places = {}
        for place, worker in enumerate(self._workers):
            if worker.jobs:
                poll.register(worker.connection, select.POLLIN)
                places[worker.connection.fileno()] = place
        for ready, _ in poll.poll(None if wait else 0):
            place = places[ready]
            worker = self._workers[place]
            try:
                content = worker.connection.recv_bytes()
            except (EOFError, OSError):
                self._replace(place, waiting)
                continue
            yield worker.jobs.popleft(), *pickle.loads(content)

    def _replace(self, place: int, waiting: deque[Job]) -> None:
        """Put a new worker where one has died, and its jobs back to the front."""
        dead = self._workers[place]
        jobs, dead.jobs = dead.jobs, deque()  # if there is no room for another, nobody has them
        dead.close()
        self._workers[place] = Worker()
        self._open(place)
        if not jobs:
            return
        job = jobs[0]
        job.tries += 1
        if job.tries >= MAX_TRIES:
            training = job.message[0] == "train"
            what = f"client {job.message[1][0].client}" if training else "the evaluation"
            raise UserError(
                f"a worker died {MAX_TRIES} times on {what} (exit code "
                f"{dead.process.returncode}): perhaps out of memory; use fewer --engine.workers"
            )
        waiting.extendleft(reversed(jobs))


def _take(waiting: deque[Job], free: list[int]) -> Job:
    """Return the next job, with a slot to write to."""
    job = waiting.popleft()
    if job.slot < 0:
        job.slot = free.pop()
    return job
