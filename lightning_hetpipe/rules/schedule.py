"""The schedule, written once as data (laws L1 and L2).

A model is a list of *pieces* (pipelined modules, in the order of their first calls), each a list of *layers*. Layers
are numbered over all pieces, and a *stage* is a contiguous range of layers. The overlap of a stage and a piece is a
*segment*: the layers that one stage runs in one go. An example of an encoder (layers 0-3) and a decoder (4-6) on three
stages that start at layers 0, 2 and 5:

    piece      |  encoder      |  decoder   |
    layer      | 0   1   2   3 | 4    5   6 |
    stage      | 0   0   1   1 | 1    2   2 |
    segment    |   0   |   1   | 2  |   3   |

Each *call* of a piece visits the piece's segments in order. If a piece is called twice, its segments are visited twice.
A minibatch makes the calls in order (forwards), and goes back in the opposite order (backwards). Its last visit is a
TURN: forward, loss and backward are one task of the stage. The user's code runs between two calls, and at the turn.
Each stage takes its tasks first in, first out.

A *span* is work over time. The engine records spans, and pictures and traces show them.
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
    """Call number ``index`` of ``training_step``, for the piece ``piece``.

    ``ordinal`` counts the earlier calls of this piece in the step. ``again`` is True if the step calls it again later.
    """

    index: int
    piece: int
    ordinal: int = 0
    again: bool = False


@dataclass(frozen=True)
class Segment:
    """The layers ``first`` to ``last`` (both inclusive, numbered over all pieces), which ``stage`` runs in one go."""

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
    """Return the calls of a step that calls ``pieces`` in this order."""
    order, before = list(pieces), Counter[int]()
    left = Counter(order)
    found = []
    for index, piece in enumerate(order):
        left[piece] -= 1
        found.append(Call(index, piece, before[piece], left[piece] > 0))
        before[piece] += 1
    return tuple(found)


def segments(piece_lengths: Sequence[int], split_points: Sequence[int]) -> tuple[Segment, ...]:
    """Return the segments of pieces with ``piece_lengths`` layers, over stages that start at ``split_points``.

    Raises:
        ValueError: if ``split_points`` does not start at 0, increase, and lie within the layers.
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
    """Return all tasks of a minibatch with the calls ``order``, in the order in which the tasks become ready."""
    *before, last = [(part, call) for call in order for part in parts if part.piece == call.piece]
    return (
        *(Instruction(Work.FORWARD, *visit) for visit in before),
        Instruction(Work.TURN, *last),
        *(Instruction(Work.BACKWARD, *visit) for visit in reversed(before)),
    )


class CallOrder(Generic[T]):
    """Order of minibatches at a segment that changes its buffers and is visited several times by each (law L2).

    One minibatch at a time runs its forwards there, in order of p. ``T`` is a forward's type. The buffers after
    minibatch p are those after its last call, and minibatch p + 1 starts from them. So the first forward of p + 1 waits
    until p has made its last call, while other tasks of the stage go on.
    """

    def __init__(self) -> None:
        self._open: int | None = None
        self._waiting: deque[tuple[int, T]] = deque()

    def admits(self, minibatch: int, forward: T) -> bool:
        """Return True if ``forward`` may run now. Otherwise keep it until :meth:`close` returns it."""
        if self._open is not None and minibatch > self._open:
            self._waiting.append((minibatch, forward))
            return False
        if self._open is None:  # an earlier one than the open one was cancelled, and nobody wants what it leaves
            self._open = minibatch
        return True

    def close(self, minibatch: int) -> T | None:
        """End the calls of ``minibatch``, and return the forward that is now ready and admitted, or None."""
        if minibatch != self._open:
            return None
        self._open, following = self._waiting.popleft() if self._waiting else (None, None)
        return following

    def withdraw(self, minibatch: int) -> bool:
        """Drop a waiting forward of ``minibatch``, and return False if there is none."""
        kept = [waiting for waiting in self._waiting if waiting[0] != minibatch]
        found = len(kept) < len(self._waiting)
        self._waiting = deque(kept)
        return found


LIGHTNING = "Lightning"
"""The row of Lightning's own thread."""
USER_CODE = "user code"
"""The row of the user's step: one section at a time, in any thread (law L8)."""

Row = int | str
"""The number of a stage, or one of the rows above. A row has one span at a time."""

FORWARD, LOSS, BACKWARD, EVALUATE = "forward", "loss", "backward", "evaluate"
"""Work of a stage. The loss is user code on the last stage, between forward and backward."""

IDLE, TURN = "idle", "wait for user code"
"""Waits of a stage: no task is ready, or user code has the outputs and computes their gradients (the turn)."""

STEP = "step"
"""Work of Lightning's thread with a minibatch's gradients: hooks, the optimizer's step, callbacks."""


class Span(NamedTuple):
    """Work in ``row``, from ``start`` to ``end``, in seconds. ``work`` is its name.

    In an evaluation, ``minibatch`` is the number of the batch there.
    """

    row: Row
    work: str
    minibatch: int
    start: float
    end: float
