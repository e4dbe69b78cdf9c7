"""The live layers of a stage, and the stage's versions of their weights (law L1).

A version is tensors. A stage has one copy of the live layers. A pass binds the tensors of its version to their
parameters. Version buffers are allocated once. There are as many as the weight policy needs if only optimizer steps
change weights. If a minibatch will use a version, publishing it copies the live weights into a free buffer, in one
fused call. Predicted weights are moved on. A version with unchanged weights shares its predecessor's buffer, if that is
moved on by as many steps.

Frozen weights exist once for all versions, beside the live ones: no version writes to this copy. If anything but an
optimizer changes a frozen weight (a callback that averages, for example), later versions share a new copy.

Parameters are bound through ``.data``. So every holder of a parameter sees the version that is bound last. Holders are
an RNN's list of its weights, a plain list, or the graph of a forward whose backward is still to come. A backward
therefore binds its forward's version again. It takes 0.16 us for each parameter (*measured*), a hundredth of a layer's
time. A stage with Nm = 1 never binds anything.

Before each forward, hooks of ``torch.nn.utils`` compute tensors of some layers (pruned weights, old weight or spectral
norm) from ``weight_orig`` and similar parameters (law L9). Stages compute them on their copies, or in a graph.
Observers of the live layers, such as Lightning's ModelPruning, expect to find there what the last forward left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, count
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_hetpipe.accelerator import accelerates
from lightning_hetpipe.errors import PipelineRefusal, SettingError
from lightning_hetpipe.pipeline.buffers import may_change, places, tensor_at, told
from lightning_hetpipe.pipeline.stage_messages import Flags, Move, Version
from lightning_hetpipe.pipeline.streams import StreamEvent
from lightning_hetpipe.pipeline.values import DeviceComparison, all_equal, unequal
from lightning_hetpipe.rules.versions import Reading
from lightning_hetpipe.torch_private.modules import computing_hooks
from lightning_hetpipe.torch_private.tensors import address_of, foreach_copy_, version_counter

Moves = Mapping[nn.Parameter, Move]
"""Expected changes of parameters by an optimizer step."""

NO_MOVES: Moves = {}

_COMPARED = 3
"""Versions that are compared by value at once, so that changes through ``.data`` from the beginning are noticed."""

_TURNS = 8
"""Versions in which a device compares all frozen weights once."""


class Live:
    """The live layers of each segment of one stage, or parameters that no stage holds."""

    def __init__(self, segments: Sequence[Sequence[nn.Module]]) -> None:
        layers = nn.ModuleList([layer for segment in segments for layer in segment])
        self.parameters: list[nn.Parameter] = list(layers.parameters())
        self._modules = list(layers.modules())
        self._buffers = [places(segment) for segment in segments]
        self.shows = any(self._buffers)
        """True if forwards leave anything in the live layers."""

    def version(self, number: int, needed: Sequence[Reading], moves: Moves = NO_MOVES) -> Version:
        """Return the message that publishes the present weights and flags as version ``number``."""
        buffers = [[*map(tensor_at, own)] for own in self._buffers]
        own = [moves.get(parameter) for parameter in self.parameters] if moves else ()
        return Version(number, self.parameters, self.flags(), buffers, needed, own)

    def flags(self) -> Flags:
        return Flags(
            tuple([parameter.requires_grad for parameter in self.parameters]),
            tuple([module.training for module in self._modules]),
        )

    def show(self, state: Sequence[Sequence[Tensor]], shown: Sequence[bool] | None = None) -> None:
        """Set buffers to the ``state`` that a forward left, by segment: all, or only of segments to be ``shown``."""
        for own, left in compress(zip(self._buffers, state, strict=True), shown or [True] * len(self._buffers)):
            for place, tensor in zip(own, left, strict=True):
                if not may_change(*place):
                    continue
                live = tensor_at(place)
                if live.shape == tensor.shape and live.dtype == tensor.dtype:
                    live.copy_(tensor)
                else:
                    setattr(*place, tensor.to(live.device, copy=True))


_SOURCES = ("_orig", "_g", "_v")


def computed_names(module: nn.Module) -> list[str]:
    """Return the attributes of ``module`` itself that hold a tensor computed from its parameters."""
    parameters = module.named_parameters(recurse=False)
    sources = {name.rsplit("_", 1)[0] for name, _ in parameters if name.endswith(_SOURCES)}
    return [name for name, value in vars(module).items() if name in sources and isinstance(value, Tensor)]


def compute(module: nn.Module, weights: Callable[[nn.Parameter], Tensor]) -> None:
    """Compute what a forward on other ``weights`` left in ``module``, which has the forward's buffers already."""
    own = SimpleNamespace(training=False)  # in training, spectral norm would iterate again
    for name, parameter in module.named_parameters(recurse=False):
        setattr(own, name, weights(parameter))
    for name, buffer in module.named_buffers(recurse=False):
        setattr(own, name, buffer)
    for hook in computing_hooks(module):
        hook(own, ())
    for name in computed_names(module):
        setattr(module, name, getattr(own, name))


