"""A stage at a host that owns it: live weights, gradients, optimizer states and versions are there.

The live parameters become :class:`~lightning_hetpipe.hosts.remote_tensor.RemoteTensor`s, and stay the same objects: the
user's optimizer, clipping, callbacks and hooks work with them as ever, and what they compute is computed at the host.
When the stage ends, values come home, and parameters are what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.errors import PipelineStalled
from lightning_hetpipe.hosts import orders
from lightning_hetpipe.hosts.host_memory import HostMemory
from lightning_hetpipe.hosts.remote_stage import LOST, HostLink, RemoteStage, sparse_of
from lightning_hetpipe.hosts.remote_tensor import RemoteTensor, come_home, leave, local, move_out, remote
from lightning_hetpipe.hosts.server_calls import HostHolder
from lightning_hetpipe.hosts.shared_weights import FoundStash
from lightning_hetpipe.pipeline.graph_code import layers_as_data
from lightning_hetpipe.pipeline.stage import FoundGradients
from lightning_hetpipe.pipeline.weight_stash import VersionedLayers, copy_of
from lightning_hetpipe.torch_private.subclasses import take_in_foreach


class OwnedStash(FoundStash):
    """A stage's versions in the ``memory`` of the host that owns it; other arguments are those of ``WeightStash``."""

    def __init__(self, memory: HostMemory, *args: Any) -> None:
        self.memory = memory
        super().__init__(*args)

    def let_go(self) -> None:
        """Nothing of it is here."""

    def numbers(self) -> set[int]:
        """Numbers of the tensors of versions, and of the layers that they are bound to."""
        every = [
            *self.parameters,
            *self._frozen.values(),
            *(each for buffer in self.buffers for each in buffer.tensors),
        ]
        return {each.handle.number for each in every if isinstance(each, RemoteTensor)}

    def _copy(self, frozen: Mapping[int, Tensor] | None = None) -> nn.ModuleList:
        return copy_of(self._live, self._device, frozen, stays=True)

    def _made(self, tensors: dict[int, Tensor]) -> dict[int, tuple[Tensor, orders.SharedTensor | orders.Held]]:
        found: dict[int, tuple[Tensor, orders.SharedTensor | orders.Held]] = {}
        for number, tensor in tensors.items():
            is_there = isinstance(tensor, RemoteTensor) and tensor.handle.owner is self.memory
            placed = tensor if is_there else remote(local(tensor), self.memory)
            assert isinstance(placed, RemoteTensor)
            found[number] = placed, placed.handle.name
        return found


class Accelerator(NamedTuple):
    """An accelerator of a host's machine, by its ``number`` there; ``name`` is that which a plan has, or None."""

    number: int
    name: str | None = None


