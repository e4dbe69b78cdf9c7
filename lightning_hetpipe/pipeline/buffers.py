"""A segment's buffers, such as BatchNorm's statistics (law L9).

Buffers are not stashed like weights but follow the forwards, in order of p. Forward p starts from what forward p - 1
left. If a minibatch calls a piece several times, each call starts from what the call before left. Each of the last Nm
minibatches keeps its own buffers. So version p can show observers what its last call left, although later forwards have
run. A backward finds the buffers that its forward used. To compute a forward again, its initial buffers are kept as
long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.errors import PipelineRefusal, SettingError
from lightning_hetpipe.pipeline.graph_layer import GraphLayer, own_path
from lightning_hetpipe.pipeline.values import DeviceComparison, alike, unequal
from lightning_hetpipe.torch_private.tensors import address_of, foreach_copy_, version_counter

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.stage import Layer

Place = tuple[nn.Module, str]
"""A module and the name of one of its own buffers."""


def places(layers: Iterable[nn.Module]) -> list[Place]:
    """Return every buffer in ``layers`` that holds a tensor, in a shared module only once."""
    return [
        (module, name)
        for module in nn.ModuleList(layers).modules()
        for name, tensor in module.named_buffers(recurse=False)
        if tensor is not None
    ]


def bind(places: Iterable[Place], tensors: Iterable[Tensor]) -> None:
    for (module, name), tensor in zip(places, tensors, strict=True):
        setattr(module, name, tensor)


def may_change(module: nn.Module, name: str) -> bool:
    """Return True if a forward may change this buffer. Only a graph tells, so other modules' buffers may change."""
    return not isinstance(module, GraphLayer) or name in module.code.changes


