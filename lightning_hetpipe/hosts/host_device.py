"""The device on which a host computes: the CPU of its machine, or one of the accelerators there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hetpipe import accelerator
from lightning_hetpipe.accelerator import accelerates, all_devices, default_generators
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.host_memory import CPU
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.stage_messages import Forward, InputGradients, Output, Result
from lightning_hetpipe.pipeline.streams import Stream, StreamEvent, move, stream_on
from lightning_hetpipe.pipeline.values import moved, tensors_in
from lightning_hetpipe.planning.model.catalogue import canonical
from lightning_hetpipe.planning.model.units import in_bytes


class Computed(NamedTuple):
    """Result that the stage's device has computed once ``event`` has happened."""

    result: Result
    event: StreamEvent

    @property
    def minibatch(self) -> int:
        return self.result.minibatch


class HostDevice:
    """Device of a host: the CPU until :meth:`use` is called. ``place`` is its name with the host's, for people.

    ``members`` are the devices of the stage's group, including the stage's own. Empty without a group.
    """

    def __init__(self) -> None:
        self.device = CPU
        self.members: Sequence[torch.device] = ()
        self.place = str(CPU)
        self._stream: Stream | None = None

    def use(self, host: str, own: tuple[int, str], members: Sequence[tuple[int, str]]) -> None:
        """Compute on an accelerator of this machine. Messages keep their tensors on the CPU.

        Args:
            host: Name of this host, for errors.
            own: Number of the accelerator on this machine, and its name in a plan.
            members: Number and name for each member of the stage's group, or none.

        Raises:
            SettingError: if this machine has no such device.
        """
        self.members = [_accelerator(*each, host) for each in members]
        device = _accelerator(*own, host)
        torch.accelerator.set_device_index(device.index)
        self.device, self.place = device, f"{device} of {host}"

    def seed(self, generators: RandomGenerators, stage: int) -> None:
        """Seed the device's default generator, from which fused operators draw, by the run and its ``stage``."""
        if accelerates(self.device):
            seed = generators.generator("default", f"stage {stage}", 0, CPU).initial_seed()
            default_generators()[self.device.index].manual_seed(seed)

    def given(self, message: Any) -> Any:
        """Adapt ``message`` to the device: the leader sees a CPU, so the CPU's autocast becomes the device's."""
        if accelerates(self.device) and isinstance(message, Forward):
            return message._replace(autocast=message.autocast.as_on_cpu(self.device.type))
        return message

    def taken(self, value: Any) -> Any:
        """Copy ``value``, a nesting of tensors, to the CPU now, because it may change before it is sent."""
        if isinstance(value, Tensor):
            there = move(value, CPU)
            return value.clone(memory_format=torch.preserve_format) if there is value else there
        return [*map(self.taken, value)] if isinstance(value, list | tuple) else value

    def brought(self, message: Any) -> Any:
        """Return ``message`` with its tensors on the CPU. Only one thread may call this, as it has its own stream."""
        if not isinstance(message, Computed):
            return message
        result, event = message
        if self._stream is None:
            self._stream = stream_on(self.device)
            self._stream.enter()
        if isinstance(result, Output):
            self._stream.join(event, result.value.tensors)
            return result._replace(value=result.value.on(CPU))
        assert isinstance(result, InputGradients)
        self._stream.join(event, [*tensors_in(result.gradients), *result.sums.values()])
        gradients = [moved(gradient, CPU) for gradient in result.gradients]
        return result._replace(gradients=gradients, sums={n: move(sum, CPU) for n, sum in result.sums.items()})


def _accelerator(number: int, name: str, host: str) -> torch.device:
    there = all_devices()
    if 0 <= number < len(there) and canonical(name) == canonical(name_of(there[number])):
        return there[number]
    has = told_devices() or "no accelerator, only its CPU"
    raise SettingError(f"{host} has no {name}:{number}: it has {has}; plan for what is there")


def name_of(device: torch.device) -> str:
    """Return the catalogue's name of ``device``, or torch's if the catalogue does not know it."""
    return canonical(accelerator.name_of(device))


def told_devices() -> str:
    """List this machine's accelerators for people, with their memory, or return an empty text."""
    sizes = {each: accelerator.total_memory(each) for each in all_devices()}
    return ", ".join(f"{each} ({name_of(each)}, {in_bytes(size)})" for each, size in sizes.items())
