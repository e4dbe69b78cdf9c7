"""A recorded run of the engine has the order of the simulated one, which knows the schedule alone.

No clock decides: each pass ends when the simulation says that it is its turn, and after all that the pass before it has
set going has come to the stages' queues. What remains to the engine is what it is tested for: which task a stage takes
next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from lightning_hetpipe.pipeline.recorder import Recorder, Window
from lightning_hetpipe.planning.model.simulate import StageTimes, simulate
from lightning_hetpipe.reporting.timeline import Timeline
from lightning_hetpipe.rules.schedule import Span
from tests.pipeline.driving import Line, mlp

UNEVEN = [StageTimes(1.0, 2.03, loss=0.0), StageTimes(1.71, 3.37), StageTimes(0.83, 1.57), StageTimes(1.13, 2.29)]
"""Whose sums are all different, so that nothing ends at the same moment."""

Task = tuple[int, str, int]
"""Stage, "forward" or "backward", minibatch."""


class Conductor:
    """Lets passes end in the order ``ends``, each after the tasks that those before it lead to are queued."""

    def __init__(self, ends: list[Task], queued: list[int]) -> None:
        self._ends = ends
        self._wanted = queued  # tasks that must have been queued before the pass with that index ends
        self._done = self._queued = 0
        self._changed = threading.Condition()

    def __call__(self, stage: int, work: str, minibatch: int) -> Callable[[], None] | None:
        return None if work == "loss" else lambda: self._end((stage, work, minibatch))

    def _end(self, task: Task) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_due(task), timeout=30), f"{task} never came"
            self._done += 1
            self._changed.notify_all()

    def _is_due(self, task: Task) -> bool:
        return self._ends[self._done] == task and self._queued >= self._wanted[self._done]

    def watch(self, stage: Any) -> None:
        put = stage.put

        def counted(task: Any) -> None:
            put(task)
            with self._changed:
                self._queued += 1
                self._changed.notify_all()

        stage.put = counted


def order(spans: tuple[Span, ...], stage: int) -> list[tuple[str, int]]:
    passes = [span for span in spans if span.row == stage and span.work != "loss"]
    return [(span.work, span.minibatch) for span in passes]


@pytest.mark.parametrize("in_flight", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_run_has_the_simulations_order(stages: int, in_flight: int) -> None:
    count, times = 14, UNEVEN[-stages:]
    simulation = simulate(times, in_flight, count)
    expected = Timeline.simulated(simulation, times, in_flight)
    ends = sorted(expected.spans, key=lambda span: span.end)
    # The first Nm minibatches are queued at once. A pass then leads to one more task, but for the last backward of a
    # minibatch that nobody waits for.
    queued, wanted = min(in_flight, count), []
    for span in ends:
        wanted.append(queued)
        over = span.row == 0 and span.work == "backward" and span.minibatch + in_flight > count
        queued += not over
    conductor = Conductor([(int(span.row), span.work, span.minibatch) for span in ends], wanted)

    recorder = Recorder(Window())
    line = Line(mlp(4), cuts=range(0, 4, 4 // stages), in_flight=in_flight, before_pass=recorder.passes(conductor))
    for stage in line.engine.stages:
        conductor.watch(stage)
    with line.running() as engine:
        for minibatch in range(1, min(in_flight, count) + 1):
            recorder.submitted(minibatch, 0)
            engine.submit(minibatch, line.plain())
        for minibatch in range(1, count + 1):
            engine.finish(minibatch)
            engine.publish(minibatch)
            if minibatch + in_flight <= count:
                recorder.submitted(minibatch + in_flight, minibatch)
                engine.submit(minibatch + in_flight, line.plain())

    measured = recorder.spans()
    for row in range(stages):
        assert order(measured, row) == order(expected.spans, row)
