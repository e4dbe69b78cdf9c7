"""Places of stages: what is declared over GPUs that are there, and which of them are measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_hetpipe import Cluster, Device, Node
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.placement.device_placement import DevicePlacement
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times

GIB = 1 << 30
HERE = ["NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090", "Tesla T4"]
GPUS = [torch.device("cuda", index) for index in range(len(HERE))]


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=HERE[device.index])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 0)


def placement(*devices: Device | str) -> DevicePlacement:
    return DevicePlacement.of(Cluster([Node("box", devices)]), GPUS)


def seconds(of: DevicePlacement) -> list[float]:
    """A plan of one layer on each device, where each type was measured to take as many as its device's index + 1."""
    times = {name: [Times(device.index + 1.0, 0.0)] for name, device in of.types.items()}
    profile = Profile("m", 1, [LayerBytes("net", 1, 1, 1)], times, {})
    return [profile.times_on(slot.device)[0].forward for slot in of.cluster.slots]


def test_one_device_of_each_type_is_measured() -> None:
    assert DevicePlacement.of(None, GPUS).types == {"RTX-3090": GPUS[0], "T4": GPUS[2]}
    assert not DevicePlacement.of(None, GPUS).is_even
    assert DevicePlacement.of(None, GPUS[:2]).is_even


def test_a_declared_speed_is_one_beside_the_device_that_is_measured() -> None:
    """The slow one was measured, and its speed divided by once more; and the fast one was taken to be as slow."""
    assert seconds(placement("RTX-3090", Device("RTX-3090", speed=0.5), "T4")) == [1.0, 2.0, 3.0]
    assert seconds(placement(Device("RTX-3090", speed=0.5), "RTX-3090", "T4")) == [4.0, 2.0, 3.0]
    assert seconds(placement("RTX-3090", Device("hot one", speed=0.5), "T4")) == [1.0, 2.0, 3.0]


def test_a_model_is_spread_by_memory() -> None:
    here = placement("RTX-3090", Device("RTX-3090", "8 GiB"), Device("T4", "12 GiB"))
    assert [here.roomiest(count) for count in (1, 2)] == [[GPUS[0]], [GPUS[0], GPUS[2]]]
    assert placement(Device("RTX-3090", "8 GiB"), "RTX-3090", "T4").roomiest(1) == [GPUS[1]]  # of equals the first one
    assert here.limits == dict(zip(GPUS, [19 * GIB, 8 * GIB, 12 * GIB], strict=True))
    assert here.room([GPUS[0], GPUS[0], GPUS[2]]) == [9.5 * GIB, 9.5 * GIB, 12 * GIB]
    cpu = torch.device("cpu")
    two = DevicePlacement.of(Cluster([Node("box", [Device("cpu", GIB), Device("cpu", 2 * GIB)])]), [cpu])
    assert two.limits == {cpu: 2 * GIB}  # either may be meant
    emulated = DevicePlacement.of(Cluster([Node("box", ["T4"])]), [cpu])
    assert (emulated.limits, emulated.room([cpu, cpu])) == ({}, [1.0, 1.0])


def test_a_declared_name_is_for_the_device_that_is_there() -> None:
    assert (
        placement("RTX 3090", Device("left one", "8 GiB"), Device("T4", "20 GiB")).cluster.slots[1].device.memory
        == 8 * GIB
    )
    with pytest.raises(SettingError, match="declares 'T4' as device 1, where 'RTX-3090' is there"):
        placement("RTX 3090", "T4", "RTX 3090")
