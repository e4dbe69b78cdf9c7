"""A stage: a thread with a device that runs its segments' forwards and backwards, first in, first out (law L2).

It exchanges only :mod:`~lightning_hetpipe.pipeline.stage_messages` with the rest of the world.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import Discarded
from lightning_hetpipe.pipeline.compilation import Exclusively
from lightning_hetpipe.pipeline.memory import Memory, PlannedMemory, explain, less
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.pipeline.segment_runner import SavedForBackward, SegmentRunner
from lightning_hetpipe.pipeline.split.member_pool import DeviceGroup, MemberPool
from lightning_hetpipe.pipeline.split.split_segment import check_divided
from lightning_hetpipe.pipeline.stage_messages import (
    Backward,
    Cancel,
    Done,
    Failure,
    Forward,
    InputGradients,
    Message,
    Output,
    Parcel,
    Result,
    Sums,
    Version,
    Wake,
)
from lightning_hetpipe.pipeline.streams import Pass, StreamEvent, Streams, move
from lightning_hetpipe.pipeline.threads import ReadersWriterLock, Watchdog, Worker
from lightning_hetpipe.pipeline.values import tensors_in
from lightning_hetpipe.pipeline.weight_stash import Live, VersionedLayers, WeightStash
from lightning_hetpipe.rules.schedule import CallOrder, Segment


@dataclass(frozen=True)
class Layer:
    """One layer of the pipelined model.

    Attributes:
        name: Its path in the LightningModule, such as "net.3".
        mutates_input: Whether it changes its input in place, as ``ReLU(inplace=True)`` does.
        aliases_input: Whether its output shares memory with its input, as a view does.
        kind: Kind for messages, by default its class.
        recompute: Whether its stage keeps only the inputs of forwards, and computes forwards again for the backward.
        piece: Path of the captured module that contains it, or empty if it has no graph.
    """

    name: str
    module: nn.Module
    mutates_input: bool = False
    aliases_input: bool = False
    kind: str = ""
    recompute: bool = False
    piece: str = ""

    def joined(self, other: Layer) -> Layer:
        """Return this layer with the treatment of inputs that was seen in this or the ``other`` call."""
        return replace(
            self,
            mutates_input=self.mutates_input or other.mutates_input,
            aliases_input=self.aliases_input or other.aliases_input,
        )


BeforePass = Callable[[int, str, int], Callable[[], None] | None]
"""Function that is called before a stage computes, with stage, "forward", "loss", "backward" or "evaluate", and p. If
it returns a function, that is called after the computation, before the result is handed on. It is called in a stage's
own thread, and for the loss, which the last stage has between forward and backward, in the minibatch's thread."""


@dataclass(frozen=True)
class StageSettings:
    """Settings that all stages share.

    Attributes:
        in_flight: Nm.
        torch_threads: Threads of each torch operation.
        default_dtype: Dtype of tensors that layers create without naming one, or None for the process's default.
        before_pass: Hook of emulated devices and of tests.
        recompute: Keep only the inputs of forwards, and compute forwards again for the backward.
        compile: Options of ``torch.compile`` for the layers, or None to run them as they are.
        buffers: Initial number of version buffers, or None for one for each minibatch in flight.
        evaluates: Run forwards only, on the live layers, whose weights do not change meanwhile.
    """

    generators: RandomGenerators
    in_flight: int
    torch_threads: int
    default_dtype: torch.dtype | None
    before_pass: BeforePass | None = None
    recompute: bool = False
    compile: Mapping[str, Any] | None = None
    buffers: int | None = None
    evaluates: bool = False

    @property
    def version_buffers(self) -> int:
        return self.in_flight if self.buffers is None else self.buffers


@dataclass
class FoundGradients:
    """Gradients of weights, by number, from backwards of one minibatch, and the event behind all of them. Gradients for
    which the stage has no room wait on the host."""

    gradients: dict[int, Tensor] = field(default_factory=dict)
    event: StreamEvent | None = None


