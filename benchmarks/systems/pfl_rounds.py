"""pfl on two processes: its simulated backend with torch.distributed over the loopback device."""

from __future__ import annotations

import atexit
import itertools
import os
import socket
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.systems.gate import Gate, arguments
from benchmarks.systems.local import Federation, in_format
from benchmarks.systems.nets import CNN

ENDLESS = 10**6


class Net(CNN):
    """The model with the two methods that pfl asks of it."""

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return what a client minimises."""
        return F.cross_entropy(self(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return nothing: no evaluation is asked for."""
        return {}


def main() -> None:
    """Be the first process, and start the second."""
    if "PFL_WORKER_RANK" not in os.environ:
        places = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
        os.environ |= {"PFL_WORKER_ADDRESSES": places, "GLOO_SOCKET_IFNAME": "lo"}
        second = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.systems.pfl_rounds", sys.argv[1]],
            env={**os.environ, "PFL_WORKER_RANK": "1"},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
        atexit.register(second.kill)
        os.environ["PFL_WORKER_RANK"] = "0"
    simulate(int(os.environ["PFL_WORKER_RANK"]))


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for listener in sockets:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def simulate(rank: int) -> None:
    """Run federated averaging, waiting at the gate between two blocks of rounds."""
    # pfl connects the processes when it is imported, so only now.
    from pfl.aggregate.simulate import SimulatedBackend  # noqa: PLC0415
    from pfl.algorithm.base import NNAlgorithmParams  # noqa: PLC0415
    from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: PLC0415
    from pfl.callback.base import TrainingProcessCallback  # noqa: PLC0415
    from pfl.data.federated_dataset import FederatedDataset  # noqa: PLC0415
    from pfl.data.pytorch import PyTorchTensorDataset  # noqa: PLC0415
    from pfl.hyperparam import NNTrainHyperParams  # noqa: PLC0415
    from pfl.metrics import Metrics  # noqa: PLC0415
    from pfl.model.pytorch import PyTorchModel  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    federation = Federation.read(arguments()["folder"], channels_last=True)
    net = in_format(Net(), torch.channels_last)
    net.load_state_dict(federation.net().state_dict())
    gate = Gate(lambda _done: federation.accuracy(net)) if rank == 0 else None
    left = torch.zeros(1, dtype=torch.int64)

    def next_block() -> None:
        """The second process starts a block when the first does, and counts along."""
        if gate is not None:
            left[0] = gate.block
        torch.distributed.broadcast(left, src=0)

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        """Stops the clock after every round."""

        def on_train_begin(self, *, model: object) -> Metrics:
            if gate is not None:
                gate.open()
            next_block()
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: object, model: object, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            if gate is not None:
                gate.tick()
            left[0] -= 1
            if left[0] == 0:
                next_block()
            return False, Metrics()

    def user_data(client: int) -> PyTorchTensorDataset:
        held = federation.rows[client]
        order = held[torch.randperm(len(held))]
        return PyTorchTensorDataset((federation.inputs[order], federation.labels[order]))

    sampled = itertools.cycle(client for round_ in federation.schedule for client in round_)
    data = FederatedDataset(user_data, lambda: next(sampled))
    model = PyTorchModel(
        model=net,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=ENDLESS,
            evaluation_frequency=ENDLESS,
            train_cohort_size=len(federation.schedule[0]),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=None,
            local_num_steps=federation.steps,
            local_learning_rate=federation.lr,
            local_batch_size=federation.batch,
        ),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
