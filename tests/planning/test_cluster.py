"""Devices, links, nodes and clusters: made by hand, in units, by Hydra, and what is declared over what was found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from hydra.utils import instantiate

from lightning_hetpipe import Cluster, Device, Link, Node
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model import cluster as planning_cluster
from lightning_hetpipe.planning.model.catalogue import fragmented
from lightning_hetpipe.planning.model.cluster import ETHERNET, NO_LINK, PCIE


def test_units() -> None:
    assert Device("RTX-3090", "24 GiB") == Device("RTX-3090", 24 << 30)
    assert Link("12 GB/s", "10 us") == Link(12e9, 1e-5)
    assert Link("200 Mbit/s").seconds(25_000_000) == pytest.approx(1.0)
    assert replace(Device("a", "1 KiB"), speed=2) == Device("a", 1024, 2)


def test_names_stand_for_devices() -> None:
    box = Node("box", ["2xRTX-3090", Device("old", "4 GiB"), "GTX-1080-Ti", "2*T4"], "12 GB/s")
    assert [device.name for device in box.devices] == ["RTX-3090", "RTX-3090", "old", "GTX-1080-Ti", "T4", "T4"]
    assert box.link == Link(12e9)


def test_memory_without_its_unit_is_asked_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fits into 24 bytes, which was all that was said then."""
    monkeypatch.setattr(planning_cluster, "LEAST_MEMORY", 1 << 20)
    for memory, meant in [(24, "24 GiB"), ("24", "24 GiB"), (10.5, "10.5 GiB"), (24576, "24576 MiB"), ("8 B", "8 GiB")]:
        with pytest.raises(SettingError, match=rf"Device\('T4'\).memory=.* bytes; did you mean '{meant}'"):
            Device("T4", cast(Any, memory))
    assert Device("T4", "24 MiB").memory == 24 << 20


def test_a_link_that_nobody_has_declared_is_supposed_and_said() -> None:
    """It was infinitely fast, and so were plans that sent much."""
    cluster = Cluster([Node("a", ["T4", "T4"]), Node("b", ["T4"]), Node("c", ["2xcpu"])])
    one, two, three, four, five = cluster.slots
    found = [cluster.link_between(*pair) for pair in [(one, two), (two, three), (four, five)]]
    assert found == [PCIE, ETHERNET, NO_LINK]
    assert cluster.assumed([one, two, three, four, five]) == [
        "12 GB/s with 0.01 ms latency is assumed between devices of 'a', as it declares no link",
        "1.25 GB/s with 0.05 ms latency is assumed between nodes, as the cluster declares no link",
    ]
    assert cluster.assumed([one, one]) == []
    assert Cluster([Node("a", ["T4", "T4"], "1 GB/s"), Node("b", ["T4"])], "1 GB/s").assumed([one, two, three]) == []


def test_spots_and_links() -> None:
    cluster = Cluster([Node("a", ["x", "y"], Link(5)), Node("b", ["z"])], Link(1))
    x, y, z = cluster.slots
    assert [(slot.node, slot.number, slot.device.name) for slot in (x, y, z)] == [(0, 0, "x"), (0, 1, "y"), (1, 0, "z")]
    assert cluster.link_between(x, y) == Link(5)
    assert cluster.link_between(y, z) == Link(1)
    assert cluster.link_between(x, x) == NO_LINK


def test_hydra_makes_one_of_plain_values() -> None:
    section: dict[str, Any] = {
        "_target_": "lightning_hetpipe.Cluster",
        "link": {"_target_": "lightning_hetpipe.Link", "bandwidth": "10 Gbit/s", "latency": "50 us"},
        "nodes": [
            {
                "_target_": "lightning_hetpipe.Node",
                "name": "box",
                "devices": ["RTX-3090", {"_target_": "lightning_hetpipe.Device", "name": "mine", "memory": "6 GiB"}],
                "link": "12 GB/s",
            }
        ],
    }
    made = Cluster([Node("box", ["RTX-3090", Device("mine", 6 << 30)], Link(12e9))], Link(1.25e9, 5e-5))
    assert instantiate(section, _convert_="all") == made
    assert instantiate(section) == made
    del section["nodes"][0]["_target_"], section["nodes"][0]["devices"][1]["_target_"], section["link"]["_target_"]
    assert instantiate(section) == made


def test_memory_that_is_not_said() -> None:
    """A profile's knowledge comes first, then the catalogue's; what was declared stays."""
    cluster = Cluster([Node("n", [Device("TITAN RTX"), "RTX-2080", Device("RTX-3090", "1 GiB"), "abacus"])])
    memories = [slot.device.memory for slot in cluster.with_memory({"RTX-2080": 11 << 30, "RTX-3090": 2}).slots]
    assert memories == [fragmented(23 << 30 | 1 << 29), 11 << 30, 1 << 30, None]


def test_declared_over_found() -> None:
    found = Cluster([Node("here", [Device("RTX-3090", 10), Device("T4", 20)], Link(7))])
    declared = Cluster([Node("box", [Device("slow 3090", speed=0.5), Device("T4", 15)])])
    assert declared.over(found) == Cluster([Node("box", [Device("slow 3090", 10, 0.5), Device("T4", 15)], Link(7))])
    with pytest.raises(SettingError, match=r"node 'box' declares 1 device, and 2 are there \(RTX-3090, T4\)"):
        Cluster([Node("box", ["T4"])]).over(found)
    with pytest.raises(SettingError, match="the cluster declares 2 nodes, and 1 are there"):
        Cluster([Node("a", ["T4"]), Node("b", ["T4"])]).over(found)


def test_what_is_declared_does_not_change_what_is_there() -> None:
    """One in another order named each device after another one, and memory that nobody has was planned with."""
    found = Cluster([Node("here", [Device("RTX-3090", 10), Device("T4", 20)])])
    same = Cluster([Node("box", [Device("NVIDIA GeForce RTX 3090", 12), Device("mine", 15)])])
    assert [device.memory for device in same.over(found).nodes[0].devices] == [10, 15]
    said = r"'box' declares 'T4' as device 0, where 'RTX-3090' is there \(RTX-3090, T4\); declare devices in the order"
    with pytest.raises(SettingError, match=said):
        Cluster([Node("box", ["T4", "RTX-3090"])]).over(found)
