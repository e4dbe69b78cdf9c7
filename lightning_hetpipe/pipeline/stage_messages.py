"""Messages between a stage and the rest of its virtual worker: plain data, nothing that is only true of threads.

    to a stage      Forward, Backward, Cancel     in its inbox, first in, first out
    from a stage    Output, InputGradients        one for each of the first two; Failure where it failed
    between tasks   Version (begin, publish); buffers and gradients of a minibatch

No message holds a lock, a queue, a thread, a live module or a minibatch; what carries messages between threads adds the
order of CUDA streams (:class:`~lightning_hetpipe.pipeline.stage_thread.Parcel`). Weights and layers are known by
number: ``segment`` is a segment's index, and a weight's number is its place among all parameters of its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hetpipe.pipeline.autocast import Autocast
from lightning_hetpipe.pipeline.values import Addends, Gradients, Nth, Value
from lightning_hetpipe.rules.versions import Reading

Sums = Mapping[int, Tensor]
"""Gradients of weights, by number."""


class Flags(NamedTuple):
    """Flags of layers that callbacks may change, version by version."""

    requires_grad: tuple[bool, ...]
    training: tuple[bool, ...]


class Move(NamedTuple):
    """Expected change of a parameter by an optimizer step.

    It is ``scale * first``, or ``scale * first / (sqrt(second) + eps)`` where there is a ``second``: the optimizer's
    own tensors, so that nothing is computed for what no minibatch will use.
    """

    first: Tensor
    scale: float = 1.0
    second: Tensor | None = None
    eps: float = 0.0

    def write(self, weights: Tensor, steps: int, out: Tensor) -> None:
        """Write into ``out`` the ``weights`` after so many ``steps``, without another tensor of their size."""
        device, scale, out = out.device, steps * self.scale, _real(out)
        weights, first = _real(weights.to(device)), _real(self.first.to(device))
        if self.second is None:
            torch.add(weights, first, alpha=scale, out=out)
        else:
            torch.sqrt(_real(self.second.to(device)), out=out).add_(self.eps)
            torch.addcdiv(weights, first, out, value=scale, out=out)


def _real(tensor: Tensor) -> Tensor:
    """The tensor; a complex one with its real and imaginary parts side by side, as Adam steps them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Version(NamedTuple):
    """The live layers of a stage as they are now, to be a version.

    Attributes:
        number: v.
        parameters: All of the stage, in order; a shared one once.
        flags: Of its parameters and modules.
        buffers: Of each of its segments.
        needed: Weights that minibatches use from now on, as far as they are there; of this version or earlier ones.
        moves: Expected change of each parameter by an optimizer step, where weights are predicted; None for no
            change.
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
        """The same with what ``change`` gives in the place of each weight, and of each tensor of a move."""

        def moved(move: Move) -> Move:
            return move._replace(first=change(move.first), second=None if move.second is None else change(move.second))

        moves = [None if move is None else moved(move) for move in self.moves]
        return self._replace(parameters=[*map(change, self.parameters)], moves=moves)


class Forward(NamedTuple):
    """Run the forward of ``minibatch`` at ``segment``, and keep what its backward needs; an evaluation keeps nothing.

    Attributes:
        value: What the segment is given: a :class:`Value`, in an evaluation the nesting itself.
        weights: Those to run on; an evaluation runs on the live ones.
        autocast: What autocast did where the piece was called.
        call: Number of calls of the piece that come before this one in the minibatch.
        again: Whether the minibatch calls the piece later again.
        last: Whether this is the last forward: the minibatch's backward is the next thing that the stage does.
        inference: Whether the piece was called in ``torch.inference_mode``.
    """

    minibatch: int
    segment: int
    value: Any
    weights: Reading
    autocast: Autocast
    call: int = 0
    again: bool = False
    last: bool = False
    inference: bool = False


class Backward(NamedTuple):
    """Run the backward of ``minibatch`` at ``segment``.

    The gradient of a weight with uses elsewhere travels with the backward, as autograd adds uses one by one, the latest
    first: who has the earlier use goes on with the sum so far, and who has the earliest one keeps it.

    Attributes:
        call: As of the :class:`Forward`.
        gradients: Of the segment's outputs.
        sums: The gradients so far of weights that were used after this visit of the segment.
        wanted: The weights that somebody else has used before it, whose gradients are to be handed on.
        apart: Whether the inputs were used after the piece, too: each use of them within it is then an addend.
    """

    minibatch: int
    segment: int
    call: int
    gradients: Gradients
    sums: Sums
    wanted: Sequence[int]
    apart: bool


class Cancel(NamedTuple):
    """Nothing of ``minibatch`` is needed any more. It overtakes what else is in the inbox."""

    minibatch: int


Message = Forward | Backward | Cancel


class Output(NamedTuple):
    """Output of a segment for ``minibatch``, as the ``value`` of the :class:`Forward`."""

    minibatch: int
    segment: int
    value: Any


class InputGradients(NamedTuple):
    """The gradients of what a segment was given for ``minibatch``, and of the weights that were ``wanted``."""

    minibatch: int
    segment: int
    gradients: Gradients
    sums: Sums


class Failure(NamedTuple):
    """Error that a task of ``minibatch`` has raised; ``Discarded`` where it was cancelled."""

    minibatch: int
    error: BaseException


Result = Output | InputGradients | Failure


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
"""Classes of messages, and of what is in them."""
