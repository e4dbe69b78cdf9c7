"""Timeline of one virtual worker, measured or simulated: work of each stage over time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import accumulate, pairwise
from operator import attrgetter
from os import PathLike
from typing import Any

import numpy as np

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.simulate import Simulation, StageTimes
from lightning_hetpipe.reporting.trace import chrome_trace
from lightning_hetpipe.rules.schedule import (
    BACKWARD,
    EVALUATE,
    FORWARD,
    IDLE,
    LIGHTNING,
    LOSS,
    TURN,
    USER_CODE,
    Row,
    Span,
    Work,
)


@dataclass(frozen=True, repr=False)
class Timeline:
    """Spans of one virtual worker, over time. A notebook shows it as ``plots.draw`` draws it.

    Attributes:
        spans: Spans by their start, in seconds since ``zero``. Spans of one row do not overlap. Rows are the stages,
            "Lightning" (its own thread) and "user code" (the sections of ``training_step``).
        versions: Version of the weights that each minibatch used.
        zero: Time 0 of the clock in seconds since 1970, or None without a clock, as in a simulation.
        devices: Each stage's device for people, or empty if unknown.
    """

    spans: tuple[Span, ...]
    stages: int
    in_flight: int
    virtual_worker: int = 0
    versions: Mapping[int, int] = field(default_factory=dict)
    zero: float | None = None
    devices: tuple[str, ...] = ()

    @classmethod
    def simulated(
        cls, simulation: Simulation, stages: Sequence[StageTimes], in_flight: int, devices: Sequence[str] = ()
    ) -> Timeline:
        """Make the timeline of ``simulate(stages, in_flight, ...)``, to compare with a measured timeline."""
        spans = [part for span in simulation.spans for part in _parts(span, stages[span.stage])]
        versions = {span.minibatch: max(0, span.minibatch - in_flight) for span in spans}
        ordered = tuple(sorted(spans, key=attrgetter("start")))
        return cls(ordered, len(stages), in_flight, versions=versions, devices=tuple(devices))

    def __str__(self) -> str:
        """Subject such as "virtual worker 0, minibatches 2 to 64, Nm = 5 (measured)"."""
        kept = self.minibatches
        which = f"minibatches {kept.start} to {kept.stop - 1}" if kept else "no minibatches"
        clock = "simulated" if self.zero is None else "measured"
        return f"virtual worker {self.virtual_worker}, {which}, Nm = {self.in_flight} ({clock})"

    def __repr__(self) -> str:
        return f"<Timeline of {self}>"

    def _repr_png_(self) -> bytes | None:
        """Draw a picture for notebooks. None, if nothing can be drawn, makes them show the text."""
        from lightning_hetpipe.reporting.plots import draw  # and matplotlib, which other uses do without

        file = BytesIO()
        try:
            draw(self).savefig(file, format="png")
        except SettingError:
            return None
        return file.getvalue()

    @property
    def minibatches(self) -> range:
        """Range from the first to the last kept minibatch."""
        numbers = [span.minibatch for span in self.spans if span.work != EVALUATE]
        return range(min(numbers), max(numbers) + 1) if numbers else range(0)

    @property
    def rows(self) -> list[Row]:
        """The stages, and the other rows that have spans."""
        used = {span.row for span in self.spans}
        return [*range(self.stages), *(row for row in (USER_CODE, LIGHTNING) if row in used)]

    @property
    def extent(self) -> tuple[float, float]:
        """The first start and the last end, in seconds."""
        starts, ends = [span.start for span in self.spans], [span.end for span in self.spans]
        return min(starts, default=0.0), max(ends, default=0.0)

    def between(self, first: int, last: int) -> Timeline:
        """Return the part of the timeline that belongs to the minibatches ``first`` to ``last``, both inclusive.

        Evaluations in between are included. At the edges stages look too idle, because other minibatches are left out.
        ``reporting.plots.draw(timeline, first, last)`` shows also these.

        Raises:
            SettingError: if the timeline has nothing of these minibatches.
        """
        own = [span for span in self.spans if span.work != EVALUATE and first <= span.minibatch <= last]
        if not own:
            kept = self.minibatches
            there = f"it has minibatches {kept.start} to {kept.stop - 1}" if kept else "it is empty"
            raise SettingError(f"between({first}, {last}) asks for minibatches that this timeline lacks: {there}")
        start, end = replace(self, spans=tuple(own)).extent
        own += [span for span in self.spans if span.work == EVALUATE and start <= span.start and span.end <= end]
        versions = {number: version for number, version in self.versions.items() if first <= number <= last}
        return replace(self, spans=tuple(sorted(own, key=attrgetter("start"))), versions=versions)

    def label(self, row: Row) -> str:
        """Name ``row`` for people, a stage with its device if known: "stage 1, RTX-3090:0"."""
        if not isinstance(row, int):
            return str(row)
        return f"stage {row}, {self.devices[row]}" if self.devices else f"stage {row}"

    def row(self, row: Row) -> list[Span]:
        """Return the spans in ``row``, by their start."""
        return [span for span in self.spans if span.row == row]

    def waits(self, stage: int) -> Iterator[Span]:
        """Yield the waits of ``stage`` as spans with the work IDLE or TURN and the minibatch that follows."""
        turns = next((span.row for span in self.spans if span.work == LOSS), self.stages - 1)
        for before, after in pairwise(self.row(stage)):
            if before.end < after.start:
                turn = before.work in (FORWARD, LOSS) and after.work in (LOSS, BACKWARD)
                turn = turn and stage == turns and before.minibatch == after.minibatch
                yield Span(stage, TURN if turn else IDLE, after.minibatch, before.end, after.start)

    def utilisation(self, stage: int, start: Any, end: Any) -> Any:
        """Return the fraction, 0 to 1, of the time from ``start`` to ``end`` (or arrays) that ``stage`` computed."""
        row = self.row(stage)
        when = [time for span in row for time in (span.start, span.end)] or [0.0]
        until = np.cumsum([part for span in row for part in (0.0, span.end - span.start)] or [0.0])
        return (np.interp(end, when, until) - np.interp(start, when, until)) / np.maximum(end - start, 1e-12)

    def flights(self) -> dict[int, tuple[float, float]]:
        """Return start (first user code, or forward) and end (last backward) of each minibatch's time in flight."""
        found: dict[int, tuple[float, float]] = {}
        for span in self.spans:
            if span.row != LIGHTNING and span.work != EVALUATE:
                start, end = found.get(span.minibatch, (span.start, span.end))
                found[span.minibatch] = min(start, span.start), max(end, span.end)
        return found

    def in_flight_over_time(self) -> list[tuple[float, int]]:
        """Return times in seconds, each with the number of minibatches in flight from then on."""
        changes: Counter[float] = Counter()
        for start, end in self.flights().values():
            changes[start] += 1
            changes[end] -= 1
        times = sorted(changes)
        return [*zip(times, accumulate(changes[when] for when in times), strict=True)]

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return the JSON object that https://ui.perfetto.dev and chrome://tracing open."""
        return chrome_trace(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write :meth:`to_chrome_trace` to the file ``path``."""
        with open(path, "w") as file:
            json.dump(self.to_chrome_trace(), file)


def _parts(span: Any, times: StageTimes) -> Iterator[Span]:
    """Divide a simulated task into spans: a turn is one task with three spans."""
    if span.work is not Work.TURN:
        yield Span(span.stage, span.work.value, span.minibatch, span.start, span.end)
        return
    loss = span.forwarded
    # Jitter lengthens a turn as a whole.
    backward = loss + (span.end - span.start) * times.loss / times.total if times.loss else loss
    yield Span(span.stage, FORWARD, span.minibatch, span.start, loss)
    if times.loss:
        yield Span(span.stage, LOSS, span.minibatch, loss, backward)
    yield Span(span.stage, BACKWARD, span.minibatch, backward, span.end)
