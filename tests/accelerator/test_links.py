"""Links between accelerators: each two of them, by copies that their device has finished."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_hetpipe import Cluster
from lightning_hetpipe.accelerator import all_devices
from lightning_hetpipe.cli.measured_links import as_yaml, links_between
from lightning_hetpipe.cli.targets import built
from lightning_hetpipe.placement.device_placement import discovered_cluster
from lightning_hetpipe.planning.model.cluster import Link


@pytest.mark.usefixtures("accelerator")
def test_each_two_devices_have_a_link_and_the_slowest_is_the_nodes() -> None:
    found = links_between(all_devices(), 1 << 20)
    assert [*found] == [*combinations(range(4), 2)]
    (node,) = discovered_cluster().nodes
    config = OmegaConf.create({"cluster": OmegaConf.create(as_yaml(node, found, {}))})
    cluster = built(config, "cluster", Cluster)
    assert [slot.device.name for slot in cluster.slots] == [device.name for device in node.devices]
    link = cluster.nodes[0].link
    assert link is not None
    assert link.bandwidth == pytest.approx(min(each.bandwidth for each in found.values()), rel=0.01)
    assert link.latency == pytest.approx(max(each.latency for each in found.values()), rel=0.01)


@pytest.mark.usefixtures("accelerator")
def test_a_copy_is_timed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are queued: without a wait for both devices, only the time to give them would count."""
    import torch

    waited: list[Any] = []
    synchronize = torch.accelerator.synchronize

    def waiting(device: Any) -> None:
        waited.append(device)
        synchronize(device)

    monkeypatch.setattr(
        "lightning_hetpipe.cli.measured_links.timed_link", lambda copy, largest: copy(largest) or Link(1)
    )
    monkeypatch.setattr(torch.accelerator, "synchronize", waiting)
    one, other = all_devices()[:2]
    links_between([one, other], 8)
    assert waited == [one, one, other, other, other, one]
