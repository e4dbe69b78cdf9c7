"""Advice on a plan that does not fit."""

from __future__ import annotations

from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.search.choice import Choice


def ways_out(choice: Choice, cli: bool = False) -> list[str]:
    """List a phrase for each way to make it fit; none where it fits, or where nothing helps.

    Args:
        choice: Result of :func:`~lightning_hetpipe.planning.search.choice.best_plan`.
        cli: Whether settings are given on the command line, not in Python.
    """
    if (found := choice.help) is None:
        return []
    prefix, true = ("strategy.", "true") if cli else ("", "True")
    lines = []
    if found.in_flight is not None:
        lines.append(f"{prefix}in_flight={found.in_flight}{' or fewer' if found.in_flight > 1 else ''}")
    if found.recompute is not None:
        fewer = " or fewer" if found.recompute > 1 else ""
        lines.append(f"{prefix}recompute={true}, with {prefix}in_flight={found.recompute}{fewer}")
    if found.lacking:
        slots = {stage: choice.stages[stage].slot for stage in sorted(found.lacking)}
        each = [f"{in_bytes(found.lacking[n])} on {slot}" for n, slot in slots.items()]
        lines.append(f"more memory: {' and '.join(each)}")
    return lines
