from __future__ import annotations

import signal

import pytest
from hypothesis import settings

from deltafl import Config

# Property tests share two cores with everything else: no deadlines, reproducible examples.
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")

# Started in the background of a shell, tests inherit a Ctrl-C that is ignored, and so would all
# that they start; but some of it is there to be stopped by one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def small() -> Config:
    """Six clients on digits, three of them a round, three rounds: runs in a blink."""
    return Config.model_validate(
        {
            "task": "digits-softmax",
            "federation": {"clients": 6, "samples": 30, "participation": 0.5, "alpha": 0.5},
            "client": {"batch_size": 8},
            "run": {"rounds": 3, "checkpoint_seconds": 0},
            "engine": {"kind": "inline"},
        }
    )
