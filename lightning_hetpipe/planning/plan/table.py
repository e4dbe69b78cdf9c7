"""A plan as a table, for people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_hetpipe.planning.model.catalogue import known
from lightning_hetpipe.planning.model.units import digits, in_bytes

if TYPE_CHECKING:
    from lightning_hetpipe.planning.plan.document import Plan
    from lightning_hetpipe.planning.plan.planned_worker import PlannedStage

ESTIMATE = "~"
"""Mark before figures that come from a data sheet."""
BAD = "!"
"""Mark behind a cell with a fault. The fault is described below the table."""

_HEADER = ["stage", "device", "layers", "", "ms per minibatch", "memory", "of"]
_CELLS = {"node": 1, "device": 1, "first_layer": 2, "last_layer": 2, "time_s": 4, "memory_bytes": 5}
_CELLS |= dict.fromkeys(("group", "share", "splits", "layer", "counts"), 1)
"""Column that shows a key of a stage."""


def table(plan: Plan) -> str:
    """Format the rates, and the stages of each virtual worker. The slowest stage and cells with faults are marked."""
    many = len(plan.virtual_workers) > 1
    lines = [_headline(plan)]
    problems = list(plan.problems())
    for index, (worker, wave) in enumerate(zip(plan.virtual_workers, plan.waves, strict=True)):
        place = f"virtual_workers[{index}].stages"
        rows = []
        for number, stage in enumerate(worker.stages):
            bad = {p.place.rpartition(".")[2] for p in problems if p.place.startswith(f"{place}[{number}].")}
            rows.append(_row(number, stage, plan, {_CELLS[key] for key in bad}))
        rate = digits(worker.minibatches_per_second)
        title = f"virtual worker {index}: {rate} minibatches per second, in waves of {wave}"
        lines += ["", *([title] if many else []), *aligned([_HEADER, *rows], left=(1, 2, 3))]
    stages = [stage for worker in plan.virtual_workers for stage in worker.stages]
    notes = []
    if many:  # the summed updates, staleness, and traffic
        workers = len(plan.virtual_workers)
        notes.append(
            f"N = {workers}: the sum of their updates acts like {workers} times the learning rate; s_global ="
            f" {plan.global_staleness} minibatches at D = {plan.clock_distance}; {in_bytes(plan.network_bytes)} cross"
            f" the network per minibatch, with placement={plan.placement!r}"
        )
    if any(stage.estimated for stage in stages):
        notes.append(f"{ESTIMATE} is an estimate from data sheets: the layers were not measured on this device")
    if any(stage.nominal for stage in stages):
        notes.append(f"{ESTIMATE} before memory is the data sheet's figure, of which a driver leaves a little less")
    if any(len(worker.nodes) > 1 for worker in plan.virtual_workers):
        nodes = len(plan.workers_on_nodes)
        notes.append(f"to run it, start the program on each node, with trainer.num_nodes={nodes}, {plan.node_ranks}")
    lines += ["", *notes] if notes else []
    lines += [f"{BAD} {_where(problem.place, many)} {problem.said}" for problem in problems]
    return "\n".join(lines)


def _where(place: str, many: bool) -> str:
    """Translate a key of ``plan.json`` into row and column of the table."""
    match = re.fullmatch(r"virtual_workers\[(\d+)\]\.stages\[(\d+)\]\.(.+)", place)
    if match is None:
        return place
    key = match[3].removesuffix("_bytes").removesuffix("_s").replace("_", " ")
    return f"{f'virtual worker {match[1]}, ' if many else ''}stage {match[2]}: {key}"


def _headline(plan: Plan) -> str:
    workers = len(plan.virtual_workers)
    rule = f" by allocation={plan.allocation!r}" if plan.allocation else ""
    together = f"{workers} virtual workers{rule}, " if workers > 1 else ""
    guess = any(stage.estimated for worker in plan.virtual_workers for stage in worker.stages)
    rate = f"{ESTIMATE if guess else ''}{digits(plan.minibatches_per_second)}"
    return (
        f"{plan.model}: {together}{'a spread run, ' if plan.spread else ''}"
        f"{plan.in_flight} minibatch{'' if plan.in_flight == 1 else 'es'} in flight,"
        f"{'' if plan.in_flight == 1 else f' weights={plan.weights!r},'}"
        f"{' forwards recomputed,' if plan.recompute else ''} {rate} minibatches per second, simulated"
    )


def _row(number: int, stage: PlannedStage, plan: Plan, bad: set[int]) -> list[str]:
    guess = ESTIMATE if stage.estimated else ""
    place, total = stage.place, sum(member.share for member in stage.group) or 1.0
    if stage.group:  # all its devices, with their percentages of the work
        place = " + ".join(f"{member.place} {member.share / total:.0%}" for member in stage.group)
    gpu, limit = known(stage.device_name), stage.memory_limit_bytes
    nominal = ESTIMATE if stage.nominal or (stage.estimated and gpu is not None and gpu.memory == limit) else ""
    cells = [
        str(number),
        f"{stage.node} {place}",
        span(plan.layers[stage.first_layer : stage.last_layer + 1]),
        f"×{stage.last_layer - stage.first_layer + 1}",
        f"{guess}{stage.time_s * 1000:,.1f}",
        in_bytes(stage.memory_bytes),
        "no limit" if limit is None else f"{nominal}{in_bytes(limit)}",
    ]
    cells = [f"{cell} {BAD}" if column in bad else cell for column, cell in enumerate(cells)]
    return [*cells, "bottleneck"] if stage.time_s == plan.bottleneck_s and not plan.spread else cells


def span(layers: Sequence[str]) -> str:
    """Name the first and the last layer."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} – {layers[-1]}" if layers else ""


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Lay out a table as lines, with the columns ``left`` aligned to the left and the others to the right.

    The first row defines the columns. Additional cells of a row follow behind its line.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join([*cells, *row[len(widths) :]]).rstrip())
    return lines
