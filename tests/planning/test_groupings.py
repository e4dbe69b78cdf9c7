"""Groupings of devices into virtual workers, as the paper has them, and their refusals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.allocation.groupings import (
    GROUPINGS,
    Grouping,
    equal_distribution,
    hybrid_distribution,
    node_partition,
)
from lightning_hetpipe.planning.model.cluster import Cluster, DeviceSlot, Node

SPEEDS = {"V": 4.0, "R": 3.0, "G": 2.0, "Q": 1.0}


def speed(slot: DeviceSlot) -> float:
    return SPEEDS[slot.device.name]


def cluster(**counts: int) -> Cluster:
    """One node for each name, with so many devices of it."""
    return Cluster([Node(name.lower(), [f"{count}x{name}"]) for name, count in counts.items()])


PAPER = cluster(V=4, R=4, G=4, Q=4)


def names(grouping: Grouping) -> list[str]:
    return ["".join(slot.device.name for slot in group) for group in grouping]


def test_the_papers_groupings() -> None:
    """HetPipe, table 3."""
    assert names(node_partition(PAPER, speed)) == ["VVVV", "RRRR", "GGGG", "QQQQ"]
    assert names(equal_distribution(PAPER, speed)) == ["VRGQ"] * 4
    assert names(hybrid_distribution(PAPER, speed)) == ["VVQQ", "VVQQ", "RRGG", "RRGG"]


@given(st.lists(st.lists(st.sampled_from("VRGQ"), min_size=1, max_size=4), min_size=1, max_size=6))
def test_every_device_is_in_one_virtual_worker(nodes: list[list[str]]) -> None:
    given = Cluster([Node(f"node {index}", devices) for index, devices in enumerate(nodes)])
    for group in GROUPINGS.values():
        try:
            found = group(given, speed)
        except SettingError:
            continue
        assert sorted((slot.node, slot.number) for own in found for slot in own) == [
            (slot.node, slot.number) for slot in given.slots
        ]
