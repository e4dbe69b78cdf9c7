"""``torch.testacc``: what torch asks of the module of a kind of devices, and what tests ask of these."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import backend_registration

from tests.support.accelerator.build import extension

NAME = "testacc"
"""The type of the devices: ``torch.device("testacc", 2)``."""

COUNT = 4

Place = torch.device | str | int | None


@dataclass(frozen=True)
class Properties:
    """Name of a device, and the bytes that it may hold."""

    name: str
    total_memory: int


def _index(device: Place) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


@dataclass
class _State:
    visible: bool = False


_state = _State()


def is_available() -> bool:
    return _state.visible


def is_initialized() -> bool:
    return _state.visible


def _lazy_init() -> None:
    """Torch 2.11 takes a device for unused, and waits for nothing on it, while its module has no such function."""


def is_bf16_supported() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return COUNT if _state.visible else 0


def current_device() -> int:
    return int(extension().current_device())


def set_device(device: Place) -> None:
    extension().set_device(_index(device))


@contextmanager
def device(place: Place) -> Iterator[None]:
    """Within it, ``place`` is this thread's device."""
    before = extension().set_device(_index(place))
    try:
        yield
    finally:
        extension().set_device(before)


def get_device_name(device: Place = None) -> str:
    return "test accelerator"


def get_device_properties(device: Place = None) -> Properties:
    return Properties(get_device_name(device), extension().limit(_index(device)))


def synchronize(device: Place = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Place = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def manual_seed(seed: int) -> None:
    extension().default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        extension().default_generator(index).manual_seed(seed)


def get_rng_state(device: Place = NAME) -> Tensor:
    state: Tensor = extension().default_generator(_index(device)).get_state()
    return state


def set_rng_state(new_state: Tensor, device: Place = NAME) -> None:
    extension().default_generator(_index(device)).set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


def set_limit(device: Place, limit: int | None) -> None:
    """Have ``device`` refuse to hold more than ``limit`` bytes at once; None: its 16 GiB."""
    extension().set_limit(_index(device), 16 << 30 if limit is None else limit)


def memory_allocated(device: Place = None) -> int:
    """Bytes that ``device`` holds."""
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Place = None) -> int:
    """The most that ``device`` has held at once since :func:`reset_peak_memory_stats`."""
    return torch.accelerator.max_memory_allocated(_index(device))


def reset_peak_memory_stats(device: Place = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device: Place = None) -> tuple[int, int]:
    """Bytes that are free on ``device``, and all that it has."""
    limit = extension().limit(_index(device))
    return limit - memory_allocated(device), limit


def show() -> None:
    """Have this process use the devices, as new: with their usual limits, random states and streams."""
    _register()
    _state.visible = True
    for index in reversed(range(COUNT)):
        torch.accelerator.set_stream(torch.Stream(stream_id=0, device_index=index, device_type=_TYPE))
        set_limit(index, None)
        reset_peak_memory_stats(index)
    manual_seed_all(0)
    extension().begin_order(True)


def hide() -> None:
    """Have this process look as one with the accelerator's driver, but without a device; torch can forget neither."""
    _state.visible = False


_TYPE: int = torch._C._autograd.DeviceType.PrivateUse1.value
"""The type of the devices, as streams have it."""


def _register() -> None:
    if hasattr(torch, NAME):
        return
    built = extension()
    backend_registration.rename_privateuse1_backend(NAME)
    module = _DeviceModule(f"torch.{NAME}")
    for name, value in globals().items():
        if isinstance(value, types.FunctionType):
            setattr(module, name, value)
    torch._register_device_module(NAME, module)  # type: ignore[no-untyped-call]  # torch has no types here
    backend_registration.generate_methods_for_privateuse1_backend()
    built.start_autograd()


class _DeviceModule(types.ModuleType):
    Stream, Event = torch.Stream, torch.Event
    _initialized = True  # torch.utils.checkpoint asks, before it keeps random states

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(extension().default_generator(index) for index in range(device_count()))
