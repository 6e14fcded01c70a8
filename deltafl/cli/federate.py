"""`deltafl federate`: one experiment on a real federation, here or elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from deltafl.cli.command import Command, config_of, console, refusals
from deltafl.cli.progress import RunProgress
from deltafl.engine import Evaluation
from deltafl.errors import UserError
from deltafl.experiment import Config, run
from deltafl.experiment.config import OWN_DATA
from deltafl.experiment.federation import build_setup
from deltafl.experiment.rounds import RoundReport
from deltafl.experiment.run_folder import SUMMARY

DEFAULT_NODES = 3

Seconds = Annotated[float, Field(gt=0, le=1e6)]


class FederateOptions(Config):
    """The configuration, and where the nodes are."""

    nodes: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None, description="SuperNodes to start here, a client each [3]"
    )
    out: Path | None = Field(None, description="the run's folder; none: runs/federate-NAME-HASH")
    data: Path | None = Field(None, description="test set of the server, for a task own-MODEL")
    node_data: list[Path] = Field([], description="data of its own for each node started here")
    deadline: Seconds = Field(600.0, description="seconds a round waits for its updates")
    join: Seconds = Field(120.0, description="seconds to wait for nodes at the start")
    evaluate_nodes: bool = Field(False, description="nodes also evaluate, on their own data")
    superlink: str | None = Field(None, description="HOST:PORT of a federation that is already up")
    root_certificates: Path | None = Field(None, description="CA certificate of that SuperLink")
    insecure: bool = Field(False, description="that SuperLink has no TLS")


def execute(options: FederateOptions) -> None:
    """Run on the nodes, and say where everything is."""
    if importlib.util.find_spec("flwr") is None:
        raise UserError("deltafl federate needs Flower: install deltafl with the extra flower")
    from deltafl.flower import control, launch  # noqa: PLC0415  (an extra)
    from deltafl.flower.engine import Patience  # noqa: PLC0415
    from deltafl.flower.server_app import read_test_set  # noqa: PLC0415

    config = configuration(options)
    here = options.superlink is None
    out = options.out or Path("runs") / f"federate-{config.run_name}"
    job = control.Job(
        config,
        out.resolve() if here else out,
        Patience(options.deadline, options.join),
        options.data and (options.data.resolve() if here else options.data),
        options.evaluate_nodes,
    )
    # The server saves every round by itself: there is none to wait for.
    with RunProgress(console, finish_rounds=False) as progress:
        hearing = Hearing(config, progress)
        if options.superlink is not None:
            address = control.Address(
                options.superlink, options.root_certificates, options.insecure
            )
            launch.run_there(job, address, hearing)
        else:
            dataset = read_test_set(config, str(options.data)) if options.data else None
            if (out / SUMMARY).exists():
                hearing(
                    {"kind": "finished", "summary": run(config, out=out, dataset=dataset).summary}
                )
            else:
                # Bad input is found, and data fetched, before any process starts.
                build_setup(config, dataset)
                told = [f'data="{path.resolve()}"' for path in options.node_data]
                launch.run_here(job, told or [""] * config.federation.clients, hearing)
    _show(config, hearing.summary, f"{out}" if here else f"{out}, beside the SuperLink")


def configuration(options: FederateOptions) -> Config:
    """Return the experiment: a client for every node, and all of them in every round."""
    if options.superlink is not None and (options.nodes or options.node_data):
        raise UserError("--nodes and --node-data start nodes here: leave them out with --superlink")
    if options.nodes and options.node_data and options.nodes != len(options.node_data):
        raise UserError(
            f"--nodes is {options.nodes}, but --node-data names {len(options.node_data)}"
        )
    for path in options.node_data:
        if not path.exists():
            raise UserError(f"--node-data {path} is not there")
    given = options.federation.model_fields_set
    nodes = options.nodes or len(options.node_data) or None
    clients = options.federation.clients if "clients" in given else nodes or DEFAULT_NODES
    if nodes is not None and clients != nodes:
        raise UserError(
            f"--federation.clients is {clients}, but {nodes} nodes would start: a node is a client"
        )
    if options.superlink is not None and "clients" not in given:
        raise UserError("say how many nodes there are: --federation.clients")
    if (config_of(options).dataset_name == OWN_DATA) != (options.data is not None):
        raise UserError("a task own-MODEL needs --data, the server's test set, and only it does")
    if options.run.evaluate_on == "validation" and (options.node_data or options.data):
        raise UserError("nodes with data of their own have no validation set: evaluate on the test")
    changes: dict[str, Any] = {
        "federation.clients": clients,
        # After every round: a lost run then goes on from its last finished round.
        "run.checkpoint_seconds": 0.0,
    }
    if "participation" not in given:
        changes["federation.participation"] = 1.0
    return config_of(options).override(**changes)


class Hearing:
    """Shows what the ServerApp says of a run, and keeps its summary."""

    def __init__(self, config: Config, progress: RunProgress) -> None:
        self._config = config
        self._progress = progress
        self.summary: dict[str, Any] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        """Hear one event."""
        match event.get("kind"):
            case "up":
                _say(
                    f"SuperLink on {event['superlink']}, {event['nodes']} SuperNodes, TLS and keys"
                )
            case "again":
                _say(str(event["text"]))
            case "started":
                self._progress.started(self._config, int(event["done"]))
            case "round":
                self._progress.finished_round(report := _report(event["row"]))
                for client, reason in report.refused.items():
                    _say(f"round {report.round}, client {client}: {reason}")
            case "finished":
                self.summary = event["summary"]


def _report(row: dict[str, Any]) -> RoundReport:
    """Return a row of metrics.jsonl as the report it was made of, as far as it is shown."""
    evaluation = None
    if row["test_accuracy"] is not None:
        loss = float("nan") if row["test_loss"] is None else row["test_loss"]
        evaluation = Evaluation(row["test_accuracy"], loss)
    return RoundReport(
        round=row["round"],
        clients=row["clients"],
        evaluation=evaluation,
        train_loss=row["train_loss"],
        step_size=row["step_size"],
        seconds=row["seconds"],
        refused={int(client): why for client, why in row.get("refused", {}).items()},
    )


def _show(config: Config, summary: dict[str, Any], folder: str) -> None:
    _say(
        f"{config.task}, {config.client.optimizer}: {config.run.evaluate_on} accuracy "
        f"{summary['final_test_accuracy']:.2%} after {summary['rounds']} rounds "
        f"({summary['seconds']:.1f} s){refusals(summary)}"
    )
    _say(f"weights_sha256 {summary['weights_sha256']}")
    _say(f"run folder {folder}")


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, markup=False)


COMMAND = Command(
    "federate",
    "Run one experiment on a real federation: Flower's SuperLink and SuperNodes, started here for "
    "the run with TLS and keys, or already up elsewhere (--superlink). A node is a client, and all "
    "take part unless --federation.participation says otherwise. Started again, it goes on from "
    "the last finished round.",
    FederateOptions,
    execute,
    (
        "deltafl federate --nodes 3 --run.rounds 3 --out runs/federation",
        "deltafl federate --node-data a.npz b.npz --server.optimizer weighted-average",
        "deltafl federate experiment.toml --superlink superlink.example.org:8000 "
        "--root-certificates ca.pem --federation.clients 5",
    ),
    positional="[CONFIG.toml]",
)
