"""A cluster's plan as a picture: its devices with their stages, and what allocations make side by side.

Needs matplotlib, the extra ``plot``; it is imported where a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_hetpipe.planning.model.cluster import Cluster
from lightning_hetpipe.planning.model.units import digits
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedStage
from lightning_hetpipe.reporting.plots import LINES, figure_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IDLE_COLOUR = "#EEEEEE"
"""Colour of a device without a stage."""

SHARED_COLOUR = "#999999"
"""Colour of a device with the last stages of several virtual workers."""


def draw_cluster(plan: Plan, cluster: Cluster, bars: Sequence[tuple[str, Sequence[float | None]]] = ()) -> Figure:
    """Draw each device of ``cluster`` as a box with its virtual worker, its stage and layers.

    Args:
        plan: Of all virtual workers.
        cluster: That it is for.
        bars: Allocations beside it: a name, and minibatches per second with equal shares and with unequal ones; None
            where that is not possible.

    Raises:
        SettingError: without matplotlib.
    """
    widest = max(len(node.devices) for node in cluster.nodes)
    height = 1.4 + max(0.8 * len(cluster.nodes), 0.45 * len(bars))
    figure: Figure = figure_class()(figsize=(6 + 1.5 * min(widest, 8), height), dpi=110, layout="constrained")
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
            stages.setdefault((stage.node, stage.device_number), []).append((number, index, stage))
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


def _draw_bars(axes: Axes, bars: Sequence[tuple[str, Sequence[float | None]]]) -> None:
    for offset, (label, colour) in enumerate((("equal shares", LINES[5]), ("shares by speed", LINES[0]))):
        rates = [rates[offset] if offset < len(rates) else None for _, rates in bars]
        places = [place + 0.38 * offset - 0.19 for place in range(len(bars))]
        drawn = axes.barh(places, [rate or 0.0 for rate in rates], height=0.36, color=colour, label=label)
        axes.bar_label(drawn, ["–" if rate is None else digits(rate) for rate in rates], padding=2, fontsize="x-small")
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("minibatches per second, simulated")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize="small", frameon=False)
