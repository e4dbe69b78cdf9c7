"""A run synchronises as its plan says, as far as nobody has set it otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hetpipe import HetPipeStrategy, Plan, WSPCallback
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.planning.plan.planned_worker import PlannedStage, PlannedWorker
from lightning_hetpipe.strategy import relations


def planned(waves: Sequence[int], in_flight: int = 3, **more: Any) -> Plan:
    workers = tuple(
        PlannedWorker(1.0, (PlannedStage("box", f"cpu:{number}", 0, 0, 0.1, 1, None),), wave)
        for number, wave in enumerate(waves)
    )
    made: dict[str, Any] = {"clock_distance": 2, "placement": "local", **more}
    return Plan(
        "m",
        in_flight,
        in_flight,
        bottleneck_s=0.1,
        minibatches_per_second=2.0,
        virtual_workers=workers,
        layers=("a",),
        **made,
    )


def taken(plan: Plan, **given: Any) -> WSPSettings:
    strategy: Any = HetPipeStrategy(plan=plan, wsp=WSPCallback(**given))
    found: WSPSettings = strategy._workers.settings()
    return found


UNEQUAL, EQUAL, LONG = planned((3, 7)), planned((3, 3)), planned((8, 8))


@pytest.mark.parametrize(
    ("plan", "given", "wanted"),
    [
        (UNEQUAL, {}, (2, "auto", (3, 7), "local")),
        (EQUAL, {}, (2, "auto", "equal", "local")),
        (LONG, {}, (2, 8, "equal", "local")),
        (planned((4, 4), accumulate_grad_batches=2), {}, (2, "auto", "equal", "local")),
        (UNEQUAL, {"clock_distance": 0}, (0, "auto", (3, 7), "local")),
        (UNEQUAL, {"placement": "size"}, (2, "auto", (3, 7), "size")),
        (UNEQUAL, {"wave": 5}, (2, 5, "equal", "local")),
        (UNEQUAL, {"shares": "equal"}, (2, "auto", "equal", "local")),
        (LONG, {"shares": [4, 9]}, (2, "auto", (4, 9), "local")),
        (LONG, {"shares": "auto"}, (2, "auto", "auto", "local")),
    ],
)
def test_what_is_left_out_is_the_plans(plan: Plan, given: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    """A run took the lengths of waves only, and of equal ones not even these."""
    found = taken(plan, **given)
    assert (found.clock_distance, found.wave, found.shares, found.placement) == wanted


def test_a_callback_of_the_trainer_is_asked() -> None:
    strategy: Any = HetPipeStrategy(plan=UNEQUAL)
    assert strategy._workers.settings().clock_distance == 2
    strategy._workers._launcher = SimpleNamespace(trainer=SimpleNamespace(callbacks=[WSPCallback(clock_distance=1)]))
    found = strategy._workers.settings()
    assert (found.clock_distance, found.placement) == (1, "local")


def test_without_a_plan_there_are_defaults() -> None:
    strategy: Any = HetPipeStrategy(virtual_workers=2)
    found = strategy._workers.settings()
    assert (found.clock_distance, found.wave, found.shares, found.placement) == (0, "auto", "equal", "size")


def test_what_is_not_as_planned_is_said() -> None:
    assert relations.other_than_planned(taken(UNEQUAL), UNEQUAL) == ""
    assert relations.other_than_planned(taken(UNEQUAL, clock_distance=2, shares=[3, 7]), UNEQUAL) == ""
    assert relations.other_than_planned(taken(UNEQUAL, clock_distance=0, shares=[3, 8]), UNEQUAL) == (
        "as set, this run has clock_distance=0, where the plan has 2, and shares=[3, 8], where the plan has [3, 7]; the"
        " plan's figures are for its own"
    )


def test_a_clock_distance_that_no_run_has_is_refused() -> None:
    with pytest.raises(SettingError, match=r"^Plan.clock_distance=10000000000 must be .* at most 1000000000"):
        planned((3, 3), clock_distance=10**10)
