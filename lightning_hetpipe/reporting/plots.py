"""Timelines and plans as pictures. Drawing imports matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.cluster import Cluster
from lightning_hetpipe.planning.model.units import digits
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedStage
from lightning_hetpipe.reporting.timeline import Timeline
from lightning_hetpipe.rules.schedule import BACKWARD, EVALUATE, FORWARD, IDLE, LOSS, TURN, Row, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    FORWARD: "#56B4E9",
    BACKWARD: "#E69F00",
    LOSS: "#009E73",
    EVALUATE: "#CC79A7",
    "training_step": "#F0E442",
    "step": "#999999",
    "publish": "#0072B2",
    "synchronise": "#D55E00",
    "fetch": "#000000",
    "look_ahead": "#B3C7D6",
    "evaluation": "#CC79A7",
}
"""Colours of Okabe and Ito (2008), which people with any colour vision can distinguish."""
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colours of the stages' curves, in turn. Line styles distinguish repeated colours."""
WAITS = {"wait_for_minibatch", "drain"}
"""Waits of Lightning's thread, hatched like waits of stages."""
WORDS = {
    "step": "Lightning's step",
    "wait_for_minibatch": "nothing to do yet",
    "fetch": "fetch a batch",
    "look_ahead": "look ahead",
    "drain": "nothing to do yet",
    "evaluation": "evaluate",
    IDLE: "nothing to do yet",
}
"""Names in a legend that differ from the work's name."""
ORDER = (FORWARD, LOSS, BACKWARD, EVALUATE, TURN, IDLE)
"""Order of a legend's first entries."""
THIN = 0.004
"""Boxes with a smaller fraction of the width have no edges, because edges would cover them."""
POINTS = 200
"""Number of points of a utilisation curve."""

IDLE_COLOUR = "#EEEEEE"
"""Colour of a device without a stage."""

SHARED_COLOUR = "#999999"
"""Colour of a device with the last stages of several virtual workers."""


def draw(timeline: Timeline, first: int | None = None, last: int | None = None) -> Figure:
    """Draw ``timeline`` from the start of minibatch ``first`` to the end of ``last``, with everything in between.

    By default a readable number of minibatches from the middle is drawn. The upper part has rows for stages, user code
    and Lightning's thread. Boxes that are wide enough show the number of the minibatch, and waits are hatched. The
    lower part shows how busy each stage is, averaged over the time of Nm minibatches, and the number in flight.

    Returns:
        A figure that no window shows. ``figure.savefig("timeline.png")`` writes it.

    Raises:
        SettingError: without matplotlib, or if the timeline has nothing of these minibatches.
    """
    kept = timeline.minibatches
    if first is None and last is None:
        if not kept:
            raise SettingError("this timeline is empty, so that there is nothing to draw; record some minibatches")
        # From the middle, because a pipeline looks different at an epoch's start and end.
        count = min(len(kept), max(6, 2 * timeline.in_flight))
        first = kept.start + (len(kept) - count) // 2
        last = first + count - 1
    window = timeline.between(kept.start if first is None else first, kept.stop - 1 if last is None else last)
    start, end = window.extent
    if end <= start:
        end = start + 1e-6
    rows = timeline.rows
    figure = _figure(14, 0.42 * len(rows) + 2.9)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[0.42 * len(rows), 1.8])
    _draw_rows(above, timeline, rows, start, end)
    _draw_curves(below, timeline, start, end)
    figure.suptitle(str(window), fontsize="medium")
    return figure


