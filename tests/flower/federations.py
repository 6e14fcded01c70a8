"""What the tests with real federations share."""

from __future__ import annotations

import contextlib
import json
import threading

from deltafl import Config
from deltafl.flower.control import Job, LostError
from deltafl.flower.engine import Patience

CONFIG = Config.model_validate(
    {
        "task": "digits-mlp",
        "federation": {"clients": 2, "participation": 1.0, "samples": 60},
        "client": {"batch_size": 16},
        "run": {"rounds": 3, "checkpoint_seconds": 0},
        "engine": {"kind": "inline"},
    }
)
# Nothing here depends on how long a patient server waits: much longer than a busy machine needs.
PATIENT = Patience(deadline=600.0, join=600.0)


class Run(threading.Thread):
    """A run on a federation, in the background."""

    def __init__(self, federation, out, config=CONFIG, patience=PATIENT, **more):
        super().__init__()
        self.federation, self.job = federation, Job(config, out, patience, **more)
        self.events = []
        self.start()

    def run(self):
        control = self.federation.control
        with contextlib.suppress(LostError, RuntimeError):  # a test may end before its run
            for event in control.follow(control.submit(self.job), self.federation.running):
                self.events.append(event)

    def rounds(self):
        return [event["row"] for event in self.events if event["kind"] == "round"]

    def refused(self, client):
        """Why there was no update of a client in each round so far; None where there was one."""
        return [row.get("refused", {}).get(str(client)) for row in self.rounds()]

    def summary(self):
        self.join()
        last = self.events[-1]
        assert last["kind"] == "finished", last
        return last["summary"]


def rows(path):
    """The rows of a file of metrics."""
    return [json.loads(line) for line in path.read_text().splitlines()]
