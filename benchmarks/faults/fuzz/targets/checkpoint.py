"""Checkpoints and clients' memories: damaged files, and files whose seal an attacker made right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import safetensors
import safetensors.torch

from benchmarks.faults.fuzz.target import Target, switch
from deltafl import tensorfile
from deltafl.engine.inline import InlineEngine
from deltafl.experiment import Config
from deltafl.experiment.federation import build_setup
from deltafl.experiment.memory import ClientMemory
from deltafl.experiment.rounds import Rounds
from deltafl.experiment.run_folder import CHECKPOINT, CONFIG, MEMORY, METRICS, RunFolder

RAW, ABOUT, TENSORS = range(3)
DONE = 2


@cache
def _rounds() -> Rounds:
    config = Config.model_validate(
        {
            "task": "digits-softmax",
            "federation": {"clients": 6, "samples": 30},
            "client": {"objective": "moon"},
            "server": {"optimizer": "fedadam"},
            "run": {"rounds": 3},
            "engine": {"kind": "inline"},
        }
    )
    return Rounds(config, build_setup(config), InlineEngine())


def _run(content: bytes, folder: Path) -> None:
    rounds = _rounds()
    rounds.done, rounds.ended = 0, None
    way, rest = switch(content)
    place = folder / CHECKPOINT
    tensors, about = rounds.state()
    about |= {"round": DONE, "memories": [], "lookout": {"good": DONE}}
    if way % 3 == RAW:
        place.write_bytes(rest)
    elif way % 3 == ABOUT:
        about = _json(rest.replace(b"THIS-RUN", rounds.config.hash.encode()))
        tensorfile.save(place, tensors, about)
    else:
        try:
            tensors = safetensors.torch.load(rest)
        except (safetensors.SafetensorError, KeyError):
            return
        tensorfile.save(place, tensors, about)
    rows = ({"round": number + 1} for number in range(DONE))
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / CONFIG).write_text(rounds.config.to_toml())
    RunFolder(folder, rounds.config).resume(rounds)
    ClientMemory(folder / MEMORY, rounds.done).recall(0, DONE + 1)


def _json(text: bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.decode(errors="replace")


def _seeds() -> Sequence[bytes]:
    rounds = _rounds()
    tensors, about = rounds.state()
    whole = safetensors.torch.save(tensors)
    text = json.dumps(about | {"run": "THIS-RUN", "round": 1, "memories": ["0-1.safetensors"]})
    first = dict(list(tensors.items())[:1])
    return [
        bytes([RAW]) + safetensors.torch.save(first, {"deltafl": "0" * 64 + ' {"round": 1}'}),
        bytes([ABOUT]) + text.encode(),
        bytes([ABOUT]) + text.replace("0-1.", "../../0-1.").encode(),
        bytes([ABOUT]) + b"[]",
        bytes([TENSORS]) + safetensors.torch.save(first),
        bytes([TENSORS]) + whole,
    ]


TARGET = Target(
    "checkpoint",
    "checkpoint.safetensors of a run folder",
    _run,
    _seeds,
    words=(b'"memories"', b'"round"', b'"native"', b'"dtype"', b'"F32"', b'"data_offsets"'),
)
