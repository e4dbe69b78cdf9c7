"""Plans know each weight policy: the copies that it keeps, and when minibatches may start."""

from __future__ import annotations

import pytest

from lightning_hetpipe.planning.model.cluster import Cluster, Device, Node
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.model.simulate import StageTimes, simulate
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.rules.versions import POLICIES, SYNC, TWO_BUFFERS, Versions
from tests.planning.loads import rate

FOUR = [StageTimes(1.0, 2.0)] * 4


def rate_of(policy: str, in_flight: int, every: int) -> float:
    run = simulate(FOUR, in_flight, 96, versions=Versions(POLICIES[policy], in_flight, every))
    return rate(run, 24)


def test_without_staleness_and_accumulation_stages_take_turns() -> None:
    assert rate_of("sync", 4, 1) == pytest.approx(1 / 12)
    assert rate_of("stash", 8, 1) == pytest.approx(1 / 3)


@pytest.mark.parametrize("every", [4, 8, 24])
def test_minibatches_of_one_step_fill_the_pipeline(every: int) -> None:
    """GPipe: M minibatches take M + k - 1 times as long as the slowest stage does for one."""
    assert rate_of("sync", every, every) == pytest.approx(every / (3.0 * (every + 3)))
    assert rate_of("2bw", every, every) > rate_of("sync", every, every)
    assert rate_of("2bw", 24, 24) == pytest.approx(1 / 3, rel=0.03)


def cluster(memory: int) -> Cluster:
    return Cluster([Node("box", [Device("gpu", memory)] * 2)])


PROFILE = Profile("six", 1, [LayerBytes(str(n), 100, 20, 1) for n in range(6)], {"gpu": [Times(1.0, 2.0)] * 6}, {})


@pytest.mark.parametrize(
    ("policy", "every", "copies"),
    [
        ("stash", 1, 4),
        ("stash", 2, 3),
        ("sync", 4, 1),
        ("2bw", 4, 2),
        ("spectrain", 1, 4),
        ("xpipe", 4, 2),
        ("pipeoptim", 4, 4),
    ],
)
def test_copies_of_the_weights(policy: str, every: int, copies: int) -> None:
    devices = cluster(1 << 30)
    found = PlanningProblem(PROFILE, devices, optimizer=0, weights=POLICIES[policy], every=every).estimate(
        devices.slots, [0, 3], 4
    )
    assert [stage.memory.versions for stage in found.stages] == [copies * 300] * 2


def test_what_fits_with_two_buffers_and_not_with_four() -> None:
    devices = cluster(1800)
    stashed = best_plan(PlanningProblem(PROFILE, devices, optimizer="sgd", stages=2), 4)
    buffered = best_plan(PlanningProblem(PROFILE, devices, optimizer="sgd", stages=2, weights=TWO_BUFFERS, every=4), 4)
    assert not stashed.fits
    assert buffered.fits


def test_in_flight_is_chosen_for_the_policy() -> None:
    devices = cluster(1 << 30)
    assert best_plan(PlanningProblem(PROFILE, devices, weights=SYNC)).in_flight == 1  # more wait for the same step
    assert best_plan(PlanningProblem(PROFILE, devices, weights=SYNC, every=8)).in_flight > 1
    assert best_plan(PlanningProblem(PROFILE, devices, weights=TWO_BUFFERS, every=2)).in_flight == 2
