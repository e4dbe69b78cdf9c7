"""One minibatch in flight: the user's step for it, run in a thread of its own ahead of Lightning's loop.

A minibatch of training runs ``training_step`` and the backward pass of its loss. A batch of an evaluation is a
minibatch without a backward pass, on weights that do not change meanwhile. The life of a minibatch on the user's side,
as its runner's thread goes through it:

    run                waits for the lock over user code, which other threads have until then
    _run_step          the user's step, in sections of user code, under the view of its version
    call               each call of a pipelined module: inputs to the pipeline, outputs back, joined into the graph
    _through_pipeline  ends the section and gives the lock back, waits until a stage delivers, and goes on with the lock
    _backward          from the loss to the last call, through the pipeline, to the call before, down to the first
    end                Lightning's step p goes on, and takes the output and the gradients of live parameters
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_hetpipe.errors import Discarded, PipelineRefusal
from lightning_hetpipe.pipeline.streams import StreamEvent, Timed, move
from lightning_hetpipe.pipeline.threads import PerThread
from lightning_hetpipe.pipeline.user.lock import Precedence, Ticket
from lightning_hetpipe.pipeline.user.parameter_view import ParameterView, UsedParameter
from lightning_hetpipe.pipeline.user.piece_call import PieceCall, gradients_below
from lightning_hetpipe.pipeline.user.user_section import UserSection
from lightning_hetpipe.pipeline.values import Value, tensors_in, tensors_of
from lightning_hetpipe.rules.schedule import Call
from lightning_hetpipe.rules.versions import Reading

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.engine import Engine

UNWINDING = 4.0
"""Seconds for which user code that must unwind waits for the lock, fewer than the pipeline waits for its threads."""

_SKIPPED = (
    "; a layer that is skipped at random (layerdrop, say) needs a chance of 0 to be skipped, or to be left out of"
    " module=[...]"
)
"""Most frequent cause of calls that differ from minibatch to minibatch."""


@dataclass
class Step:
    """The user's side of one minibatch.

    Attributes:
        run: Calls the user's step, and returns its output and the loss to differentiate (divided for accumulation). In
            an evaluation the loss is None.
        context: Opened once around the whole step, in the minibatch's thread.
        section: Swaps process state in and out around its sections of user code.
        check: Checks this loss before it is differentiated, given the ``id`` of our leaves in its graph. It may raise.
    """

    run: Callable[[], tuple[Any, Tensor | None]]
    context: Callable[[], AbstractContextManager[Any]]
    section: UserSection
    check: Callable[[Tensor, Collection[int]], None] = lambda loss, ours: None


@dataclass(slots=True)
class Sum:
    """The gradient of a weight so far: the sum of its uses, the latest first, computed behind ``event``."""

    gradient: Tensor
    event: StreamEvent | None


class Minibatch:
    """Minibatch ``number`` in flight, on ``weights``, which ``view`` shows to user code in training.

    It is in one place at a time: in its runner (user code) or with a stage. If it fails or is discarded, it ends there.
    Of minibatches that wait for the lock over user code, the lowest number goes first.

    Attributes:
        evaluates: Whether it is a batch of an evaluation.
        output: Output of the user's step.
        gradients: Gradients of live parameters, once it has ended.
        sums: Gradients that no stage keeps, because user code contributes to them.
        continued: Parameters that user code used before the call whose backward runs: their sums go on.
        calling: The call of a piece that is in the pipeline.
    """

    def __init__(self, engine: Engine, number: int, weights: Reading, step: Step, view: ParameterView) -> None:
        self.number = number
        self.weights = weights
        self.output: Any = None
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.sums: dict[nn.Parameter, Sum] = {}
        self.continued: set[nn.Parameter] = set()
        self.calling: PieceCall
        self.loss: Timed | None = None
        self.failure: BaseException | None = None
        self.cancelled = False
        self.in_user_code = False
        self.start = Ticket(Precedence.START, number)
        self.context = contextvars.copy_context()
        """Context variables of the submitting thread."""
        self._began_at = time.perf_counter()
        self._decided = self.ended = False
        self.ended_at = self._began_at
        """Time of its end, by ``time.perf_counter``."""
        self.arrived_after: StreamEvent | None = None
        """Event behind which the value that arrived last is computed."""
        self._arrived: Any = None
        self._resume: Ticket | None = None
        self._mutex = threading.Lock()
        self._when_ended: Callable[[], None] | None = None
        self.evaluates = engine.evaluates
        self._engine = engine
        self._step = step
        self._view = view
        self._view.calls = self
        self._calls: list[PieceCall] = []
        self._often = Counter[int]()  # by piece, the calls so far
        self._in_backward = False

    # Lightning's side.

    @property
    def seconds(self) -> float:
        """Seconds in flight, once it has ended."""
        return self.ended_at - self._began_at

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call ``call`` once the minibatch has ended, at once if it has ended already."""
        with self._mutex:
            if not self.ended:
                self._when_ended = call
                return
        call()

    def end(self, failure: BaseException | None = None) -> None:
        """Mark the minibatch as ended: its results are there, or it failed. Stages forget a failed one. The first call
        decides which it is."""
        with self._mutex:
            if self._decided:
                return
            self._decided = True
        if failure is not None:
            self._engine.abandon(self)
        with self._mutex:
            self.ended = True
            self.ended_at = time.perf_counter()
            self.failure = self.failure or failure
            call = self._when_ended
        self._engine.watchdog.moved()
        if call is not None:
            call()

    # The stages' side.

    def deliver(self, value: Any, event: StreamEvent | None = None) -> None:
        """Hand a stage's result, or a failure, to the runner, with a place in the lock's queue. If no runner waits,
        because it has handed over the last task, a failure ends the minibatch."""
        ticket = self._take_ticket()
        if ticket is None:
            self.end(value if isinstance(value, BaseException) else None)
            return
        self._arrived, self.arrived_after = value, event
        self._engine.lock.request(ticket)

    # The runner's side.

    def run(self) -> None:
        """Run the user's step. Called once, in the runner's thread."""
        failure: BaseException | None = None
        try:
            self._engine.watchdog.wait(self.start.wait, f"the start of minibatch {self.number}")
        except BaseException as error:
            self._engine.lock.abandon(self.start)
            self.end(error)
            return
        try:
            self._enter()
            self._check_cancelled()
            with _current.holding(self):
                self._run_step()
        except BaseException as error:
            failure = error
        try:
            self._leave(for_good=True)
        except BaseException as error:
            failure = failure or error
        for call in self._calls:
            call.close()
        self._view.close()
        if failure is not None or self.evaluates:  # otherwise it ends with its last backward
            self.end(failure)

    def _run_step(self) -> None:
        with self._step.context():
            if self.evaluates:
                self.output, _ = self._step.run()
                return
            with self._view:
                self.output, total = self._step.run()
            self._check_cancelled()
            if self.failure is not None:  # user code has swallowed a stage's failure
                raise self.failure
            self._check_calls()
            self._view.check()
            assert total is not None
            self._step.check(total, {*self._view.ids(), *(id(call.anchor) for call in self._calls)})
            self._in_backward = True
            self._backward(total)

    def calls_of(self, piece: int) -> int:
        """Count the calls of ``piece`` so far."""
        return self._often[piece]

    def call(self, piece: int, name: str, given: Any, prepare: Callable[[Any], Any]) -> Any:
        """Run a piece in the pipeline on ``prepare(given)`` when the user's step calls the module."""
        self._check_cancelled()
        if self.evaluates:
            return self._evaluate(piece, name, prepare(given))
        with self._view.suspended():
            inputs = prepare(self._view.replaced(given))
            call = PieceCall(self._expected(piece, name), inputs, self._engine.streams.user)
            self._calls.append(call)
            outputs = self._outputs(call, name)
            self.loss = self._engine.loss(self, call)
            self._view.region = len(self._calls)
            connected = call.connect(tensors_of(inputs), outputs)
            self._view.stand_in(call.later_inputs)
            return connected

    def _evaluate(self, piece: int, name: str, inputs: Any) -> Any:
        call = PieceCall(Call(0, piece, self._often[piece]), inputs, self._engine.streams.user)
        try:
            outputs = self._outputs(call, name)
        except Exception:
            self.failure = None  # user code may catch it
            raise
        return outputs.tree(outputs.tensors)

    def _outputs(self, call: PieceCall, name: str) -> Value:
        """Return the outputs of ``call``, where user code computes."""
        self._often[call.which.piece] += 1
        outputs: Value = self._through_pipeline(lambda: self._engine.forward(self, call), f"the output of '{name}'")
        # An evaluation reads live weights, which user code may change next, on all devices.
        devices = [stage.device for stage in self._engine.stages] if self.evaluates else ()
        self._engine.streams.user.join(self.arrived_after, outputs.tensors, devices)
        return outputs.on(self._engine.root_device)

    def _expected(self, piece: int, name: str) -> Call:
        """Return the next call of the step, if it is a call of ``piece``. Otherwise refuse the call."""
        calls, done = self._engine.calls, len(self._calls)
        if done == len(calls) or calls[done].piece != piece:
            often = sum(call.piece == piece for call in calls)
            again = self.calls_of(piece) == often
            expected = name if again else self._engine.piece_names[calls[done].piece]
            raise PipelineRefusal(
                f"the pipelined module '{name}' was called "
                + (f"more often than {_times(often)}" if again else "out of order")
                + (" (by a backward pass, as torch.utils.checkpoint does)" if self._in_backward else "")
                + "; call the pipelined modules as often and in the same order as in the first minibatch"
                + f"{self._without(expected)}{_SKIPPED}"
            )
        return calls[done]

    def show_buffers(self) -> None:
        """Write buffers that the calls so far left into the live ones. Not called while minibatches run ahead."""
        self._engine.show_buffers(self.number, {call.which.piece for call in self._calls})

    def is_above(self, tensor: Tensor) -> bool:
        """Return True if ``tensor`` was computed from the last call's outputs."""
        return bool(self._calls) and self._calls[-1].leads_to(tensor)

    def _backward(self, total: Tensor) -> None:
        """Run the backward pass, from the user's code after the last call down to the code before the first."""
        above: PieceCall | None = None
        for call in reversed(self._calls):
            index = call.which.index
            first = index == 0
            # What the first call's inputs do not depend on need not wait for its backward.
            before = first and not call.needs_input_gradients
            direct = self._view.used(index + 1) + (self._view.used(0) if before else [])
            waits = not first or (not before and bool(self._view.used(0)))
            self._collect(total, above, direct, keep_graph=waits, call=call)
            self.continued = {used.live for region in range(before, index + 1) for used in self._view.used(region)}
            gradients = call.output_gradients or [None] * call.outputs
            start = partial(self._engine.backward, self, call, [*gradients])
            if waits:
                found = self._through_pipeline(start, f"the backward of call {index} of a piece")
                self._engine.streams.user.join(self.arrived_after, tensors_in(found))
                call.take_input_gradients(found)
            else:
                start()
            above = call
        if waits:
            self._collect(total, above, self._view.used(0), keep_graph=False)
            self.end()

    def _collect(
        self,
        total: Tensor,
        above: PieceCall | None,
        direct: Sequence[UsedParameter],
        *,
        keep_graph: bool,
        call: PieceCall | None = None,
    ) -> None:
        """Add the gradients of the parameters that user code used between ``call`` and the call ``above``."""
        user, later = self._engine.streams.user, list[tuple[Tensor, Tensor]]()
        for used in direct:
            if (sum := self.sums.get(used.live)) is not None:
                user.join(sum.event, [sum.gradient])
                later.append((used.seen, move(sum.gradient, used.seen.device)))
        leaves = [used.copy for used in direct]
        gradients = gradients_below(total, above, leaves, later, self._view, keep_graph=keep_graph, call=call)
        found = {used.live: g for used, g in zip(direct, gradients, strict=True) if g is not None}
        event = user.record(gradient.device for gradient in found.values()) if found else None
        self.sums.update((live, Sum(gradient, event)) for live, gradient in found.items())

    def _without(self, name: str) -> str:
        """Describe how to pipeline all pieces but ``name``, or return nothing if these are too few for the stages."""
        others = [each for each in self._engine.piece_names if each != name]
        return (
            f", or pipeline only modules that are (module={others!r})"
            if len(others) >= len(self._engine.stages)
            else ""
        )

    def _check_calls(self) -> None:
        missing = self._engine.calls[len(self._calls) :]
        if missing:
            piece, ordinal = missing[0].piece, missing[0].ordinal
            name, often = self._engine.piece_names[piece], sum(call.piece == piece for call in self._engine.calls)
            raise PipelineRefusal(
                f"training_step called the pipelined module '{name}' {_times(ordinal)}, and {_times(often)} in the"
                f" first minibatch; call the same modules as often in every minibatch{self._without(name)}"
                if ordinal
                else f"training_step did not call the pipelined module '{name}' this time; call the same modules in"
                f" every minibatch{self._without(name)}{_SKIPPED}"
            )

    # The waits of the runner.

    def _through_pipeline(self, start: Callable[[], None], what: str) -> Any:
        """Hand over to the pipeline, let other user code run meanwhile, and return what comes back."""
        ticket = self._resume = Ticket(Precedence.RESUME, self.number)
        start()
        failure: BaseException | None = None
        try:
            self._leave()
        except BaseException as error:  # raised below: what was started comes back first
            failure = error
        try:
            self._engine.watchdog.wait(ticket.wait, f"minibatch {self.number} for {what}")
        except BaseException:
            if self._take_ticket() is not None:  # nothing came, so nobody has asked for the lock yet
                self._engine.lock.request(ticket)
            if ticket.wait(min(UNWINDING, self._engine.watchdog.seconds)):
                self._enter()
            else:  # user code unwinds without the lock, because its holder is stuck
                self._engine.lock.abandon(ticket)
            raise
        self._enter()
        arrived, self._arrived = failure or self._arrived, None
        if isinstance(arrived, BaseException):
            self.failure = arrived
            raise arrived
        return arrived

    def _take_ticket(self) -> Ticket | None:
        with self._mutex:
            ticket, self._resume = self._resume, None
        return ticket

    def _check_cancelled(self) -> None:
        if self.cancelled:
            raise Discarded

    def _enter(self) -> None:
        self.in_user_code = True
        self._step.section.enter()

    def _leave(self, for_good: bool = False) -> None:
        if not self.in_user_code:
            return
        try:
            self._step.section.leave(for_good)
        finally:
            self.in_user_code = False
            self._engine.lock.release()


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


_current: PerThread[Minibatch] = PerThread()


def current() -> Minibatch | None:
    """Return the minibatch whose user code runs in this thread, or None."""
    return _current.get()
