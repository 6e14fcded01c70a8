from __future__ import annotations

import pytest
from hypothesis import settings

from deltafl import Config

# Property tests share two cores with everything else: no deadlines, reproducible examples.
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")


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
