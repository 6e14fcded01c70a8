"""What is measured, one item a file; the registry is in the order in which they run."""

from __future__ import annotations

from benchmarks.items import anatomy, cluster, delta, memory, resnet, scale, text, tiny, workload
from benchmarks.items.base import Item, Settings

__all__ = ["ITEMS", "Item", "Settings"]

ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        workload.ITEM,
        delta.ITEM,
        anatomy.ITEM,
        tiny.ITEM,
        resnet.ITEM,
        scale.ITEM,
        cluster.ITEM,
        text.ITEM,
        memory.ITEM,
    )
}
