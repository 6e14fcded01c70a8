"""Talking to a SuperLink: handing it a run, and following the run to its end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import tomli_w
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from deltafl.errors import UserError
from deltafl.experiment import Config
from deltafl.flower.engine import Patience
from deltafl.flower.server_app import EVENT
from deltafl.version import __version__

Event = dict[str, Any]
# So long a SuperLink that stopped answering may stay away before its run is given up.
AWAY_SECONDS = 20.0


class LostError(Exception):
    """The SuperLink is gone, or has lost the run; the run folder still has it."""


@dataclass(frozen=True)
class Address:
    """Where a SuperLink is, and how to know that it is the right one."""

    superlink: str
    root_certificates: Path | None = None
    insecure: bool = False


@dataclass(frozen=True)
class Job:
    """A run to hand over."""

    config: Config
    out: Path
    patience: Patience
    data: Path | None = None
    evaluate_nodes: bool = False

    def run_config(self) -> dict[str, str | float | bool]:
        """Return what the ServerApp reads."""
        return {
            "experiment": self.config.to_toml(),
            "out": str(self.out),
            "deadline": self.patience.deadline,
            "join": self.patience.join,
            "data": "" if self.data is None else str(self.data),
            "evaluate-nodes": self.evaluate_nodes,
        }


class Control:
    """A connection to a SuperLink's Control API."""

    def __init__(self, address: Address) -> None:
        self.address = address
        certificates = None
        if address.root_certificates is not None and not address.insecure:
            try:
                certificates = address.root_certificates.expanduser().read_bytes()
            except OSError as error:
                raise UserError(
                    f"cannot read --root-certificates {address.root_certificates}: {error.strerror}"
                ) from None
        with _directly(address.superlink):
            self._client = ControlHttpClient.from_server_address(
                server_address=address.superlink,
                insecure=address.insecure,
                root_certificates=certificates,
                interceptors=[RuntimeVersionHttpInterceptor(component_name="deltafl")],
            )

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()

    def answers(self) -> bool:
        """Whether the SuperLink is there."""
        try:
            self._client.ListNodes(ListNodesRequest())
        except httpx.TransportError:
            return False
        return True

    def register(self, public_key: bytes, name: str) -> None:
        """Let the node with this key (PEM) take part."""
        self._call(lambda: self._client.RegisterNode(_registration(public_key, name)))

    def submit(self, job: Job) -> int:
        """Hand a run over and return its number."""
        content = bundle(job.run_config())
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(
            fab=fab_to_proto(fab), override_config=user_config_to_proto(job.run_config())
        )
        response = self._call(lambda: self._client.StartRun(request))
        if not response.HasField("run_id"):
            raise UserError("the SuperLink did not accept the run: its log says why")
        return int(response.run_id)

    def stop(self, run: int) -> None:
        """Ask the SuperLink to stop a run; nothing happens if it is gone."""
        with contextlib.suppress(httpx.HTTPError):
            self._client.StopRun(StopRunRequest(run_id=run))

    def follow(self, run: int, alive: Callable[[], bool] = lambda: True) -> Iterator[Event]:
        """Yield what the ServerApp says until its run is over; `LostError` if that is not seen."""
        after, rest, away = 0.0, "", None
        while True:
            try:
                for part in self._client.StreamLogs(
                    StreamLogsRequest(run_id=run, after_timestamp=after)
                ):
                    away = None
                    after = max(after, part.latest_timestamp)
                    *lines, rest = (rest + part.log_output).split("\n")
                    yield from _events(lines)
                yield from _events([rest])
                return
            except (httpx.TransportError, ValueError):  # a stream that was cut is the latter
                away = away or time.monotonic()
                if not alive() or time.monotonic() - away > AWAY_SECONDS:
                    raise LostError("the SuperLink is gone") from None
                time.sleep(0.5)
            except httpx.HTTPStatusError as error:
                raise LostError(_reason(error)) from None

    def _call(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except httpx.HTTPStatusError as error:
            raise UserError(f"the SuperLink refuses: {_reason(error)}") from None
        except httpx.TransportError as error:
            raise UserError(
                f"no SuperLink answers at {self.address.superlink}: {error} (is the address right, "
                "and --root-certificates or --insecure as it was started?)"
            ) from None


def bundle(run_config: Mapping[str, str | float | bool]) -> bytes:
    """Return the Flower App Bundle: it names our apps, which are installed wherever it goes.

    A SuperLink accepts values only for keys that the bundle has.
    """
    project = {
        "project": {
            "name": "deltafl-federation",
            "version": __version__,
            "description": "Federated learning whose clients tune their own step sizes.",
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "deltafl",
                    "components": {
                        "serverapp": "deltafl.flower.server_app:app",
                        "clientapp": "deltafl.flower.client_app:app",
                    },
                    "config": {name: type(value)() for name, value in run_config.items()},
                }
            }
        },
    }
    return build_fab_from_files({"pyproject.toml": tomli_w.dumps(project).encode()})[0]


def _registration(public_key: bytes, name: str) -> RegisterNodeRequest:
    return RegisterNodeRequest(public_key=public_key, name=name)


def _events(lines: list[str]) -> Iterator[Event]:
    """Yield the events among the lines of a log; other lines are Flower's."""
    for line in lines:
        _, found, text = line.partition(EVENT)
        if not found:
            continue
        try:
            event = json.loads(text)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _reason(error: httpx.HTTPStatusError) -> str:
    known = FlowerError.from_json(error.response.text)
    return known.message if known else f"HTTP {error.response.status_code}"


@contextlib.contextmanager
def _directly(address: str) -> Iterator[None]:
    """Keep a proxy of the environment out of the way of this machine itself."""
    if not address.startswith(("127.", "localhost", "[::1]")):
        yield
        return
    before = os.environ.get("NO_PROXY")
    os.environ["NO_PROXY"] = "*"
    try:
        yield
    finally:
        if before is None:
            del os.environ["NO_PROXY"]
        else:
            os.environ["NO_PROXY"] = before
