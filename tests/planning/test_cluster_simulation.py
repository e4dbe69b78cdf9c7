"""The simulation of a cluster: pipelines as they are alone, Wave Synchronous Parallel, servers, and shared links."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.planning.model.cluster import Cluster, Link, Node
from lightning_hetpipe.planning.model.cluster_simulation import ClusterSimulation, simulate_cluster
from lightning_hetpipe.planning.model.simulate import (
    Crossing,
    PlacedWeights,
    StageTimes,
    Visits,
    WorkerPipeline,
    simulate,
)
from lightning_hetpipe.rules.schedule import calls, segments
from lightning_hetpipe.rules.versions import STASH, SYNC, TWO_BUFFERS, Versions
from lightning_hetpipe.rules.waves import staleness_bound, wave_lengths
from tests.oracle_policies import global_staleness
from tests.planning.loads import rate

EQUAL = [StageTimes(1.0, 2.0)] * 4

seconds = st.integers(0, 5).map(float)
times = st.builds(StageTimes, seconds, seconds, seconds, seconds, seconds)


@st.composite
def visits(draw: st.DrawFn) -> Visits:
    """Two pieces of a few layers, called in some order, on a few stages."""
    lengths = [draw(st.integers(1, 3)) for _ in range(2)]
    splits = sorted({0, *draw(st.lists(st.integers(1, sum(lengths) - 1), max_size=3))})
    parts = segments(lengths, splits)
    order = [0, 1, *draw(st.lists(st.integers(0, 1), max_size=2))]
    return Visits(parts, calls(order), draw(st.sets(st.integers(0, len(parts) - 1), max_size=2)))


@given(
    st.lists(times, min_size=1, max_size=5),
    st.one_of(st.none(), visits()),
    st.integers(1, 6),
    st.integers(1, 7),
    st.integers(1, 4),
    seconds,
    st.sampled_from([(STASH, 1), (SYNC, 3), (TWO_BUFFERS, 6)]),
    st.data(),
)
def test_one_virtual_worker_does_what_its_simulation_alone_says(
    stages: list[StageTimes],
    parts: Visits | None,
    in_flight: int,
    wave: int,
    waves: int,
    step: float,
    policy: tuple[object, int],
    data: st.DataObject,
) -> None:
    """Bit for bit, ties included."""
    if parts is not None:
        stages = data.draw(st.lists(times, min_size=len(parts.segments), max_size=len(parts.segments)))
    versions = Versions(policy[0], in_flight, policy[1])  # type: ignore[arg-type]
    alone = simulate(stages, in_flight, waves * wave, step=step, visits=parts, versions=versions)
    run = simulate_cluster([WorkerPipeline(stages, wave, step, parts)], in_flight, waves, versions=versions)
    assert run.workers[0].published == alone.published
    assert (run.workers[0].waited, run.workers[0].synchronised, run.staleness) == (0, (), 0)


def test_equal_virtual_workers_that_move_nothing_run_side_by_side() -> None:
    alone = simulate(EQUAL, 4, 80, step=0.5)
    run = simulate_cluster([WorkerPipeline(EQUAL, 4, 0.5)] * 3, 4, 20)
    assert run.rate(4) == pytest.approx(3 * rate(alone, 16), rel=0.01)


def single(took: float, wave: int = 4) -> WorkerPipeline:
    """A virtual worker of one stage, which makes ``1 / took`` minibatches per second."""
    return WorkerPipeline([StageTimes(took / 3, 2 * took / 3)], wave)


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_equal_waves_lock_all_to_the_slowest(distance: int) -> None:
    """DESIGN, section 13: N * min X_v at any finite D."""
    run = simulate_cluster([single(1.0), single(2.0), single(4.0)], 1, 60, clock_distance=distance)
    assert run.rate(20) == pytest.approx(3 / 4, rel=0.01)
    assert run.workers[0].waited > run.workers[1].waited > run.workers[2].waited == 0


def test_waves_in_proportion_run_at_the_sum_of_all() -> None:
    rates = [1.0, 0.5, 0.25]
    waves = wave_lengths(rates, 4)
    assert waves == (16, 8, 4)
    run = simulate_cluster([single(1 / rate, wave) for rate, wave in zip(rates, waves, strict=True)], 1, 10)
    assert run.rate(2) == pytest.approx(sum(rates))
    assert sum(worker.waited for worker in run.workers) == pytest.approx(0)


def test_a_clock_distance_takes_up_jitter() -> None:
    at_once, apart = (
        simulate_cluster([WorkerPipeline(EQUAL, 4)] * 6, 4, 60, clock_distance=distance, jitter=0.2).rate(10, 1)
        for distance in (0, 4)
    )
    assert apart > 1.02 * at_once


TWO = Cluster([Node("one", ["2xT4"], "10 B/s"), Node("two", ["2xT4"], "10 B/s")], Link(2.0, 0.25))


def test_an_update_goes_to_the_server_and_comes_back() -> None:
    """One stage takes 3 s, W = 1: 20 bytes take 2 s in the server's memory each way, and from the other node
    10 s over the network, with its latency. The nearer one waits for the other, as D = 0."""
    stages = [StageTimes(1.0, 2.0)]
    workers = [WorkerPipeline(stages, 1, weights=[PlacedWeights(node, 0, 20)]) for node in (0, 1)]
    run = simulate_cluster(workers, 1, 3, cluster=TWO, servers=[0])
    near, far = run.workers
    # Both push at 3 and share the memory's 10 bytes/s until 7; the network's 2 bytes/s take until 13.
    assert far.published[0] == 3 + 10 + 0.25 + 10 + 0.25
    assert near.published[0] == 3 + 10 + 0.25 + 4
    assert near.waited > far.waited
    assert [each.synchronised[0] for each in (near, far)] == [near.published[0] - 3, far.published[0] - 3]
    assert sum(far.synchronised) == pytest.approx(far.waited + 3 * 2 * (10 + 0.25))
    assert run.traffic == {
        "one out": 60.0,
        "one in": 60.0,
        "two out": 60.0,
        "two in": 60.0,
        "one server in": 120.0,
        "one server out": 120.0,
    }


def test_nothing_crosses_the_network_where_servers_are_local() -> None:
    """The paper's ED-local: what a stage holds lies on its node's server."""
    workers = [WorkerPipeline(EQUAL, 4, weights=[PlacedWeights(0, 0, 30), PlacedWeights(1, 1, 10)])] * 2
    run = simulate_cluster(workers, 4, 5, cluster=TWO, servers=[0, 1])
    assert {name: nbytes for name, nbytes in run.traffic.items() if "server" not in name} == dict.fromkeys(
        ["one out", "one in", "two out", "two in"], 0.0
    )
    assert run.traffic["one server in"] == 2 * 5 * 30


def crossing(nbytes: float, latency: float = 0.0) -> WorkerPipeline:
    """Two stages on two nodes."""
    stages = [StageTimes(1.0, 2.0, receive_gradient=latency), StageTimes(1.0, 2.0, receive=latency)]
    return WorkerPipeline(stages, 4, forwards={1: Crossing(nbytes, 0, 1)}, gradients={0: Crossing(nbytes, 1, 0)})


def test_activations_take_as_long_as_their_link_says() -> None:
    alone = simulate([StageTimes(1.0, 2.0, receive_gradient=0.75), StageTimes(1.0, 2.0, receive=0.75)], 3, 24)
    run = simulate_cluster([crossing(1.0, latency=0.25)], 3, 6, cluster=TWO)
    assert run.workers[0].published == pytest.approx(alone.published)
    assert run.traffic["one out"] == run.traffic["two out"] == 24


def test_virtual_workers_share_the_link_between_their_nodes() -> None:
    """One receives 3 bytes in 1.5 s and computes for 3 s. Four that go in step receive for 6 s."""
    one, four = (simulate_cluster([crossing(3.0)] * count, 4, 20, cluster=TWO) for count in (1, 4))
    assert one.rate(5) == pytest.approx(1 / 4.5, rel=0.02)
    assert four.rate(5) == pytest.approx(4 / 9, rel=0.02)


def test_a_push_slows_activations_down_that_share_its_link() -> None:
    busy = WorkerPipeline(EQUAL[:1], 1, weights=[PlacedWeights(0, 0, 1000)])
    idle = WorkerPipeline(EQUAL[:1], 1)
    two = WorkerPipeline(crossing(1.0).stages, 1, 0.0, None, crossing(1.0).forwards, crossing(1.0).gradients)
    rates = [
        simulate_cluster([two, other], 4, 20, cluster=TWO, servers=[1], clock_distance=20).workers[0].published[-1]
        for other in (idle, busy)
    ]
    assert rates[1] > rates[0] + 5


def sharing(own: StageTimes, last: StageTimes, wave: int = 1) -> WorkerPipeline:
    """A stage on a device of its own, and one on a device that is others', too."""
    return WorkerPipeline([own, last], wave, devices={1: "shared"})


