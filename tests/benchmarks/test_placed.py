"""The benchmark of placed layers: virtual workers train to the same bits, and bytes are what plans say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.harness import ProcessFailed
from benchmarks.placed import MODELS, NP, PLACED, SCALE, Found, measure, planned, report, ring, shapes, task_of
from benchmarks.placed_worker import NODES
from tests.support.namespaces import Unavailable, network

MACHINE = {"cpu": "a cpu", "cores_used": None, "load_average": 0.0, "torch": "2", "lightning": "2"}


def test_the_scale_keeps_proportions() -> None:
    """VGG-19 has 123.6 of its 143.7 million parameters in the classifier, AlexNet 58.6 of 61.1 million."""
    for model, classifier, others in zip(MODELS, (123_642_856, 58_631_144), (20_024_384, 2_469_696), strict=True):
        assert sum(layer.parameters for layer in shapes(model).layers) == 4 * (classifier + others)
        task = task_of(model)
        assert SCALE * task.classifier_bytes == pytest.approx(4 * classifier, rel=0.01)
        assert SCALE * task.other_bytes == pytest.approx(4 * others, rel=0.06)
        assert SCALE * task.image_bytes == 4 * 32 * 3 * 224**2


def test_fewer_bytes_cross_the_network_than_with_servers_or_all_reduce() -> None:
    for model in MODELS:
        made = planned(model)
        assert {choice.stages[-1].slot for choice in made[PLACED].choices} == {made[PLACED].choices[-1].stages[0].slot}
        assert made[PLACED].network_bytes < made[NP].network_bytes / 4
        assert made[NP].network_bytes < ring(model)[1] / 3
        assert made[PLACED].rate > 3 * made[NP].rate > 3 * ring(model)[0]


@pytest.mark.slow
def test_allocations_train_to_the_same_bits_and_placed_weights_stay_where_they_are() -> None:
    try:
        with network(1):
            pass
    except Unavailable as why:
        pytest.skip(str(why))
    task = replace(task_of("VGG-19"), seconds=(0.0, 0.0), warmup=4, steps=16)
    found = {name: measure(replace(task, allocation=name), None) for name in ("one machine", "np", "placed")}
    assert len({each.weight for each in found.values()}) == 1
    wave = task.in_flight * NODES
    weights = task.classifier_bytes + task.other_bytes
    assert found["np"].bytes / SCALE == pytest.approx(2 * (NODES - 1) * weights / wave, rel=0.15)
    away = (NODES - 1) / NODES
    expected = away * (task.image_bytes + 2 * task.activation_bytes) + 2 * (NODES - 1) * task.other_bytes / wave
    assert found["placed"].bytes / SCALE == pytest.approx(expected, rel=0.25)


def test_the_report_says_whether_weights_are_the_same() -> None:
    model = MODELS[0]
    rounds = [
        {f"{model}, {NP}": Found(1.0, 2e8, "a"), f"{model}, {PLACED}": Found(2.0, 4e7, "a")},
        {f"{model}, {NP}": Found(1.0, 2e8, "a"), f"{model}, {PLACED}": Found(3.0, 4e7, "b")},
    ]
    outcome = report(MACHINE, rounds[:1], {"other": str(ProcessFailed("no namespaces"))})
    assert "the same weights in the end: yes" in outcome.text
    assert "no namespaces" in outcome.text
    assert "not measured" in outcome.text
    assert not outcome.complete
    outcome = report(MACHINE, rounds, {})
    assert "the same weights in the end: NO" in outcome.text
    assert not outcome.complete
    line = next(line for line in outcome.text.splitlines() if line.startswith(f"  {PLACED}"))
    assert (line.split()[1], line.split()[3], line.split()[5]) == ("40.0", "2.50", "4.4")
    speeds, nbytes, *_ = outcome.figures
    assert speeds.spread is not None
    assert nbytes.spread is not None
    assert (speeds.spread.median, nbytes.spread.median) == (2.5, 0.2)
