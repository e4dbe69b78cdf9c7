"""Devices found on a machine: GPUs by the catalogue's names with the memory that torch says, or the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_hetpipe.placement.device_placement import discovered_cluster
from lightning_hetpipe.planning.model.catalogue import fragmented
from lightning_hetpipe.planning.model.cluster import NO_LINK, PCIE, Device

GIB = 1 << 30
THERE = [
    ("NVIDIA GeForce RTX 3090", 25_300_000_000),
    ("NVIDIA TITAN RTX", 25_200_000_000),
    ("NVIDIA Whatever", 7 << 30),
]


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=THERE[device.index][0])

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(THERE))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    # A context and another process hold a GiB; the allocator of this process has taken two, which it gives away itself.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (THERE[device.index][1] - 3 * GIB, 0))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 2 * GIB)


@pytest.mark.usefixtures("three_gpus")
def test_gpus_by_the_catalogues_names() -> None:
    (node,) = discovered_cluster().nodes
    assert node.devices == (
        Device("RTX-3090", fragmented(25_300_000_000 - GIB)),
        Device("Titan-RTX", fragmented(25_200_000_000 - GIB)),
        Device("NVIDIA Whatever", fragmented(6 * GIB)),
    )
    assert node.link == PCIE
    assert node.name


@pytest.mark.usefixtures("three_gpus")
def test_only_the_devices_that_are_asked_for() -> None:
    (node,) = discovered_cluster([torch.device("cuda", 1)]).nodes
    assert [device.name for device in node.devices] == ["Titan-RTX"]


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    (node,) = discovered_cluster().nodes
    assert (node.devices, node.link) == ((Device("cpu"),), NO_LINK)
    assert len(discovered_cluster([torch.device("cpu")] * 3).slots) == 3
