"""The accelerator of this process, as torch knows it: CUDA, or any other; torch has one kind in a process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def accelerates(device: torch.device) -> bool:
    """Return True if ``device`` computes by itself, in streams, while threads go on."""
    return device.type != "cpu" and device.type != "meta"


def all_devices() -> list[torch.device]:
    """The accelerators that this process can use."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return (
        []
        if device is None
        else [torch.device(device.type, index) for index in range(torch.accelerator.device_count())]
    )


def device_module(device: torch.device) -> Any:
    """Torch's module for devices of that type, such as ``torch.cuda``."""
    return torch.get_device_module(device)


def is_initialized() -> bool:
    """Return True if this process has used its accelerator; to ask starts none."""
    device = torch.accelerator.current_accelerator()
    return device is not None and bool(device_module(device).is_initialized())


def default_generators() -> Sequence[torch.Generator]:
    """The default random generators of all accelerators here; none until the process uses one."""
    device = torch.accelerator.current_accelerator()
    found: Sequence[torch.Generator] = () if device is None else device_module(device).default_generators
    return found