def _figure(width: float, height: float) -> Figure:
    """Return an empty figure. Raise SettingError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingError(
            'drawing a picture needs matplotlib, which is not installed; pip install "lightning-hetpipe[plot]"'
        ) from error
    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def _draw_rows(axes: Axes, timeline: Timeline, rows: Sequence[Row], start: float, end: float) -> None:
    from matplotlib.patches import Patch

    unit = 1000.0
    known: dict[str, Any] = {}
    for place, row in enumerate(rows):
        waits = timeline.waits(row) if isinstance(row, int) else ()
        for span in [each for each in (*timeline.row(row), *waits) if each.end > start and each.start < end]:
            left, right = max(span.start, start), min(span.end, end)
            style = _style(span)
            if right - left < THIN * (end - start):
                style["linewidth"] = 0.0
            axes.broken_barh([(unit * (left - start), unit * (right - left))], (place - 0.4, 0.8), **style)
            known.setdefault(span.work, Patch(**_style(span)))
            text = str(span.minibatch)
            if span.work not in WAITS | {IDLE, TURN} and right - left > 0.005 * len(text) * (end - start):
                centre = unit * (left + right - 2 * start) / 2
                axes.text(centre, place, text, ha="center", va="center", fontsize="x-small", clip_on=True)
    axes.set_yticks(range(len(rows)), [timeline.label(row).replace(", ", "\n", 1) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, unit * (end - start))
    axes.tick_params(axis="x", labelbottom=False)
    order = sorted(known, key=lambda work: ORDER.index(work) if work in ORDER else len(ORDER))
    words = {WORDS.get(work, work): known[work] for work in reversed(order)}  # some are called alike
    axes.legend(
        list(words.values())[::-1],
        list(words)[::-1],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=7,
        fontsize="small",
        frameon=False,
    )


def _style(span: Span) -> dict[str, Any]:
    if span.work in (IDLE, *WAITS):
        return {"facecolor": "white", "edgecolor": "#C8C8C8", "hatch": "////", "linewidth": 0.0}
    if span.work == TURN:
        return {"facecolor": "white", "edgecolor": "#D55E00", "hatch": "xxxx", "linewidth": 0.0}
    return {"facecolor": COLOURS.get(span.work, "#DDDDDD"), "edgecolor": "white", "linewidth": 0.5}


def _draw_curves(axes: Axes, timeline: Timeline, start: float, end: float) -> None:
    from matplotlib.ticker import MaxNLocator

    times = np.linspace(start, end, POINTS)
    count = max(1, len([span for span in timeline.flights().values() if start < span[1] <= end]))
    half = min(end - start, timeline.in_flight * (end - start) / count) / 2
    began, ended = timeline.extent
    edges = np.maximum(began, times - half), np.minimum(ended, times + half)
    for stage in range(timeline.stages):
        busy = 100 * timeline.utilisation(stage, *edges)
        style = "-" if stage < len(LINES) else "--"
        axes.plot(
            1000 * (times - start), busy, color=LINES[stage % len(LINES)], linestyle=style, label=f"stage {stage}"
        )
    axes.set_ylim(0, 105)
    axes.set_ylabel("busy, %")
    axes.set_xlabel("ms")
    axes.grid(axis="y", color="#DDDDDD")
    axes.legend(loc="upper left", bbox_to_anchor=(1.05, 1.0), fontsize="small", frameon=False)
    other = axes.twinx()
    curve = timeline.in_flight_over_time()
    steps = [(when, number) for when, number in curve if start <= when <= end]
    before = [number for when, number in curve if when <= start]
    steps = [(start, before[-1] if before else 0), *steps, (end, steps[-1][1] if steps else 0)]
    other.step(
        [1000 * (when - start) for when, _ in steps],
        [number for _, number in steps],
        where="post",
        color="#555555",
        linestyle=":",
    )
    other.set_ylim(0, timeline.in_flight + 1)
    other.yaxis.set_major_locator(MaxNLocator(integer=True))
    other.set_ylabel("in flight (dotted)")


def draw_cluster(plan: Plan, cluster: Cluster, bars: Mapping[str, Sequence[float | None]]) -> Figure:
    """Draw each device of ``cluster`` as a box with its virtual worker, stage and layers in ``plan``.

    ``bars`` are other allocations to compare, by name: minibatches per second with equal and with unequal shares, or
    None.

    Raises:
        SettingError: without matplotlib.
    """
    widest = max(len(node.devices) for node in cluster.nodes)
    height = 1.4 + max(0.8 * len(cluster.nodes), 0.45 * len(bars))
    figure = _figure(6 + 1.5 * min(widest, 8), height)
    if bars:
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.4])
        _draw_bars(left, bars)
    else:
        right = figure.subplots()
    _draw_devices(right, plan, cluster, widest)
    figure.suptitle(
        f"{plan.model}: allocation={plan.allocation!r}, N = {len(plan.virtual_workers)}, Nm = {plan.in_flight}, D ="
        f" {plan.clock_distance}, {digits(plan.minibatches_per_second)} minibatches per second, simulated",
        fontsize="medium",
    )
    return figure


def _draw_devices(axes: Axes, plan: Plan, cluster: Cluster, widest: int) -> None:
    stages: dict[tuple[str, int | None], list[tuple[int, int, PlannedStage]]] = {}
    for number, worker in enumerate(plan.virtual_workers):
        for index, stage in enumerate(worker.stages):
            stages.setdefault(stage.at, []).append((number, index, stage))
    for row, node in enumerate(cluster.nodes):
        for place, device in enumerate(node.devices):
            text, colour = f"{device.name}\nidle", IDLE_COLOUR
            if found := stages.get((node.name, place), ()):
                own = " and ".join(dict.fromkeys(f"{stage.first_layer}–{stage.last_layer}" for *_, stage in found))
                (number, index, _), *others = found
                which = f"last stages of {len(found)} VWs" if others else f"VW {number} stage {index}"
                text = f"{device.name}\n{which}\nlayers {own}"
                colour = SHARED_COLOUR if others else LINES[number % len(LINES)]
            axes.broken_barh(
                [(place - 0.46, 0.92)], (row - 0.42, 0.84), facecolor=colour, alpha=0.45, edgecolor="white"
            )
            axes.text(place, row, text, ha="center", va="center", fontsize="x-small", clip_on=True)
    axes.set_xlim(-0.5, widest - 0.5)
    axes.set_ylim(len(cluster.nodes) - 0.5, -0.5)
    axes.set_yticks(range(len(cluster.nodes)), [node.name for node in cluster.nodes])
    axes.set_xticks(range(widest))
    axes.set_xlabel("device of the node; a colour for each virtual worker (VW)")
    axes.set_ylabel("node")


def _draw_bars(axes: Axes, bars: Mapping[str, Sequence[float | None]]) -> None:
    for offset, (label, colour) in enumerate((("equal shares", LINES[5]), ("shares by speed", LINES[0]))):
        rates = [rates[offset] if offset < len(rates) else None for rates in bars.values()]
        places = [place + 0.38 * offset - 0.19 for place in range(len(bars))]
        drawn = axes.barh(places, [rate or 0.0 for rate in rates], height=0.36, color=colour, label=label)
        axes.bar_label(drawn, ["–" if rate is None else digits(rate) for rate in rates], padding=2, fontsize="x-small")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("minibatches per second, simulated")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize="small", frameon=False)
