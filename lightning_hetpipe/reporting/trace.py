"""Timelines in the Trace Event Format, which Perfetto and chrome://tracing open.

Source: "Trace Event Format" (Chromium's documentation of chrome://tracing). A virtual worker is a process there, and a
row is a thread. Both are numbered from 1, because viewers take process 0 and thread 0 for the kernel's. Times are in
microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_hetpipe.rules.schedule import EVALUATE, IDLE, TURN, Row, Span

if TYPE_CHECKING:
    from lightning_hetpipe.reporting.timeline import Timeline

Event = dict[str, Any]


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Convert ``timeline`` to the JSON object of a trace. Its ``otherData`` has time 0 in seconds since 1970."""
    threads = {row: thread for thread, row in enumerate(timeline.rows, start=1)}

    def event(phase: str, name: str, row: Row | None = None, start: float = 0.0, **more: Any) -> Event:
        """Return an event that starts at ``start`` seconds in ``row``, or is of the whole virtual worker."""
        place = {"pid": timeline.virtual_worker + 1, "tid": 1 if row is None else threads[row]}
        return {"ph": phase, "name": name, "ts": _microseconds(start), **place, **more}

    flying = timeline.in_flight_over_time()
    counters = [event("C", "in flight", None, when, args={"minibatches": count}) for when, count in flying]
    events = sorted([*_spans(timeline, event), *_arrows(timeline, event), *counters], key=_when)
    return {
        "traceEvents": [*_names(timeline, event), *events],
        "displayTimeUnit": "ms",
        "otherData": {"zero": timeline.zero, "in_flight": timeline.in_flight},
    }


def together(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge traces of :func:`chrome_trace` of several virtual workers, as exactly as the machines' clocks agree."""
    zeros: list[float] = [trace["otherData"]["zero"] or 0.0 for trace in traces]
    zero = min(zeros, default=0.0)
    every = [(event, own) for trace, own in zip(traces, zeros, strict=True) for event in trace["traceEvents"]]
    moved = [{**e, "ts": round(e["ts"] + 1e6 * (own - zero), 3)} for e, own in every if e["ph"] != "M"]
    return {
        "traceEvents": [*(event for event, _ in every if event["ph"] == "M"), *sorted(moved, key=_when)],
        "displayTimeUnit": "ms",
        "otherData": {"zero": zero},
    }


def _when(event: Event) -> tuple[float, int]:
    return event["ts"], "XstfC".index(event["ph"])  # an arrow binds to the span that it begins in


def _names(timeline: Timeline, event: Callable[..., Event]) -> Iterator[Event]:
    worker = timeline.virtual_worker
    yield event("M", "process_name", args={"name": f"virtual worker {worker}"})
    yield event("M", "process_sort_index", args={"sort_index": worker + 1})
    for index, row in enumerate(timeline.rows, start=1):
        yield event("M", "thread_name", row, args={"name": timeline.label(row)})
        yield event("M", "thread_sort_index", row, args={"sort_index": index})


def _spans(timeline: Timeline, event: Callable[..., Event]) -> Iterator[Event]:
    # The row of an idle stage is empty, because viewers show all other waits.
    waits = [wait for stage in range(timeline.stages) for wait in timeline.waits(stage) if wait.work != IDLE]
    for span in [*timeline.spans, *waits]:
        arguments = {"batch" if span.work == EVALUATE else "minibatch": span.minibatch}
        if span.work != EVALUATE and span.minibatch in timeline.versions:
            arguments["version"] = timeline.versions[span.minibatch]
        name = f"{span.work} {span.minibatch}"  # Perfetto colours by the name without its number
        kind = span.row if isinstance(span.row, str) else "wait" if span.work == TURN else "stage"
        lasts = round(_microseconds(span.end) - _microseconds(span.start), 3)
        yield event("X", name, span.row, span.start, cat=kind, dur=lasts, args=arguments)


def _arrows(timeline: Timeline, event: Callable[..., Event]) -> Iterator[Event]:
    ways: dict[int, list[Span]] = {}
    for span in timeline.spans:
        if isinstance(span.row, int) and span.work != EVALUATE:
            ways.setdefault(span.minibatch, []).append(span)
    for minibatch, (first, *others) in ways.items():
        arrow = {"cat": "minibatch", "id": f"{timeline.virtual_worker}.{minibatch}"}
        if others:
            *between, last = others
            yield event("s", "minibatch", first.row, first.start, **arrow)
            yield from (event("t", "minibatch", each.row, each.start, **arrow) for each in between)
            yield event("f", "minibatch", last.row, last.start, **arrow, bp="e")


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
