"""The benchmark of divided layers: both sides train the same, and what the report says."""

from __future__ import annotations

import pytest

from benchmarks.harness import Measurement
from benchmarks.split_layers import NETS, SMALL, WIDE, report, variant
from benchmarks.split_layers_worker import Job, measured

MACHINE = {"cpu": "a cpu", "cores_used": "CPUs 0 and 1", "load_average": 0.0, "torch": "2", "lightning": "2"}


def test_both_train_alike() -> None:
    losses = [measured(Job(SMALL, divided, steps=6)).loss for divided in (True, False)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_report() -> None:
    rates = {(WIDE, True): 9.0, (WIDE, False): 5.0, (SMALL, True): 2.0, (SMALL, False): 8.0}
    measured = {
        variant(net, divided): Measurement(net, rates[net, divided], 1.0, 1, 0.5, {"longest_s": 1.0 + (not divided)})
        for net in NETS
        for divided in (True, False)
    }
    outcome = report(MACHINE, [measured], {})
    assert outcome.complete
    assert [figure.spread.median for figure in outcome.figures if figure.spread] == [1.8, 2.0, 0.25, 2.0]
    assert [figure.verdict for figure in outcome.figures] == ["met", "", "", ""]
    assert "Conv2d(64, 256, 3)" in outcome.text
