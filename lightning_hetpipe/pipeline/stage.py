"""A stage: a thread with a device that runs its segments' forwards and backwards, first in, first out (law L2).

All it needs from the rest of the world: run forward p with these values, run backward p with these gradients, publish
version v. Values come in and go out as :class:`~lightning_hetpipe.pipeline.values.Value`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import Discarded
from lightning_hetpipe.pipeline.chance import Chance
from lightning_hetpipe.pipeline.compiling import Compiling, Exclusively
from lightning_hetpipe.pipeline.lanes import Lane, Lanes, Mark, move
from lightning_hetpipe.pipeline.memory import Memory
from lightning_hetpipe.pipeline.minibatch import Minibatch
from lightning_hetpipe.pipeline.part import Left, LeftInputs, Part
from lightning_hetpipe.pipeline.quiet import Quiet
from lightning_hetpipe.pipeline.ring import Ring
from lightning_hetpipe.pipeline.threads import Patience, Worker
from lightning_hetpipe.pipeline.values import Gradients, Value, gradients, gradients_apart, moved, tensors_in
from lightning_hetpipe.rules.schedule import Instruction, Segment, Work


@dataclass(frozen=True)
class Layer:
    """One layer of the pipelined model.

    Attributes:
        name: Its path in the LightningModule, such as "net.3".
        module: The live module.
        mutates_input: Whether it changes its input in place, as ``ReLU(inplace=True)`` does.
        aliases_input: Whether its output shares memory with its input, as a view does.
        kind: What it is, for people; by default its class.
    """

    name: str
    module: nn.Module
    mutates_input: bool = False
    aliases_input: bool = False
    kind: str = ""


class Task(NamedTuple):
    step: int  # of the route
    instruction: Instruction
    minibatch: Minibatch
    payload: Any  # a Value to run forward, or the gradients to run backward
    mark: Mark | None  # behind which that is computed


BeforePass = Callable[[int, str, int], Callable[[], None] | None]
"""What is called before a stage computes, with stage, "forward", "loss", "backward" or "evaluate", and p.