class Buffers:
    """The buffers of one segment's ``layers`` for the last Nm minibatches, on ``device``, where forwards run."""

    def __init__(self, layers: Sequence[nn.Module], in_flight: int, device: torch.device) -> None:
        self._device = device
        self._names = [told(module, name, "buffer") for module, name in places(layers)]
        self._shared: set[int] = set()  # buffers of which several minibatches have had one tensor
        self._asked: tuple[int, DeviceComparison] | None = None  # whether buffers were changed after a minibatch
        self._left = [[tensor_at(place).to(device, copy=True) for place in places(layers)] for _ in range(in_flight)]

    def begin(self, minibatch: int, live: Sequence[Tensor]) -> None:
        """Take the ``live`` buffers as what forward ``minibatch`` left, because the pipeline starts empty behind it."""
        left = self.left(minibatch)
        for index, tensor in enumerate(live):
            left[index] = tensor.to(left[index].device, copy=True)

    def let_go(self) -> None:
        """Release the buffers that forwards left."""
        self._asked = None
        self._left = [[] for _ in self._left]

    def all(self) -> list[Tensor]:
        """Return the buffers that Lightning's thread has prepared for the next forwards."""
        return [tensor for left in self._left for tensor in left]

    def before_forward(self, minibatch: int, layers: list[Place], call: int = 0) -> None:
        """Give ``layers`` buffers for a forward of ``minibatch``: copies of what the minibatch before it left. If it is
        not the first ``call``, give the buffers that the minibatch's own call before left."""
        if not self._names:
            return
        own, previous = self.left(minibatch), self.left(minibatch - 1)
        if own is not previous and not call:
            changing = list[int]()
            for index, (place, tensor) in enumerate(zip(layers, previous, strict=True)):
                if not may_change(*place):
                    own[index] = tensor
                    self._shared.add(index)
                    continue
                changing.append(index)
                is_alike = own[index].shape == tensor.shape and own[index].dtype == tensor.dtype
                if not is_alike or self._is_shared(index, own):
                    own[index] = torch.empty_like(tensor)
            with torch.no_grad():
                foreach_copy_([own[index] for index in changing], [previous[index] for index in changing])
        self.bind(minibatch, layers)

    def _is_shared(self, index: int, own: Sequence[Tensor]) -> bool:
        others = (left for left in self._left if left is not own)
        return index in self._shared and any(left[index] is own[index] for left in others)

    def copied(self, minibatch: int) -> list[Tensor]:
        """Return copies of the buffers from which a forward of ``minibatch`` is about to start."""
        return [tensor.clone() for tensor in self.left(minibatch)]

    def bind(self, minibatch: int, layers: list[Place]) -> None:
        if self._names:
            bind(layers, self.left(minibatch))

    def changes(self, minibatch: int) -> list[int]:
        """Return the number of in-place changes so far of each buffer of ``minibatch``."""
        return [version_counter(tensor) for tensor in self.left(minibatch)] if self._names else []

    def after_forward(self, minibatch: int, layers: list[Place]) -> None:
        """Keep what a forward of ``minibatch`` left, even if a layer replaced a buffer by a new tensor."""
        if not self._names:
            return
        own = self.left(minibatch)
        for index, (module, name) in enumerate(layers):
            left = getattr(module, name)
            if left is not own[index]:
                own[index] = left.detach()

    def left(self, minibatch: int) -> list[Tensor]:
        """Return the buffers as ``minibatch`` left them."""
        return self._left[minibatch % len(self._left)]

    def mirror(self, minibatch: int, left: Sequence[Tensor]) -> None:
        """Hold the buffers that the forward of ``minibatch`` left elsewhere."""
        self._left[minibatch % len(self._left)] = [*left]

    def publish(self, minibatch: int, live: Sequence[Tensor], *, ahead: bool) -> bool:
        """Take over callbacks' changes of the ``live`` buffers after ``minibatch``. Return True if there may be any.

        Raises:
            SettingError: for a change while later forwards run ``ahead``: they may have started from older buffers. If
                a device compares the buffers, :meth:`refuse_changes` raises it later, so that nobody waits.
        """
        self.refuse_changes()
        if not self._names:
            return False
        left = self.left(minibatch)
        pairs = [(now.to(own.device), own) for now, own in zip(live, left, strict=True)]
        if accelerates(self._device) and alike(pairs):
            if ahead:
                self._asked = minibatch, DeviceComparison(pairs)
                return False
            changed = list(range(len(pairs)))  # to copy them takes less than to ask
        else:
            changed = unequal(pairs)
        for index in changed:
            if ahead:
                self._refuse(index, minibatch)
            left[index] = pairs[index][0].to(left[index].device, copy=True)
        return bool(changed)

    def refuse_changes(self) -> None:
        """Raise as :meth:`publish` if the device has found a change."""
        if self._asked is not None:
            (minibatch, comparison), self._asked = self._asked, None
            if (index := comparison.place()) is not None:
                self._refuse(index, minibatch)

    def _refuse(self, index: int, minibatch: int) -> NoReturn:
        raise SettingError(
            f"{self._names[index]} was changed outside of forward after minibatch {minibatch} (in a hook, or as a view"
            " of a weight), while later minibatches were in flight; set in_flight=1, or change it at the end of an"
            " epoch"
        )


def told(module: nn.Module, name: str, kind: str) -> str:
    """Name a tensor of ``kind``, a buffer or a weight, for an error."""
    if not isinstance(module, GraphLayer):
        return f"the {kind} {name!r} of a pipelined {type(module).__name__}"
    path = own_path(name)
    if "lifted_tensor" in path:
        return f"{module.code.named.get(name, 'a tensor')}, which a pipelined module reads,"
    return f"'{path}' of a pipelined module"


def check_shared(parts: Sequence[Sequence[Layer]]) -> None:
    """Refuse changing buffers on both sides of a split point, because forwards would not see them in order of p."""
    owners: dict[int, tuple[str, bool]] = {}
    for layers in parts:
        here: dict[int, tuple[str, bool]] = {}
        for layer in layers:
            for module, name in places([layer.module]):
                buffer = getattr(module, name)
                memory = address_of(buffer) or id(buffer)
                changes = may_change(module, name) or here.get(memory, ("", False))[1]
                here[memory] = (layer.name, changes)
        for key, (name, changes) in here.items():
            owner, changed = owners.get(key, ("", False))
            if owner and (changes or changed):
                raise PipelineRefusal(
                    f"layers {owner} and {name} share a module that has buffers, or the memory of one, and a stage"
                    " begins between them; give each layer a module of its own"
                )
        owners.update(here)


def tensor_at(place: Place) -> Tensor:
    tensor: Tensor = getattr(*place)
    return tensor.detach()