def test_virtual_workers_take_turns_on_a_device_that_they_share() -> None:
    """Both forwards end at 1. The shared device computes from 1 to 4 for the one, and from 4 to 7 for the other, whose
    backward ends at 9; the first one's, which ends at 6, waits for it, as D = 0."""
    run = simulate_cluster([sharing(EQUAL[0], EQUAL[1])] * 2, 1, 2)
    assert [each.published for each in run.workers] == [(9.0, 18.0)] * 2
    assert [each.waited for each in run.workers] == [6.0, 0.0]


odd = st.floats(0.1, 5.0, allow_subnormal=False)


@given(
    st.lists(st.tuples(odd, odd, odd, odd), min_size=2, max_size=4),
    st.integers(1, 4),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_a_shared_device_does_what_a_plain_loop_says(
    drawn: list[tuple[float, float, float, float]], in_flight: int, count: int, random: Random
) -> None:
    times = [[each * (1 + random.random() / 100) for each in own] for own in drawn]  # no ties
    workers = [sharing(StageTimes(a, b), StageTimes(c, d), count) for a, b, c, d in times]
    run = simulate_cluster(workers, in_flight, 1, clock_distance=1)
    for worker, completed in zip(run.workers, plain(times, in_flight, count), strict=True):
        assert worker.published[:-1] == pytest.approx(completed[:-1])  # the last one ends a wave
        assert worker.published[-1] - worker.synchronised[-1] == pytest.approx(completed[-1])


def plain(times: Sequence[Sequence[float]], in_flight: int, count: int) -> list[list[float]]:
    """When each minibatch of each virtual worker is complete. Tasks are (virtual worker, minibatch, which of three):
    forward, both on the shared device, backward. What is ready first starts first."""
    ready = {(vw, p, 0): 0.0 for vw in range(len(times)) for p in range(min(in_flight, count))}
    free: dict[object, float] = {}
    completed: list[list[float]] = [[] for _ in times]
    while ready:
        starts = []
        for (vw, p, which), since in ready.items():
            stage, device = (vw, which == 1), "shared" if which == 1 else vw
            asked = max(since, free.get(stage, 0.0))  # one task of a stage is there at a time
            starts.append((max(asked, free.get(device, 0.0)), asked, since, (vw, p, which), stage, device))
        start, _, _, task, stage, device = min(starts)
        vw, p, which = task
        forward, backward, *last = times[vw]
        end = start + (forward, sum(last), backward)[which]
        free[stage] = free[device] = end
        del ready[task]
        if which < 2:
            ready[vw, p, which + 1] = end
        else:
            completed[vw].append(end)
            if p + in_flight < count:
                ready[vw, p + in_flight, 0] = end
    return completed


def run_of(lengths: list[int], in_flight: int, distance: int, jitter: float, seed: int = 0) -> ClusterSimulation:
    workers = [WorkerPipeline(EQUAL[: 1 + index % 3], wave) for index, wave in enumerate(lengths)]
    return simulate_cluster(workers, in_flight, 8, clock_distance=distance, jitter=jitter, seed=seed)


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 3),
)
def test_staleness_is_within_its_bound(
    lengths: list[int], in_flight: int, distance: int, jitter: float, seed: int
) -> None:
    run = run_of(lengths, in_flight, distance, jitter, seed)
    for vw, worker in enumerate(run.workers):
        others = [of for of in range(len(lengths)) if of != vw]
        assert worker.staleness <= max(staleness_bound(lengths, vw, of, in_flight, distance) for of in others)


@pytest.mark.parametrize(("wave", "in_flight"), [(4, 4), (4, 2), (6, 3)])
def test_the_bound_of_staleness_is_reached(wave: int, in_flight: int) -> None:
    """With D = 0 nobody has more of the others than it must."""
    assert run_of([wave] * 3, in_flight, 0, 0.0).staleness == global_staleness(in_flight, 0, wave)


def test_a_run_repeats_for_its_seed() -> None:
    one, same, other = (run_of([4, 4], 3, 1, 0.1, seed) for seed in (1, 1, 2))
    assert one == same != other
