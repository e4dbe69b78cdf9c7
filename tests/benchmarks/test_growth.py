"""The benchmark of growth: all processes of a launch are looked at, and one that leaks is noticed."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from benchmarks import harness
from benchmarks.growth import MEMORY, SHORT, Growth, growth, measure, report
from tests.support import forks
from tests.support.process_use import Use

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}
MIB = 1 << 20
STEADY = Growth(Use(100 * MIB, 10, 5), Use(101 * MIB, 10, 5))


def test_the_short_mode_notices_what_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have virtual worker 1 keep 256 KiB and a file of each step; others open a few connections at first."""
    forked = partial(forks.Popen, starting=forks.LAUNCHES)
    monkeypatch.setattr(harness, "subprocess", SimpleNamespace(Popen=forked, PIPE=subprocess.PIPE))
    task = replace(SHORT, steps=120, samples=40, leaks=1)
    found = measure(task)
    assert found.keys() == {"virtual worker 0", "virtual worker 1", "server"}
    leaking = found.pop("virtual worker 1")
    assert leaking.grows == ["memory", "descriptors"]
    assert leaking.memory > task.steps / 2 / 4
    assert all(each.descriptors < 10 < leaking.descriptors for each in found.values())


def test_quarters_are_compared() -> None:
    """Nothing counts that a process has for a moment, or between these quarters."""
    first = [Use(memory * MIB, 10, 6) for memory in (1, 9, 1)]
    last = [Use(memory * MIB, descriptors, 5) for memory, descriptors in ((3, 11), (30, 11), (3, 40))]
    found = growth([*first, *[Use(50 * MIB, 60, 9)] * 6, *last])
    assert (found.first, found.last) == (Use(MIB, 10, 6), Use(3 * MIB, 11, 5))
    assert (found.memory, found.descriptors, found.threads) == (2.0, 1, -1)
    assert found.grows == ["descriptors"]


def test_each_kind_of_growth_is_named() -> None:
    assert STEADY.grows == []
    assert replace(STEADY, last=Use(int((100 + MEMORY) * MIB) + 1, 10, 6)).grows == ["memory", "threads"]


def test_the_report_says_who_grows() -> None:
    grown = replace(STEADY, last=Use(150 * MIB, 10, 5))
    rounds = [{"server": STEADY, "virtual worker 0": grown}, {"server": STEADY, "virtual worker 0": STEADY}]
    outcome = report(MACHINE, SHORT, rounds, {})
    rows = {line[:16].strip(): line for line in outcome.text.splitlines()}
    assert rows["virtual worker 0"].endswith("grows: memory")
    assert rows["server"].split() == ["server", "100.0", "->", "101.0", "10", "->", "10", "5", "->", "5"]
    memory, descriptors, threads = outcome.figures
    assert memory.spread is not None
    assert (memory.spread.low, memory.spread.high, memory.verdict) == (1.0, 50.0, "missed")
    assert descriptors.verdict == threads.verdict == "met"
    assert not report(MACHINE, SHORT, [], {"growth": "it broke"}).complete
