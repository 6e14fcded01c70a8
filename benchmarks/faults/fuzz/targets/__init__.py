"""The targets by name, one for each kind of input."""

from __future__ import annotations

from benchmarks.faults.fuzz.target import Target
from benchmarks.faults.fuzz.targets import (
    checkpoint,
    config,
    images,
    node_data,
    order,
    package,
    rates,
    records,
    request,
    run_folder,
    store,
    texts,
    update,
)

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        checkpoint.TARGET,
        config.TARGET,
        rates.TARGET,
        run_folder.TARGET,
        records.TARGET,
        images.IDX,
        images.ARCHIVE,
        images.STRIP,
        images.LABELS,
        images.DELTAS,
        store.TARGET,
        texts.ROWS,
        texts.TOKENS,
        package.TARGET,
        node_data.TARGET,
        update.TARGET,
        order.TARGET,
        request.TARGET,
    )
}
