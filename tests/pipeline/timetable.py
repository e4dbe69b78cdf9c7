"""Passes that end in the order of a simulation, so that what an engine does is a matter of its schedule only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_hetpipe.planning.model.simulate import Simulation
from lightning_hetpipe.rules.schedule import Work
from tests.pipeline.driving import Line, X

PATIENCE = 30.0


class Timetable:
    """Holds up each stage's pass until the simulation's time has come at which it ends.

    It fails if a stage takes another task than the simulation says, as the one that is to end next never begins then.
    Times of different tasks must differ: give stages times like 1.0003 and 2.0007.

    Args:
        simulation: Of one piece.
    """

    def __init__(self, simulation: Simulation) -> None:
        # When, stage, whether it is a backward, minibatch; a turn has one of each.
        self._ends = sorted(
            (span.end if backward else span.forwarded, span.stage, backward, span.minibatch)
            for span in simulation.spans
            for backward in (False, True)
            if span.work is not (Work.FORWARD if backward else Work.BACKWARD)
        )
        assert len({end for end, *_ in self._ends}) == len(self._ends), "two tasks end at the same time"
        self._changed = threading.Condition()
        self._begun: set[tuple[int, bool, int]] = set()
        self._released: set[tuple[int, bool, int]] = set()
        self._puts = 0

    def __call__(self, stage: int, work: str, minibatch: int) -> Callable[[], None] | None:
        """A pass begins, see ``BeforePass``."""
        if work == "loss":
            return None
        what = stage, work == "backward", minibatch

        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: what in self._released, PATIENCE), f"{what} was not to end"

        with self._changed:
            self._begun.add(what)
            self._changed.notify_all()
        return wait

    def run(self, line: Line, in_flight: int, minibatches: int, inputs: Sequence[Tensor] | None = None) -> None:
        """Sends minibatches through ``line``, whose ``before_pass`` this is, and publishes each."""
        engine = line.engine
        each: Any
        for each in engine.stages:
            each.put = self._counted(each.put)

        def submit(number: int) -> None:
            engine.submit(number, line.plain(X if inputs is None else inputs[number - 1]))

        with line.running():
            expected = min(in_flight, minibatches)
            for number in range(1, expected + 1):
                submit(number)
            with engine.main.unlocked():
                self._arrived(expected)
            for _, stage, backward, number in self._ends:
                with engine.main.unlocked():
                    self._end(stage, backward, number)
                    done = backward and stage == 0
                    expected += 0 if done else 1
                    self._arrived(expected)
                if done:
                    engine.finish(number)
                    engine.delivered(number)
                    engine.publish(number)
                    if number + in_flight <= minibatches:
                        submit(number + in_flight)
                        expected += 1
                        with engine.main.unlocked():
                            self._arrived(expected)

    def _end(self, *what: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: what in self._begun, PATIENCE), f"{what} is to end, and has not begun"
            self._released.add(what)
            self._changed.notify_all()

    def _arrived(self, puts: int) -> None:
        """Waits until so many tasks have been given to stages."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._puts == puts, PATIENCE), f"{self._puts} tasks, not {puts}"

    def _counted(self, put: Callable[[Any], None]) -> Callable[[Any], None]:
        def counted(task: Any) -> None:
            put(task)
            with self._changed:
                self._puts += 1
                self._changed.notify_all()

        return counted