class Stage:
    """Stage ``index`` with its ``segments``. ``layers`` are the whole model's. The forwards of each minibatch visit it
    ``visits`` times. Its own thread computes in ``streams`` on ``device``, and calls ``done`` with each result. The
    sender of versions calls :meth:`begin`, :meth:`publish`, :meth:`state` and :meth:`take` between tasks that they
    concern."""

    def __init__(
        self,
        index: int,
        device: torch.device,
        segments: Sequence[Segment],
        layers: Sequence[Layer],
        settings: StageSettings,
        watchdog: Watchdog,
        compute_lock: ReadersWriterLock,
        exclusively: Exclusively,
        done: Done,
        streams: Streams,
        planned: PlannedMemory | None = None,
        visits: int = 1,
        group: DeviceGroup | None = None,
    ) -> None:
        self.index = index
        self.device = device
        self.stream = streams.on(device)
        self.place = str(device)
        """Name of its device for messages."""
        self._name = f"hetpipe-{'evaluation-' if settings.evaluates else ''}stage-{index}"
        self._watchdog = watchdog
        self._done = done
        self._worker: Worker[Parcel] | None = None
        self._cancelled: set[int] = set()
        self._doing: tuple[Message, float] | None = None
        self.segments = list(segments)
        self.layers = [layers[number] for segment in segments for number in segment.layers]
        self.compile_seconds = 0.0
        self._exclusively, self._compiles = exclusively, False
        self.memory = Memory(planned, visits)
        self._user_stream = streams.user
        self._settings = settings
        self._compute_lock = compute_lock
        self._newest: StreamEvent | None = None  # behind all that Lightning's thread does with earlier buffers
        self._saved: dict[tuple[int, tuple[int, int]], SavedForBackward] = {}  # by minibatch, and call and segment
        self._found: dict[int, FoundGradients] = {}
        self._taking = threading.Lock()
        self._orders: dict[int, CallOrder[Parcel]] = {}
        self._held_back: deque[Parcel] = deque()
        self._beside: deque[Callable[[], None]] = deque()
        self._members = None
        if group is not None:
            self._members = MemberPool(self._name, group, settings.torch_threads, streams, self.stream)
        self.copy_layers()

    def copy_layers(self) -> None:
        """Replace the copies of the live layers by new ones. Nothing may be in flight."""
        self.stash = self._new_stash(nn.ModuleList([layer.module for layer in self.layers]))
        self._runners: dict[int, SegmentRunner] = {}
        parts, start = list[list[nn.Module]](), 0
        for segment in self.segments:
            own = self.layers[start : start + len(segment.layers)]
            self._runners[segment.index] = SegmentRunner(
                own, start, self.stash, self._settings, self.device, self._members
            )
            parts.append([layer.module for layer in own])
            start += len(own)
        self.live = Live(parts)
        if self._members is not None:
            check_divided([runner.split for runner in self._runners.values()], self._members.group, self.index)
        self.stream.join(None, [tensor for buffer in self.stash.buffers for tensor in buffer.tensors])

    def _new_stash(self, layers: nn.ModuleList) -> VersionedLayers:
        if self._settings.evaluates:
            return VersionedLayers(layers)
        return WeightStash(layers, self._settings.version_buffers, self.device)

    # Whoever sends.

    def start(self) -> None:
        if self._members is not None:
            self._members.start()
        self._worker = Worker(self._name, self._run, self._settings.torch_threads, self.stream.enter)

    def put(self, parcel: Parcel) -> None:
        assert self._worker is not None
        if isinstance(parcel.message, Cancel):
            self._cancelled.add(parcel.message.minibatch)
        self._worker.put(parcel)

    def compute(self, work: Callable[[], None], tensors: Sequence[Tensor]) -> Future[StreamEvent | None]:
        """Do ``work`` with ``tensors`` of user code in the stage's thread and stream, before all tasks that wait. The
        result is the event behind it."""
        behind = self._user_stream.record([self.device, *(tensor.device for tensor in tensors)])
        future = Future[StreamEvent | None]()

        def run() -> None:
            self._doing = _WAKE.message, time.monotonic()
            try:
                self.stream.join(behind, tensors)
                with self._compute_lock.shared():
                    work()
                future.set_result(self.stream.record())
            except BaseException as error:
                future.set_exception(error)
            self._doing = None
            self._watchdog.moved()

        self._beside.append(run)
        self.put(_WAKE)
        return future

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._members is not None:
            self._members.close()

    def join(self, seconds: float) -> bool:
        is_over = self._worker is None or self._worker.join(seconds)
        return is_over and (self._members is None or self._members.join(seconds))

    def describe(self) -> str:
        """Describe what the stage does right now, for error messages."""
        doing = self._doing
        if doing is None:
            return f"stage {self.index} is idle"
        message, since = doing
        done = "evaluated" if self._settings.evaluates else "compiled" if self._compiles else "run"
        return f"stage {self.index} has {done} {self._work(message)} for {time.monotonic() - since:.1f} s"

    def let_go(self) -> None:
        """Release the memory of versions, buffers and activations."""
        self._saved.clear()
        self._found.clear()
        self.stash.let_go()
        for runner in self._runners.values():
            runner.buffers.let_go()

    # Versions and states.

    def begin(self, version: Version, forwards: int) -> None:
        """Publish ``version``, with the buffers that forward ``forwards`` left, into an empty pipeline."""
        self._saved.clear()
        self._found.clear()
        self.memory.clear()
        self.stream.join(None, self.stash.begin(version))
        for runner, buffers in zip(self._runners.values(), version.buffers, strict=True):
            runner.buffers.begin(forwards, buffers)
            self.stream.join(None, runner.buffers.all())
            runner.counter.clear()
        self._published(version)

    def publish(self, version: Version) -> None:
        """Take ``version``, the next one.

        Raises:
            SettingError: if its buffers differ from what the last forward left, while later forwards have gone on.
        """
        self.stream.join(None, self.stash.publish(version))
        for runner, buffers in zip(self._runners.values(), version.buffers, strict=True):
            if runner.buffers.publish(version.number, buffers, ahead=version.is_late):
                self.stream.join(None, runner.buffers.all())
        self._published(version)

    def _published(self, version: Version) -> None:
        """Count the bytes of versions, and let tasks wait until ``version`` is computed."""
        self.memory.publish(self.stash.held_bytes)
        self._newest = self._user_stream.record([self.device])
        for reading in version.needed:
            if reading.version == version.number:
                self.stash.buffer(reading).published = self._newest

    def refuse_changes(self) -> None:
        """Raise as :meth:`publish` for changes that a device has yet to report."""
        self.stash.refuse_changes()
        for runner in self._runners.values():
            runner.buffers.refuse_changes()

    def state(self, minibatch: int) -> Sequence[Sequence[Tensor]]:
        """Return the buffers of each segment as the forwards of ``minibatch``, one of the last Nm, left them."""
        return [each.buffers.left(minibatch) for each in self._runners.values()]

    def take(self, minibatch: int) -> FoundGradients:
        """Hand over the gradients of ``minibatch``, which has ended. They count until they are :meth:`delivered`."""
        with self._taking:
            return self._found.pop(minibatch, None) or FoundGradients()

    def lacks_room(self) -> bool:
        """Return True if the gradients of one more minibatch exceed the planned memory."""
        memory, weights = self.memory, self.live.parameters
        return memory.limited and memory.lacks(sum(each.nbytes for each in weights if each.requires_grad))

    def delivered(self, minibatch: int) -> None:
        """Stop counting the gradients of ``minibatch``: weights have them, in place of the last step's."""
        self.memory.take(minibatch)

    # Its thread.

    def _run(self, parcel: Parcel) -> None:
        """Handle ``parcel``. Minibatches for which the stage has no room yet wait in order. Minibatches come to all
        stages in one order, so the first one that waits here never waits for another one."""
        while self._beside:
            self._beside.popleft()()
        if isinstance(parcel.message, Wake):
            return
        if (self._held_back and self._is_new(parcel.message)) or not self._admits(parcel.message):
            self._held_back.append(parcel)
        else:
            self._handle(parcel)
        while self._held_back and self._admits(self._held_back[0].message):
            self._handle(self._held_back.popleft())

    def _is_new(self, task: Message) -> bool:
        return isinstance(task, Forward) and not self.memory.holds(task.minibatch)

    def _admits(self, task: Message) -> bool:
        if not self.memory.limited or not isinstance(task, Forward) or not self._is_new(task):
            return True
        known = self._runners[task.segment].counter.known(task.value.tensors)
        return known is None or self.memory.admits(known.all)

    def _handle(self, parcel: Parcel) -> None:
        following: Parcel | None = parcel
        while following is not None:
            following = self._answer(following)

    def _answer(self, parcel: Parcel) -> Parcel | None:
        """Handle ``parcel``, and hand the result on. Return a parcel to handle before all others, or None."""
        message = parcel.message
        assert not isinstance(message, Wake)
        number = message.minibatch
        if isinstance(message, Cancel):
            self._cancelled.discard(number)
            self._forget(number)
            return None
        if isinstance(message, Forward) and (message.again or message.call) and self._waits(parcel, message.segment):
            return None
        self._doing = message, time.monotonic()
        result: Result
        event: StreamEvent | None
        try:
            if number in self._cancelled:
                raise Discarded
            if isinstance(message, Backward):
                result, event = self._backward(message, parcel)
            elif self._settings.evaluates:
                result, event = self._evaluate(message, parcel.event)
            else:
                result, event = self._forward(message, parcel.event)
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError):
                explain(error, self._lacking(message))
            self._forget(number)
            result, event = Failure(number, error), None
        self._doing = None
        self._watchdog.moved()
        self._done(result, event)
        return self._next_of(number) if isinstance(message, Forward) and message.last else None

    def _waits(self, parcel: Parcel, segment: int) -> bool:
        """Hold a forward back if it starts from buffers that earlier calls have yet to leave. Return True if so."""
        if not self._runners[segment].changes_buffers():
            return False
        return not self._orders.setdefault(segment, CallOrder()).admits(parcel.message.minibatch, parcel)

    def _end_calls(self, order: CallOrder[Parcel], minibatch: int) -> None:
        if (following := order.close(minibatch)) is not None:
            self.put(following)  # behind what became ready before it

    # Each returns its result, and the event behind which it is computed.

    def _evaluate(self, task: Forward, event: StreamEvent | None) -> tuple[Output, StreamEvent | None]:
        self.stream.join(event, task.value.tensors)
        with self._computing("evaluate", task.minibatch):
            value = self._runners[task.segment].evaluate(task)
        # Operators on a tied weight compute where it lies.
        event = self.stream.record(tensor.device for tensor in value.tensors)
        return Output(task.minibatch, task.segment, value), event

    def _forward(self, task: Forward, event: StreamEvent | None) -> tuple[Output, StreamEvent | None]:
        number, segment = task.minibatch, task.segment
        self.stream.join(self.stash.buffer(task.weights).published)
        self.stream.join(event, task.value.tensors)
        runner = self._runners[segment]
        if runner.changes_buffers():
            self.stream.join(self._newest)
        kind = runner.kind(task)
        if self.memory.limited and (known := runner.counter.known(task.value.tensors)) is not None:
            self._make_room(known.all)
        with self._exclusive(runner.compiles(kind), runner, number), self._computing("forward", number):
            output, saved = runner.forward(task, kind)
        visit = task.call, segment
        self._saved[number, visit] = saved
        self.memory.hold(number, visit, saved.kept.all)
        if saved.again is not None:
            self.memory.hold(number, visit, saved.kept.inputs)
        if task.call and not task.again and segment in self._orders:
            self._end_calls(self._orders[segment], number)
        return Output(number, segment, output), self.stream.record()

    def _backward(self, task: Backward, parcel: Parcel) -> tuple[InputGradients, StreamEvent | None]:
        number, segment = task.minibatch, task.segment
        visit = task.call, segment
        if (number, visit) not in self._saved:
            raise Discarded
        self.stream.join(parcel.event, tensors_in(task.gradients))
        for behind in parcel.others:
            self.stream.join(behind, task.sums.values())
        runner, saved = self._runners[segment], self._saved.pop((number, visit))
        if saved.again is not None:
            self.memory.hold(number, visit, saved.kept.all)
        if self.memory.limited:
            self._make_room(max(0, runner.gradient_bytes(saved.weights) - saved.kept.all))
        compiles = runner.compiles(saved.kind, backward=True)
        if (found := self._found.get(number)) is None:
            found = self._found[number] = FoundGradients()
        sums = {**found.gradients, **task.sums} if found.gradients or task.sums else _NO_SUMS
        kept = [saved]  # so that nobody here holds what the backward lets go of
        del saved
        with self._exclusive(compiles, runner, number), self._computing("backward", number):
            below, own = runner.backward(task, kept.pop(), sums)
        handed_on, waiting = self._keep(found.gradients, runner, own, task)
        self.memory.release(number, visit, waiting)
        found.event = event = self.stream.record()
        return InputGradients(number, segment, below, handed_on), event

    def _keep(
        self, found: dict[int, Tensor], runner: SegmentRunner, own: Sequence[Tensor | None], task: Backward
    ) -> tuple[Sums, int]:
        """Add the gradients of a segment's ``own`` weights to ``found``, except for gradients to be handed on. Return
        these, and the bytes by which ``found`` has grown."""
        size, grown = self.stash.bytes, 0
        for number, gradient in zip(reversed(runner.weights), reversed(own), strict=True):
            if gradient is not None:
                if number not in found:
                    grown += size[number]
                found[number] = gradient
        if not task.wanted:
            return _NO_SUMS, grown
        handed_on = {number: found.pop(number) for number in task.wanted if number in found}
        return handed_on, grown - sum(size[number] for number in handed_on)

    def _make_room(self, coming: int) -> None:
        """Move gradients to the host while ``coming`` bytes lack room, the latest first, because they wait longest. A
        backward makes gradients while it releases activations, so it takes most memory when it begins or ends."""
        if not self.memory.lacks(coming):
            return
        for number in sorted(self.memory.waiting(), reverse=True):
            with self._taking:
                if (found := self._found.get(number)) is None:  # Lightning's step has just taken them
                    continue
                found.gradients = {weight: move(each, _HOST) for weight, each in found.gradients.items()}
                self.memory.move_out(number)
            if not self.memory.lacks(coming):
                return

    def _next_of(self, minibatch: int) -> Parcel | None:
        """Wait for the next message of ``minibatch``, whose loss is being computed, while other messages wait."""
        worker, found = self._worker, list[Parcel]()
        assert worker is not None

        def ready(seconds: float) -> bool:
            parcel = worker.take(lambda each: each is _WAKE or each.message.minibatch == minibatch, seconds)
            if parcel is _WAKE:  # the loss may wait for what was asked
                self._run(parcel)
            elif parcel is not None:
                found.append(parcel)
            return bool(found)

        try:
            self._watchdog.wait(ready, f"stage {self.index} for the loss of minibatch {minibatch}")
        except BaseException as error:
            self._forget(minibatch)
            self._done(Failure(minibatch, error), None)
        return found[0] if found else None

    def _forget(self, minibatch: int) -> None:
        """Drop everything of ``minibatch``."""
        self._found.pop(minibatch, None)
        for key in [key for key in self._saved if key[0] == minibatch]:
            del self._saved[key]
        self.memory.forget(minibatch)
        for parcel in [each for each in self._held_back if each.message.minibatch == minibatch]:
            self._held_back.remove(parcel)
            self._done(Failure(minibatch, Discarded()), None)
        for order in self._orders.values():
            if order.withdraw(minibatch):
                self._done(Failure(minibatch, Discarded()), None)
            self._end_calls(order, minibatch)

    def _lacking(self, message: Message) -> str:
        """Describe what the stage holds when there is no memory for ``message``, and what helps."""
        where, work = f"stage {self.index} ran out of memory on {self.place}", self._work(message)
        if self._settings.evaluates:
            return (
                f"{where} while it evaluated {work}; give this loop smaller batches, or set in_flight lower, or give"
                " more devices, or ones with more memory"
            )
        less_of = less(self._settings.in_flight, self._settings.recompute)
        return f"{where} in {work}. It held {self.memory.told()}; {less_of}"

    def _work(self, message: Message) -> str:
        if isinstance(message, Wake):
            return "the optimizer's step of its weights"
        assert isinstance(message, Forward | Backward)
        layers, number = self._runners[message.segment].describe(), message.minibatch
        if self._settings.evaluates:
            return f"batch {number} ({layers})"
        return f"the {type(message).__name__.lower()} of minibatch {number} ({layers})"

    # What is wrapped around a task.

    def _exclusive(self, compiles: bool, runner: SegmentRunner, minibatch: int) -> AbstractContextManager[None]:
        if self._members is not None:
            self._members.in_turn = compiles
        return self._alone(runner.describe(), minibatch) if compiles else _NOTHING

    @contextmanager
    def _alone(self, layers: str, minibatch: int) -> Iterator[None]:
        """Context manager in which torch may compile ``layers`` (:mod:`~lightning_hetpipe.pipeline.compilation`)."""
        with self._exclusively(minibatch, f"stage {self.index}, which is to compile {layers},"):
            self._compiles, started = True, time.perf_counter()
            try:
                yield
            finally:
                self._compiles = False
                self.compile_seconds += time.perf_counter() - started

    def _computing(self, work: str, minibatch: int) -> Pass:
        return Pass(self, self._compute_lock, self._settings.before_pass, work, minibatch)


_WAKE = Parcel(Wake())
_NOTHING: AbstractContextManager[None] = nullcontext()
_NO_SUMS: Sums = {}
_HOST = torch.device("cpu")
