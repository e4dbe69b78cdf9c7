"""The devices of this machine, as planning knows them."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch

from lightning_hetpipe.planning.model.catalogue import canonical
from lightning_hetpipe.planning.model.cluster import NO_LINK, PCIE, Cluster, Device, Node


def found_cluster(devices: Sequence[torch.device] | None = None) -> Cluster:
    """One node with ``devices``, by default all GPUs, or the CPU where there are none.

    A GPU has the catalogue's name, or torch's where that does not know it, and its memory as torch says; a CPU's memory
    is no limit, and nothing has to travel there.
    """
    if devices is None:
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]
    link = PCIE if any(device.type == "cuda" for device in devices) else NO_LINK
    return Cluster([Node(socket.gethostname() or "here", [_found(device) for device in devices], link)])


def _found(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(device.type)
    properties = torch.cuda.get_device_properties(device)
    return Device(canonical(properties.name), properties.total_memory)
