"""Benchmarks of pairs that take turns: pairs differ by one thing alone, and are compared within rounds."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks import training_worker
from benchmarks.folder_profile import FolderProfile, folder_of
from benchmarks.harness import Measurement
from benchmarks.host_cost import PAIRS as HOST_PAIRS
from benchmarks.host_cost import by_folder, profile
from benchmarks.prediction_costs import PREDICTION_COSTS
from benchmarks.timeline_costs import TIMELINE_COSTS
from benchmarks.training_task import Task
from benchmarks.training_worker import in_turn, of_all_turns
from benchmarks.turns import Compared, Pair, Turns, compare, measure, on_cores, shortened

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}
PAIRS = TIMELINE_COSTS.pairs


def measured(rate: float) -> Measurement:
    return Measurement("strategy", rate, cores=1.0, threads=1, loss=0.5)


def compared(off: float, on: float) -> Compared:
    return Compared(measured(off), measured(on))


def test_pairs_differ_by_the_timeline_alone() -> None:
    for pair in PAIRS:
        assert not pair.off.timeline
        assert pair.on == replace(pair.off, timeline=True)


def test_pairs_differ_by_the_weight_policy_alone() -> None:
    pairs = PREDICTION_COSTS.pairs
    assert [pair.on.weights for pair in pairs] == ["spectrain", "pipeoptim", "xpipe"]
    for pair in pairs:
        assert pair.off == replace(pair.on, weights="stash")


def test_pairs_differ_by_the_strategy_alone() -> None:
    for pair in HOST_PAIRS.pairs:
        assert pair.off == replace(pair.on, variant="plain", stages=2, in_flight=None, weights=None)


def test_cpu_time_is_compared_per_minibatch() -> None:
    """Half as fast on one core as on three is less CPU time, of which the target is the largest ratio."""
    pair, other, *_, evaluation = HOST_PAIRS.pairs
    found = Compared(replace(measured(100.0), cores=3.0), measured(50.0))
    of_others = {other.label: compared(100.0, 90.0), evaluation.label: compared(100.0, 90.0)}
    outcome = HOST_PAIRS.report(MACHINE, [{pair.label: found, **of_others}], {})
    known = [figure for figure in outcome.figures if figure.spread is not None]
    assert [figure.cells()[0] for figure in known] == ["0.667", "1.111", "1.111"]
    assert [figure.verdict for figure in known] == ["met", "missed", "met"]  # an evaluation may cost 1.2


def test_folders_of_code() -> None:
    assert folder_of("/x/lightning_hetpipe/run/extensions/replay.py") == "lightning_hetpipe/run/extensions"
    assert folder_of("/v/lib/site-packages/lightning/pytorch/trainer/trainer.py") == "lightning"
    assert folder_of("/x/benchmarks/line.py") == "benchmarks"
    assert folder_of("/usr/lib/python3.11/threading.py") == "python"


def test_calls_and_cpu_time_of_all_threads_count_by_folder() -> None:
    from lightning_hetpipe.errors import closest

    def work() -> None:
        for _ in range(1000):
            closest("stagse", ["stages", "weights"])

    profile = FolderProfile()
    with profile.watching():
        work()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    work()
    calls, seconds = profile.totals()["lightning_hetpipe"]
    assert calls == 2000
    assert seconds > 0


def test_a_profile_has_a_column_for_each_variant() -> None:
    rows = by_folder({"plain": {"lightning": (90.0, 200.0)}, "d": {"lightning": (99.0, 210.0), "run": (40.0, 300.0)}})
    assert rows == [("folder", "plain", "d"), ("lightning", "90, 200", "99, 210"), ("run", "0, 0", "40, 300")]


@pytest.mark.slow
def test_a_profile_names_our_folders() -> None:
    task = Task("strategy", layers=4, width=8, batch=8, warmup=4, steps=4, tail=2, in_flight=3, profile=True)
    found = profile(task)
    assert found["lightning_hetpipe/pipeline"][0] > 50
    assert found["torch's operators"][1] > 0


@pytest.mark.parametrize("turns", [HOST_PAIRS, TIMELINE_COSTS, PREDICTION_COSTS])
def test_both_of_a_pair_are_shortened_and_pinned(turns: Turns) -> None:
    for pair in turns.pairs:
        short = on_cores(shortened(pair), (3, 5))
        assert short.off.turns == short.on.turns < pair.off.turns
        assert short.off.cores == short.on.cores == (3, 5)


def test_ratios_are_formed_within_rounds() -> None:
    pair, other, third = PAIRS
    rounds = [
        {pair.label: compared(100.0, 99.0)},
        {pair.label: compared(50.0, 49.0), other.label: compared(1.0, 1.0)},
    ]
    spread = compare(rounds, pair)
    assert spread is not None
    assert (spread.low, spread.high) == pytest.approx((0.98, 0.99))
    assert compare(rounds, third) is None


def test_the_report_says_what_was_met() -> None:
    pair, other, third = PAIRS
    rounds = [{pair.label: compared(50.0, 49.5), other.label: compared(100.0, 90.0)}]
    outcome = TIMELINE_COSTS.report(MACHINE, rounds, {third.label: "it broke"})
    rows = {line.partition("  ")[0]: line.split() for line in outcome.text.splitlines()}
    assert rows[pair.label][-8:] == ["0.990", "0.990", "..", "0.990", "0.98", "met", "202", "202"]
    assert rows[other.label][-3:] == ["missed", "1111", "1111"]
    assert "?" in rows[third.label]
    assert "it broke" in outcome.text
    assert not outcome.complete


def test_every_other_turn_goes_in_the_opposite_order(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[bool] = []

    def train(task: Task) -> Iterator[Measurement]:
        done.append(task.timeline)
        yield measured(40.0 if task.timeline else 10.0)

    monkeypatch.setattr(training_worker, "TRAINING", {"strategy": train})
    off = Task("strategy", turns=3)
    assert [each.rate for each in in_turn([off, replace(off, timeline=True)])] == pytest.approx([10.0, 40.0])
    assert done == [False, True, True, False, False, True]


def test_turns_weigh_by_their_seconds() -> None:
    slow = replace(measured(10.0), cores=2.0)
    both = of_all_turns([slow, measured(40.0)])
    assert both.rate == pytest.approx(16.0)  # as many minibatches in 0.1 s as in 0.025 s
    assert both.cores == pytest.approx(1.8)


@pytest.mark.slow
def test_the_timeline_is_recorded_where_it_is_said_to_be() -> None:
    task = Task("strategy", layers=4, width=8, batch=8, warmup=4, steps=4, tail=2, turns=2)
    found = measure(Pair("tiny", task, replace(task, timeline=True)))
    assert "spans" not in found.off.notes
    assert found.on.notes["spans"]


@pytest.mark.slow
def test_weights_are_predicted_where_they_are_said_to_be() -> None:
    """After so few minibatches losses differ a little."""
    task = Task(
        "strategy", layers=4, width=8, batch=8, warmup=4, steps=4, tail=2, turns=1, weights="stash", optimizer="adamw"
    )
    found = measure(Pair("tiny", task, replace(task, weights="xpipe")))
    assert found.off.loss != found.on.loss
