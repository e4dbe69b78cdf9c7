"""Timelines in the Trace Event Format, which Perfetto and chrome://tracing open.

Source: "Trace Event Format" (Chromium's documentation of chrome://tracing). A virtual worker is a process there, and a
row is a thread. Both are numbered from 1, because viewers take process 0 and thread 0 for the kernel's. Times are in
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_hetpipe.rules.schedule import EVALUATE, IDLE, TURN, Row, Span

if TYPE_CHECKING:
    from lightning_hetpipe.reporting.timeline import Timeline

Event = dict[str, Any]


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Convert ``timeline`` to the JSON object of a trace. Its ``otherData`` has time 0 in seconds since 1970."""
    events = sorted([*_spans(timeline), *_arrows(timeline), *_counters(timeline)], key=_when)
    return {
        "traceEvents": [*_names(timeline), *events],
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


def _threads(timeline: Timeline) -> dict[Row, int]:
    return {row: thread for thread, row in enumerate(timeline.rows, start=1)}


def _names(timeline: Timeline) -> Iterator[Event]:
    process = timeline.virtual_worker + 1

    def about(what: str, thread: int, **arguments: Any) -> Event:
        return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": arguments}

    yield about("process_name", 1, name=f"virtual worker {timeline.virtual_worker}")
    yield about("process_sort_index", 1, sort_index=process)
    for row, thread in _threads(timeline).items():
        yield about("thread_name", thread, name=timeline.label(row))
        yield about("thread_sort_index", thread, sort_index=thread)


def _spans(timeline: Timeline) -> Iterator[Event]:
    threads = _threads(timeline)
    # The row of an idle stage is empty, because viewers show all other waits.
    waits = [wait for stage in range(timeline.stages) for wait in timeline.waits(stage) if wait.work != IDLE]
    for span in [*timeline.spans, *waits]:
        start, end = _microseconds(span.start), _microseconds(span.end)
        number = "batch" if span.work == EVALUATE else "minibatch"
        arguments = {number: span.minibatch}
        if span.work != EVALUATE and span.minibatch in timeline.versions:
            arguments["version"] = timeline.versions[span.minibatch]
        yield {
            "ph": "X",
            "name": f"{span.work} {span.minibatch}",  # Perfetto colours by the name without its number
            "cat": span.row if isinstance(span.row, str) else "wait" if span.work == TURN else "stage",
            "pid": timeline.virtual_worker + 1,
            "tid": threads[span.row],
            "ts": start,
            "dur": round(end - start, 3),
            "args": arguments,
        }


def _arrows(timeline: Timeline) -> Iterator[Event]:
    threads = _threads(timeline)
    ways: dict[int, list[Span]] = {}
    for span in timeline.spans:
        if isinstance(span.row, int) and span.work != EVALUATE:
            ways.setdefault(span.minibatch, []).append(span)
    for minibatch, way in ways.items():
        if len(way) == 1:
            continue
        for index, span in enumerate(way):
            last = index + 1 == len(way)
            event: Event = {
                "ph": "s" if index == 0 else "f" if last else "t",
                "name": "minibatch",
                "cat": "minibatch",
                "id": f"{timeline.virtual_worker}.{minibatch}",
                "pid": timeline.virtual_worker + 1,
                "tid": threads[span.row],
                "ts": _microseconds(span.start),
            }
            yield event | {"bp": "e"} if last else event


def _counters(timeline: Timeline) -> Iterator[Event]:
    for when, count in timeline.in_flight_over_time():
        yield {
            "ph": "C",
            "name": "in flight",
            "pid": timeline.virtual_worker + 1,
            "tid": 1,
            "ts": _microseconds(when),
            "args": {"minibatches": count},
        }


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