_NO_FLAGS = Flags((), ())


class VersionBuffer:
    """Room for the weights of one version at a time.

    Attributes:
        tensors: Tensor of each parameter. Tensors of frozen parameters belong to all versions.
        frozen: Numbers of the frozen parameters.
        flags: The version's flags of parameters and modules.
        published: Event behind which the tensors are computed.
        parts: Parts of the weights that members of a group have used.
    """

    def __init__(self, flags: Flags = _NO_FLAGS) -> None:
        self.tensors: list[Tensor] = []
        self.frozen: frozenset[int] | None = None
        self.flags = flags
        self.published: StreamEvent | None = None
        self.parts: dict[Any, Tensor] = {}

    def fill(self, version: Version, steps: int, frozen: Mapping[int, Tensor]) -> None:
        """Take the live weights, moved on by ``steps`` optimizer steps, the ``frozen`` ones, and the flags."""
        self.parts.clear()  # also for regions that keep the table until their next call
        if any(self.tensors[number] is not tensor for number, tensor in frozen.items()):
            self.tensors = [frozen.get(number, tensor) for number, tensor in enumerate(self.tensors)]
        unmoved: list[tuple[Tensor, Tensor]] = []
        for tensor, weights, move in self._beside(version, steps):
            if move is None:
                unmoved.append((tensor, weights))
            else:
                move.write(weights, steps, tensor)
        foreach_copy_([tensor for tensor, _ in unmoved], [weights for _, weights in unmoved])
        self.flags = version.flags

    def may_hold(self, version: Version, frozen: Mapping[int, Tensor]) -> bool:
        """Return True if :meth:`fill` would change nothing but values, which :meth:`compared` gives."""
        return self.flags == version.flags and all(self.tensors[number] is each for number, each in frozen.items())

    def compared(self, version: Version, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor that is not frozen with what :meth:`fill` would write into it."""
        for tensor, weights, move in self._beside(version, steps):
            yield tensor, weights.to(tensor.device) if move is None else _moved(weights, move, steps, tensor)

    def _beside(self, version: Version, steps: int) -> Iterator[tuple[Tensor, Tensor, Move | None]]:
        """Yield each tensor that is not frozen with its live weights, and their expected change."""
        moves = version.moves if steps and version.moves else [None] * len(self.tensors)
        beside = zip(self.tensors, version.parameters, moves, version.flags.requires_grad, strict=True)
        return ((tensor, weights, move) for tensor, weights, move, is_trained in beside if is_trained)


class VersionedLayers:
    """Layers that are bound to the weights of one version or another, with ``buffers`` for versions. An instance of
    this class itself holds the live layers of an evaluation, and no versions."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.layers = layers
        self.parameters = list(layers.parameters())
        self.bytes = [parameter.nbytes for parameter in self.parameters]
        self.buffers: list[VersionBuffer] = []
        self._modules = list(layers.modules())
        self._total_bytes = sum(self.bytes)
        self._held: dict[Reading, VersionBuffer] = {}
        self._bound: list[Tensor] = []
        self._bound_flags = _NO_FLAGS

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffers that hold a version."""
        buffers = set(self._held.values())
        if not any(buffer.frozen for buffer in buffers):
            return self._total_bytes * len(buffers)
        sizes = (zip(map(id, buffer.tensors), self.bytes, strict=True) for buffer in buffers)
        return sum(dict(chain(*sizes)).values())

    def begin(self, version: Version) -> list[Tensor]:
        """Forget every version and publish ``version``: the pipeline starts empty."""
        self._held.clear()
        return self.publish(version)

    def publish(self, version: Version) -> list[Tensor]:
        """Hold ``version``, if minibatches need it. Return the tensors that were made for it."""
        raise NotImplementedError

    def bind(self, weights: Reading) -> None:
        """Bind the layers to ``weights``: their tensors, frozen parameters and modes."""
        buffer = self._held[weights]
        if buffer.tensors is not self._bound:
            for parameter, tensor in zip(self.parameters, buffer.tensors, strict=True):
                parameter.data = tensor
            self._bound = buffer.tensors
        if buffer.flags is not self._bound_flags:
            if buffer.flags != self._bound_flags:
                for parameter, wanted in zip(self.parameters, buffer.flags.requires_grad, strict=True):
                    parameter.requires_grad_(wanted)
                for module, training in zip(self._modules, buffer.flags.training, strict=True):
                    module.training = training
            self._bound_flags = buffer.flags

    def refuse_changes(self) -> None:
        """Raise SettingError if a device has found a change of weights that no version has."""

    def let_go(self) -> None:
        """Release the memory of versions in this process, even if the layers are still held."""

    def buffer(self, weights: Reading) -> VersionBuffer:
        return self._held[weights]

    def tensor(self, index: int, weights: Reading) -> Tensor:
        """Return the tensor of the live parameter number ``index`` in ``weights``."""
        return self._held[weights].tensors[index]

    def parameter(self, index: int, weights: Reading) -> nn.Parameter:
        """Make a new leaf with ``weights`` of the live parameter number ``index``."""
        return nn.Parameter(self.tensor(index, weights).detach(), self._held[weights].flags.requires_grad[index])


class WeightStash(VersionedLayers):
    """A copy of a stage's ``live`` layers on ``device``, and initially ``size`` version buffers for its weights.
    Lightning's thread publishes, and touches only buffers that no minibatch in flight uses. The stage's thread binds
    buffers."""

    def __init__(self, live: nn.ModuleList, size: int, device: torch.device) -> None:
        self._live, self._device = live, device
        super().__init__(copy_of(live, device))
        self._frozen = {number: each.data for number, each in enumerate(self.parameters) if not each.requires_grad}
        """Tensors, by number, that versions share."""
        self.buffers = [VersionBuffer() for _ in range(size)]
        for buffer in self.buffers:
            self._make_room(buffer, self.layers if buffer is self.buffers[0] else None)
        self._newest: dict[int, VersionBuffer] = {}  # by steps, for weights that may still be the live ones
        self._counters: list[int] = []
        self._published = 0
        self._by_value = False  # weights have changed without their counters
        self._asked: list[tuple[int, Sequence[int], DeviceComparison]] = []  # of versions and weights
        self._bound = self.buffers[0].tensors
        self._bound_flags = self.buffers[0].flags

    def publish(self, version: Version) -> list[Tensor]:
        """Copy the live weights as ``version``, if they are needed and differ from the version before.

        Version counters tell which weights differ, except for changes through ``.data``. So values are compared as
        well. On an accelerator the host would wait for that. Behind the first versions, it asks there and goes on, and
        :meth:`refuse_changes` raises an error if the device finds a change.
        """
        self.refuse_changes()
        needed = set(version.needed)
        self._held = {reading: buffer for reading, buffer in self._held.items() if reading in needed}
        new = [reading for reading in version.needed if reading not in self._held]
        if not new:
            return []
        counters = [version_counter(each) for each in version.parameters]
        if counters != self._counters:
            self._newest.clear()
        self._published += 1
        with torch.no_grad():
            made = self._share_frozen(version, counters)
            self._counters = counters
            for reading in new:
                last = self._newest.get(reading.steps)
                is_there = last is not None and last in self._held.values()
                may_hold = last is not None and is_there and last.may_hold(version, self._frozen)
                own = compress(count(), version.flags.requires_grad)
                if last is None or not may_hold or self._differ(version, own, last.compared(version, reading.steps)):
                    last = self._newest[reading.steps] = self._free()
                    if last.frozen != self._frozen.keys():
                        made += self._make_room(last)
                    last.fill(version, reading.steps, self._frozen)
                self._held[reading] = last
        return made

    def _share_frozen(self, version: Version, counters: Sequence[int]) -> list[Tensor]:
        """Make ``version`` and later ones share the frozen weights. Return the copies of changed frozen weights."""
        trained = version.flags.requires_grad
        if not self._frozen and all(trained):
            return []
        live = {number: each for number, each in enumerate(version.parameters) if not trained[number]}
        shared = {number: each for number, each in self._frozen.items() if number in live}
        numbers = [*shared]
        if self._asks_later(version):
            counted = dict(enumerate(zip(counters, self._counters, strict=True)))
            turn = [n for n in numbers[version.number % _TURNS :: _TURNS] if counted[n][0] == counted[n][1]]
            numbers = [number for number in numbers if counted[number][0] != counted[number][1]]
            self._differ(version, turn, ((shared[n], live[n].to(shared[n].device)) for n in turn))
        changed = unequal([(shared[number], live[number].to(shared[number].device)) for number in numbers])
        for number in [numbers[place] for place in changed]:
            self._by_value |= self._counters[number : number + 1] == [counters[number]]
            del shared[number]
        copies = {n: each.detach().to(self._device, copy=True) for n, each in live.items() if n not in shared}
        self._frozen = {**shared, **copies}
        return [*copies.values()]

    def _asks_later(self, version: Version) -> bool:
        """Return True if a device compares values while the host goes on, because so far counters have told all."""
        return accelerates(self._device) and version.is_late and self._published > _COMPARED and not self._by_value

    def _differ(self, version: Version, numbers: Iterable[int], pairs: Iterator[tuple[Tensor, Tensor]]) -> bool:
        """Return True if tensors of ``pairs``, of the weights ``numbers``, differ. If a device answers later, return
        False."""
        if self._asks_later(version):
            self._asked.append((version.number, [*numbers], DeviceComparison(pairs)))
            return False
        differ = not all_equal(pairs)
        self._by_value |= differ
        return differ

    def refuse_changes(self) -> None:
        asked, self._asked = self._asked, []
        for version, numbers, comparison in asked:
            if (place := comparison.place()) is not None:
                raise SettingError(
                    f"{self._told(numbers[place])} was changed through .data after minibatch {version}, which torch"
                    " does not count, while later minibatches were in flight; change it in place under torch.no_grad(),"
                    " without .data, or set in_flight=1"
                )

    def _told(self, number: int) -> str:
        own = [*self._live.parameters()][number]
        every = ((module, *each) for module in self._live.modules() for each in module.named_parameters(recurse=False))
        return next(told(module, name, "weight") for module, name, weight in every if weight is own)

    def _free(self) -> VersionBuffer:
        """Return a buffer that no minibatch needs, maybe a new one if not only the optimizer changes weights."""
        used = set(map(id, self._held.values()))
        for buffer in self.buffers:
            if id(buffer) not in used:
                return buffer
        self.buffers.append(VersionBuffer())
        return self.buffers[-1]

    def _make_room(self, buffer: VersionBuffer, layers: nn.Module | None = None) -> list[Tensor]:
        """Give the empty ``buffer`` the tensors of ``layers``, by default of a new copy, and shared frozen ones."""
        buffer.tensors = []  # frees the old memory before new memory is allocated
        if layers is None:
            # Each has its own copy's weights, because layers may need them in one block of memory (CUDA's RNNs).
            layers = copy_of(self._live, self._device, self._frozen)
        own = {n: each.data for n, each in enumerate(layers.parameters()) if n not in self._frozen}
        every = {**own, **self._frozen}
        buffer.tensors = [every[number] for number in range(len(self.parameters))]
        buffer.frozen = frozenset(self._frozen)
        return [*own.values()]

    def let_go(self) -> None:
        for buffer in self.buffers:
            buffer.tensors.clear()
            buffer.parts.clear()
        self._bound = []
        for parameter in self.parameters:
            parameter.data = parameter.data.new_empty(0)
        self._frozen.clear()


def _moved(weights: Tensor, move: Move, steps: int, like: Tensor) -> Tensor:
    """Return the ``weights`` after ``steps`` steps, in new memory."""
    moved = torch.empty_like(like)
    move.write(weights, steps, moved)
    return moved


M = TypeVar("M", bound=nn.Module)


def copy_of(live: M, device: torch.device | None, frozen: Mapping[int, Tensor] | None = None) -> M:
    """Return a copy of ``live`` on ``device``, which shares the tensors ``frozen``, by numbers of parameters.

    If ``device`` is None, parameters of the copy share the live ones' memory, but not hooks that users put on them.

    Raises:
        SettingError: if a layer holds what cannot be copied.
    """
    # What torch.nn.utils computes from parameters before each forward (as weight norm does) is no leaf, and only leaves
    # can be deep-copied; the copy computes its own.
    computed = [v for m in live.modules() for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf]
    copies: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in computed}
    for parameter in live.parameters():
        if device is None:
            copies[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
        elif address_of(parameter) is None:
            memory = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
            copies[id(parameter)] = nn.Parameter(memory.copy_(parameter.detach()), parameter.requires_grad)
    parameters = list(live.parameters()) if frozen else []
    for number, tensor in (frozen or {}).items():
        copies[id(parameters[number])] = nn.Parameter(tensor, requires_grad=False)
    try:
        made = copy.deepcopy(live, copies)
        return made if device is None else made.to(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise PipelineRefusal(
            f"the pipelined layers cannot be copied for weight stashing ({error}); give them only attributes that"
            " copy.deepcopy can copy"
        ) from error
