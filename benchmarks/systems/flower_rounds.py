"""Flower's simulation on Ray with two client actors of one core each."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.systems import flower_client
from benchmarks.systems.gate import Gate, arguments
from benchmarks.systems.local import Federation

ENDLESS = 10**6


class TimedFedAvg(FedAvg):  # type: ignore[misc]
    """Plain averaging; a round lasts from the choice of its clients to that of the next."""

    def __init__(self, federation: Federation) -> None:
        sampled = len(federation.schedule[0])
        super().__init__(
            fraction_train=sampled / len(federation.rows),
            fraction_evaluate=0.0,
            min_train_nodes=sampled,
            min_available_nodes=len(federation.rows),
        )
        self._net = federation.net()
        self._accuracy = federation.accuracy
        self._arrays = ArrayRecord()
        self._gate = Gate(self._evaluate)

    def _evaluate(self, _done: int) -> float:
        self._net.load_state_dict(self._arrays.to_torch_state_dict())
        return self._accuracy(self._net)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, *args: Any, **kwargs: Any
    ) -> Iterable[Message]:
        """Stop the clock of the last round, then choose the clients of this one."""
        self._arrays = arrays
        try:
            if server_round == 1:
                self._gate.open()
            else:
                self._gate.tick()
        except SystemExit:
            # Flower waits for its server thread unless that fails.
            raise RuntimeError("the benchmark is over") from None
        messages: Iterable[Message] = super().configure_train(server_round, arrays, *args, **kwargs)
        return messages


def main() -> None:
    """Start the simulation and run rounds in it."""
    spec = arguments()
    os.environ[flower_client.FOLDER] = spec["folder"]
    federation = Federation.read(spec["folder"])
    strategy = TimedFedAvg(federation)
    server = ServerApp()

    @server.main()  # type: ignore[untyped-decorator]
    def serve(grid: Grid, _context: Context) -> None:
        initial = ArrayRecord(federation.net().state_dict())
        strategy.start(grid=grid, initial_arrays=initial, num_rounds=ENDLESS)

    run_simulation(
        server,
        flower_client.app,
        num_supernodes=len(federation.rows),
        backend_config={
            "init_args": {"num_cpus": spec["processes"], "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    main()