class OwnedStage(RemoteStage):
    """The stage, as the process of Lightning's loop has it.

    Args:
        connect: As of ``RemoteStage``.
        accelerators: On which the host computes: the stage's, then that of each member of its group; none for a CPU.
        args: Those of ``RemoteStage``. The device is that which weights have for this process.
    """

    shows_gradients = False  # they stay at the host

    def __init__(self, connect: Callable[[], HostLink] | None, accelerators: Sequence[Accelerator], *args: Any) -> None:
        self._moved: list[nn.Parameter] = []
        self._accelerators = accelerators
        try:
            super().__init__(connect, *args)
        except BaseException:
            self.close()  # nobody else knows of it yet
            raise

    @property
    def place(self) -> str:
        if not self._accelerators or self._host is None:
            return super().place
        number, name = self._accelerators[0]
        return f"{self.device if name is None else f'{name}:{number}'} of {self._host.name}"

    def await_weights(self) -> None:
        """Wait until the host has the weights, if they are to be on an accelerator.

        Raises:
            SettingError: if the host has no such device.
            torch.OutOfMemoryError: if that has no room for them.
        """
        if self._accelerators:
            self._memory.bring(())

    def adopt(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Have the states that ``optimizers`` keep of its weights at the host, too."""
        own = set(self._moved)
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                if parameter not in own:
                    continue
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                        state[name] = remote(value, self._memory)

    def close(self) -> None:
        try:
            if self._host is not None and self._lost is None:
                with suppress(*LOST, PipelineStalled):
                    self._come_home()
        finally:
            super().close()

    def copy_layers(self) -> None:
        if self._host is None:
            self._connect()
        self._move_out()
        super().copy_layers()

    def take(self, minibatch: int) -> FoundGradients:
        assert isinstance(self.stash, OwnedStash)
        handles = [self._memory.new() for _ in self.stash.parameters]
        looks = self._taken(minibatch, [handle.number for handle in handles])
        found = FoundGradients()
        for number, look in looks.items():
            if isinstance(look, orders.SparseTensor):
                found.gradients[number] = sparse_of(look)
            else:
                like = torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device="meta")
                found.gradients[number] = RemoteTensor(handles[number], like)
        return found

    def listen(self, secret: str) -> int:
        """Have the host let in those of other stages that show ``secret``; gives its port."""
        port: int = self._ask(orders.Listen(secret)).values
        return port

    def hand_over(self, order: orders.HandOver) -> list[str | None]:
        """Have the host hand over to others what ``order`` says; gives for each why it cannot be reached, or None."""
        reasons: list[str | None] = self._ask(order).values
        return reasons

    def has(self, parameter: Tensor) -> bool:
        """Tell whether the host has ``parameter``."""
        return isinstance(parameter, RemoteTensor) and parameter.handle.owner is self._memory

    def _connect(self) -> None:
        super()._connect()
        assert self._host is not None
        self._memory = HostMemory(
            super()._send,
            self._asking,
            self._await_answer,
            self.device,
            accelerates=bool(self._accelerators),
        )
        take_in_foreach(RemoteTensor)
        if self._accelerators:
            own, *members = self._accelerators
            super()._send(orders.UseDevice(*own, self.device, self._host.name, [[*each] for each in members]))
            if own.name is not None:  # else the device is of this machine, and there
                self._memory.bring(())  # before any weight leaves this process for a host that has no such device
        self.holder = HostHolder(self._memory, self._send, self._end_silent)

    def _new_stash(self, layers: nn.ModuleList) -> VersionedLayers:
        return OwnedStash(self._memory, layers, self._settings.version_buffers, self.device)

    def _layers_as_data(self) -> list[Any]:
        return layers_as_data(self.layers, lambda each: each.handle.name if isinstance(each, RemoteTensor) else each)

    def _send(self, message: Any) -> None:
        self._memory.flush()
        super()._send(message)

    def _move_out(self) -> None:
        """Have the live weights at the host."""
        every = nn.ModuleList([layer.module for layer in self.layers]).parameters()
        own = [parameter for parameter in every if not isinstance(parameter, RemoteTensor)]
        if accelerates(self.device):
            for parameter in own:  # first, as the device may have no room for them and the host's
                leave(parameter)
            torch.accelerator.empty_cache()
        try:
            for parameter in own:
                move_out(parameter, self._memory)
        except BaseException:
            for parameter in own:  # the others come home from the host
                if not isinstance(parameter, RemoteTensor):
                    parameter.data = parameter.data.to(self.device)
            raise
        self._moved += own

    def _come_home(self) -> None:
        """Have all values in this process: weights, gradients, the optimizers' states, and what else is of use."""
        stash = getattr(self, "stash", None)  # none where the stage was not made
        self._memory.close(stash.numbers() if isinstance(stash, OwnedStash) else ())
        for tensor in [*self._memory.tensors.values()]:
            if isinstance(tensor, RemoteTensor) and tensor.handle.owner is None and _is_leaf(tensor):
                come_home(tensor)


def _is_leaf(tensor: Tensor) -> bool:
    with suppress(RuntimeError):  # torch does not tell it of a view from no_grad whose base was changed with gradients
        return tensor.is_leaf
    return False
