"""The round loop: sample clients, run their work, aggregate, evaluate (Algorithm 1).

The loop has no side effects of its own; whoever iterates over it records, saves and shows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from deltafl import kernels, tensorfile
from deltafl.client import ClientMetrics, one_thread
from deltafl.engine import ClientTask, Engine, Evaluation, Setup, process
from deltafl.engine.base import Missing
from deltafl.engine.workbench import build_model
from deltafl.errors import UserError
from deltafl.experiment.attack import ATTACKS, Attacked, attackers
from deltafl.experiment.config import Config
from deltafl.experiment.divergence import LARGEST_LOSS, Divergence, Known, Lookout, Snapshot
from deltafl.experiment.federation import sample_clients
from deltafl.experiment.memory import ClientMemory
from deltafl.server import Server, problem, trainable_names, weights_of


@dataclass(frozen=True)
class RoundReport:
    """What happened in a round; rounds count from 1."""

    round: int
    clients: int
    evaluation: Evaluation | None
    train_loss: float | None
    step_size: float | None
    seconds: float
    refused: Mapping[int, str] = field(default_factory=dict)
    steps: Mapping[int, ClientMetrics] = field(default_factory=dict)
    divergence: Divergence | None = None

    @property
    def unchanged(self) -> bool:
        """Whether no update could be used, so that the global weights are as before."""
        return len(self.refused) == self.clients

    def row(self) -> dict[str, Any]:
        """Return the report as a row of metrics.jsonl."""
        row: dict[str, Any] = {
            "round": self.round,
            "test_accuracy": self.evaluation and self.evaluation.accuracy,
            "test_loss": self.evaluation and _finite(self.evaluation.loss),
            "train_loss": self.train_loss,
            "step_size": self.step_size,
            "clients": self.clients,
            "seconds": round(self.seconds, 4),
        }
        if self.refused:
            row["refused"] = {str(client): why for client, why in self.refused.items()}
        if self.unchanged:
            row["unchanged"] = True
        if self.divergence is not None:
            row["diverged"] = self.divergence.row()
        if any(metrics.steps for metrics in self.steps.values()):
            row["steps"] = {
                str(client): {
                    name: [_finite(getattr(step, name)) for step in metrics.steps]
                    for name in ("smoothness", "growth", "eta", "theta")
                }
                for client, metrics in self.steps.items()
            }
        return row


class Rounds:
    """The state of a run between two rounds, and the step from one to the next."""

    def __init__(self, config: Config, setup: Setup, engine: Engine) -> None:
        self.config = config
        self.done = 0
        self.ended: int | None = None
        """The round whose weights diverged; `done` is then the newest good one."""
        federation = config.federation
        if federation.attack is not None:
            bad = attackers(federation, config.run.seed)
            engine = Attacked(engine, ATTACKS[federation.attack], bad)
        self._engine = engine
        self.remembers = setup.work.objective.remembers
        model = build_model(setup)
        self._trainable = trainable_names(model)
        # Asked here first, so that the kernels are compiled once and not by every worker.
        self.native = model.native
        self.data_part = setup.dataset.part
        self.server = self._serve(weights_of(model))
        self._lookout = Lookout(self._snapshot())
        del model
        engine.open(setup)
        process.give_back()  # models were built, perhaps large ones

    def _serve(self, weights: Mapping[str, Tensor]) -> Server:
        chosen = self.config.server
        return Server(
            chosen.optimizer,
            weights,
            self._trainable,
            lr=chosen.lr,
            options=chosen.options,
            weighting=chosen.weighting,
            aggregate=chosen.aggregate,
            aggregate_options=chosen.aggregate_options,
        )

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The current global weights."""
        return self.server.weights

    def run(self, memory: ClientMemory | None = None) -> Iterator[RoundReport]:
        """Run the rounds that are left, yielding after each; one that diverges is the last."""
        while self.ended is None and self.done < self.config.run.rounds:
            # Threads that wait for each other would only get in the way of the workers.
            with one_thread():
                report = self._round(self.done + 1, memory)
            yield report
            if report.divergence is not None:
                return

    def _round(self, number: int, memory: ClientMemory | None) -> RoundReport:
        start = time.perf_counter()
        run = self.config.run
        clients = sample_clients(self.config, number)
        tasks = [self._task(client, number, memory) for client in clients]
        collected = self.server.start_round()
        refused: dict[int, str] = {}
        metrics: dict[int, ClientMetrics] = {}
        unusable = ""
        ahead = iter(tasks)
        for updates in self._engine.train(self.weights, tasks):
            if isinstance(updates, Missing):
                refused[next(ahead).client] = updates.reason
                continue
            shares = [self.server.client_weight(count) for count in updates.samples]
            faults = collected.add_all(updates.weights, shares)
            for place, how in enumerate(updates.metrics):
                task = next(ahead)
                if place in faults:
                    refused[task.client] = faults[place]
                    unusable = (
                        f"client {task.client}, step size {how.step_size:.3g}: {faults[place]}"
                    )
                    if task.remember is not None:  # a broken client should not remember it
                        task.remember.unlink(missing_ok=True)
                    continue
                metrics[task.client] = how
                if memory is not None and task.remember is not None:
                    memory.kept(task.client, number)
        fault = None
        if metrics:  # a round with no usable update keeps the old weights
            self._lookout.used(number, metrics, collected.lengths)
            average = collected.result()
            del collected  # of a large model, one copy of the weights less, or several
            self.server.finish_round(average)
            del average
            fault = self.server.fault()
        elif unusable:
            fault = self._lookout.unusable(unusable)
        evaluation = None
        if fault or number % run.eval_every == 0 or number == run.rounds:
            evaluation = self._engine.evaluate(self.weights)
            if not fault and not evaluation.loss <= LARGEST_LOSS:
                fault = f"the {run.evaluate_on} loss is {evaluation.loss:.3g}"
        self.done = number
        if evaluation and metrics and not fault:
            self._lookout.sensible(self._snapshot())
        return RoundReport(
            round=number,
            clients=len(clients),
            evaluation=evaluation,
            train_loss=_mean([m.loss for m in metrics.values()]),
            step_size=_mean([m.step_size for m in metrics.values()]),
            seconds=time.perf_counter() - start,
            refused=refused,
            steps=metrics if run.record_step_sizes else {},
            divergence=self._lookout.divergence(fault) if fault else None,
        )

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.done, self.weights, self.server.state_tensors())

    def back_to_good(self) -> None:
        """Go back to the newest state that was found good; the run has ended."""
        self.ended = self.done
        self._place(*self._lookout.good)
        self._lookout = Lookout(self._snapshot())

    def _place(self, done: int, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        self.server = self._serve(weights)
        self.server.load_state_tensors(state)
        self.done = done

    def _task(self, client: int, number: int, memory: ClientMemory | None) -> ClientTask:
        progress = (number - 1) / self.config.run.rounds
        if memory is None or not self.remembers:
            return ClientTask(client, number, progress)
        return ClientTask(
            client,
            number,
            progress,
            recall=memory.recall(client, number),
            remember=memory.remember(client, number),
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that the next round depends on, as tensors and JSON."""
        tensors = {f"weights/{name}": value for name, value in self.weights.items()}
        tensors |= {f"server/{name}": v for name, v in self.server.state_tensors().items()}
        good = self._lookout.good
        changed = any(good.weights[name] is not value for name, value in self.weights.items())
        if changed and self.done < self.config.run.rounds:  # after the last, nobody goes back
            tensors |= {f"good/weights/{name}": value for name, value in good.weights.items()}
            tensors |= {f"good/server/{name}": value for name, value in good.server.items()}
        about = {
            "round": self.done,
            "ended": self.ended,
            "run": self.config.hash,
            "native": self.native,
            "lookout": self._lookout.known().model_dump(),
        }
        return tensors, about | ({"data": self.data_part} if self.data_part else {})

    def load_state(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned."""
        weights = _below("weights/", tensors)
        done, ended = about.get("round"), about.get("ended")
        reason = problem(weights, self.weights)
        if about.get("run") != self.config.hash:
            reason = "it belongs to another run or version"
        elif not isinstance(done, int) or not 0 <= done <= self.config.run.rounds:
            reason = f"it claims to be of round {done!r}"
        elif ended is not None and not (
            isinstance(ended, int) and done <= ended <= self.config.run.rounds
        ):
            reason = f"it claims to have ended in round {ended!r}"
        elif about.get("native") is not self.native:
            reason = (
                f"it was computed with compiled kernels, which are not here: {kernels.reason()}"
                if about.get("native")
                else "it was computed without compiled kernels; set DELTAFL_NATIVE=0 to go on so"
            )
        elif about.get("data") != self.data_part:
            reason = f"it was trained on {about.get('data') or 'the whole data set'}"
        if reason is not None:
            raise UserError(f"the checkpoint does not fit this run ({reason}): delete it")
        self._place(int(about["round"]), weights, _below("server/", tensors))
        self.ended = ended
        self._lookout = self._looked_out(tensors, about)

    def _looked_out(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Lookout:
        """Return what a checkpoint tells of the newest good state."""
        now = self._snapshot()
        try:
            known = Known.model_validate(about.get("lookout"))
        except ValidationError:
            raise UserError(
                "the checkpoint does not say which round was good last: delete it"
            ) from None
        good = now._replace(round=known.good)
        if kept := _below("good/", tensors):  # otherwise they have not changed since
            good = Snapshot(known.good, _below("weights/", kept), _below("server/", kept))
        fault = problem(good.weights, now.weights) or problem(good.server, now.server)
        if fault is not None:
            raise UserError(f"the checkpoint's last good weights do not fit ({fault}): delete it")
        return Lookout.resumed(good, known, now)

    def weights_sha256(self) -> str:
        """Return the checksum that two equal runs share."""
        return tensorfile.digest(self.weights)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _mean(values: list[float]) -> float | None:
    return _finite(sum(values) / len(values)) if values else None


def _finite(value: float | None) -> float | None:
    """Return None for what JSON cannot write."""
    return value if value is not None and math.isfinite(value) else None
