"""A segment's buffers, such as BatchNorm's statistics (law L9).

Buffers are not stashed like weights but follow the forwards, in order of p: forward p starts from what forward p - 1
left, and where a minibatch calls a piece several times, each call from what the one before it left. Each of the last Nm
minibatches keeps its own, so that version p can show outsiders what its last call left while later forwards have run
already, and so that a backward finds the buffers that its forward used. To compute a forward again takes what it
started from, which is kept for as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.graph_layer import GraphLayer, own_path
from lightning_hetpipe.pipeline.values import unequal
from lightning_hetpipe.torch_private.tensors import foreach_copy_, version_counter

Place = tuple[nn.Module, str]
"""A module and the name of one of its own buffers."""


def places(layers: Iterable[nn.Module]) -> list[Place]:
    """Every buffer in ``layers`` that holds a tensor; a shared module's once."""
    return [
        (module, name)
        for module in nn.ModuleList(layers).modules()
        for name, tensor in module.named_buffers(recurse=False)
        if tensor is not None
    ]


def bind(places: Iterable[Place], tensors: Iterable[Tensor]) -> None:
    """Let ``places`` hold ``tensors``."""
    for (module, name), tensor in zip(places, tensors, strict=True):
        setattr(module, name, tensor)


def may_change(module: nn.Module, name: str) -> bool:
    """Return True if a forward may change this buffer, as far as its module tells (a graph does)."""
    return not isinstance(module, GraphLayer) or name in module.code.changes


class Buffers:
    """The buffers of one segment's ``layers``: those of the last Nm minibatches on ``device``, where forwards run."""

    def __init__(self, layers: Sequence[nn.Module], in_flight: int, device: torch.device) -> None:
        self._names = [_told(module, name) for module, name in places(layers)]
        self._left = [[tensor_at(place).to(device, copy=True) for place in places(layers)] for _ in range(in_flight)]

    def begin(self, minibatch: int, live: Sequence[Tensor]) -> None:
        """Takes the ``live`` buffers as what forward ``minibatch`` left: the pipeline starts empty behind it."""
        left = self._of(minibatch)
        for index, tensor in enumerate(live):
            left[index] = tensor.to(left[index].device, copy=True)

    def let_go(self) -> None:
        """Forgets what forwards have left."""
        self._left = [[] for _ in self._left]

    def all(self) -> list[Tensor]:
        """Buffers that Lightning's thread has prepared for the next forwards."""
        return [tensor for left in self._left for tensor in left]

    def before_forward(self, minibatch: int, layers: list[Place], call: int = 0) -> None:
        """Hands to ``layers`` the buffers for a forward of ``minibatch``: copies of what the minibatch before it left,
        or what its own ``call`` before this one left.
        """
        if not self._names:
            return
        own, previous = self._of(minibatch), self._of(minibatch - 1)
        if own is not previous and not call:
            for index, tensor in enumerate(previous):
                if own[index].shape != tensor.shape or own[index].dtype != tensor.dtype:
                    own[index] = torch.empty_like(tensor)
            with torch.no_grad():
                foreach_copy_(own, previous)
        self.bind(minibatch, layers)

    def copied(self, minibatch: int) -> list[Tensor]:
        """Copies of the buffers that a forward of ``minibatch`` is about to start from."""
        return [tensor.clone() for tensor in self._of(minibatch)]

    def bind(self, minibatch: int, layers: list[Place]) -> None:
        """Lets ``layers`` hold the buffers of ``minibatch``."""
        if self._names:
            bind(layers, self._of(minibatch))

    def changes(self, minibatch: int) -> list[int]:
        """Count the in-place changes of each buffer of ``minibatch`` so far."""
        return [version_counter(tensor) for tensor in self._of(minibatch)] if self._names else []

    def after_forward(self, minibatch: int, layers: list[Place]) -> None:
        """Keeps what a forward of ``minibatch`` left, also where a layer replaced a buffer by a new tensor."""
        if not self._names:
            return
        own = self._of(minibatch)
        for index, (module, name) in enumerate(layers):
            left = getattr(module, name)
            if left is not own[index]:
                own[index] = left.detach()

    def left(self, minibatch: int) -> Sequence[Tensor]:
        """Buffers as ``minibatch`` left them."""
        return self._of(minibatch)

    def mirror(self, minibatch: int, left: Sequence[Tensor]) -> None:
        """Hold what the forward of ``minibatch`` has left elsewhere."""
        self._left[minibatch % len(self._left)] = [*left]

    def publish(self, minibatch: int, live: Sequence[Tensor], *, ahead: bool) -> bool:
        """Take over what callbacks did to the ``live`` buffers after ``minibatch``: return whether they did anything.

        Raises:
            SettingError: for a change, if later forwards run ``ahead``, which may have started from what was there.
        """
        if not self._names:
            return False
        pairs = [(now.to(left.device), left) for now, left in zip(live, self._of(minibatch), strict=True)]
        changed = unequal(pairs)
        for index in changed:
            if ahead:
                raise SettingError(
                    f"{self._names[index]} was changed outside of forward after minibatch {minibatch} (in a hook, or as"
                    " a view of a weight), while later minibatches were in flight; set in_flight=1, or change it at the"
                    " end of an epoch"
                )
            self._of(minibatch)[index] = pairs[index][0].to(pairs[index][1].device, copy=True)
        return bool(changed)

    def _of(self, minibatch: int) -> list[Tensor]:
        return self._left[minibatch % len(self._left)]


def _told(module: nn.Module, name: str) -> str:
    if not isinstance(module, GraphLayer):
        return f"the buffer {name!r} of a pipelined {type(module).__name__}"
    path = own_path(name)
    if "lifted_tensor" in path:
        return f"{module.code.named.get(name, 'a tensor')}, which a pipelined module reads,"
    return f"'{path}' of a pipelined module"


def tensor_at(place: Place) -> Tensor:
    tensor: Tensor = getattr(*place)
    return tensor.detach()
