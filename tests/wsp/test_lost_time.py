"""The time that a fault cost, as the coordinator's decisions tell it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.wsp.lost_time import LostTime, Strike, lost_time, strikes_of, summary


def committed(vw: int, clock: int, time: float) -> dict[str, Any]:
    return {"decision": "UpdateCommitted", "vw": vw, "clock": clock, "time": time}


def pushed(vw: int, time: float) -> dict[str, Any]:
    return {"decision": "UpdatePushed", "vw": vw, "time": time}


SMOOTH = [committed(0, clock, float(clock)) for clock in range(10)]
"""Waves of a second each."""
STOOD = [committed(0, clock, clock + 5.0 * (clock >= 5)) for clock in range(10)]
"""Likewise; wave 5 takes six seconds."""


@pytest.mark.parametrize("struck", [3.1, 3.9, 4.1, 5.0])
def test_waves_that_took_longer_than_usual_count(struck: float) -> None:
    """Also where the wave in which the fault struck had all it needed: the one after it waits then."""
    (found,) = lost_time(STOOD, [Strike("server", 0, struck)], size=3)
    assert found == LostTime("server", 5.0, 0.0, 3)


@pytest.mark.parametrize("struck", [0.5, 2.9, 10.5])
def test_a_fault_that_nobody_notices_costs_nothing(struck: float) -> None:
    (found,) = lost_time(STOOD, [Strike("garbage", 1, struck)], size=3)
    assert found.seconds == 0.0


def test_with_a_clock_distance_the_wait_comes_later() -> None:
    strike = Strike("kill", 1, 2.5)
    pushes = [pushed(1, 11.0)]
    assert lost_time([*STOOD, *pushes], [strike], size=3)[0].waited == 0.0
    assert lost_time([*STOOD, *pushes], [strike], size=3, distance=1)[0].waited == 5.0


def test_one_that_is_missing_is_a_part_of_the_run() -> None:
    """Its first push after the fault ends that; pushes of others and earlier ones do not."""
    told = [*STOOD[:5], pushed(1, 4.05), pushed(2, 11.6), *STOOD[5:8], pushed(1, 13.5), *STOOD[8:]]
    (found,) = lost_time(told, [Strike("kill", 1, 4.1)], size=3)
    assert (found.waited, found.missing) == pytest.approx((5.0, 2.5))
    assert found.seconds == pytest.approx(5.0 + 2.5 / 3)


def test_one_that_does_not_come_back_is_missing_until_the_end() -> None:
    (found,) = lost_time(SMOOTH, [Strike("stop", 1, 4.5)], size=2)
    assert (found.waited, found.missing) == (0.0, 3.0)
    (found,) = lost_time(SMOOTH, [Strike("server", 0, 4.5)], size=2)
    assert found.missing == 0.0


def test_what_servers_lost_and_commit_again_is_no_progress() -> None:
    again = [*STOOD[:5], *(committed(0, clock, 5.0) for clock in (2, 3, 4)), *STOOD[5:]]
    assert lost_time(again, [Strike("server", 0, 4.1)], size=3) == lost_time(STOOD, [Strike("server", 0, 4.1)], size=3)


def test_what_the_test_holds_up_does_not_count() -> None:
    (found,) = lost_time(STOOD, [Strike("server", 0, 4.1)], size=3, held=[(6.0, 9.0)])
    assert found.waited == pytest.approx(2.0)


def test_only_faults_that_have_struck_are_found(tmp_path: Path) -> None:
    marks = [tmp_path / str(index) for index in range(3)]
    marks[0].write_text("17.5")
    marks[1].touch()
    faults = [{"what": "kill", "vw": index, "mark": str(mark)} for index, mark in enumerate(marks)]
    assert strikes_of(faults) == [Strike("kill", 0, 17.5)]


def test_the_summary_has_all_kinds() -> None:
    assert summary([("server", 1.0), ("kill", 8.0), ("kill", 6.0)]) == (
        "time lost per fault: median 6.0 s of 3 (kill 7.0 s of 2, server 1.0 s of 1)"
    )
    assert summary([]).endswith("no fault has struck")
