"""The ClientApp: a node's side of the federation. Flower calls it with one message at a time.

It does what every engine does, `deltafl.client.train` by way of a `Workbench`, on the samples the
node holds. What the server sends is checked before it is followed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from deltafl import tensorfile
from deltafl.engine import ClientTask
from deltafl.engine.base import chunks, total
from deltafl.engine.workbench import Workbench
from deltafl.errors import UserError
from deltafl.experiment import Config
from deltafl.experiment.config import validated
from deltafl.flower.node import Node
from deltafl.flower.wire import (
    ARRAYS,
    CONFIG,
    METRICS,
    Introduction,
    MalformedError,
    Order,
    from_arrays,
    read_experiment,
    read_order,
    to_arrays,
    to_evaluation,
    to_metrics,
)

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Say which client this node is."""
    return _answer(message, context, _introduce)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do the client's work of a round."""
    return _answer(message, context, _train)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Say how the global weights do on the client's own samples."""
    return _answer(message, context, _evaluate)


def _answer(
    message: Message, context: Context, work: Callable[[Message, Node], RecordDict]
) -> Message:
    try:
        return Message(work(message, Node.read(context.node_config)), reply_to=message)
    except (UserError, MalformedError, OSError) as error:
        reason = " ".join(str(error).split())
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _introduce(message: Message, node: Node) -> RecordDict:
    return RecordDict({CONFIG: Introduction(node.client, node.own_data).record()})


def _train(message: Message, node: Node) -> RecordDict:
    order = read_order(message)
    config = node.config(order)
    bench = _workbench(node, order.experiment, order.facts)
    weights = from_arrays(_arrays(message), bench.model.state_dict())
    recall, remember = _memories(node.memory_of(config), order)
    task = ClientTask(order.client, order.round, order.progress, recall, remember)
    updates = bench.train(weights, [task])
    trained = {name: value[0] for name, value in updates.weights.items()}
    metrics = to_metrics(updates.samples[0], updates.metrics[0])
    return RecordDict({ARRAYS: to_arrays(trained), METRICS: metrics})


def _evaluate(message: Message, node: Node) -> RecordDict:
    order = read_order(message)
    setup = node.setup(node.config(order), order.facts)
    rows = setup.partition.indices(order.client)
    bench = Workbench(replace(setup, held_out=rows))
    weights = from_arrays(_arrays(message), bench.model.state_dict())
    parts = [bench.evaluate(weights, *chunk) for chunk in chunks(len(rows))]
    return RecordDict({METRICS: to_evaluation(len(rows), total(parts, len(rows)))})


@lru_cache(maxsize=1)  # whoever keeps the process alive builds model and data once
def _workbench(node: Node, experiment: str, facts: str) -> Workbench:
    config = validated(Config, read_experiment(experiment), "from the server")
    return Workbench(node.setup(config, facts))


def _arrays(message: Message) -> ArrayRecord:
    record = message.content.get(ARRAYS)
    if not isinstance(record, ArrayRecord):
        raise MalformedError("no record of arrays")
    return record


def _memories(folder: Path, order: Order) -> tuple[Path | None, Path | None]:
    """Return what to recall and where to remember, and forget what no round needs any more.

    A memory that is lost, or of another run, is none: the client starts as in its first round.
    """
    if not order.remember:
        return None, None
    folder.mkdir(parents=True, exist_ok=True)
    paths = {r: folder / f"{order.client}-{r}.safetensors" for r in (order.recall, order.round)}
    for path in folder.glob(f"{order.client}-*.safetensors"):
        if path not in paths.values():
            path.unlink()
    recall = paths[order.recall]
    try:
        found = tensorfile.digest(tensorfile.load(recall)[0]) == order.recall_sha256
    except UserError:
        found = False
    return recall if found else None, paths[order.round]
