"""Versions of a stage's weights at its host: the leader makes them, and tells the host which minibatches use which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_hetpipe.hosts.host_memory import HostMemory
from lightning_hetpipe.hosts.orders import PublishedWeights
from lightning_hetpipe.hosts.remote_tensor import RemoteTensor, local, remote
from lightning_hetpipe.pipeline.stage_messages import Version
from lightning_hetpipe.pipeline.weight_stash import VersionBuffer, VersionedLayers, WeightStash, copy_of


class RemoteStash(WeightStash):
    """Versions of a stage in the ``memory`` of its host. Further arguments go to ``WeightStash``."""

    def __init__(self, memory: HostMemory, *args: Any) -> None:
        self.memory = memory
        self._told: dict[int, list[int]] = {}
        super().__init__(*args)

    def let_go(self) -> None:
        """Nothing of it is here."""

    def numbers(self) -> set[int]:
        """Numbers of the tensors of versions, and of the layers that they are bound to."""
        every = [*self.parameters, *self._frozen.values()]
        every += [each for buffer in self.buffers for each in buffer.tensors]
        return {each.handle.number for each in every if isinstance(each, RemoteTensor)}

    def published(self) -> PublishedWeights:
        """Message to the host, about what it was not told before."""
        numbers = {id(buffer): number for number, buffer in enumerate(self.buffers)}
        new: dict[int, list[int]] = {}
        for buffer in set(self._held.values()):
            number = numbers[id(buffer)]
            tensors = [each.handle.number for each in buffer.tensors if isinstance(each, RemoteTensor)]
            if tensors != self._told.get(number):
                new[number] = self._told[number] = tensors
        held = [(reading, numbers[id(buffer)], buffer.flags) for reading, buffer in self._held.items()]
        return PublishedWeights(held, new)

    def _copy(self, frozen: Mapping[int, Tensor] | None = None) -> nn.ModuleList:
        return copy_of(self._live, self._device, frozen, stays=True)

    def _placed(self, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
        return {number: self._there(tensor) for number, tensor in tensors.items()}

    def _there(self, tensor: Tensor) -> RemoteTensor:
        if isinstance(tensor, RemoteTensor) and tensor.handle.owner is self.memory:
            return tensor
        return remote(local(tensor), self.memory)


class HostedStash(VersionedLayers):
    """The versions, for the ``layers`` of the host; ``held`` gives a tensor that the host holds."""

    def __init__(self, layers: nn.ModuleList, held: Callable[[int], Tensor]) -> None:
        super().__init__(layers)
        self._held_by_number = held
        self._numbered: dict[int, VersionBuffer] = {}
        self._new: list[Tensor] = []

    def take(self, weights: PublishedWeights) -> None:
        """Have what was published now."""
        self._new = []
        for number, tensors in weights.buffers.items():
            buffer = self._numbered.setdefault(number, VersionBuffer())
            buffer.tensors = [*map(self._held_by_number, tensors)]
            self._new += buffer.tensors
        self.buffers = [*self._numbered.values()]
        before, self._held = self._held, {}
        for reading, number, flags in weights.held:
            if before.get(reading) is not self._numbered[number]:
                self._numbered[number].fills += 1
            self._held[reading] = self._numbered[number]
            if self._numbered[number].flags != flags:
                self._numbered[number].flags = flags

    def begin(self, version: Version) -> list[Tensor]:
        for buffer in self.buffers:
            buffer.fills += 1  # with weights that may have changed under the same number
        return self.publish(version)

    def publish(self, version: Version) -> list[Tensor]:
        return self._new