What it returns, if anything, is called when that is computed, and before it is handed on. A stage's own thread calls
it; for the loss, which the last stage has between forward and backward, the minibatch's.
"""


@dataclass(frozen=True)
class StageSettings:
    """What all stages share.

    Attributes:
        chance: The run's random numbers.
        in_flight: Nm.
        torch_threads: Threads of each torch operation.
        default_dtype: The dtype of the tensors that layers create without naming one; None for the process's.
        before_pass: For emulated devices, and for tests.
        recompute: Keep only the inputs of forwards, and compute these again for the backward.
        compile: What ``torch.compile`` is given for the layers; None to run them as they are.
    """

    chance: Chance
    in_flight: int
    torch_threads: int
    default_dtype: torch.dtype | None
    before_pass: BeforePass | None = None
    recompute: bool = False
    compile: Mapping[str, Any] | None = None


class Computes(Protocol):
    """A stage, as far as a :class:`Pass` goes."""

    index: int

    @property
    def lane(self) -> Lane: ...


class Pass:
    """Around what ``stage`` computes at once: never while somebody is alone; counted as busy, padded if that is asked.

    A class, as a generator would cost as much as a small layer.
    """

    def __init__(self, stage: Computes, quiet: Quiet, before: BeforePass | None, work: str, minibatch: int) -> None:
        self._stage = stage
        self._quiet = quiet
        self._before = before
        self._work = work
        self._minibatch = minibatch
        self._after: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._quiet.begin()
        self._since = self._stage.lane.now()
        if self._before is not None:
            try:
                self._after = self._before(self._stage.index, self._work, self._minibatch)
            except BaseException:
                self._quiet.end()
                raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                lane = self._stage.lane
                if self._after is not None:  # who looks at a clock wants to know when it is computed
                    lane.synchronize()
                    self._after()
                lane.spent(self._since)
        finally:
            self._quiet.end()


class Loss:
    """What user code computes of a minibatch between the forward and the backward of the last stage, as part of it.

    It begins here, in the minibatch's thread.
    """

    def __init__(self, stage: Computes, before: BeforePass | None, minibatch: int) -> None:
        self._stage = stage
        self._after = None if before is None else before(stage.index, "loss", minibatch)
        self._since = stage.lane.now()

    def end(self, mark: Mark | None) -> None:
        """What user code has given to its device stands before ``mark``."""
        if self._after is not None:
            if mark is not None:
                mark.synchronize()
            self._after()
        self._stage.lane.spent(self._since)


class Stage:
    """Stage ``index`` with the ``segments`` that lie on it; ``layers`` are those of the whole model."""

    def __init__(
        self,
        index: int,
        device: torch.device,
        segments: Sequence[Segment],
        layers: Sequence[Layer],
        settings: StageSettings,
        patience: Patience,
        quiet: Quiet,
        exclusively: Exclusively,
        done: Callable[[Task, Any, Mark | None], None],
        lanes: Lanes,
    ) -> None:
        self.index = index
        self.device = device
        self.segments = list(segments)
        self.layers = [layers[number] for segment in segments for number in segment.layers]
        self.lane = lanes.on(device)
        self.compiling = Compiling(index, exclusively)
        self.memory = Memory()
        self._outside = lanes.outside
        self._published: dict[int, Mark | None] = {}
        """Behind what Lightning's thread has put into each slot."""
        self._settings = settings
        self._patience = patience
        self._quiet = quiet
        self._done = done
        self._doing: tuple[Task, float] | None = None
        self._left: dict[tuple[int, int], Left | LeftInputs] = {}
        self._worker: Worker[Task] | None = None
        self.copy_layers()

    def copy_layers(self) -> None:
        """Makes the copies of the live layers, in place of earlier ones; nothing may be in flight."""
        self.ring = Ring(nn.ModuleList([layer.module for layer in self.layers]), self._settings.in_flight, self.device)
        self._parts: dict[int, Part] = {}
        start = 0
        for segment in self.segments:
            own = self.layers[start : start + len(segment.layers)]
            self._parts[segment.index] = Part(own, segment.piece, start, self.ring, self._settings, self.device)
            start += len(own)
        self.lane.join(None, [parameter for slot in self.ring.slots for parameter in slot.parameters])

    def start(self) -> None:
        name = f"hetpipe-stage-{self.index}"
        self._worker = Worker(name, self._run, self._settings.torch_threads, self.lane.enter)

    def put(self, task: Task) -> None:
        assert self._worker is not None
        self._worker.put(task)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def join(self, seconds: float) -> bool:
        return self._worker is None or self._worker.join(seconds)

    def let_go(self) -> None:
        """Gives the memory of versions, buffers and activations back."""
        self._left.clear()
        self.ring.let_go()
        for part in self._parts.values():
            part.buffers.let_go()
            part.computed.let_go()

    def begin(self, version: int, forwards: int) -> None:
        """Publishes ``version``, with the live buffers as forward ``forwards`` left them, into an empty pipeline."""
        self._left.clear()
        self.memory.clear()
        self.ring.begin(version)
        self.memory.publish(self.ring.held_bytes)
        for part in self._parts.values():
            part.buffers.begin(forwards)
            self.lane.join(None, part.buffers.all())
            part.counter.clear()
        self._mark(version)

    def publish(self, version: int) -> None:
        self.ring.publish(version)
        self.memory.publish(self.ring.held_bytes)
        for part in self._parts.values():
            if part.buffers.publish(version):
                self.lane.join(None, part.buffers.all())
        self._mark(version)

    def _mark(self, version: int) -> None:
        self._published[self.ring.place(version)] = self._outside.mark([self.device])

    def show(self, minibatch: int) -> None:
        for part in self._parts.values():
            part.buffers.show(minibatch)
            part.computed.show(minibatch, self._outside)

    def describe(self) -> str:
        """What the stage does right now, for people."""
        doing = self._doing
        if doing is None:
            return f"stage {self.index} is idle"
        task, since = doing
        segment = self._parts[task.instruction.segment.index].describe()
        verb = "compiled" if self.compiling.at_work else "run"
        return (
            f"stage {self.index} has {verb} the {task.instruction.work.value} of minibatch {task.minibatch.number}"
            f" ({segment}) for {time.monotonic() - since:.1f} s"
        )

    def _run(self, task: Task) -> None:
        minibatch = task.minibatch
        if minibatch.cancelled:
            self._forget(minibatch)
            minibatch.deliver(Discarded())
            return
        self._doing = (task, time.monotonic())
        try:
            result, mark = self._perform(task)
        except BaseException as error:
            self._doing = None
            self._forget(minibatch)
            if not isinstance(error, _TurnDropped):
                minibatch.deliver(error)
            return
        self._doing = None
        self._patience.moved()
        self._done(task, result, mark)

    def _perform(self, task: Task) -> tuple[Any, Mark | None]:
        work, segment = task.instruction.work, task.instruction.segment
        if work is Work.BACKWARD:
            return self._backward(task.minibatch, segment, task.payload, task.mark)
        # At the turn the backward follows at once, so that there is nothing to be gained by computing again.
        again = self._settings.recompute and work is Work.FORWARD
        output = self._forward(task.minibatch, segment, task.payload, task.mark, again)
        mark = self.lane.mark()
        if work is Work.FORWARD:
            return output, mark
        task.minibatch.deliver(output, mark)
        given, mark = self._turn(task.minibatch)
        del output
        return self._backward(task.minibatch, segment, given, mark)

    def _turn(self, minibatch: Minibatch) -> tuple[Gradients, Mark | None]:
        """Waits at the turn for the gradients that the user's loss gives to the outputs."""
        given: list[tuple[Gradients, Mark | None] | Discarded] = []

        def ready(seconds: float) -> bool:
            try:
                given.append(minibatch.turn.get(timeout=seconds))
            except queue.Empty:
                return False
            return True

        self._patience.wait(ready, f"stage {self.index} for the loss of minibatch {minibatch.number}")
        if isinstance(given[0], Discarded):
            raise _TurnDropped
        return given[0]

    def _forward(self, minibatch: Minibatch, segment: Segment, value: Value, mark: Mark | None, again: bool) -> Value:
        self.lane.join(self._published[self.ring.place(minibatch.version)])
        self.lane.join(mark, value.tensors)
        part = self._parts[segment.index]
        kind = part.kind(minibatch, value)
        with self._alone(part.compiles(kind), part, minibatch), self._computing(Work.FORWARD, minibatch):
            inputs = value.leaves(self.device)
            left: Left | LeftInputs
            output, left = part.forward(minibatch, value, inputs, kind)
            self.memory.hold(minibatch.number, segment.index, left.kept.all)
            if again:
                left = LeftInputs(left, value)  # at once: a graph that is kept while the pass ends takes memory
                self.memory.hold(minibatch.number, segment.index, left.kept.inputs)
            self._left[minibatch.number, segment.index] = left
        return output

    def _backward(
        self, minibatch: Minibatch, segment: Segment, given: Gradients, mark: Mark | None
    ) -> tuple[Gradients, Mark | None]:
        self.lane.join(mark, tensors_in(given))
        part = self._parts[segment.index]
        left = self._left.pop((minibatch.number, segment.index))
        compiles = part.compiles(left.kind, backward=True)
        with self._alone(compiles, part, minibatch), self._computing(Work.BACKWARD, minibatch):
            given = [moved(gradient, self.device) for gradient in given]
            own = part.parameters[self.ring.place(minibatch.version)]
            if isinstance(left, LeftInputs):
                outputs = part.again(minibatch, left)
                self.memory.hold(minibatch.number, segment.index, left.kept.all)
            else:
                outputs = list(left.outputs)
            before = part.bind_left(minibatch)
            summed = self._seed(minibatch, part, own, outputs, given) if minibatch.gradients else ()
            below: Gradients
            if minibatch.has_later_uses(segment.piece):
                below, found = gradients_apart(outputs, given, left.inputs, own)
            else:
                both = gradients(outputs, given, [*left.inputs, *own])
                below, found = [*both[: len(left.inputs)]], both[len(left.inputs) :]
            del left, outputs
            part.check_left(minibatch, before)
            waiting = 0
            for live, gradient in zip(reversed(part.live_parameters), reversed(found), strict=True):
                if gradient is not None:
                    minibatch.gradients[live] = gradient
                    if live not in summed:  # the sum waits once
                        waiting += live.nbytes
            self.memory.release(minibatch.number, segment.index, waiting)
        mark = self.lane.mark()
        if mark is not None:
            minibatch.marks.append(mark)
        return below, mark

    def _seed(
        self, minibatch: Minibatch, part: Part, own: Sequence[nn.Parameter], outputs: list[Tensor], given: Gradients
    ) -> set[nn.Parameter]:
        """Lets autograd go on with the sums of later segments' gradients of tied weights; gives the live ones of these.

        A plain backward adds the uses of a weight one by one, from the last to the first: to add this segment's sum to
        the later one would give other last bits. What is given for a leaf itself, autograd adds before all else.
        """
        tied = set[nn.Parameter]()
        for live, copy in zip(part.live_parameters, own, strict=True):
            if copy.requires_grad and (earlier := minibatch.earlier_gradient(live, self.lane)) is not None:
                outputs.append(copy)
                given.append(move(earlier, self.device))
                tied.add(live)
        return tied

    def loss(self, minibatch: int) -> Loss:
        """Begins the loss of ``minibatch``, at its turn; the stage's thread waits for its gradients."""
        return Loss(self, self._settings.before_pass, minibatch)

    def _alone(self, compiles: bool, part: Part, minibatch: Minibatch) -> AbstractContextManager[None]:
        return self.compiling.alone(part.describe(), minibatch.number) if compiles else _NOTHING

    def _computing(self, work: Work, minibatch: Minibatch) -> Pass:
        return Pass(self, self._quiet, self._settings.before_pass, _WORDS[work], minibatch.number)

    def _forget(self, minibatch: Minibatch) -> None:
        for segment in self.segments:
            self._left.pop((minibatch.number, segment.index), None)
            self.memory.release(minibatch.number, segment.index)


_NOTHING: AbstractContextManager[None] = nullcontext()

_WORDS = {work: work.value for work in Work}  # to ask the enumeration takes as long as to add two small tensors


class _TurnDropped(Exception):
    """The runner has failed, and so has ended the minibatch already."""
