"""The benchmark of plans: what it compares with, and the report."""

from functools import partial

import pytest

from benchmarks import planning
from benchmarks.harness import Measurement
from benchmarks.planning import MIXES, OPT_350M, PLAIN, emulated, gap, mixes, plain, predicted, report
from benchmarks.planning_problems import best_of_all, by_hand, small
from benchmarks.reference_graphs import BEST, busiest, busiest_of, file_of, missing
from lightning_hetpipe.planning.search.divider import CLOSE

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}


def test_there_is_no_gap() -> None:
    assert gap(8) <= CLOSE - 1


def test_a_gap_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their given order devices do worse."""
    monkeypatch.setattr(planning, "divided", partial(planning.divided, ordered=True))
    assert gap(8) > 0.01


def test_random_problems_differ_and_some_have_no_room() -> None:
    found = [best_of_all(*small(seed)) for seed in range(6)]
    assert None in found
    assert len(set(found)) > 4


def test_splits_by_hand_are_splits() -> None:
    profile, cluster = small(3)
    for splits in by_hand(profile, cluster.slots).values():
        assert len(splits) == len(cluster.slots)
        assert splits[0] == 0
        assert list(splits) == sorted(set(splits))
        assert splits[-1] < len(profile.layers)


def test_a_graphs_load_counts_each_value_that_enters_or_leaves_once() -> None:
    def node(number: int, colour: int, backward: int, took: float) -> dict[str, float]:
        return {"id": number, "colorClass": colour, "isBackwardNode": backward, "fpgaLatency": took, "size": 1.0}

    nodes = [node(n, n, 0, 10.0) for n in range(6)] + [node(10 + n, n, 1, 20.0) for n in range(6)]
    edges = [{"sourceId": n, "destId": n + 1, "cost": 1.0} for n in range(5)]
    edges += [{"sourceId": n + 11, "destId": n + 10, "cost": 2.0} for n in range(5)]
    # Six layers on six devices: each has forward and backward, a value and a gradient in, and as much out.
    assert busiest_of({"nodes": nodes, "edges": edges, "maxSizePerFPGA": 2.0}) == 30 + 2 * (1 + 2)


absent = missing(OPT_350M, *map(file_of, BEST))


@pytest.mark.skipif(absent is not None, reason=absent or "")
def test_the_reference_graphs_are_split_as_well_as_by_their_own_program() -> None:
    assert {name: round(busiest(name), 4) for name in BEST} == dict(BEST)


@pytest.mark.skipif(absent is not None, reason=absent or "")
@pytest.mark.slow
def test_plans_are_no_slower_than_what_people_do() -> None:
    found = mixes()
    outcome = report(MACHINE, 0.0, [0.5], {}, {}, found, {}, [], {})
    ratios = [figure for figure in outcome.figures if figure.name.startswith("OPT-350M")]
    assert len(ratios) == len(MIXES)
    assert all(figure.spread is None or figure.spread.median >= 0.99 for figure in ratios)
    assert "does not fit" in outcome.text


def test_what_is_trained_plainly_is_what_emulated_stages_train() -> None:
    one = next(iter(emulated().values()))
    assert (plain().layers, plain().width, plain().batch) == (one.layers, one.width, one.batch)
    assert plain().variant == "plain"


def test_the_report_compares_the_engine_with_the_simulation() -> None:
    tasks = emulated()
    name = "bottleneck last, Nm = 2"
    expected = predicted(tasks[name], step=0.01)
    assert expected < predicted(tasks[name], step=0.0)
    rounds = [
        {
            name: Measurement("strategy", expected * 0.97, cores=0.5, threads=1, loss=0.5),
            PLAIN: Measurement("plain", 100.0, cores=1.0, threads=1, loss=0.5),
        }
    ]
    outcome = report(
        MACHINE,
        0.0,
        [0.5],
        {"4 nodes": 2.0},
        {"resnet50": 81.0},
        {},
        tasks,
        rounds,
        {"x": "it broke"},
        "there is no data",
    )
    cells = {figure.name: figure.cells() for figure in outcome.figures}
    assert cells[f"engine off the simulation, {name}"] == ("0.030", "0.030 .. 0.030", "0.05", "met")
    assert cells["T_max above the best of all, random problems"][-1] == "met"
    assert cells["resnet50 on six accelerators, over the reference"][-1] == "met"
    assert cells["bert24 on six accelerators, over the reference"][0] == "?"
    assert "left out: there is no data" in outcome.text
    assert "it broke" in outcome.text
    assert not outcome.complete
