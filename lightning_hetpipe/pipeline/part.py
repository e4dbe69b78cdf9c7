"""The layers of one segment, as a stage runs them: on the weights of any version, with their own buffers and chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.buffers import Buffers, places
from lightning_hetpipe.pipeline.chance import attach
from lightning_hetpipe.pipeline.compilation import Compiled, Kind
from lightning_hetpipe.pipeline.computed import Computed, computed_places
from lightning_hetpipe.pipeline.creation import creating
from lightning_hetpipe.pipeline.memory import Counter, Kept
from lightning_hetpipe.pipeline.minibatch import Minibatch
from lightning_hetpipe.pipeline.ring import Ring
from lightning_hetpipe.pipeline.values import Value, blocks, tensors_of
from lightning_hetpipe.private import version_counter

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.stage import Layer, StageSettings


@dataclass(slots=True)
class Left:
    """What a forward leaves for its backward.

    Attributes:
        inputs: Leaves of its graph.
        outputs: Its ends.
        kept: The bytes of both, and of what the graph has saved.
        kind: Of the call, where layers are compiled.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    kept: Kept
    kind: Kind = None


class LeftInputs:
    """What is left of ``left`` without its graph, which is to be computed again; ``value`` is what it was given.

    Attributes:
        value: The structure of the inputs.
        changes: How often each input was changed in place before.
    """

    def __init__(self, left: Left, value: Value) -> None:
        self.inputs = left.inputs
        self.kept = left.kept
        self.kind = left.kind
        self.value = replace(value, tensors=())
        self.changes = [version_counter(tensor) for tensor in left.inputs]


