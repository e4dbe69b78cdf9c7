"""The engine: stages, runners (threads of minibatches in flight) and the lock over user code, as one object.

Lightning's thread drives it, and holds the lock over user code except while it waits here. The life of minibatch p:

    submit(p)        its runner starts training_step, ahead of Lightning's loop
    finish(p)        Lightning's step p: waits until devices have been given all of its work
    show(p)          the live buffers and computed weights become what forward p left
    publish(p)       after Lightning's step p: the live weights become version p
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from lightning_hetpipe.errors import Discarded
from lightning_hetpipe.pipeline.buffers import check_shared
from lightning_hetpipe.pipeline.memory import PlannedMemory, less
from lightning_hetpipe.pipeline.split.member_pool import DeviceGroup
from lightning_hetpipe.pipeline.stage import Layer, Stage, StageSettings
from lightning_hetpipe.pipeline.stage_messages import Backward, Cancel, Failure, Forward, InputGradients, Parcel, Result
from lightning_hetpipe.pipeline.streams import StreamEvent, Streams, Timed, shared_streams
from lightning_hetpipe.pipeline.threads import ReadersWriterLock, Watchdog, Worker
from lightning_hetpipe.pipeline.user.lock import MainThread, Precedence, Ticket, UserLock
from lightning_hetpipe.pipeline.user.minibatch import Minibatch, Step, Sum
from lightning_hetpipe.pipeline.user.parameter_view import ParameterView, VersionedTensors
from lightning_hetpipe.pipeline.user.piece_call import PieceCall
from lightning_hetpipe.pipeline.values import Gradients, Value
from lightning_hetpipe.pipeline.weight_stash import (
    NO_MOVES,
    Live,
    Moves,
    VersionedLayers,
    WeightStash,
    compute,
    computed_names,
)
from lightning_hetpipe.rules.schedule import Segment, Work, calls, route, segments
from lightning_hetpipe.rules.versions import STASH, Reading, Versions

MakeStage = Callable[..., Stage]

JOIN_SECONDS = 5.0
"""Seconds that closing waits for a thread before it reports the thread as stuck."""


class Engine:
    """One virtual worker's pipeline, with up to Nm minibatches in flight, each in a runner's thread.

    In an evaluation, its stages run forwards on the live layers, which do not change meanwhile. Nothing is copied,
    published or shown. User code calls pieces as often as it likes, in any order.

    ``following`` and ``preceding`` have the next and the previous segment in its piece for each segment, or None.

    Args:
        pieces: Name and layers of each piece, in the order of first calls.
        split_points: The first layer of each stage.
        devices: The device of each stage.
        timeout: Seconds after which a wait in which nothing moves ends with an explanation.
        root: The module of ``training_step``. Its trainable parameters outside the pieces have versions as well.
        changing: The ``id`` of each live buffer that forwards change.
        called: The pieces that ``training_step`` calls, in order. By default it calls each once.
        planned: The memory of each stage by its plan. By default there is no limit.
        versions: Returns the versions from a number on, at which the pipeline starts empty. By default they are
            stashed.
        make_stage: Makes the stages without the loss, from the arguments of :class:`Stage`.
        groups: The devices of each stage that has several.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[str, Sequence[Layer]]],
        split_points: Sequence[int],
        devices: Sequence[torch.device],
        settings: StageSettings,
        timeout: float,
        root: nn.Module | None = None,
        changing: Collection[int] = (),
        streams: Streams | None = None,
        called: Sequence[int] | None = None,
        planned: Sequence[PlannedMemory] = (),
        versions: Callable[[int], Versions] | None = None,
        make_stage: MakeStage = Stage,
        groups: Mapping[int, DeviceGroup] | None = None,
    ) -> None:
        self.in_flight, self.evaluates = settings.in_flight, settings.evaluates
        self.lock = UserLock()
        self.watchdog = Watchdog(timeout, lambda: self.lock.held, self.describe)
        self.compute_lock = ReadersWriterLock(self.watchdog)
        self.minibatches: dict[int, Minibatch] = {}
        self.main = MainThread(self.lock, self.watchdog, self._cancel, JOIN_SECONDS)
        self._runners: list[Worker[Minibatch]] = []
        self._behind: Sequence[StreamEvent] = ()  # of the last finished minibatch
        self.piece_names = [name for name, _ in pieces]
        self._layers = [layer for _, own in pieces for layer in own]
        self._segments = segments([len(own) for _, own in pieces], split_points)
        self._of_piece = [[part for part in self._segments if part.piece == piece] for piece in range(len(pieces))]
        self.following: list[Segment | None] = [part for own in self._of_piece for part in (*own[1:], None)]
        self.preceding: list[Segment | None] = [part for own in self._of_piece for part in (None, *own[:-1])]
        self.streams = streams or Streams()
        self.root_device = devices[-1]
        if not self.evaluates:
            check_shared([self._layers[segment.first : segment.last + 1] for segment in self._segments])
        self.calls = () if self.evaluates else calls(range(len(pieces)) if called is None else called)
        self._route = route(self._segments, self.calls) if self.calls else ()
        self._turn = next((step for step in self._route if step.work is Work.TURN), None)
        with_loss = None if self._turn is None else self._turn.segment.stage
        self.stages: list[Stage] = [
            (Stage if index == with_loss else make_stage)(
                index=index,
                device=device,
                segments=[segment for segment in self._segments if segment.stage == index],
                layers=self._layers,
                settings=settings,
                watchdog=self.watchdog,
                compute_lock=self.compute_lock,
                exclusively=self.exclusively,
                done=self._done,
                streams=self.streams,
                planned=planned[index] if planned else None,
                visits=sum(step.segment.stage == index for step in self._route if step.work is not Work.BACKWARD),
                group=(groups or {}).get(index),
            )
            for index, device in enumerate(devices)
        ]
        self._settings = settings
        self.moves: Callable[[], Moves] = lambda: NO_MOVES
        """Returns the expected changes of parameters by an optimizer step, if weights are predicted."""
        self._root = root if root is not None else nn.Module()
        self._changing = changing
        self._outside: list[tuple[Live, WeightStash]] = []
        self._versions_from = versions or (lambda version: Versions(STASH, self.in_flight, empty_at=version))
        self.versions = self._versions_from(0)
        self._find_layers()
        self._find_weights()

    # Lightning's thread.

    def start(self) -> None:
        """Start the threads. The calling thread takes the lock over user code."""
        for stage in self.stages:
            stage.start()
            if self.evaluates:  # on the live weights, as user code has left them
                layers = nn.ModuleList([layer.module for layer in stage.layers])
                stage.compute(lambda: None, [*layers.parameters(), *layers.buffers()])
        others = [stage.device for stage in self.stages if stage.device != self.root_device]
        enter = shared_streams([*others, self.root_device])
        name, threads = "hetpipe-evaluation" if self.evaluates else "hetpipe-runner", self._settings.torch_threads
        names = [f"{name}-{index}" for index in range(self.in_flight)]
        self._runners = [Worker(each, lambda own: own.context.run(own.run), threads, enter) for each in names]
        self.main.take_lock()

    def begin(self, version: int, forwards: int | None = None) -> None:
        """Start with an empty pipeline at ``version`` v_e, the live weights. The live buffers have seen the
        ``forwards`` up to this minibatch, by default up to ``version``."""
        self.discard()
        self._find_weights()
        self.versions = self._versions_from(version)
        needed, moves = self._needed(version)
        for stage in self.stages:
            stage.begin(stage.live.version(version, needed, moves), version if forwards is None else forwards)
        for live, stash in self._outside:
            stash.begin(live.version(version, needed, moves))

    def discard(self) -> None:
        """Drop every minibatch in flight. Their user code unwinds."""
        self._cancel()
        self.drain()
        self.minibatches.clear()
        for stage in self.stages:
            stage.stream.synchronize()  # what was dropped may still be computed, on the weights that come next
            stage.refuse_changes()
        for _, stash in self._outside:
            stash.refuse_changes()

    def copy_layers(self) -> None:
        """Copy the live layers anew after changes other than of weights. Called before :meth:`begin`."""
        self.discard()
        for stage in self.stages:
            stage.copy_layers()
        self._find_layers()

    def versioned(self) -> set[int]:
        """Return the ``id`` of each live parameter that has versions."""
        return set(self._weights.known)

    def versioned_tensors(self) -> Mapping[str, Tensor]:
        """Return the live weights and buffers, by name, of which minibatches in flight have other versions."""
        return {found.name: found.live for found in self._weights.memory.values()}

    def submit(self, number: int, step: Step) -> None:
        """Put minibatch ``number``, the next one, in flight."""
        weights = self.versions.reading(number)
        view = ParameterView(self._weights, weights, self.versions.runs_ahead, self.root_device)
        minibatch = self.minibatches[number] = Minibatch(self, number, weights, step, view)
        self.lock.request(minibatch.start)
        self._runners[number % self.in_flight].put(minibatch)

    def finish(self, number: int) -> Minibatch:
        """Wait for minibatch ``number``, and take it out of the pipeline. Its error, if any, is raised with the
        traceback of the thread in which it happened. Stages count its gradients until they are :meth:`delivered`."""
        minibatch = self.minibatches[number]
        self.main.wait_for(minibatch)
        del self.minibatches[number]
        if minibatch.failure is not None:
            raise minibatch.failure
        found, last = minibatch.gradients, dict[nn.Parameter, Tensor]()
        user, behind = self.streams.user, list[StreamEvent]()
        if self.evaluates and minibatch.arrived_after is not None:
            behind.append(minibatch.arrived_after)
        for weight, sum in minibatch.sums.items():
            (last if weight in minibatch.continued else found)[weight] = sum.gradient
            user.join(sum.event, [sum.gradient])
        for stage in reversed(self.stages):
            taken = stage.take(number)
            found.update((stage.live.parameters[number], gradient) for number, gradient in taken.gradients.items())
            if taken.event is not None:
                user.join(taken.event, taken.gradients.values(), [stage.device])
                behind.append(taken.event)
        found.update(last)
        self.catch_up(behind)
        return minibatch

    def catch_up(self, behind: Sequence[StreamEvent] = ()) -> None:
        """Wait until devices have computed all finished minibatches but the last one, whose events are ``behind``: they
        reuse memory only after that. Without room for more gradients, wait for the last one as well."""
        events, self._behind = self._behind, behind
        if any(stage.lacks_room() for stage in self.stages):
            events = [*events, *behind]
        if not all(event.query() for event in events):
            with self.main.unlocked():
                for event in events:
                    event.synchronize()

    def delivered(self, number: int) -> None:
        """Record that weights have the gradients of minibatch ``number``, in place of the last step's."""
        for stage in self.stages:
            stage.delivered(number)

    def publish(self, version: int) -> None:
        """Make ``version`` of the live weights, after Lightning's step of this number with all its callbacks."""
        if self.evaluates:
            return
        needed, moves = self._needed(version)
        with self.computing(), torch.no_grad():  # copying is no user code, and losses must not wait for it
            for stage in self.stages:
                stage.publish(stage.live.version(version, needed, moves))
            for live, stash in self._outside:
                stash.publish(live.version(version, needed, moves))

    def _needed(self, version: int) -> tuple[list[Reading], Moves]:
        """Return the weights that minibatches use from now on, and the moves of ``version``, the newest one."""
        needed = self.versions.needed(version)
        moved = any(reading.steps and reading.version == version for reading in needed)
        return needed, self.moves() if moved else NO_MOVES

    def show(self, minibatch: Minibatch) -> None:
        """Set the live buffers and computed weights to what the forward of ``minibatch`` left."""
        if self.evaluates:
            return
        for stage in self.stages:
            if stage.live.shows:
                stage.live.show(stage.state(minibatch.number))
        if self._computed:

            def weight(live: nn.Parameter) -> Tensor:
                return self._weights.of_version(live, minibatch.weights).to(live.device)

            with torch.no_grad(), minibatch.calling.autocast.opened(alone=self.in_flight == 1):
                for module in self._computed:
                    compute(module, weight)

    def drain(self) -> None:
        """Wait until nothing is in motion. Minibatches that ended wait for their :meth:`finish`."""
        for number in sorted(self.minibatches):
            self.main.wait_for(self.minibatches[number])

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context manager in which user code runs while Lightning's thread computes."""
        with self.main.unlocked(), self.compute_lock.shared():
            yield

    def close(self) -> None:
        """Drop every minibatch and end every thread. Warn of a thread that is stuck in a layer or in user code."""
        workers: list[Worker[Minibatch] | Stage] = [*self._runners, *self.stages]
        deadline = time.monotonic() + JOIN_SECONDS
        try:
            self._cancel()
            if self.watchdog.given_up is None:
                for minibatch in self.minibatches.values():
                    self.main.wait_for(minibatch, deadline)
        finally:
            self.main.leave()  # an interrupt may have left minibatches that need the lock to unwind
            try:
                with ExitStack() as ends:  # all end, even if one fails
                    for worker in reversed(workers):
                        ends.callback(worker.close)
            finally:
                self._join(workers, deadline)

    def _join(self, workers: Sequence[Worker[Minibatch] | Stage], deadline: float) -> None:
        stuck = [w for w in workers if not w.join(max(0.1, deadline - time.monotonic()))]
        if stuck:
            warnings.warn(f"the pipeline could not end all its threads: {self.describe()}", stacklevel=3)
        ran, self._runners = bool(self._runners), []
        if stuck:  # a late result of a stage still ends the minibatches
            return
        self.minibatches = {}
        if ran:  # Python would release the memory, which is in cycles, only later
            for stage in self.stages:
                stage.let_go()
            for _, stash in self._outside:
                stash.let_go()

    def _cancel(self) -> None:
        for minibatch in self.minibatches.values():
            minibatch.cancelled = True
            self.abandon(minibatch)

    def describe(self) -> str:
        """Describe each stage and each minibatch in flight, for messages."""
        unfinished = [minibatch for minibatch in self.minibatches.values() if not minibatch.ended]
        doing = "the evaluation of batch" if self.evaluates else "training_step of minibatch"
        running = [f"{doing} {minibatch.number} is running" for minibatch in unfinished if minibatch.in_user_code]
        numbers = ", ".join(str(minibatch.number) for minibatch in unfinished) or "none"
        return "; ".join([*(s.describe() for s in self.stages), *running, f"minibatches in flight: {numbers}"])

    # Layers and weights.

    def _find_layers(self) -> None:
        """Find the live layers of each stage, and the weights that several segments use."""
        numbers = [{weight: number for number, weight in enumerate(each.live.parameters)} for each in self.stages]
        modules = [[self._layers[number].module for number in segment.layers] for segment in self._segments]
        self._weights_of = [
            {weight: numbers[segment.stage][weight] for weight in nn.ModuleList(own).parameters()}
            for segment, own in zip(self._segments, modules, strict=True)
        ]
        # By call and segment, the weights whose use before is on another stage.
        self._handed_on: dict[tuple[int, int], tuple[int, ...]] = {}
        last: dict[nn.Parameter, int] = {}
        for step in (step for step in self._route if step.work is not Work.BACKWARD):
            own, here = self._weights_of[step.segment.index], step.segment.stage
            before = tuple([own[weight] for weight in own if last.get(weight, here) != here])
            self._handed_on[step.call.index, step.segment.index] = before
            last.update(dict.fromkeys(own, here))

    def _find_weights(self) -> None:
        """Make the stashes of trainable parameters that no stage holds, one on each device, and find all stashes.
        Called whenever the pipeline starts empty, because there may be new parameters."""
        inside = {id(parameter) for stage in self.stages for parameter in stage.live.parameters}
        outside: dict[torch.device, list[nn.Parameter]] = {}
        for parameter in self._root.parameters():
            if parameter.requires_grad and id(parameter) not in inside:
                outside.setdefault(parameter.device, []).append(parameter)
        before = [id(parameter) for live, _ in self._outside for parameter in live.parameters]
        if before != [id(parameter) for parameters in outside.values() for parameter in parameters]:
            self._outside = []
            for device, parameters in outside.items():
                own = nn.ParameterList(parameters)
                self._outside.append(
                    (Live([[own]]), WeightStash(nn.ModuleList([own]), self._settings.version_buffers, device))
                )
        stashes: list[tuple[Live, VersionedLayers]] = [(stage.live, stage.stash) for stage in self.stages]
        layers = [layer.module for layer in self._layers]
        self._weights = VersionedTensors(self._root, [*stashes, *self._outside], layers, self._changing)
        self._computed = [
            module
            for module in nn.ModuleList([self._root, *layers]).modules()
            if computed_names(module) and inside.issuperset(map(id, module.parameters(recurse=False)))
        ]

    # The runners' side.

    def abandon(self, minibatch: Minibatch) -> None:
        """Make stages forget ``minibatch``, for which no thread waits any more."""
        for stage in self.stages:
            stage.put(Parcel(Cancel(minibatch.number)))

    def show_buffers(self, number: int, pieces: Collection[int]) -> None:
        """Set the live buffers of ``pieces`` to what their last call left in minibatch ``number``, which is alone."""
        for stage in self.stages:
            if stage.live.shows:
                stage.stream.synchronize()
                with torch.no_grad():
                    stage.live.show(stage.state(number), [segment.piece in pieces for segment in stage.segments])

    def forward(self, minibatch: Minibatch, call: PieceCall) -> None:
        """Send a piece's inputs into the pipeline. Its outputs will be delivered to ``minibatch``."""
        minibatch.calling = call
        event = self.streams.user.record(tensor.device for tensor in call.inputs.tensors)
        self._forward(minibatch, self._of_piece[call.which.piece][0], call.inputs, event)

    def loss(self, minibatch: Minibatch, call: PieceCall) -> Timed | None:
        """Begin the loss if user code has the outputs of the last call of a piece."""
        if self._turn is None or call.which is not self._turn.call:
            return None
        return Timed(self.stages[self._turn.segment.stage], self._settings.before_pass, "loss", minibatch.number)

    def backward(self, minibatch: Minibatch, call: PieceCall, gradients: Gradients) -> None:
        """Send gradients of a piece's outputs. The gradients of its inputs will be delivered to ``minibatch``."""
        minibatch.calling = call
        if minibatch.loss is not None:
            minibatch.loss.end(call.collected)
            minibatch.loss = None
        self._backward(minibatch, self._of_piece[call.which.piece][-1], gradients, call.collected)

    def lacking(self) -> str:
        """Describe what all stages hold when another thread runs out of memory, and what helps."""
        held = [f"  stage {stage.index} on {stage.place}: {stage.memory.told()}" for stage in self.stages]
        what = "memory ran out in user code or a step of Lightning's; stages held"
        return "\n".join([what, *held, less(self.in_flight, self._settings.recompute)])

    # Messages to stages and from stages.

    def _forward(self, minibatch: Minibatch, segment: Segment, value: Value, event: StreamEvent | None) -> None:
        call = minibatch.calling
        which, turn = call.which, self._turn
        message = Forward(
            minibatch.number,
            segment.index,
            value,
            minibatch.weights,
            call.autocast,
            call=which.ordinal,
            again=which.again,
            last=turn is not None and which is turn.call and segment is turn.segment,
            inference=call.inference,
        )
        self.stages[segment.stage].put(Parcel(message, event))

    def _backward(
        self, minibatch: Minibatch, segment: Segment, gradients: Gradients, event: StreamEvent | None
    ) -> None:
        sums: dict[int, Tensor] = {}
        call = minibatch.calling
        wanted, events = self._handed_on[call.which.index, segment.index], tuple[StreamEvent, ...]()
        if minibatch.sums or minibatch.continued:
            own = self._weights_of[segment.index]
            found = {own[weight]: minibatch.sums.pop(weight) for weight in [*minibatch.sums] if weight in own}
            sums = {number: sum.gradient for number, sum in found.items()}
            events = tuple([sum.event for sum in found.values() if sum.event is not None])
            wanted = tuple({*wanted, *(own[weight] for weight in minibatch.continued if weight in own)})
        ordinal, apart = call.which.ordinal, call.has_later_uses()
        message = Backward(minibatch.number, segment.index, ordinal, gradients, sums=sums, wanted=wanted, apart=apart)
        self.stages[segment.stage].put(Parcel(message, event, events))

    @contextmanager
    def exclusively(self, number: int, who: str) -> Iterator[None]:
        """Context manager in which user code and other threads pause for ``who``, an idle stage. Other threads' waits
        do not time out meanwhile, however long it takes, because it counts as user code."""
        ticket = Ticket(Precedence.RESUME, number)
        with self.lock.taken(ticket, self.watchdog, f"{who} for user code to pause"), self.compute_lock.exclusive():
            yield

    def _done(self, result: Result, event: StreamEvent | None) -> None:
        """Send a minibatch to its next stage, or at the end of a piece to its runner. Called in stages' threads."""
        minibatch = self.minibatches.get(result.minibatch)
        if minibatch is None:  # it has failed, and nobody waits for it
            return
        if isinstance(result, Failure):
            minibatch.deliver(result.error)
        elif minibatch.cancelled:
            minibatch.deliver(Discarded())
        elif isinstance(result, InputGradients):
            self._backward_done(minibatch, result, event)
        elif (following := self.following[result.segment]) is None:
            minibatch.deliver(result.value, event)
        else:
            self._forward(minibatch, following, result.value, event)

    def _backward_done(self, minibatch: Minibatch, result: InputGradients, event: StreamEvent | None) -> None:
        """Send on the gradients from a segment."""
        if result.sums:
            weights = self.stages[self._segments[result.segment].stage].live.parameters
            minibatch.sums.update((weights[number], Sum(each, event)) for number, each in result.sums.items())
        if (preceding := self.preceding[result.segment]) is None:
            minibatch.deliver(result.gradients, event)
        else:
            self._backward(minibatch, preceding, result.gradients, event)
