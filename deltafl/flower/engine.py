"""The engine of a real federation: client work runs on Flower's nodes, wherever they are.

The rounds, the server and the run folder are those of a simulation; only the weights and a few
numbers travel. A node that is away, late, broken or dishonest costs its own update and no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from deltafl import tensorfile
from deltafl.client import Updates
from deltafl.engine.base import ClientTask, Evaluation, Missing, Setup
from deltafl.engine.inline import InlineEngine
from deltafl.engine.workbench import build_model
from deltafl.errors import UserError
from deltafl.experiment.memory import VERSION
from deltafl.flower.wire import (
    ARRAYS,
    CONFIG,
    Introduction,
    MalformedError,
    Order,
    facts_of,
    from_arrays,
    read_evaluation,
    read_introduction,
    read_metrics,
    to_arrays,
)

POLL_SECONDS = 0.2
# So often in a row nobody may answer before the run stops; it goes on when it is started again.
SILENT_ROUNDS = 3


class AwayError(Exception):
    """The SuperLink cannot be reached; the run goes on from its folder when it is back."""


@dataclass(frozen=True)
class Patience:
    """How long the server waits, in seconds."""

    deadline: float = 600.0
    """For the updates of a round; who is later is left out of it."""
    join: float = 120.0
    """For the nodes of the first round to appear."""


@dataclass(frozen=True)
class Holder:
    """A node, and what it said of itself."""

    node: int
    introduction: Introduction


class FlowerEngine:
    """Sends every sampled client's work to the node that holds the client."""

    def __init__(
        self,
        grid: Grid,
        experiment: str,
        patience: Patience | None = None,
        on_nodes: Callable[[int, list[dict[str, Any]]], None] | None = None,
    ) -> None:
        """Work through `grid` on the configuration `experiment` (TOML).

        `on_nodes`, if given, hears after each evaluation how every node does on its own data.
        """
        self._grid = grid
        self._experiment = experiment
        self._patience = patience or Patience()
        self._on_nodes = on_nodes
        self._evaluating = InlineEngine()
        self._holders: dict[int, Holder] = {}
        self._spare: dict[int, Holder] = {}
        self._asked: dict[str, int] = {}
        self._turned_away: dict[int, str] = {}
        self._round = 0
        self._silent = 0

    def __enter__(self) -> FlowerEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def open(self, setup: Setup) -> None:
        """Prepare for a run; the server evaluates on its own copy of the test set."""
        self._setup = setup
        self._facts = facts_of(setup.dataset)
        self._reference = build_model(setup).state_dict()
        self._evaluating.open(setup)

    def train(
        self, weights: Mapping[str, Tensor], tasks: Sequence[ClientTask]
    ) -> Iterator[Updates | Missing]:
        """Yield the clients' updates, or why there is none, in the order of `tasks`."""
        first = self._round == 0
        self._round = tasks[0].round
        self._meet({task.client for task in tasks}, self._patience.join if first else 0.0)
        arrays = to_arrays(weights)
        contents = {
            task.client: RecordDict({ARRAYS: arrays, CONFIG: self._order(task).record()})
            for task in tasks
        }
        replies = self._exchange(MessageType.TRAIN, contents, self._patience.deadline)
        answered = 0
        for task, (_, reply) in zip(tasks, replies, strict=True):
            outcome = reply if isinstance(reply, Missing) else self._read(task, reply)
            answered += isinstance(outcome, Updates)
            yield outcome
        self._silent = 0 if answered else self._silent + 1
        if self._silent >= SILENT_ROUNDS:
            raise UserError(
                f"no node sent a usable update in {SILENT_ROUNDS} rounds, up to round "
                f"{self._round}: metrics.jsonl says why; start the run again when they are back"
            )

    def _order(self, task: ClientTask) -> Order:
        recall, sha256 = 0, ""
        if task.recall is not None and (version := VERSION.fullmatch(task.recall.name)):
            recall = int(version[2])
            sha256 = str(tensorfile.load(task.recall)[1].get("sha256", ""))
        return Order(
            self._experiment,
            self._facts,
            task.client,
            task.round,
            task.progress,
            recall,
            sha256,
            task.remember is not None,
        )

    def _read(self, task: ClientTask, reply: Message) -> Updates | Missing:
        """Turn a reply into an update, or say what is wrong with it."""
        try:
            content = reply.content
            if set(content.array_records) != {ARRAYS}:
                raise MalformedError("no record of arrays, or several")
            weights = from_arrays(content.array_records[ARRAYS], self._reference)
            samples, how = read_metrics(content)
            if not self._holders[task.client].introduction.own_data:
                held = self._setup.partition.size(task.client)
                if samples != held:
                    raise MalformedError(f"it claims {samples} samples, but holds {held}")
        except MalformedError as wrong:
            return Missing(f"malformed reply: {wrong}")
        if task.remember is not None:
            # The memory itself stays on the node; what it is, is noted here.
            tensorfile.save(task.remember, {}, {"sha256": tensorfile.digest(weights)})
        stacked = {name: value.unsqueeze(0) for name, value in weights.items()}
        return Updates(stacked, [samples], [how])

    def evaluate(self, weights: Mapping[str, Tensor]) -> Evaluation:
        """Evaluate on the server's test set and, where somebody listens, on the nodes' own data."""
        evaluation = self._evaluating.evaluate(weights)
        if self._on_nodes is not None:
            self._on_nodes(self._round, self._ask_nodes(weights))
        return evaluation

    def _ask_nodes(self, weights: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        arrays = to_arrays(weights)
        contents = {
            client: RecordDict(
                {
                    ARRAYS: arrays,
                    CONFIG: Order(
                        self._experiment, self._facts, client, max(1, self._round), 0.0
                    ).record(),
                }
            )
            for client in sorted(self._holders)
        }
        rows = []
        for client, reply in self._exchange(
            MessageType.EVALUATE, contents, self._patience.deadline
        ):
            row: dict[str, Any] = {"client": client}
            try:
                if isinstance(reply, Missing):
                    raise MalformedError(reply.reason)
                samples, how = read_evaluation(reply.content)
                row |= {"samples": samples, "accuracy": how.accuracy, "loss": how.loss}
            except MalformedError as wrong:
                row["missing"] = str(wrong)
            rows.append(row)
        return rows

    def _exchange(
        self, kind: str, contents: Mapping[int, RecordDict], seconds: float
    ) -> Iterator[tuple[int, Message | Missing]]:
        """Send each client's content to its node and yield the replies in order."""
        outcomes: dict[int, Message | Missing] = {}
        messages: dict[int, Message] = {}
        for client, content in contents.items():
            holder = self._holders.get(client)
            if holder is None:
                outcomes[client] = Missing(self._why_nobody(client))
            else:
                # What nobody has fetched soon after the deadline is not worth working on.
                messages[client] = Message(
                    content, holder.node, kind, ttl=seconds + 2, group_id=str(self._round)
                )
        waiting: dict[int, str] = {}
        end = time.monotonic() + seconds
        sent = self._push(list(messages.values()))
        for client, message_id in zip(messages, sent, strict=True):
            if message_id:
                waiting[client] = message_id
            else:
                outcomes[client] = Missing("its node has left the federation")
        for client in contents:
            while client not in outcomes:
                outcomes |= self._collect(waiting)
                if client in outcomes:
                    break
                if time.monotonic() >= end:
                    del waiting[client]
                    outcomes[client] = Missing(f"no reply within {seconds:g} s")
                    break
                time.sleep(POLL_SECONDS)
            yield client, outcomes.pop(client)

    def _push(self, messages: list[Message]) -> list[str | None]:
        if not messages:
            return []
        sent: list[str | None] = list(self._grid.push_messages(messages))
        return sent or [None] * len(messages)

    def _collect(self, waiting: dict[int, str]) -> dict[int, Message | Missing]:
        """Take the replies that are there, one by one: a broken one must not spoil the others."""
        arrived: dict[int, Message | Missing] = {}
        for client, message_id in list(waiting.items()):
            reply = self._pull(message_id)
            if reply is not None:
                del waiting[client]
                arrived[client] = reply
        return arrived

    def _pull(self, message_id: str) -> Message | Missing | None:
        try:
            replies = list(self._grid.pull_messages([message_id]))
        except (httpx.HTTPError, OSError) as error:
            raise AwayError(
                f"the SuperLink is gone, or has ended the run: {_line(error)}"
            ) from error
        except Exception as error:  # what a node sent cannot be put together
            return Missing(f"malformed reply: {_line(error)}")
        if not replies:
            return None
        (reply,) = replies
        if reply.has_error():
            return Missing(f"the node could not: {_line(reply.error.reason or 'no reason given')}")
        return reply

    def _meet(self, wanted: set[int], seconds: float) -> None:
        """Ask nodes that are new who they are; wait until all wanted clients have one."""
        end = time.monotonic() + seconds
        while True:
            known = {h.node for h in (*self._holders.values(), *self._spare.values())}
            known |= set(self._asked.values()) | set(self._turned_away)
            online = set(self._grid.get_node_ids())
            self._ask(sorted(online - known))
            for client, spare in list(self._spare.items()):
                holder = self._holders.get(client)
                if holder is None or holder.node not in online:
                    self._holders[client] = spare
                    del self._spare[client]
            for message_id, node in list(self._asked.items()):
                reply = self._pull(message_id)
                if reply is not None:
                    del self._asked[message_id]
                    self._welcome(node, reply, online)
            if wanted <= self._holders.keys():
                return
            if time.monotonic() >= end:
                break
            time.sleep(POLL_SECONDS)
        if seconds and not self._holders:
            reasons = "; ".join(sorted(set(self._turned_away.values())))
            raise UserError(
                f"no node joined within {seconds:g} s"
                + (f" ({reasons})" if reasons else ": start SuperNodes, or wait longer (--join)")
            )

    def _ask(self, nodes: list[int]) -> None:
        messages = [
            Message(
                RecordDict({CONFIG: Introduction(0, False).record()}),
                node,
                MessageType.QUERY,
                ttl=self._patience.deadline,
            )
            for node in nodes
        ]
        for node, message_id in zip(nodes, self._push(messages), strict=True):
            if message_id:
                self._asked[message_id] = node

    def _welcome(self, node: int, reply: Message | Missing, online: set[int]) -> None:
        try:
            if isinstance(reply, Missing):
                raise MalformedError(reply.reason)
            introduction = read_introduction(reply, self._setup.partition.clients)
        except MalformedError as wrong:
            self._turned_away[node] = f"a node was turned away: {wrong}"
            return
        client = introduction.client
        holder = self._holders.get(client)
        if holder is None or holder.node not in online:
            self._holders[client] = Holder(node, introduction)
        else:  # perhaps a node that was started again, before its end was noticed
            self._spare[client] = Holder(node, introduction)

    def _why_nobody(self, client: int) -> str:
        reasons = sorted(set(self._turned_away.values()))
        return "; ".join([f"no node holds client {client}", *reasons])


def _line(error: object) -> str:
    """Return the start of an untrusted text as one line."""
    return " ".join(str(error).split())[:300]
