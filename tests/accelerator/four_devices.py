"""Four devices of the test accelerator, each with a limit in bytes; what they have held at most; Trainers on them."""

from __future__ import annotations

import gc
from typing import Any

import lightning as L
import torch

from lightning_hetpipe import Cluster, HetPipeStrategy
from lightning_hetpipe.planning.model.cluster import Device, Node
from tests.support.accelerator import NAME, TestAccelerator, set_limit
from tests.support.trainers import quiet_trainer

DEVICES = 4
SHARE = 3.2
"""Bytes that a model needs, as a multiple of those that one device has."""

LARGE = [1 << 30] * DEVICES

MARGIN = 1.1
"""Bytes that a device may hold, as a multiple of those that its plan says."""


def cluster(*memory: int) -> Cluster:
    """Devices with so many bytes each."""
    name = torch.get_device_module(NAME).get_device_name(0)
    return Cluster([Node("box", [Device(name, each) for each in memory])])


def peaks() -> list[int]:
    return [torch.accelerator.max_memory_allocated(index) for index in range(DEVICES)]


def limit(*bytes_of_each: int) -> None:
    gc.collect()  # what other tests have left
    for index, each in enumerate(bytes_of_each):
        set_limit(index, int(MARGIN * each))
        torch.accelerator.reset_peak_memory_stats(index)


def trainer_on(accelerator: TestAccelerator, strategy: HetPipeStrategy, **settings: Any) -> L.Trainer:
    return quiet_trainer(strategy, accelerator=accelerator, devices=DEVICES, **settings)
