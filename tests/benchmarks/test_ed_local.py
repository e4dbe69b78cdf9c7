"""The benchmark of allocations over a network: virtual workers train to the same bits, and bytes are counted."""

import pytest

from benchmarks.ed_local import ED, NP, RATES, Found, measure, report
from benchmarks.ed_local_worker import SPEEDS, Task
from benchmarks.harness import ProcessFailed
from tests.support.namespaces import Unavailable, network

MACHINE = {"cpu": "a cpu", "cores_used": None, "load_average": 0.0, "torch": "2", "lightning": "2"}


@pytest.mark.slow
def test_allocations_train_to_the_same_bits_and_ed_local_keeps_weights_where_they_are() -> None:
    try:
        with network(1):
            pass
    except Unavailable as why:
        pytest.skip(str(why))
    tasks = {name: Task(name, seconds=0.0, warmup=4, steps=32) for name in ("one machine", "np", "ed")}
    found = {name: measure(task, None) for name, task in tasks.items()}
    assert len({each.weight for each in found.values()}) == 1
    # A virtual worker pushes and pulls what three other machines have, and its machine does the same for the others.
    task = tasks["np"]
    wave = 4 * (1 - 1 / len(SPEEDS)) * task.weights_bytes / (len(SPEEDS) * task.in_flight)
    assert 7 / 8 * wave < found["np"].bytes < 1.5 * wave
    assert found["ed"].bytes < found["np"].bytes / 10


def test_the_report_says_whether_weights_are_the_same() -> None:
    link = next(iter(RATES))
    rounds = [
        {f"{NP}, {link}": Found(2.0, 3e6, "a"), f"{ED}, {link}": Found(4.0, 1e5, "a")},
        {f"{NP}, {link}": Found(2.0, 3e6, "a"), f"{ED}, {link}": Found(6.0, 1e5, "b")},
    ]
    outcome = report(MACHINE, rounds[:1], {"other": str(ProcessFailed("no namespaces"))})
    assert "the same weights in the end: yes" in outcome.text
    assert "no namespaces" in outcome.text
    assert not outcome.complete
    outcome = report(MACHINE, rounds, {})
    assert "the same weights in the end: NO" in outcome.text
    assert not outcome.complete
    line = next(line for line in outcome.text.splitlines() if line.strip().startswith(ED))
    assert line.split() == [ED, "5.00", "4.00", "..", "6.00", "0.10"]
    (first, *_) = outcome.figures
    assert first.spread is not None
    assert first.spread.median == 2.5
