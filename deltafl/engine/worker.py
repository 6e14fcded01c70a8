"""A worker process: `python -m deltafl.engine.worker FD` serves client work over a socket pair."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing import connection, reduction

from deltafl.engine import process
from deltafl.engine.base import ClientTask, Setup
from deltafl.engine.shared import Layout, Places, SharedMemory, copy_into, first_clients, unpack
from deltafl.engine.workbench import Workbench
from deltafl.errors import told


class Desk:
    """A workbench, and the shared memory that it reads from and writes to."""

    def __init__(self, setup: Setup, places: Places, memory: SharedMemory) -> None:
        self._one_shape = setup.one_shape
        process.keep_freed(one_shape=self._one_shape)
        self._bench = Workbench(setup)
        self._slots = places.bundles(memory.bytes)
        self._global = places.global_weights(memory.bytes)

    def train(self, bundle: Sequence[ClientTask], slot: int) -> object:
        """Run a bundle of clients and leave their weights in the slot."""
        place = first_clients(self._slots[slot], len(bundle))
        self._bench.settle(place)
        updates = self._bench.train(self._global, bundle)
        copy_into(place, updates.weights)
        if not self._one_shape:
            process.give_back()
        return updates.samples, updates.metrics

    def evaluate(self, start: int, stop: int, _slot: int) -> object:
        """Evaluate a chunk of the test set."""
        return self._bench.evaluate(self._global, start, stop)


def serve(link: connection.Connection) -> None:
    """Answer messages until the main process closes the connection or is gone."""
    desk: Desk | None = None
    refused: Exception | None = None
    while True:
        try:
            kind, *arguments = pickle.loads(link.recv_bytes())
            if kind == "open":
                try:
                    desk, refused = _take_up(link, *arguments), None
                except (EOFError, ConnectionResetError):
                    raise
                except Exception as error:
                    desk, refused = None, error
                continue
        except (EOFError, ConnectionResetError):
            return
        try:
            if desk is None:
                raise refused or RuntimeError("the worker was not opened")
            answer: tuple[bool, object] = True, getattr(desk, kind)(*arguments)
        except Exception as error:
            answer = False, error
        try:
            link.send_bytes(pickle.dumps(answer))
        except (BrokenPipeError, ConnectionResetError):
            return


def _take_up(
    link: connection.Connection, content: bytes, layout: Layout, data_size: int, places: Places
) -> Desk:
    """Receive the shared memory that belongs to an "open" message, and set the desk up."""
    data = SharedMemory(reduction.recv_handle(link), data_size)
    weights = SharedMemory(reduction.recv_handle(link), places.size)
    for memory in (data, weights):
        memory.close()  # the mapping stays
    with told("a worker could not begin"):
        return Desk(unpack(content, layout, data), places, weights)


def _leave_with(fd: int) -> None:
    """End this process as soon as the other end of a socket is closed, also amid a client's work.

    What it works on nobody waits for; and a run that is started again may write the same files.
    """
    watch = select.poll()
    watch.register(fd, 0)  # no events but a hang-up
    watch.poll()
    os._exit(0)


def main() -> None:
    """Serve on the file descriptor given on the command line."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the main process decides when to stop
        signal.signal(number, signal.SIG_IGN)
    fd = int(sys.argv[1])
    threading.Thread(target=_leave_with, args=[fd], daemon=True).start()
    process.prepare()
    serve(connection.Connection(fd))


if __name__ == "__main__":
    main()
