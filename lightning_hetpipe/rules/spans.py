"""Spans: work over time as data, which the engine records, and pictures and traces show."""

from __future__ import annotations

from typing import NamedTuple

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
