"""Order of simulated minibatches at segments that are visited several times and change buffers (law L2)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_hetpipe.rules.call_order import CallOrder
from lightning_hetpipe.rules.schedule import Instruction, Work

Task = tuple[int, int]
"""Minibatch, and which instruction of its route."""


class SimulatedCalls:
    """A :class:`~lightning_hetpipe.rules.call_order.CallOrder` for each segment that changes buffers.

    Args:
        route: Instructions of a minibatch.
        changing: Indices of the segments whose forwards change buffers; without any, all tasks are ready at once.
    """

    def __init__(self, route: Sequence[Instruction], changing: Collection[int]) -> None:
        self._route = route
        self._orders = {segment: CallOrder[Task]() for segment in changing}

    def __bool__(self) -> bool:
        return bool(self._orders)

    def admits(self, number: int, index: int) -> bool:
        """Tell whether the task is ready; a forward may have to wait for another minibatch's last call."""
        task = self._route[index]
        order = self._orders.get(task.segment.index)
        if order is None or task.work is Work.BACKWARD or not (task.call.again or task.call.ordinal):
            return True
        return order.admits(number, (number, index))

    def forwarded(self, number: int, index: int) -> Task | None:
        """The forward of the task is done: where it was the last call, give the next minibatch's, which is ready."""
        task = self._route[index]
        order = self._orders.get(task.segment.index)
        if order is None or task.call.again or not task.call.ordinal:
            return None
        return order.close(number)
