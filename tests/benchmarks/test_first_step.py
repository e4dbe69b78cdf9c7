"""The table of the cost of the first step."""

from __future__ import annotations

from benchmarks.first_step import report
from benchmarks.harness import Measurement


def measured(first: float, again: float) -> dict[str, Measurement]:
    notes = {"first_s": first, "again_s": again}
    return {"timm/net": Measurement("timm/net", rate=1.0, cores=1.0, threads=1, loss=None, notes=notes)}


def test_the_least_of_all_rounds_counts() -> None:
    rounds = [
        {"before": measured(4.0, 2.0), "now": measured(6.0, 2.5)},
        {"before": measured(5.0, 1.0), "now": measured(5.0, 1.0)},
        {"before": measured(4.5, 3.0)},
    ]
    _, row = report(["timm/net"], rounds).splitlines()
    assert row.split() == ["timm/net", "4.00", "s", "5.00", "s", "1.25", "1.00", "s", "1.00", "s", "1.00"]


def test_a_model_that_was_not_measured() -> None:
    _, row = report(["timm/net"], []).splitlines()
    assert row.split().count("nan") == 6
