"""The engine: stages, minibatch runners and the lock over user code, as one thing that begins, submits and publishes.

Lightning's thread drives it and holds the lock over user code except while it waits. The life of minibatch p:

    submit(p)        its runner starts training_step, ahead of Lightning's loop
    finish(p)        Lightning's step p: waits until its gradients are there
    show(p)          the live buffers and computed weights become what forward p left
    publish(p)       after Lightning's step p: the live weights become version p
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.buffers import may_change
from lightning_hetpipe.pipeline.crew import Crew
from lightning_hetpipe.pipeline.lanes import Lanes, Mark
from lightning_hetpipe.pipeline.minibatch import Minibatch, Step
from lightning_hetpipe.pipeline.piece_call import PieceCall
from lightning_hetpipe.pipeline.ring import Ring
from lightning_hetpipe.pipeline.stage import Layer, Loss, Stage, StageSettings, Task
from lightning_hetpipe.pipeline.values import Gradients
from lightning_hetpipe.pipeline.view import View, Weights
from lightning_hetpipe.rules.schedule import Work, route, segments
from lightning_hetpipe.rules.versions import version_of


class Engine(Crew[Minibatch]):
    """One virtual worker's pipeline.

    Args:
        pieces: For each piece, in the order of ``training_step``, its name and its layers.
        cuts: The first layer of each stage.
        devices: The device of each stage.
        settings: What all stages share.
        timeout: Seconds after which a wait in which nothing moves ends with an explanation.
        root: The module that ``training_step`` belongs to. Its trainable parameters outside the pieces have versions,
            too.
        changing: The ``id`` of each live buffer that forwards change.
    """

    stages: list[Stage]

    def __init__(
        self,
        pieces: Sequence[tuple[str, Sequence[Layer]]],
        cuts: Sequence[int],
        devices: Sequence[torch.device],
        settings: StageSettings,
        timeout: float,
        root: nn.Module | None = None,
        changing: Collection[int] = (),
        lanes: Lanes | None = None,
    ) -> None:
        super().__init__("hetpipe-runner", settings.in_flight, settings.torch_threads, timeout)
        self.lanes = lanes or Lanes()
        self.root_device = devices[-1]
        self.piece_names = [name for name, _ in pieces]
        layers = [layer for _, own in pieces for layer in own]
        self._parts = segments([len(own) for _, own in pieces], cuts)
        _check_shared_buffers([layers[part.first : part.last + 1] for part in self._parts])
        self._route = route(self._parts)
        self._steps = {(step.work, step.segment.index): index for index, step in enumerate(self._route)}
        pieces_of = [step.segment.piece for step in self._route]
        self._goes_on = [*map(operator.eq, pieces_of, pieces_of[1:]), False]
        """Whether, after each step, the minibatch goes on to the next one by itself."""
        self.stages = [
            Stage(
                index,
                device,
                [part for part in self._parts if part.stage == index],
                layers,
                settings,
                self.patience,
                self.quiet,
                self.exclusively,
                self._done,
                self.lanes,
            )
            for index, device in enumerate(devices)
        ]
        self._root = root if root is not None else nn.Module()
        self._changing = changing
        self._outside: list[Ring] = []
        self._find_weights()
        self._empty_at = 0

    # Lightning's thread.

    def begin(self, version: int, forwards: int | None = None) -> None:
        """The pipeline starts empty at ``version``, which the live weights are.

        Args:
            version: v_e.
            forwards: The last minibatch whose forward the live buffers have seen; by default that of ``version``.
        """
        self.discard()
        self._find_weights()
        self._empty_at = version
        for stage in self.stages:
            stage.begin(version, version if forwards is None else forwards)
        for ring in self._outside:
            ring.begin(version)

    def discard(self) -> None:
        super().discard()
        for stage in self.stages:
            stage.lane.synchronize()  # what was dropped may still be computed, on the weights that come next

    def copy_layers(self) -> None:
        """Copies the live layers anew, as they have changed in other ways than their weights; before :meth:`begin`."""
        self.discard()
        for stage in self.stages:
            stage.copy_layers()

    def versioned(self) -> set[int]:
        """The ``id`` of each live parameter that has versions."""
        return set(self._weights.known)

    def submit(self, number: int, step: Step) -> None:
        """Starts minibatch ``number``, the next one."""
        version = version_of(number, self.in_flight, self._empty_at)
        view = View(self._weights, version, self.in_flight > 1, self.root_device)
        self.launch(Minibatch(self, number, version, step, view))

    def finish(self, number: int) -> Minibatch:
        minibatch = super().finish(number)
        if minibatch.marks:
            with self.unlocked():
                for mark in minibatch.marks:
                    mark.synchronize()
            self.lanes.outside.join(None, minibatch.gradients.values())
        for stage in self.stages:
            stage.memory.take(number)
        return minibatch

    def publish(self, version: int) -> None:
        """The live weights are ``version`` now: Lightning's step of that number is over, with all its callbacks."""
        with self.computing():  # copying is no user code, and losses must not wait for it
            for stage in self.stages:
                stage.publish(version)
            for ring in self._outside:
                ring.publish(version)

    def show(self, number: int) -> None:
        """Makes the live buffers and computed weights what forward ``number`` left."""
        for stage in self.stages:
            stage.show(number)

    def _let_go(self) -> None:
        for stage in self.stages:
            stage.let_go()
        for ring in self._outside:
            ring.let_go()

    def _find_weights(self) -> None:
        """Makes the rings of the trainable parameters that no stage holds, one on each device, and finds all rings.

        Whenever the pipeline starts empty, as there may be other parameters than before.
        """
        rings = [stage.ring for stage in self.stages]
        inside = {id(parameter) for ring in rings for parameter in ring.parameters}
        outside: dict[torch.device, list[nn.Parameter]] = {}
        for parameter in self._root.parameters():
            if parameter.requires_grad and id(parameter) not in inside:
                outside.setdefault(parameter.device, []).append(parameter)
        before = [id(parameter) for ring in self._outside for parameter in ring.parameters]
        if before != [id(parameter) for parameters in outside.values() for parameter in parameters]:
            self._outside = [
                Ring(nn.ModuleList([nn.ParameterList(parameters)]), self.in_flight, device)
                for device, parameters in outside.items()
            ]
        layers = [layer.module for stage in self.stages for layer in stage.layers]
        self._weights = Weights(self._root, [*rings, *self._outside], layers, self._changing)

    # The runners' side.

    def forward(self, minibatch: Minibatch, call: PieceCall) -> None:
        """Sends a piece's inputs into the pipeline; its outputs will be delivered to ``minibatch``."""
        first = next(part for part in self._parts if part.piece == call.piece)
        work = Work.TURN if first is self._parts[-1] else Work.FORWARD
        mark = self.lanes.outside.mark(tensor.device for tensor in call.inputs.tensors)
        self._send(self._steps[work, first.index], minibatch, call.inputs, mark)

    def loss(self, minibatch: Minibatch, call: PieceCall) -> Loss | None:
        """The outputs of a piece are with the user: if it is the last one, the loss begins."""
        if call.piece != self._parts[-1].piece:
            return None
        return self.stages[self._parts[-1].stage].loss(minibatch.number)

    def backward(self, minibatch: Minibatch, call: PieceCall, gradients: Gradients) -> None:
        """Sends gradients of a piece's outputs; those of its inputs will be delivered to ``minibatch``."""
        last = [part for part in self._parts if part.piece == call.piece][-1]
        if last is self._parts[-1]:
            minibatch.loss_ends(call.collected)
            minibatch.turn.put((gradients, call.collected))
        else:
            self._send(self._steps[Work.BACKWARD, last.index], minibatch, gradients, call.collected)

    # The stages' side.

    def _send(self, step: int, minibatch: Minibatch, payload: Any, mark: Mark | None) -> None:
        instruction = self._route[step]
        self.stages[instruction.segment.stage].put(Task(step, instruction, minibatch, payload, mark))

    def _done(self, task: Task, result: Any, mark: Mark | None) -> None:
        """Sends a minibatch on: along its route to the next stage, or at the end of a piece to its runner."""
        following = task.step + 1
        if self._goes_on[task.step]:
            self._send(following, task.minibatch, result, mark)
        else:
            task.minibatch.deliver(result, mark)


def _check_shared_buffers(parts: Sequence[Sequence[Layer]]) -> None:
    """Refuses buffers that stand on both sides of a cut and may change: forwards would not see them in order of p."""
    owners: dict[int, tuple[str, bool]] = {}
    for layers in parts:
        here: dict[int, tuple[str, bool]] = {}
        for layer in layers:
            for buffer, changes in _buffers(layer.module):
                changes = changes or here.get(id(buffer), ("", False))[1]
                here[id(buffer)] = (layer.name, changes)
        for key, (name, changes) in here.items():
            owner, changed = owners.get(key, ("", False))
            if owner and (changes or changed):
                raise SettingError(
                    f"layers {owner} and {name} share a module that has buffers, and a stage begins between them;"
                    " give each layer a module of its own, or set stages=1"
                )
        owners.update(here)


def _buffers(layer: nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """The buffers of ``layer``, and whether it may change them."""
    for module in layer.modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield buffer, may_change(module, name)
