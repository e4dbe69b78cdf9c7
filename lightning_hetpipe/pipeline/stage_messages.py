"""Messages between a stage and the rest of its virtual worker: plain data that is not bound to threads.

    to a stage      Forward, Backward, Cancel     in its inbox, first in, first out
                    Wake                          beside it, within a process
    from a stage    Output, InputGradients        for each forward and backward, or Failure
    between tasks   Version (begin, publish), and buffers and gradients of a minibatch

No message holds a lock, a queue, a thread, a live module or a minibatch. A carrier between threads adds the order of
CUDA streams (:class:`Parcel`). ``segment`` is a segment's index. A weight's number is its place among all parameters of
its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hetpipe.pipeline.dtypes import Autocast
from lightning_hetpipe.pipeline.streams import StreamEvent
from lightning_hetpipe.pipeline.values import Addends, Gradients, Nth, Value
from lightning_hetpipe.rules.versions import Reading

Sums = Mapping[int, Tensor]
"""Gradients of weights, by number."""


class Flags(NamedTuple):
    """Flags of layers that callbacks may change, version by version."""

    requires_grad: tuple[bool, ...]
    training: tuple[bool, ...]


class Move(NamedTuple):
    """Expected change of a parameter by an optimizer step. It is ``scale * first``, or with ``second`` it is ``scale *
    first / (sqrt(second) + eps)``. The tensors are the optimizer's own, so nothing is computed for unused changes."""

    first: Tensor
    scale: float = 1.0
    second: Tensor | None = None
    eps: float = 0.0

    def write(self, weights: Tensor, steps: int, out: Tensor) -> None:
        """Write into ``out`` the ``weights`` after ``steps`` steps, without another tensor of their size."""
        device, scale, out = out.device, steps * self.scale, _real(out)
        weights, first = _real(weights.to(device)), _real(self.first.to(device))
        if self.second is None:
            torch.add(weights, first, alpha=scale, out=out)
        else:
            torch.sqrt(_real(self.second.to(device)), out=out).add_(self.eps)
            torch.addcdiv(weights, first, out, value=scale, out=out)


def _real(tensor: Tensor) -> Tensor:
    """Return the tensor, or a complex one with its real and imaginary parts side by side, as Adam steps them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Version(NamedTuple):
    """The present live layers of a stage as a version.

    Attributes:
        number: v.
        parameters: All parameters of the stage in order, a shared one once.
        buffers: Buffers of each of its segments.
        needed: Weights of this or earlier versions that minibatches use from now on.
        moves: Expected change of each parameter by an optimizer step if weights are predicted, or None for no change.
    """

    number: int
    parameters: Sequence[Tensor]
    flags: Flags
    buffers: Sequence[Sequence[Tensor]]
    needed: Sequence[Reading]
    moves: Sequence[Move | None] = ()

    @property
    def is_late(self) -> bool:
        """True if minibatches that use an earlier version may have begun already."""
        return any(reading.version < self.number for reading in self.needed)

    def replaced(self, change: Callable[[Tensor], Any]) -> Version:
        """Return the version with each weight, and each tensor of a move, replaced by ``change``."""

        def moved(move: Move) -> Move:
            return move._replace(first=change(move.first), second=None if move.second is None else change(move.second))

        moves = [None if move is None else moved(move) for move in self.moves]
        return self._replace(parameters=[*map(change, self.parameters)], moves=moves)


class Forward(NamedTuple):
    """Run the forward of ``minibatch`` at ``segment``, and keep what its backward needs. An evaluation keeps nothing.

    Attributes:
        value: Input of the segment.
        weights: Weights to run on. An evaluation runs on the live ones.
        autocast: State of autocast at the call of the piece.
        call: Number of earlier calls of the piece in the minibatch.
        again: Whether the minibatch calls the piece again later.
        last: Whether this is the last forward, after which the stage first runs the minibatch's backward.
        inference: Whether the piece was called in ``torch.inference_mode``.
    """

    minibatch: int
    segment: int
    value: Value
    weights: Reading
    autocast: Autocast
    call: int = 0
    again: bool = False
    last: bool = False
    inference: bool = False


class Backward(NamedTuple):
    """Run the backward of ``minibatch`` at ``segment``.

    The gradient of a weight with uses elsewhere travels with the backward, because autograd adds uses one by one, the
    latest first. The stage of an earlier use continues the sum, and the stage of the earliest use keeps it.

    Attributes:
        call: As in :class:`Forward`.
        gradients: Gradients of the segment's outputs.
        sums: Gradients so far of weights that were used after this visit of the segment.
        wanted: Weights that were used elsewhere before it, and whose gradients are to be handed on.
        apart: Whether the inputs were used after the piece as well. Then each use of them within it is an addend.
    """

    minibatch: int
    segment: int
    call: int
    gradients: Gradients
    sums: Sums
    wanted: Sequence[int]
    apart: bool


class Cancel(NamedTuple):
    """Drop everything of ``minibatch``. The message overtakes all else in the inbox."""

    minibatch: int


class Wake(NamedTuple):
    """Do the work that was asked beside messages. Only within a process."""

    minibatch: int = 0


Message = Forward | Backward | Cancel | Wake


class Output(NamedTuple):
    """Output of a segment for ``minibatch``."""

    minibatch: int
    segment: int
    value: Value


class InputGradients(NamedTuple):
    """Gradients of a segment's inputs for ``minibatch``, and of the weights that were ``wanted``."""

    minibatch: int
    segment: int
    gradients: Gradients
    sums: Sums


class Failure(NamedTuple):
    """Error of a task of ``minibatch``, or ``Discarded`` if it was cancelled."""

    minibatch: int
    error: BaseException


Result = Output | InputGradients | Failure


class Parcel(NamedTuple):
    """A message whose value is computed behind ``event`` in streams, and its sums behind ``others``."""

    message: Message
    event: StreamEvent | None = None
    others: tuple[StreamEvent, ...] = ()


Done = Callable[[Result, StreamEvent | None], None]
"""Takes a result, and the event behind which it is computed."""

RECORDS: Sequence[type[Any]] = (
    Forward,
    Backward,
    Cancel,
    Version,
    Move,
    Flags,
    Output,
    InputGradients,
    Value,
    Nth,
    Addends,
    Autocast,
    Reading,
    Failure,
)
"""Classes of messages, and of their contents."""
