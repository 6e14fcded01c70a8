from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from deltafl.engine.shared import Layout, SharedMemory, copy_into

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(entries=st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=6), place=st.integers(0, 2))
def test_weights_come_back_from_every_place_of_a_block(entries, place):
    weights = {
        str(i): torch.randint(0, 2, shape).to(dtype) for i, (dtype, shape) in enumerate(entries)
    }
    layout = Layout.of(weights)
    block = torch.zeros(3 * layout.size, dtype=torch.uint8)
    views = layout.views(block, place * layout.size)
    copy_into(views, weights)
    again = layout.views(block, place * layout.size)
    assert list(again) == list(weights)
    for name, value in weights.items():
        assert again[name].dtype == value.dtype
        assert torch.equal(again[name], value)
    used = range(place * layout.size, (place + 1) * layout.size)
    assert not block[: used.start].any()
    assert not block[used.stop :].any()


def test_shared_memory_is_seen_through_a_second_mapping():
    first = SharedMemory.create(4096)
    second = SharedMemory(first.fd, 4096)
    first.bytes[17] = 42
    assert second.bytes[17] == 42
    first.close()
    second.bytes[18] = 43  # the mapping outlives the descriptor
    assert first.bytes[18] == 43
