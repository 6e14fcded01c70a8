"""deltafl on a Ray cluster of several nodes, all of them on this machine.

Every node has processes and an object store of its own, and the nodes talk to each other as they
would over a network.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from ray.cluster_utils import Cluster

from benchmarks.systems import deltafl_rounds
from benchmarks.systems.gate import arguments


@contextmanager
def cluster(nodes: int, cpus: int) -> Iterator[str]:
    """Start so many nodes and yield the address of the first."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder  # or the address would be left in a folder of everybody
        niceness = {"worker_niceness": 0}  # as deltafl has it in a cluster of its own
        head = {"temp_dir": f"{folder}/ray", "include_dashboard": False, "_system_config": niceness}
        running = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, **head})
        try:
            for _ in range(nodes - 1):
                running.add_node(num_cpus=cpus)
            yield running.address
        finally:
            running.shutdown()


def main() -> None:
    """Run rounds of a configuration given as {dotted field: value} on so many nodes."""
    spec = arguments()
    with cluster(spec["nodes"], spec["cpus"]) as address:
        spec["config"] |= {"engine.kind": "ray", "engine.workers": 0, "engine.address": address}
        deltafl_rounds.measure(spec)


if __name__ == "__main__":
    main()
