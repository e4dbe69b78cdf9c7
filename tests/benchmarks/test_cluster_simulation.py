"""The benchmark of simulated clusters: real and simulated trainings are measured alike, and trained as told."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.cluster_simulation import (
    TAIL,
    WARM_UP,
    Costs,
    Seen,
    lacking,
    pads,
    report,
    seen,
    seen_in,
    simulated,
    simulation,
    tasks,
    train,
)
from benchmarks.cluster_simulation_worker import Task
from benchmarks.harness import Measurement
from lightning_hetpipe.rules.waves import staleness_bound

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}
COSTS = Costs(step=0.002, server=1e9)
TINY = Task((pads(0.02, [1, 1]), pads(0.04, [1, 1])), (3, 3), waves=WARM_UP + TAIL + 2, in_flight=3, width=8)


def announced(task: Task) -> list[Measurement]:
    """Virtual workers that do as the simulation says, where all pull the same number of waves of each."""
    found = simulation(task, COSTS)
    return [
        Measurement(
            "strategy",
            rate=1.0,
            cores=0.25,
            threads=1,
            loss=None,
            notes={
                "vw": vw,
                "published": [1000.0 + each for each in worker.published],
                "waits": list(worker.synchronised),
                "included": [clock for clock in range(1, task.waves) for _ in task.lengths],
                "passes": 50,
                "late": 0.5 * vw,
            },
        )
        for vw, worker in enumerate(found.workers)
    ]


@pytest.mark.parametrize("lengths", [(3, 3), (6, 3)])
def test_real_and_simulated_are_measured_alike(lengths: tuple[int, ...]) -> None:
    task = replace(TINY, lengths=lengths)
    real, model = seen(task, announced(task)), seen_in(task, simulation(task, COSTS))
    assert real.rate == pytest.approx(model.rate)
    assert real.waits == pytest.approx(model.waits)
    assert real.staleness == model.staleness
    assert (real.late, real.cores) == (0.005, 0.5)


def test_the_window_is_that_of_the_slowest() -> None:
    """With equal waves, both go at the pace of the second, whose stages take 40 ms: the first one waits."""
    found = simulated(TINY, Costs(step=0.0, server=1e12))
    assert found.rate == pytest.approx(2 / 0.04, rel=0.02)
    assert 0.4 < found.waits[0] < 0.7
    assert found.waits[1] < 0.01
    assert simulated(replace(TINY, clock_distance=2), COSTS).staleness > found.staleness


def test_a_wave_waits_for_what_the_server_takes() -> None:
    """Three minibatches in flight over two stages hide little of a push and a pull as long as a minibatch."""
    task = replace(TINY, pads=TINY.pads[:1] * 2)
    seconds = task.weights_bytes / 0.02
    slow = simulated(task, Costs(step=0.0, server=seconds))
    assert slow.rate < 0.9 * simulated(task, Costs(step=0.0, server=1e12)).rate
    assert min(slow.waits) > 0.3


def test_equal_virtual_workers_are_simulated_without_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real ones of this case were 7% off times that are equal to the last digit."""
    task = replace(tasks()["equal, larger weights, Nm = 4, D = 0"], waves=100)
    costs = Costs(step=0.01, server=2e9)
    found = [simulated(task, costs).rate]
    for jitter in (1e-6, 1e-3, 0.0):
        monkeypatch.setattr("benchmarks.cluster_simulation.JITTER", jitter)
        found.append(simulated(task, costs).rate)
    *without, with_ties = found
    assert without == pytest.approx([without[0]] * 3, rel=0.02), "how much tasks differ does not matter"
    assert with_ties > 1.03 * max(without)


@pytest.mark.parametrize("lengths", [(4, 4, 4), (4, 6, 9)])
def test_what_weights_lack_is_what_the_rules_say(lengths: tuple[int, ...]) -> None:
    """With D = 0, all have pulled as many waves."""
    task = Task((pads(0.1, [1]),) * 3, lengths, waves=20, in_flight=4)
    for vw, clock in itertools.product(range(3), (0, 5)):
        most = max(staleness_bound(lengths, vw, of, 4, 0) for of in range(3) if of != vw)
        assert lacking(task, vw, [clock] * 3) == most
    assert lacking(task, 0, [5, 5, 4]) == lacking(task, 0, [5, 5, 5]) + lengths[2], "it lacks a wave more"
    assert lacking(task, 0, [20, 20, 20]) < 0, "nothing comes behind the last wave"


def test_all_variants_are_long_enough() -> None:
    for name, task in tasks().items():
        assert task.waves > WARM_UP + TAIL + 4, name
        assert len(task.pads) == len(task.lengths) == 4
        assert min(task.lengths) >= task.in_flight
        assert Task.from_json(task.to_json()) == task
    assert len({task.weights_bytes for task in tasks().values()}) == 2


def test_the_report_compares_within_rounds_and_says_what_failed() -> None:
    tried = {"two": TINY, "one that broke": TINY}
    model = simulated(TINY, COSTS)
    rounds: list[dict[str, Costs | Seen]] = [
        {"costs of width 8": COSTS, "two": Seen(0.96 * model.rate, (0.5, 0.125), 7, late=0.002, cores=0.25)},
        {"two": Seen(1.0, (0.0, 0.0), 0)},
    ]
    outcome = report(MACHINE, tried, rounds, {"one that broke": "for a reason"})
    cells = {figure.name: figure.cells() for figure in outcome.figures}
    assert cells["real off the simulation, two"] == ("0.040", "0.040 .. 0.040", "0.05", "met")
    assert cells["real off the simulation, one that broke"][0] == "?"
    rows = [line.split() for line in outcome.text.splitlines()]
    assert [row[2:] for row in rows if row[:2] == ["two", "real"]] == [
        [f"{0.96 * model.rate:.2f}", "0.50", "0.12", "7", "2.0", "0.25"]
    ]
    assert "for a reason" in outcome.text
    assert not outcome.complete


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(3, 3), (6, 3)])
def test_virtual_workers_train_as_told(lengths: tuple[int, ...]) -> None:
    """With D = 0 what weights lack does not depend on timing."""
    task = replace(TINY, lengths=lengths)
    found = train(task)
    assert found.staleness == simulation(task, COSTS).staleness
    assert found.rate > 0
    assert all(0 <= share < 1 for share in found.waits)
