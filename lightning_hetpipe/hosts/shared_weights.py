"""Versions of a stage's weights where its host finds them: what is published is copied once, and sent nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.hosts.orders import Held, PublishedWeights, SharedTensor
from lightning_hetpipe.pipeline.stage_messages import Version
from lightning_hetpipe.pipeline.weight_stash import VersionBuffer, VersionedLayers, WeightStash
from lightning_hetpipe.server.transport.shared_memory import NoBlock, Views, place_of, shared

_ALIGNED = 64


class SharedMemory:
    """A block of memory that other processes see, for as many tensors as have room in it."""

    def __init__(self, size: int) -> None:
        """
        Raises:
            SettingError: if this system shares no memory.
        """
        try:
            self._memory = shared(max(size, 1))
        except NoBlock as no:
            raise SettingError(
                f"stage_hosts='processes' needs memory that processes share, and {no}; leave stage_hosts out"
            ) from None
        self.size = size
        self._used = 0

    @staticmethod
    def needed(tensors: Iterable[Tensor]) -> int:
        """Bytes of a block that has room for ``tensors``."""
        return sum(tensor.numel() * tensor.element_size() + _ALIGNED for tensor in tensors)

    def clear(self) -> None:
        """Its tensors are of no use any more."""
        self._used = 0

    def copy(self, tensor: Tensor) -> tuple[Tensor, SharedTensor]:
        """A copy of ``tensor`` with its strides, where they leave no gaps, and where other processes find it."""
        like = torch.empty_like(tensor, device="meta")
        size = tensor.numel() * tensor.element_size()
        described = tensor.dtype, list(like.shape), list(like.stride())
        if not size:
            return torch.empty_like(tensor), SharedTensor(None, *described)
        first, self._used = self._used, self._used + -(-size // _ALIGNED) * _ALIGNED
        memory = self._memory[first : first + size]
        made = torch.frombuffer(memory, dtype=tensor.dtype).as_strided(like.shape, like.stride())
        made.copy_(tensor)
        return made, SharedTensor(place_of([memory]), *described)


class SeenTensors:
    """Tensors in the memory of another process."""

    def __init__(self) -> None:
        self._views = Views()

    def of(self, shared: SharedTensor) -> Tensor:
        """The tensor; the other process changes it, nobody sees changes that are made here.

        Raises:
            NoBlock: if it cannot be seen.
        """
        if shared.place is None:
            return torch.empty_strided(shared.shape, shared.stride, dtype=shared.dtype)
        memory = self._views.look(shared.place)
        return torch.frombuffer(memory, dtype=shared.dtype).as_strided(shared.shape, shared.stride)


class FoundStash(WeightStash):
    """A stage's versions, which its host finds."""

    def __init__(self, live: nn.ModuleList, size: int, device: torch.device) -> None:
        self._where: dict[int, tuple[Tensor, SharedTensor | Held]] = {}  # by id of the tensor
        self._told: dict[int, list[int]] = {}
        super().__init__(live, size, device)

    def _made(self, tensors: dict[int, Tensor]) -> dict[int, tuple[Tensor, SharedTensor | Held]]:
        """Copies of ``tensors`` that the host finds, with where it does."""
        raise NotImplementedError

    def _placed(self, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
        made = self._made(tensors)
        self._where.update((id(tensor), (tensor, where)) for tensor, where in made.values())
        return {number: tensor for number, (tensor, _) in made.items()}

    def published(self) -> PublishedWeights:
        """Message to the host, about what it was not told before."""
        numbers = {id(buffer): number for number, buffer in enumerate(self.buffers)}
        new: dict[int, Sequence[SharedTensor | Held]] = {}
        for buffer in set(self._held.values()):
            number = numbers[id(buffer)]
            if [*map(id, buffer.tensors)] != self._told.get(number):
                new[number] = [self._where[id(tensor)][1] for tensor in buffer.tensors]
                self._told[number] = [*map(id, buffer.tensors)]
        if new:  # others are gone
            used = {*map(id, self._frozen.values()), *(id(each) for buffer in self.buffers for each in buffer.tensors)}
            self._where = {key: found for key, found in self._where.items() if key in used}
        held = [(reading, numbers[id(buffer)], buffer.flags) for reading, buffer in self._held.items()]
        return PublishedWeights(held, new)


class SharedStash(FoundStash):
    """A stage's versions in memory of this process that the host sees."""

    def __init__(self, live: nn.ModuleList, size: int, device: torch.device) -> None:
        super().__init__(live, size, device)
        for parameter, tensor in zip(self.parameters, self.buffers[0].tensors, strict=True):
            parameter.data = tensor  # nothing is computed here, and so no copy of its own is needed

    def _made(self, tensors: dict[int, Tensor]) -> dict[int, tuple[Tensor, SharedTensor | Held]]:
        block = SharedMemory(SharedMemory.needed(tensors.values()))
        return {number: block.copy(tensor) for number, tensor in tensors.items()}


class SeenStash(VersionedLayers):
    """Versions that the process of Lightning's loop has published, for the ``layers`` of a host.

    Args:
        layers: The layers.
        held: Gives a tensor that the host holds.
    """

    def __init__(self, layers: nn.ModuleList, held: Callable[[int], Tensor]) -> None:
        super().__init__(layers)
        self._held_by_number = held
        self._seen = SeenTensors()
        self._numbered: dict[int, VersionBuffer] = {}
        self._new: list[Tensor] = []

    def take(self, weights: PublishedWeights) -> None:
        """Have what was published now."""
        self._new = []
        for number, tensors in weights.buffers.items():
            buffer = self._numbered.setdefault(number, VersionBuffer())
            buffer.tensors = [
                self._held_by_number(each.number) if isinstance(each, Held) else self._seen.of(each) for each in tensors
            ]
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
