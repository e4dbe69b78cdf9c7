"""The benchmark of faults: they strike as drawn, and throughput is that of committed waves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from benchmarks.cluster_simulation import pads
from benchmarks.faults import KINDS, LEFT, RANDOM, Found, Rest, at_random, drawn, one_is_lost, report, rest, tasks
from benchmarks.faults_worker import Task
from tests.wsp.lost_time import LostTime

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}
TINY = Task((pads(0.02, (1.0, 1.0)),) * 3, (2,) * 3, waves=20, in_flight=2, width=8, lease=2.0)


def test_each_kind_is_drawn_as_often_and_has_an_epoch_to_come_back_in() -> None:
    task = replace(tasks()[RANDOM], folder="folder")
    found = drawn(task, 1)
    assert Counter(each["what"] for each in found) == dict.fromkeys(KINDS, 2)
    assert [each["epoch"] for each in found] == [*range(task.epochs - 2)]
    for each in found:
        assert 0 < each["batch"] < task.waves * task.lengths[each["vw"]] / 2
        assert (each["vw"] == 0) == (each["what"] == "server")
    victims = {each["epoch"]: each["vw"] for each in found if each["vw"]}
    assert all(victims.get(epoch + 1) != vw for epoch, vw in victims.items())
    assert drawn(task, 1) == found != drawn(task, 2)


def committed(vw: int, *times: float) -> list[dict[str, Any]]:
    return [{"decision": "UpdateCommitted", "vw": vw, "clock": clock, "time": time} for clock, time in enumerate(times)]


def test_those_who_are_left_are_compared_with_what_they_had_before() -> None:
    """Waves of half a second for ten seconds, then a lease of three in which one is still committed, then 0.6 s."""
    task = replace(TINY, lengths=(4, 2, 3))
    early = [0.5 * index for index in range(21)]
    late = [10.5, *(13.0 + 0.6 * index for index in range(10)), 30.0]
    log = [*committed(0, *early, *late), *committed(1, *early), *committed(2, *early, *late)]
    found = rest(task, [*log, {"decision": "MemberLeft", "vw": 1, "time": 13.0}], 1, 10.0)
    assert found.before == pytest.approx({0: 8.0, 1: 4.0, 2: 6.0})
    assert found.after == pytest.approx({0: 4 / 0.6, 2: 3 / 0.6})
    assert (found.waited, found.waiting) == pytest.approx((3.0, 7 / 3))
    assert found.ratio == pytest.approx(0.5 / 0.6)


@pytest.mark.slow
def test_faults_strike_and_cost_time() -> None:
    found = at_random(replace(TINY, waves=60, epochs=5, restarts=5), count(1))
    kinds = {each.what for each in found}  # one that has not come back yet cannot be struck again
    assert kinds <= KINDS.keys()
    assert len(kinds) >= 2
    left_out = [each for each in found if each.what != "server"]
    assert all(each.waited > TINY.lease / 2 for each in left_out)
    assert all(each.size == 3 for each in found)


@pytest.mark.slow
def test_one_is_lost_for_good() -> None:
    found = one_is_lost(replace(TINY, waves=60))
    assert found.before.keys() == {0, 1, 2}
    assert found.after.keys() == {0, 2}
    assert found.waited > TINY.lease / 2
    assert found.waiting < sum(found.before.values()) / 2


def test_the_report_says_what_was_lost_and_what_is_left() -> None:
    rounds: list[dict[str, Found]] = [
        {
            RANDOM: [LostTime("kill", 3.0, 6.0, 3), LostTime("server", 1.0, 0.0, 3)],
            LEFT[0]: Rest({0: 10.0, 1: 10.0, 2: 10.0}, 1, 2.0, 3.1, {0: 9.0, 2: 9.0}),
        }
    ]
    outcome = report(MACHINE, rounds, {LEFT[1]: "it broke"})
    figures = {figure.name: figure for figure in outcome.figures}
    assert figures["time lost per fault"].cells()[:2] == ("3.0", "1.0 .. 5.0")
    assert figures[f"time lost: {KINDS['stop']}"].spread is None
    ratio, broken = (each for each in outcome.figures if "former sum" in each.name)
    assert ratio.cells() == ("0.900", "0.900 .. 0.900", "0.95", "missed")
    assert broken.spread is None
    lines = outcome.text.splitlines()
    assert next(line for line in lines if line.startswith(KINDS["kill"])).split()[-4:] == ["1", "3.0", "6.0", "5.0"]
    row = next(line for line in lines if line.startswith(LEFT[0]))
    assert row.split()[-6:] == ["30.0", "20.0", "2.0", "3.1", "18.0", "0.0"]
    assert not outcome.complete
    assert "it broke" in outcome.text
