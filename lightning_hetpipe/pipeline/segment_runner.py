"""The layers of one segment, as a stage runs them: on the weights of any version, with buffers and generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.pipeline.buffers import Buffers, bind, may_change, places
from lightning_hetpipe.pipeline.compilation import Compiled, Kind, KindsOfCalls, names_of
from lightning_hetpipe.pipeline.dtypes import Autocast, creating
from lightning_hetpipe.pipeline.graph_layer import GraphLayer
from lightning_hetpipe.pipeline.memory import Counter, Kept
from lightning_hetpipe.pipeline.operands import OperandsTogether
from lightning_hetpipe.pipeline.random.generators import attach
from lightning_hetpipe.pipeline.split.member_pool import MemberPool
from lightning_hetpipe.pipeline.split.split_segment import SplitSegment
from lightning_hetpipe.pipeline.stage_messages import Backward, Forward, Sums
from lightning_hetpipe.pipeline.streams import move
from lightning_hetpipe.pipeline.values import Gradients, Value, blocks, gradients, gradients_apart, moved, tensors_of
from lightning_hetpipe.pipeline.weight_stash import VersionedLayers
from lightning_hetpipe.rules.versions import Reading
from lightning_hetpipe.torch_private.tensors import version_counter

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.stage import Layer, StageSettings


@dataclass(slots=True)
class SavedForBackward:
    """State that a forward saves for its backward.

    Attributes:
        weights: Weights of the forward.
        inputs: Leaves of its graph.
        outputs: Ends of its graph.
        kept: Bytes of both, and of what the graph has saved.
        kind: Kind of the call, if layers are compiled.
        again: Forward to compute again, without its tensors, or None if the graph is kept.
        changes: Counts of in-place changes of the inputs before the forward, if the graph is not kept.
        buffers: Copies of the buffers before the forward, if the graph is not kept.
    """

    weights: Reading
    inputs: list[Tensor]
    outputs: list[Tensor]
    kept: Kept
    kind: Kind
    again: Forward | None = None
    changes: Sequence[int] = ()
    buffers: Sequence[Tensor] = ()


class SegmentRunner:
    """Runner of the layers of one segment, which begin at index ``start`` of the stage's ``stash``. If the stage has
    several devices, their ``members`` compute the layers together."""

    def __init__(
        self,
        layers: Sequence[Layer],
        start: int,
        stash: VersionedLayers,
        settings: StageSettings,
        device: torch.device,
        members: MemberPool | None = None,
    ) -> None:
        self.layers = list(layers)
        copies = list(stash.layers[start : start + len(layers)])
        own = nn.ModuleList(copies)
        self._recompute = settings.recompute or any(layer.recompute for layer in layers)
        changing = [] if settings.evaluates else copies  # live layers keep their buffers themselves
        self.buffers = Buffers(changing, settings.in_flight, device)
        self._parameters = list(own.parameters())
        numbers = {id(parameter): number for number, parameter in enumerate(stash.parameters)}
        self.weights = [numbers[id(parameter)] for parameter in self._parameters]
        """Numbers of its weights among the weights of the stage."""
        self._device = device
        self._devices = [device, *(each.device for each in (*self._parameters, *own.buffers()))]
        self._stash = stash
        self._settings = settings
        self._calls: list[Callable[..., Any]] = [
            # A graph layer draws by its graph and has no hooks. A call of a module takes as long as a short operator.
            module.forward if isinstance(module, GraphLayer) else attach(module, layer.name)
            for module, layer in zip(copies, layers, strict=True)
        ]
        self.split: SplitSegment | None = None
        if members is not None and all(isinstance(each, GraphLayer) for each in copies):
            self.split = SplitSegment(layers, copies, members, settings.compile)
        self.compiled: Compiled | None = None
        if settings.compile is not None and self.split is None:
            names = [layer.name for layer in layers]
            fused = not settings.generators.deterministic
            self.compiled = Compiled(names, copies, self._calls, settings.compile, device, fused=fused)
        self._kinds: KindsOfCalls | None = self.compiled if self.split is None else self.split.compiled
        self._places = places(changing)
        self._mutates_input = mutates_input(layers)
        self.counter = Counter()

    def gradient_bytes(self, weights: Reading) -> int:
        """Return the bytes of the gradients of its ``weights``, without the frozen ones."""
        trained, size = self._stash.buffer(weights).flags.requires_grad, self._stash.bytes
        return sum(size[number] for number in self.weights if trained[number])

    def changes_buffers(self) -> bool:
        """Return True if a forward may change buffers."""
        return any(may_change(*place) for place in self._places)

    def kind(self, task: Forward) -> Kind:
        """Return the key of the call for torch.compile, or None if nothing is compiled."""
        if self._kinds is None:
            return None
        return self._kinds.kind(task.value, self._stash.buffer(task.weights).flags, task.autocast)

    def compiles(self, kind: Kind, *, backward: bool = False) -> bool:
        """Return True if torch may compile in a forward of this ``kind``, or in its backward: other threads pause."""
        if self._kinds is None:
            return False
        new = self._kinds.is_new(kind)  # a backward may compute its forward again
        return (self._kinds.begins_backward(kind) or new) if backward else new

    def forward(self, task: Forward, kind: Kind) -> tuple[Value, SavedForBackward]:
        """Run a forward. Return the value for the next segment, and the state for the backward."""
        number = task.minibatch
        self._bind(task.weights)
        inputs = task.value.leaves(self._device)
        self.buffers.before_forward(number, self._places, task.call)
        again = self._recompute and not task.last  # else its backward follows at once: nothing is gained
        buffers = self.buffers.copied(number) if again else ()
        kept = self.counter.known(inputs)
        if kept is not None:
            result = self._compute(task, inputs, kind)
        else:
            result, kept = self.counter.kept(
                inputs,
                lambda: self._compute(task, inputs, kind),
                lambda: [*self._parameters, *(getattr(*place) for place in self._places)],
            )
        self.buffers.after_forward(number, self._places)
        saved = SavedForBackward(task.weights, inputs, [] if again else tensors_of(result), kept, kind, buffers=buffers)
        if again:
            saved.again = task._replace(value=replace(task.value, tensors=()))
            saved.changes = [version_counter(tensor) for tensor in inputs]
        return Value.of(result), saved

    def evaluate(self, task: Forward) -> Value:
        """Run a forward on the live layers, and keep nothing for a backward. A tied weight may lie on the device of
        another stage."""
        with torch.inference_mode(task.inference), torch.no_grad(), OperandsTogether(self._devices):
            given = task.value.on(self._device)
            return Value.of(self._run(task, given.tree(given.tensors), None))

    def _bind(self, weights: Reading) -> None:
        self._stash.bind(weights)
        if self.split is not None:
            self.split.parts = self._stash.buffer(weights).parts

    def backward(self, task: Backward, saved: SavedForBackward, sums: Sums) -> tuple[Gradients, list[Tensor | None]]:
        """Run the backward of ``saved``. Return the gradients of the inputs and of :attr:`weights`.

        ``sums`` are gradients of weights that were used later, with which autograd goes on. A plain backward adds the
        uses of a weight one by one, from the last to the first. To add this segment's sum to the later one would give
        other last bits. Autograd adds a gradient that is given for a leaf itself before all other gradients.
        """
        self._bind(saved.weights)
        own = self._parameters
        given = [moved(gradient, self._device) for gradient in task.gradients]
        outputs = [*saved.outputs] if saved.again is None else self._again(saved.again, saved)
        self.buffers.bind(task.minibatch, self._places)
        before = self.buffers.changes(task.minibatch)
        if sums:
            for number, weight in zip(self.weights, own, strict=True):
                if number in sums and weight.requires_grad:
                    outputs.append(weight)
                    given.append(move(sums[number], self._device))
        below: Gradients
        if task.apart:
            below, found = gradients_apart(outputs, given, saved.inputs, own)
        else:
            both = gradients(outputs, given, [*saved.inputs, *own])
            below, found = [*both[: len(saved.inputs)]], both[len(saved.inputs) :]
        del saved, outputs
        if before != self.buffers.changes(task.minibatch):
            raise PipelineRefusal(
                f"a backward pass of {self.describe()} changed buffers (as torch.utils.checkpoint around a BatchNorm"
                " does), which the next minibatches' forwards have read already; leave such layers out of the"
                " checkpoint"
            )
        return below, found

    def _again(self, task: Forward, saved: SavedForBackward) -> list[Tensor]:
        """Compute the outputs of the ``saved`` forward once more, and change no buffer that anybody sees. Weights,
        buffers, random numbers and autocast are as before, so the outputs are bit for bit equal."""
        if saved.changes != [version_counter(tensor) for tensor in saved.inputs]:
            raise PipelineRefusal(
                f"what {self.describe()} were given was changed in place after their forward, which is to be computed"
                " again from it (recompute=True); change a copy of it, or leave recompute out"
            )
        bind(self._places, saved.buffers)
        return tensors_of(self._compute(task, saved.inputs, saved.kind))

    def _compute(self, task: Forward, inputs: list[Tensor], kind: Kind) -> Any:
        """Run the layers on ``inputs``, nested as the value of ``task``."""
        # A layer that changes its input in place may change neither a leaf nor what the stage before has kept.
        if self._mutates_input and len(blocks(inputs)) < sum(1 for tensor in inputs if tensor.numel()):
            raise PipelineRefusal(
                f"a layer of {self.describe()} changes its input in place, and is given several tensors in the same"
                " memory, which part where a stage begins; make it work out of place (inplace=False)"
            )
        own = [tensor.clone() for tensor in inputs] if self._mutates_input else inputs
        before = [version_counter(tensor) for tensor in inputs]
        if not torch.is_grad_enabled():  # a layer has left it so
            torch.set_grad_enabled(True)
        result = self._run(task, task.value.tree(own), kind)
        if before != [version_counter(tensor) for tensor in inputs]:
            raise PipelineRefusal(
                f"a layer of {self.describe()} changed its input in place, which it did not do in the first minibatch;"
                " let it do so always, or never"
            )
        return result

    def _run(self, task: Forward, current: Any, kind: Kind) -> Any:
        """Run the layers on ``current`` as a part of the minibatch of ``task``."""
        autocast = task.autocast
        with (
            self._settings.generators.minibatch(task.minibatch, task.call),
            autocast.opened(alone=self._settings.in_flight == 1),
            creating(self._settings.default_dtype),
        ):
            if self.compiled is not None:
                return self.compiled(kind, current, autocast)
            if self.split is not None:
                return self.split(current, partial(self._opened, autocast), kind, autocast)
            for call in self._calls:
                current = call(current)
            return current

    @contextmanager
    def _opened(self, autocast: Autocast) -> Iterator[None]:
        """Context manager in which a member's thread computes as the stage does."""
        with autocast.opened(alone=False), creating(self._settings.default_dtype):
            yield

    def describe(self) -> str:
        return names_of(self.layers[0].name, self.layers[-1].name)


def mutates_input(layers: Sequence[Layer]) -> bool:
    """Return True if ``layers``, run in order, change the first one's input in place, maybe through a view of it."""
    for layer in layers:
        if layer.mutates_input:
            return True
        if not layer.aliases_input:
            return False
    return False
