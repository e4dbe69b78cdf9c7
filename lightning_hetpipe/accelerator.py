"""The accelerator of this process, as torch knows it: CUDA or another kind. Torch has one kind in a process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_hetpipe.errors import SettingError


def accelerates(device: torch.device) -> bool:
    """Return True if ``device`` computes by itself, in streams, while threads go on."""
    return device.type != "cpu" and device.type != "meta"


def all_devices() -> list[torch.device]:
    """List the accelerators that this process can use."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return (
        []
        if device is None
        else [torch.device(device.type, index) for index in range(torch.accelerator.device_count())]
    )


def device_module(device: torch.device) -> Any:
    """Return torch's module for devices of this type, such as ``torch.cuda``."""
    return torch.get_device_module(device)


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on ``device``, without the memory that torch keeps for this process.

    Raises:
        SettingError: if torch has no such function for the device.
    """
    free, _ = _asked(device, "mem_get_info")
    return int(free)


def total_memory(device: torch.device) -> int:
    """Return all bytes of ``device``. Errors are as for :func:`free_memory`."""
    return int(_asked(device, "get_device_properties").total_memory)


def name_of(device: torch.device) -> str:
    """Return torch's name of ``device``. Errors are as for :func:`free_memory`."""
    return str(_asked(device, "get_device_properties").name)


def _asked(device: torch.device, function: str) -> Any:
    module = device_module(device)
    if not hasattr(module, function):
        raise SettingError(
            f"accelerator='{device.type}' has no torch.{device.type}.{function}, by which stages are placed; set"
            " Trainer(accelerator='cpu')"
        )
    return getattr(module, function)(device)


def is_initialized() -> bool:
    """Return True if this process has used its accelerator. The question itself does not start the accelerator."""
    device = torch.accelerator.current_accelerator()
    # MPS has no such function. No stage lies on it, because nobody can ask for its memory.
    asked = getattr(device_module(device), "is_initialized", None) if device is not None else None
    return asked is not None and bool(asked())


def default_generators() -> Sequence[torch.Generator]:
    """Return the default random generators of all accelerators here, or none until the process uses an accelerator."""
    device = torch.accelerator.current_accelerator()
    return () if device is None else getattr(device_module(device), "default_generators", ())
