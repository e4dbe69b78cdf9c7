"""Cost of `timeline=True`: the same training with and without it, by turns."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.training_task import Task
from benchmarks.turns import Pair, Turns
from benchmarks.virtual_workers import T_MAX, pads

EMULATED = Task(
    "strategy",
    layers=4,
    width=64,
    batch=4,
    momentum=0.0,
    warmup=30,
    steps=60,
    tail=12,
    turns=4,
    stages=4,
    in_flight=6,
    pads=pads(0.6 * T_MAX, T_MAX, 0.8 * T_MAX, 0.5 * T_MAX),
)
WIDE = Task("strategy", width=256, batch=128, warmup=20, steps=100, tail=12, turns=10)
VARIANTS = {
    "a four emulated stages, longest 20 ms": EMULATED,
    "b two real stages, width 256": WIDE,
    "c two real stages, width 16": replace(WIDE, width=16, batch=16, warmup=40, steps=300, turns=8),
}
"""The last one has next to nothing to compute: what is measured there is what a minibatch itself costs."""

TIMELINE_COSTS = Turns(
    "timeline_costs",
    "HetPipeStrategy(timeline=True) against timeline=False",
    [Pair(label, task, replace(task, timeline=True)) for label, task in VARIANTS.items()],
    "speed with the timeline over without",
    0.98,
)
