"""One minibatch of training: the user's ``training_step`` and the backward pass of its loss, in a runner's thread.

The life of minibatch p on the user's side, in the order of this file:

    _run_step     runs ``training_step`` under the view of its version, then the backward pass of its loss
    call          each call of a pipelined module: inputs to the pipeline, outputs back, joined into the user's graph
    _backward     from the loss to the last call, through the pipeline, to the call before, down to the first
    gradients     of live parameters, which Lightning's step p takes

:class:`~lightning_hetpipe.pipeline.user.batch_in_flight.BatchInFlight` has the thread, the lock and the waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_hetpipe.errors import PipelineRefusal
from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.streams import StreamEvent, move
from lightning_hetpipe.pipeline.user.batch_in_flight import BatchInFlight
from lightning_hetpipe.pipeline.user.parameter_view import ParameterView, UsedParameter
from lightning_hetpipe.pipeline.user.piece_call import PieceCall, gradients_below
from lightning_hetpipe.pipeline.user.user_section import UserSection
from lightning_hetpipe.pipeline.values import Value, tensors_in, tensors_of
from lightning_hetpipe.rules.versions import Reading

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.engine import Engine
    from lightning_hetpipe.pipeline.stage_thread import Loss

_SKIPPED = (
    "; a layer that is skipped at random (layerdrop, say) needs a chance of 0 to be skipped, or to be left out of"
    " module=[...]"
)
"""Most frequent cause of calls that differ from minibatch to minibatch."""


@dataclass
class Step:
    """The user's side of one minibatch.

    Attributes:
        run: Calls ``training_step``, and returns its output and the loss to differentiate (divided for accumulation).
        check: Checks this loss before it is differentiated, given the ``id`` of our leaves in its graph. It may raise.
        context: Opened once around the whole step, in the minibatch's thread.
        section: Swaps process state in and out around its sections of user code.
    """

    run: Callable[[], tuple[Any, Tensor]]
    check: Callable[[Tensor, Collection[int]], None]
    context: Callable[[], AbstractContextManager[Any]]
    section: UserSection


@dataclass(slots=True)
class Sum:
    """The gradient of a weight so far: the sum of its uses, the latest first, computed behind ``event``."""

    gradient: Tensor
    event: StreamEvent | None


class Minibatch(BatchInFlight):
    """Minibatch ``number`` in flight, on ``weights``.

    Attributes:
        gradients: Gradients of live parameters, once it has ended.
        sums: Gradients that no stage keeps, because user code contributes to them.
        continued: Parameters that user code used before the call whose backward runs: their sums go on.
        calling: The call of a piece that is in the pipeline.
    """

    def __init__(self, engine: Engine, number: int, weights: Reading, step: Step, view: ParameterView) -> None:
        super().__init__(engine, number, step.section)
        self.weights = weights
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.sums: dict[nn.Parameter, Sum] = {}
        self.continued: set[nn.Parameter] = set()
        self.calling: PieceCall
        self._engine = engine
        self._step = step
        self._view = view
        self._view.calls = self
        self._calls: list[PieceCall] = []
        self._in_backward = False
        self.loss: Loss | None = None

    # The runner's side.

    def _run_step(self) -> None:
        with self._step.context():
            with self._view:
                self.output, total = self._step.run()
            self._check_cancelled()
            if self.failure is not None:  # user code has swallowed a stage's failure
                raise self.failure
            self._check_calls()
            self._view.check()
            self._step.check(total, {*self._view.ids(), *(id(call.anchor) for call in self._calls)})
            self._in_backward = True
            self._backward(total)

    def _step_ended(self, failure: BaseException | None) -> None:
        for call in self._calls:
            call.close()
        self._view.close()
        if failure is not None:
            self._engine.abandon(self)
            self.end(failure)

    def calls_of(self, piece: int) -> int:
        """Count the calls of ``piece`` so far."""
        return sum(call.which.piece == piece for call in self._calls)

    def call(self, piece: int, name: str, given: Any, prepare: Callable[[Any], Any]) -> Any:
        """Run a piece in the pipeline on ``prepare(given)`` when ``training_step`` calls the module."""
        self._check_cancelled()
        with self._view.suspended():
            return self._call(piece, name, prepare(self._view.replaced(given)))

    def _call(self, piece: int, name: str, inputs: Any) -> Any:
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
        call = PieceCall(calls[done], Value.of(inputs), Autocast.current(), self._engine.streams.user)
        self._calls.append(call)
        outputs: Value = self._through_pipeline(lambda: self._engine.forward(self, call), f"the output of '{name}'")
        self._engine.streams.user.join(self.arrived_after, outputs.tensors)
        outputs = outputs.on(self._engine.root_device)
        self.loss = self._engine.loss(self, call)
        self._view.region = len(self._calls)
        connected = call.connect(tensors_of(inputs), outputs)
        self._view.stand_in(call.later_inputs)
        return connected

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
            leaves, later = [used.copy for used in direct], self._later(direct)
            gradients, found = call.collect(total, above, leaves, later, self._view, keep_graph=waits)
            self._add(direct, found)
            self.continued = {used.live for region in range(before, index + 1) for used in self._view.used(region)}
            start = partial(self._engine.backward, self, call, [*gradients])
            if waits:
                found = self._through_pipeline(start, f"the backward of call {index} of a piece")
                self._engine.streams.user.join(self.arrived_after, tensors_in(found))
                call.take_input_gradients(found)
            else:
                start()
            above = call
        if waits:
            direct = self._view.used(0)
            leaves, later = [used.copy for used in direct], self._later(direct)
            self._add(direct, gradients_below(total, above, leaves, later, self._view, keep_graph=False))
            self.end()

    def _later(self, direct: Sequence[UsedParameter]) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors that user code used for ``direct``, with gradients of later uses, if there are any."""
        found = []
        for used in direct:
            if (sum := self.sums.get(used.live)) is not None:
                self._engine.streams.user.join(sum.event, [sum.gradient])
                found.append((used.seen, move(sum.gradient, used.seen.device)))
        return found

    def _add(self, direct: Sequence[UsedParameter], gradients: Sequence[Tensor | None]) -> None:
        found = {used.live: g for used, g in zip(direct, gradients, strict=True) if g is not None}
        event = self._engine.streams.user.record(gradient.device for gradient in found.values()) if found else None
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


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
