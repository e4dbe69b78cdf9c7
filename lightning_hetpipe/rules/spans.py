"""What took place when, as data: what the engine records, and what pictures and traces are made from."""

from __future__ import annotations

from typing import NamedTuple

LIGHTNING = "Lightning"
"""The row of Lightning's own thread."""
USER_CODE = "user code"
"""The row of the user's step: one stretch at a time, whatever the thread (law L8)."""

Row = int | str
"""The number of a stage, or one of the rows above. In one row one thing takes place at a time."""

FORWARD, LOSS, BACKWARD, EVALUATE = "forward", "loss", "backward", "evaluate"
"""What a stage computes. The loss is the user's code on the last stage, between the other two."""

IDLE, TURN = "idle", "wait for user code"
"""Why a stage does not compute: nothing was ready for it; or it has handed the outputs to the user's code, and waits
for the gradients that the loss gives to them (the turn)."""

STEP = "step"
"""What Lightning's thread does with a minibatch's gradients: hooks, the optimizer's step, callbacks."""


class Span(NamedTuple):
    """Something that took place in ``row``, from ``start`` to ``end``, in seconds.

    ``work`` names it; ``minibatch`` is the one for which it was done, in an evaluation the batch's number there.
    """

    row: Row
    work: str
    minibatch: int
    start: float
    end: float
