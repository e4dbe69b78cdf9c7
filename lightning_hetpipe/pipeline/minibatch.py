"""The minibatch runner: the user's ``training_step``, run in a thread of its own ahead of Lightning's loop."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_hetpipe.errors import Discarded, SettingError
from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.lock import Rank, Ticket
from lightning_hetpipe.pipeline.piece_call import PieceCall, below
from lightning_hetpipe.pipeline.stretch import Stretch
from lightning_hetpipe.pipeline.values import Gradients, Value, tensors_of
from lightning_hetpipe.pipeline.view import View

if TYPE_CHECKING:
    from lightning_hetpipe.pipeline.engine import Engine


@dataclass
class Step:
    """What the user's side of one minibatch is.

    Attributes:
        run: Calls ``training_step``; gives its output and the loss to differentiate (divided for accumulation).
        check: Sees that loss before it is differentiated, and the ``id`` of every leaf of its graph that is ours; may
            raise.
        context: Opened once around all of it, in the minibatch's thread.
        stretch: Swaps in the process-wide state that its stretches run with; None leaves the process's alone.
        entered: Called where a stretch of it begins.
    """

    run: Callable[[], tuple[Any, Tensor]]
    check: Callable[[Tensor, Collection[int]], None]
    context: Callable[[], AbstractContextManager[Any]]
    stretch: Stretch | None
    entered: Callable[[], None] = lambda: None


class Minibatch:
    """Minibatch ``number`` in flight, on the weights of ``version``.

    It is in one place at a time: in its runner (user code), or with a stage; at its turn the last stage waits for the
    runner. Wherever it is when it fails or is discarded, it ends there.
    """

    def __init__(self, engine: Engine, number: int, version: int, step: Step, view: View) -> None:
        self.number = number
        self.version = version
        self.output: Any = None
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.failure: BaseException | None = None
        self.cancelled = False
        self.in_user_code = False
        self.turn: queue.SimpleQueue[Gradients | Discarded] = queue.SimpleQueue()
        self.start = Ticket(Rank.START, number)
        self.context = contextvars.copy_context()
        """What the thread that submits it has set for the code that it calls."""
        self._engine = engine
        self._step = step
        self._view = view
        self._calls: list[PieceCall] = []
        self._arrived: Any = None
        self._resume: Ticket | None = None
        self._mutex = threading.Lock()
        self._ended = False
        self._in_backward = False
        self._when_ended: Callable[[], None] | None = None

    # Whoever waits for the minibatch.

    @property
    def ended(self) -> bool:
        return self._ended

    def when_ended(self, call: Callable[[], None]) -> None:
        """Calls ``call`` once the minibatch has ended; at once where it has."""
        with self._mutex:
            if not self._ended:
                self._when_ended = call
                return
        call()

    def end(self, failure: BaseException | None = None) -> None:
        """The minibatch is done: its gradients are there, or it failed."""
        with self._mutex:
            if self._ended:
                return
            self._ended = True
            self.failure = self.failure or failure
            call = self._when_ended
        self._engine.patience.moved()
        if call is not None:
            call()

    # The stages' side.

    def autocast(self, piece: int) -> Autocast:
        """What ``training_step`` had autocast do where it called ``piece``."""
        return self._calls[piece].autocast

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Adds a segment's gradient; segments come from the last to the first, as in a plain backward."""
        earlier = self.gradients.get(parameter)
        if earlier is not None:
            gradient = earlier.to(gradient.device) + gradient
        self.gradients[parameter] = gradient

    def deliver(self, value: Any) -> None:
        """Hands a piece's outputs, its inputs' gradients, or a failure to the runner, with a place in the lock's queue.

        Where no runner waits (it has handed over the last backward, and is through), a failure ends the minibatch.
        """
        ticket = self._take_ticket()
        if ticket is None:
            self.end(value if isinstance(value, BaseException) else None)
            return
        self._arrived = value
        self._engine.lock.request(ticket)

    # The runner's side.

    def run(self) -> None:
        """Runs ``training_step`` and its backward; called in the runner's thread, once."""
        failure: BaseException | None = None
        try:
            self._engine.patience.wait(self.start.wait, f"the start of minibatch {self.number}")
        except BaseException as error:
            self._engine.lock.abandon(self.start)
            self.end(error)
            return
        self._enter()
        try:
            with _running(self), self._step.context():
                self._check_cancelled()
                with self._view:
                    self.output, total = self._step.run()
                self._check_cancelled()
                if self.failure is not None:  # user code has swallowed a stage's failure
                    raise self.failure
                self._check_calls()
                self._view.check()
                self._step.check(total, {*self._view.ids(), *(id(call.anchor) for call in self._calls)})
                self._in_backward = True
                with self._view:  # for hooks, and what is computed again
                    self._backward(total)
        except BaseException as error:
            failure = error
        finally:
            self._leave()
        if failure is not None:
            self.turn.put(Discarded())
            self.end(failure)

    def call(self, piece: int, name: str, given: Any, prepare: Callable[[Any], Any]) -> Any:
        """Runs a piece in the pipeline on ``prepare(given)``; called where ``training_step`` calls the module."""
        self._check_cancelled()
        given = self._view.replaced(given)
        with self._view.resting():
            return self._call(piece, name, prepare(given))

    def _call(self, piece: int, name: str, inputs: Any) -> Any:
        expected = len(self._calls)
        if piece != expected:
            raise SettingError(
                f"the pipelined module '{name}' was called "
                + ("twice in one training_step" if piece < expected else "out of order")
                + (" (by a backward pass, as torch.utils.checkpoint does)" if self._in_backward else "")
                + "; call each pipelined module once, and all of them in the same order as in the first minibatch"
            )
        call = PieceCall(piece, Value.of(inputs), Autocast.current())
        self._calls.append(call)
        outputs: Value = self._through_pipeline(lambda: self._engine.forward(self, call), f"the output of '{name}'")
        self._view.region = len(self._calls)
        return call.connect(tensors_of(inputs), outputs)

    def _backward(self, total: Tensor) -> None:
        """Starts the backward pass, from the user's code after the last call down to that before the first."""
        above: PieceCall | None = None
        for call in reversed(self._calls):
            first = call.piece == 0
            # What the first piece's inputs do not depend on need not wait for its backward.
            before = first and not call.needs_input_gradients
            direct = self._view.leaves(call.piece + 1) + (self._view.leaves(0) if before else [])
            waits = not first or (not before and bool(self._view.leaves(0)))
            leaves = [leaf for _, leaf in direct]
            gradients, found = call.collect(total, above, leaves, keep_graph=waits)
            self._add(direct, found)
            start = partial(self._engine.backward, self, call, gradients)
            if waits:
                call.input_gradients = self._through_pipeline(start, f"the backward of piece {call.piece}")
            else:
                start()
            above = call
        if waits:
            direct = self._view.leaves(0)
            self._add(direct, below(total, above, [leaf for _, leaf in direct], keep_graph=False))
            self.end()

    def _add(self, direct: Sequence[tuple[nn.Parameter, Tensor]], gradients: Sequence[Tensor | None]) -> None:
        for (live, _), gradient in zip(direct, gradients, strict=True):
            if gradient is not None:
                self.add_gradient(live, gradient)

    def _through_pipeline(self, start: Callable[[], None], what: str) -> Any:
        """Hands over to the pipeline, lets other user code run meanwhile, and returns what comes back."""
        ticket = self._resume = Ticket(Rank.RESUME, self.number)
        start()
        self._leave()
        try:
            self._engine.patience.wait(ticket.wait, f"minibatch {self.number} for {what}")
        except BaseException:
            if self._take_ticket() is not None:  # nothing came, so nobody has asked for the lock yet
                self._engine.lock.request(ticket)
            if ticket.wait(self._engine.patience.seconds):
                self._enter()
            else:  # user code unwinds without the lock: whoever holds it is stuck
                self._engine.lock.abandon(ticket)
            raise
        self._enter()
        arrived, self._arrived = self._arrived, None
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

    def _check_calls(self) -> None:
        missing = self._engine.piece_names[len(self._calls) :]
        if missing:
            raise SettingError(
                f"training_step did not call the pipelined module '{missing[0]}' this time; call the same modules in"
                " every minibatch, or pipeline only those that are (module=[...])"
            )

    def _enter(self) -> None:
        self.in_user_code = True
        if self._step.stretch is not None:
            self._step.stretch.enter()
        self._step.entered()

    def _leave(self) -> None:
        if not self.in_user_code:
            return
        if self._step.stretch is not None:
            self._step.stretch.leave()
        self.in_user_code = False
        self._engine.lock.release()


class _Current(threading.local):
    minibatch: Minibatch | None = None


_current = _Current()


def current() -> Minibatch | None:
    """The minibatch whose ``training_step`` runs in this thread, if any."""
    return _current.minibatch


@contextmanager
def _running(minibatch: Minibatch) -> Iterator[None]:
    _current.minibatch = minibatch
    try:
        yield
    finally:
        _current.minibatch = None