class Part:
    """The layers of one segment: in every slot, and with their own buffers."""

    def __init__(
        self, layers: Sequence[Layer], piece: int, start: int, ring: Ring, settings: StageSettings, device: torch.device
    ) -> None:
        self.layers = list(layers)
        self._piece = piece
        live = [layer.module for layer in layers]
        copies = [list(slot.layers[start : start + len(live)]) for slot in ring.slots]
        self.buffers = Buffers(live, settings.in_flight, device, recompute=settings.recompute)
        self.computed = Computed(live, settings.in_flight)
        self.parameters = [list(nn.ModuleList(modules).parameters()) for modules in copies]
        uses = [name for name, _ in nn.ModuleList(copies[0]).named_parameters()]
        self.live_parameters = [nn.ModuleList(live).get_parameter(use) for use in uses]
        self._ring = ring
        self._settings = settings
        self._calls = [
            [attach(module, layer.name) for module, layer in zip(modules, layers, strict=True)] for modules in copies
        ]
        self.compiled: Compiled | None = None
        if settings.compile is not None:
            names = [layer.name for layer in layers]
            fused = not settings.chance.deterministic
            self.compiled = Compiled(names, copies, self._calls, settings.compile, device, fused=fused)
        self._places = [places(modules) for modules in copies]
        self._computed_places = [computed_places(modules) for modules in copies]
        self._mutates_input = mutates_input(layers)
        self.counter = Counter()

    def kind(self, minibatch: Minibatch, value: Value) -> Kind:
        """What tells calls apart that torch compiles; None where it compiles none."""
        if self.compiled is None:
            return None
        slot = self._ring.place(minibatch.version)
        return self.compiled.kind(slot, value, self._ring.slots[slot].flags, minibatch.autocast(self._piece))

    def compiles(self, kind: Kind, *, backward: bool = False) -> bool:
        """Whether torch may compile in a forward of that ``kind``, or in its backward: then all others must pause."""
        if self.compiled is None:
            return False
        new = self.compiled.is_new(kind)  # a backward may compute its forward again
        return (self.compiled.begins_backward(kind) or new) if backward else new

    def forward(self, minibatch: Minibatch, value: Value, inputs: list[Tensor], kind: Kind) -> tuple[Value, Left]:
        """The forward of ``minibatch``: what it gives to the next segment, and what its backward needs."""
        index = self._ring.place(minibatch.version)
        self.buffers.before_forward(minibatch.number, self._places[index])
        kept = self.counter.known(inputs)
        if kept is not None:
            result = self._compute(minibatch, index, value, inputs, kind)
        else:
            result, kept = self.counter.kept(
                inputs,
                lambda: self._compute(minibatch, index, value, inputs, kind),
                lambda: [*self.parameters[index], *(getattr(*place) for place in self._places[index])],
            )
        self.buffers.after_forward(minibatch.number, self._places[index])
        self.computed.after_forward(minibatch.number, self._computed_places[index])
        return Value.of(result), Left(inputs, tensors_of(result), kept, kind)

    def again(self, minibatch: Minibatch, left: LeftInputs) -> list[Tensor]:
        """The outputs of the forward that has left ``left``, computed once more: on the same weights, buffers, random
        numbers and state of autocast, and so the same bit for bit; it changes no buffer that anybody sees.
        """
        if left.changes != [version_counter(tensor) for tensor in left.inputs]:
            raise SettingError(
                f"what {self.describe()} were given was changed in place after their forward, which is to be computed"
                " again from it (recompute=True); change a copy of it, or leave recompute out"
            )
        index = self._ring.place(minibatch.version)
        self.buffers.before_again(minibatch.number, self._places[index])
        return tensors_of(self._compute(minibatch, index, left.value, left.inputs, left.kind))

    def _compute(self, minibatch: Minibatch, index: int, value: Value, inputs: list[Tensor], kind: Kind) -> Any:
        """What the layers in slot ``index`` make of ``inputs``, with the structure of ``value``."""
        # A layer that changes its input in place may change neither a leaf nor what the stage before has kept.
        if self._mutates_input and len(blocks(inputs)) < sum(1 for tensor in inputs if tensor.numel()):
            raise SettingError(
                f"a layer of {self.describe()} changes its input in place, and is given several tensors in the same"
                " memory, which part where a stage begins; make it work out of place (inplace=False)"
            )
        own = [tensor.clone() for tensor in inputs] if self._mutates_input else inputs
        before = [version_counter(tensor) for tensor in inputs]
        current = value.tree(own)
        if not torch.is_grad_enabled():  # a layer has left it so
            torch.set_grad_enabled(True)
        autocast = minibatch.autocast(self._piece)
        with (
            self._settings.chance.minibatch(minibatch.number),
            autocast.opened(alone=self._settings.in_flight == 1),
            creating(self._settings.default_dtype),
        ):
            if self.compiled is not None:
                current = self.compiled(kind, index, current, autocast)
            else:
                for call in self._calls[index]:
                    current = call(current)
        if before != [version_counter(tensor) for tensor in inputs]:
            raise SettingError(
                f"a layer of {self.describe()} changed its input in place, which it did not do in the first minibatch;"
                " let it do so always, or never"
            )
        return current

    def bind_left(self, minibatch: Minibatch) -> list[int]:
        """Before a backward: the layers hold the buffers that their forward left; gives how often they were changed."""
        self.buffers.bind(minibatch.number, self._places[self._ring.place(minibatch.version)])
        return self.buffers.changes(minibatch.number)

    def check_left(self, minibatch: Minibatch, before: list[int]) -> None:
        """After a backward: it must have left the buffers alone."""
        if before != self.buffers.changes(minibatch.number):
            raise SettingError(
                f"a backward pass of {self.describe()} changed buffers (as torch.utils.checkpoint around a BatchNorm"
                " does), which the next minibatches' forwards have read already; leave such layers out of the"
                " checkpoint"
            )

    def describe(self) -> str:
        first, last = self.layers[0].name, self.layers[-1].name
        return f"layer {first}" if first == last else f"layers {first} to {last}"


def mutates_input(layers: Sequence[Layer]) -> bool:
    """Whether ``layers``, run in order, change the first one's input in place, maybe through a view of it."""
    for layer in layers:
        if layer.mutates_input:
            return True
        if not layer.aliases_input:
            return False
    return False
