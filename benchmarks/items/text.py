"""MiniLM on AG News: tokens a second beside a plain transformers loop, padding, and memory."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import compare, fleet
from benchmarks.items.base import Item, Settings
from benchmarks.items.memory import peak
from benchmarks.progress import Progress
from benchmarks.report import Outcome, Table
from benchmarks.session import FailedError
from deltafl.client import batches
from deltafl.experiment import Config
from deltafl.experiment.federation import build_setup
from deltafl.seeding import derive, torch_generator

TITLE = "Text: MiniLM on AG News, batch 16, float32, one thread a worker"

W_TEXT: dict[str, Any] = {
    "task": "agnews-minilm",
    "federation.clients": 50,
    "federation.samples": 500,
    "federation.alpha": 1.0,
    "client.optimizer": "sgd",
    "client.lr": 0.01,
    "client.batch_size": 16,
    "engine.workers": 2,
}
"""The paper's text setting."""

SAMPLES = 128
ONE_CLIENT = W_TEXT | {
    "federation.clients": 1,
    "federation.samples": SAMPLES,
    "federation.participation": 1.0,
    "federation.partition": "iid",
    "engine.kind": "inline",
}


def measure(settings: Settings, progress: Progress) -> Outcome:
    """Measure a client's pass in turns with the loop's, then padding, then memory."""
    repeats, rounds = settings.choose(3, 1)
    systems = [
        fleet.deltafl(ONE_CLIENT),
        fleet.text_loop(ONE_CLIENT),
    ]
    results = compare.interleave(systems, progress, repeats=repeats, rounds=rounds, warm_up=1)
    tokens = padding(ONE_CLIENT)[0]
    title = f"seconds for {SAMPLES} samples ({tokens} real tokens); ratio to deltafl"
    outcome = Outcome(TITLE, [Table(title, compare.COLUMNS, compare.rows(results, "deltafl"))])
    outcome.raw.update(compare.raw(results))
    for name, series in results.items():
        if series.blocks:
            outcome.notes.append(f"{name}: {tokens / series.median:.0f} real tokens a second.")
    real, padded = padding(W_TEXT)
    share = 1 - real / padded
    outcome.raw["padding"] = {"real": real, "padded": padded}
    outcome.notes.append(
        f"Padding of one round of all 50 clients: {share:.1%} of {padded} tokens; with texts "
        f"padded to 128 it is {1 - real / (50 * 31 * 16 * 128):.1%}."
    )
    for optimizer in ("delta-sgd", "adam"):  # those that keep most
        _memory(outcome, optimizer)
    return outcome


def _memory(outcome: Outcome, optimizer: str) -> None:
    fields = W_TEXT | {"client.optimizer": optimizer, "client.lr": None}
    try:
        found = peak(fleet.deltafl(fields, optimizer), 1)
    except FailedError as error:
        outcome.notes.append(f"Memory with {optimizer}: failed: {error}")
        return
    outcome.raw[f"memory {optimizer}"] = vars(found)
    outcome.notes.append(
        f"Memory of a round of W-text with {optimizer} on 2 workers: peak PSS {found.pss:.0f} MB "
        f"(RSS {found.rss:.0f} MB) over {found.processes} processes."
    )


def padding(fields: dict[str, Any]) -> tuple[int, int]:
    """Return the real tokens of a round of all clients, and those with padding."""
    setup = build_setup(Config().override(**fields))
    real = padded = 0
    for client in range(setup.partition.clients):
        samples = setup.dataset.samples(setup.dataset.train, setup.partition.indices(client))
        seed = derive(setup.seed, "client", 1, client)
        plain = batches(len(samples), setup.work, seed)
        for rows in samples.grouped(plain, torch_generator(seed, "groups")):
            inputs, _ = samples.batch(rows)
            padded += inputs["input_ids"].numel()
            mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
            real += int(mask.sum())
    return real, padded


ITEM = Item("text", TITLE, 6, measure)
