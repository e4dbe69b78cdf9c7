"""The test accelerator for Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator

from tests.support.accelerator import device_module


class TestAccelerator(Accelerator):
    """``Trainer(accelerator=TestAccelerator(), devices=4)``."""

    __test__ = False  # pytest takes it for tests

    def setup_device(self, device: torch.device) -> None:
        device_module.set_device(device)

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        return dict(torch.accelerator.memory_stats(device))

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        count = device_module.device_count()
        return devices if isinstance(devices, list) else list(range(count if devices == "auto" else int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(device_module.NAME, index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return device_module.device_count()

    @staticmethod
    def is_available() -> bool:
        return device_module.is_available()

    @staticmethod
    def name() -> str:
        return device_module.NAME
