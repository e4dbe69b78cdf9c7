"""Which learning rates stale gradients bear, and where a fit warns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.staleness import largest_stable
from lightning_hetpipe.rules.staleness import (
    BATCH_NORM,
    LIMIT,
    NORMALISED,
    PREDICTED,
    PREDICTED_AND_CLIPPED,
    Stepped,
    bearable_rate,
    steps_behind,
)
from tests.oracle_policies import global_staleness
from tests.support.marks import explores

HEAVY = Stepped(lr=0.05, momentum=0.9)


@explores(30)
@given(st.floats(0, 0.99), st.integers(1, 30), st.booleans())
def test_a_quadratic_is_stable_up_to_one_over_curvature_and_staleness(mu: float, steps: int, nesterov: bool) -> None:
    assert largest_stable(mu, steps, nesterov) / (1 - mu) * steps >= 1 - 1e-4


@pytest.mark.parametrize(("momentum", "steps", "largest"), [(0.9, 0, 3.8), (0.9, 3, 0.0348), (0, 0, 2.0), (0, 1, 1.0)])
def test_staleness_takes_away_what_momentum_adds(momentum: float, steps: int, largest: float) -> None:
    assert largest_stable(momentum, steps) == pytest.approx(largest, rel=2e-3)


def growth(rate: float, mu: float, workers: int, in_flight: int) -> float:
    """Rest of a quadratic of curvature 1 after 300 waves of workers whose updates are added, D = 0."""
    rng = np.random.default_rng(0)
    versions = [[1.0] for _ in range(workers)]
    velocity, common = rng.normal(size=workers), 1.0
    for _ in range(300):
        taken = common
        for worker, known in enumerate(versions):
            start = known[-1]
            for _ in range(in_flight):
                velocity[worker] = mu * velocity[worker] + known[max(0, len(known) - in_flight)]
                known.append(known[-1] - rate * velocity[worker])
            common += known[-1] - start
        assert taken == pytest.approx(start)
        for known in versions:
            known[-1] = common
    return abs(common)


@pytest.mark.parametrize("mu", [0.0, 0.9])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("in_flight", [2, 4])
def test_updates_that_are_added_act_like_as_much_larger_a_rate(mu: float, workers: int, in_flight: int) -> None:
    """The same bound holds, with N * lr and the global staleness."""
    steps = in_flight - 1 if workers == 1 else global_staleness(in_flight, 0)
    assert growth(0.98 * (1 - mu) / (workers * steps), mu, workers, in_flight) < 1
    assert growth(4 * (1 - mu) / (workers * steps), mu, workers, in_flight) > 1


@pytest.mark.parametrize(
    ("minibatches", "accumulate", "steps"), [(0, 1, 0), (3, 1, 3), (3, 4, 1), (4, 4, 1), (5, 4, 2), (0, 4, 0)]
)
def test_gradients_that_are_accumulated_are_fewer_steps_stale(minibatches: int, accumulate: int, steps: int) -> None:
    assert steps_behind(minibatches, accumulate) == steps


@pytest.mark.parametrize(
    ("group", "steps", "workers", "most"),
    [
        (HEAVY, 3, 1, LIMIT / 3 / 10),
        (HEAVY, 3, 2, LIMIT / 3 / 10 / 2),
        (HEAVY, 1, 1, LIMIT / 10),
        (HEAVY, 0, 1, None),
        (Stepped(0.05, 0.5), 3, 1, LIMIT / 3 / 2),
        (Stepped(0.05), 3, 1, LIMIT / 3),
        (Stepped(0.03), 3, 1, None),
        (Stepped(0.05, 0.99), 3, 1, LIMIT / 3 / 100),
        (Stepped(0.05, 1.0), 3, 1, 0.0),
        (Stepped(0.05, 1.0), 0, 1, None),
        (Stepped(0.003, 0.9), 3, 1, None),
        (Stepped(0.003, 0.9), 7, 1, LIMIT / 7 / 10),
        (Stepped(0.05, 0.9, dampening=0.9), 2, 1, None),  # an average
        (Stepped(0.05, 0.9, dampening=0.9), 3, 1, LIMIT / 3),
        (Stepped(0.05, 0.9, dampening=1.0), 3, 1, None),
        (Stepped(0.0, 1.0), 3, 1, None),
        (Stepped(0.001, 0.9, normalised=True), 3, 1, NORMALISED / 3 / 10),
        (Stepped(0.001, normalised=True), 3, 1, NORMALISED / 3),
        (Stepped(0.001, normalised=True), 2, 1, None),  # exactly the bound
    ],
)
def test_where_a_fit_warns(group: Stepped, steps: int, workers: int, most: float | None) -> None:
    found = bearable_rate(group, steps, workers)
    assert found == (None if most is None else pytest.approx(most))


@pytest.mark.parametrize(
    ("bears", "sgd", "adam"),
    [
        ({}, 1, 1),
        ({"clipped": True}, 1, 1),
        ({"corrected": True}, 1, 1),
        ({"predicted": True}, 1, PREDICTED),
        ({"predicted": True, "corrected": True}, PREDICTED, PREDICTED),
        ({"predicted": True, "clipped": True}, PREDICTED_AND_CLIPPED, PREDICTED),
        ({"predicted": True, "clipped": True, "corrected": True}, PREDICTED_AND_CLIPPED, PREDICTED),
        ({"batch_norm": True}, BATCH_NORM, BATCH_NORM),
        ({"batch_norm": True, "predicted": True, "corrected": True}, BATCH_NORM * PREDICTED, BATCH_NORM * PREDICTED),
    ],
)
def test_policies_and_models_bear_different_rates(bears: dict[str, bool], sgd: float, adam: float) -> None:
    assert bearable_rate(Stepped(1.0), 3, **bears) == pytest.approx(sgd * LIMIT / 3)
    assert bearable_rate(Stepped(1.0, normalised=True), 3, **bears) == pytest.approx(adam * NORMALISED / 3)


def test_the_rate_that_is_named_is_enough() -> None:
    for steps in range(1, 30):
        most = bearable_rate(HEAVY, steps)
        assert most is not None
        assert bearable_rate(Stepped(most, 0.9), steps) is None
