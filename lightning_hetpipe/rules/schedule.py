"""The schedule, written once as data (laws L1 and L2).

A model is a list of *pieces* (pipelined modules, in the order of their first calls), each a list of *layers*. Layers
are numbered through, over all pieces, and a *stage* is a contiguous range of them. Where a stage and a piece overlap
lies a *segment*: the layers that one stage runs in one go. For an encoder (layers 0-3) and a decoder (4-6) on three
stages that start at layers 0, 2 and 5:

    piece      |  encoder      |  decoder   |
    layer      | 0   1   2   3 | 4    5   6 |
    stage      | 0   0   1   1 | 1    2   2 |
    segment    |   0   |   1   | 2  |   3   |

Each *call* of a piece visits the piece's segments in order: where a piece is called twice, they are visited twice. A
minibatch makes the calls in order (forwards), and goes back in the opposite order (backwards); its last visit is a
TURN, where forward, loss and backward are one task of the stage. Between two calls, and at the turn, the user's own
code runs. Each stage takes its tasks first in, first out.

A *span* is work over time: the engine records spans, and pictures and traces show them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Work(Enum):
    """Kind of a stage's task for one minibatch at one segment."""

    FORWARD = "forward"
    BACKWARD = "backward"
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a piece in ``training_step``.

    Attributes:
        index: Its place among the calls of the step.
        piece: The piece that is called.
        ordinal: Number of calls of the piece that come before it in the step.
        again: Whether the step calls the piece later again.
    """

    index: int
    piece: int
    ordinal: int = 0
    again: bool = False


@dataclass(frozen=True)
class Segment:
    """The layers ``first`` to ``last`` (both inclusive, numbered over all pieces), run in one go by ``stage``."""

    index: int
    piece: int
    stage: int
    first: int
    last: int

    @property
    def layers(self) -> range:
        return range(self.first, self.last + 1)


@dataclass(frozen=True)
class Instruction:
    """One task of a stage: ``work`` at ``segment``, for ``call``."""

    work: Work
    segment: Segment
    call: Call


def calls(pieces: Iterable[int]) -> tuple[Call, ...]:
    """The calls of a step that calls ``pieces`` in this order."""
    order, before = list(pieces), Counter[int]()
    left = Counter(order)
    found = []
    for index, piece in enumerate(order):
        left[piece] -= 1
        found.append(Call(index, piece, before[piece], left[piece] > 0))
        before[piece] += 1
    return tuple(found)


def segments(piece_lengths: Sequence[int], split_points: Sequence[int]) -> tuple[Segment, ...]:
    """The segments of pieces with ``piece_lengths`` layers each, over stages that start at the layers ``split_points``.

    Raises:
        ValueError: where ``split_points`` is not an increasing sequence that starts at 0 and lies within the layers.
    """
    total = sum(piece_lengths)
    ends = [*split_points[1:], total]
    if not split_points or split_points[0] != 0 or any(a >= b for a, b in zip(split_points, ends, strict=True)):
        wrong = f"split points {tuple(split_points)}"
        raise ValueError(f"{wrong} must start at 0, increase, and stay below the number of layers, {total}")
    found: list[Segment] = []
    start = 0
    for piece, length in enumerate(piece_lengths):
        end = start + length
        for stage, (first, after) in enumerate(zip(split_points, ends, strict=True)):
            low, high = max(first, start), min(after, end)
            if low < high:
                found.append(Segment(len(found), piece, stage, low, high - 1))
        start = end
    return tuple(found)


def route(parts: Sequence[Segment], order: Sequence[Call]) -> tuple[Instruction, ...]:
    """Every task of a minibatch that makes the calls ``order``, in the order in which they become ready."""
    *before, last = [(part, call) for call in order for part in parts if part.piece == call.piece]
    return (
        *(Instruction(Work.FORWARD, *visit) for visit in before),
        Instruction(Work.TURN, *last),
        *(Instruction(Work.BACKWARD, *visit) for visit in reversed(before)),
    )


class CallOrder(Generic[T]):
    """Order of minibatches at a segment that each of them visits several times, and that changes its buffers (law L2).

    One minibatch at a time runs its forwards there, in order of p; ``T`` are the forwards. The buffers after minibatch
    p are those that its last call leaves, and minibatch p + 1 starts from them. So the first forward of p + 1 waits
    until p has made its last call, while other tasks of the stage go on.
    """

    def __init__(self) -> None:
        self._open: int | None = None
        self._waiting: deque[tuple[int, T]] = deque()

    def admits(self, minibatch: int, forward: T) -> bool:
        """Tell whether ``forward`` may run now; one that may not is kept until :meth:`close` gives it."""
        if self._open is not None and minibatch > self._open:
            self._waiting.append((minibatch, forward))
            return False
        if self._open is None:  # an earlier one than the open one was cancelled, and nobody wants what it leaves
            self._open = minibatch
        return True

    def close(self, minibatch: int) -> T | None:
        """End the calls of ``minibatch``; give the forward that is ready by that, which is admitted."""
        if minibatch != self._open:
            return None
        self._open, following = self._waiting.popleft() if self._waiting else (None, None)
        return following

    def withdraw(self, minibatch: int) -> bool:
        """Drop a forward of ``minibatch`` that waits; return False if none does."""
        kept = [waiting for waiting in self._waiting if waiting[0] != minibatch]
        found = len(kept) < len(self._waiting)
        self._waiting = deque(kept)
        return found


LIGHTNING = "Lightning"
"""The row of Lightning's own thread."""
USER_CODE = "user code"
"""The row of the user's step: one section at a time, whatever the thread (law L8)."""

Row = int | str
"""The number of a stage, or one of the rows above. In one row one thing takes place at a time."""

FORWARD, LOSS, BACKWARD, EVALUATE = "forward", "loss", "backward", "evaluate"
"""Work of a stage. The loss is the user's code on the last stage, between the other two."""

IDLE, TURN = "idle", "wait for user code"
"""Waits of a stage: nothing was ready for it; or it has handed the outputs to the user's code, and waits
for the gradients that the loss gives to them (the turn)."""

STEP = "step"
"""Work of Lightning's thread with a minibatch's gradients: hooks, the optimizer's step, callbacks."""


class Span(NamedTuple):
    """Work in ``row``, from ``start`` to ``end``, in seconds.

    ``work`` names it; ``minibatch`` is the one for which it was done, in an evaluation the batch's number there.
    """

    row: Row
    work: str
    minibatch: int
    start: float
    end: float
