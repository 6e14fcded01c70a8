"""The workloads: deltafl configurations, and the same federations as files for the others."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environments import HERE
from deltafl import Config
from deltafl.client import local_steps
from deltafl.engine.workbench import build_model
from deltafl.experiment.federation import build_setup, sample_clients

Fields = dict[str, Any]

CORES = 2
SCHEDULED = 2000
"""Rounds whose clients are written down; later rounds begin again from the first."""

LR = 0.1

W: Fields = {
    "task": "fmnist-cnn",
    "federation.clients": 100,
    "federation.samples": 500,
    "federation.alpha": 0.1,
    "federation.participation": 0.1,
    "client.optimizer": "sgd",
    "client.lr": LR,
    "client.epochs": 1,
    "client.batch_size": 64,
    "server.optimizer": "average",
    "engine.kind": "workers",
    "engine.workers": CORES,
    "engine.fast": True,
    "run.device": "cpu",
}


def tiny(model: str, samples: int | None = None) -> Fields:
    """Return the federation of a tiny model on digits, all of 100 clients in every round."""
    return W | {
        "task": f"digits-{model}",
        "federation.samples": samples,
        "federation.replacement": samples is not None,
        "federation.participation": 1.0,
    }


def files(fields: Mapping[str, Any]) -> Path:
    """Return a folder with the federation as .npy files, writing them on first use."""
    name = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]
    folder = HERE / ".work" / f"{fields['task']}-{name}"
    if not folder.exists():
        draft = folder.with_suffix(".draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _write(Config().override(**fields), draft)
        draft.rename(folder)
    return folder


def _write(config: Config, folder: Path) -> None:
    setup = build_setup(config)
    for prefix, split in (("", setup.dataset.train), ("test_", setup.dataset.test)):
        samples = setup.dataset.samples(split)
        np.save(folder / f"{prefix}inputs.npy", samples.inputs.numpy())
        np.save(folder / f"{prefix}labels.npy", samples.labels.numpy())
    rows = [setup.partition.indices(client) for client in range(config.federation.clients)]
    np.save(folder / "rows.npy", np.stack(rows))
    schedule = [sample_clients(config, number) for number in range(1, SCHEDULED + 1)]
    np.save(folder / "schedule.npy", np.array(schedule))
    state = build_model(setup).state_dict()
    np.savez(folder / "initial.npz", **{name: value.numpy() for name, value in state.items()})
    client = config.client
    about = {
        "model": config.model_name,
        "lr": client.lr,
        "batch": client.batch_size,
        "steps": local_steps(len(rows[0]), client.epochs, client.batch_size),
    }
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")
