"""A plan fits as simulated, is as fast as any that fits, and says what would help where none does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.planning.model.cluster import Cluster, Device, Link, Node
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times
from lightning_hetpipe.planning.model.simulate import StageLoad
from lightning_hetpipe.planning.model.stage_memory import (
    OPTIMIZERS,
    STEP,
    StageBytes,
    optimizer_state,
)
from lightning_hetpipe.planning.model.units import in_bytes
from lightning_hetpipe.planning.search.choice import NEGLIGIBLE, best_plan
from lightning_hetpipe.planning.search.plans import ENOUGH, PlansAt
from lightning_hetpipe.planning.search.problem import PlanningProblem
from tests.planning.instances import bottleneck, clusters, divisions, profiles
from tests.support.marks import explores

MEMORY = 1000


def even(
    layers: int = 12, kept: int = 50, parameters: int = 10, memory: int | None = MEMORY
) -> tuple[Profile, Cluster]:
    """Layers and devices that are all the same: three devices on one node."""
    profile = Profile(
        "even",
        1,
        [LayerBytes(str(number), parameters, kept, 0) for number in range(layers)],
        {"gpu": [Times(1.0, 2.0)] * layers},
        {},
    )
    return profile, Cluster([Node("box", [Device("gpu", memory)] * 3)])


def test_a_module_that_is_called_twice_costs_twice() -> None:
    """Its profile has the time of both calls, and the plan simulates both."""
    profile, cluster = even(layers=4, memory=None)
    profile = replace(profile, calls=[(0, 4), (0, 4)])
    once = PlanningProblem(replace(profile, calls=()), cluster, optimizer=0).estimate(cluster.slots[:2], (0, 2), 8)
    twice = PlanningProblem(profile, cluster, optimizer=0).estimate(cluster.slots[:2], (0, 2), 8)
    assert [stage.times for stage in twice.stages] == [stage.times for stage in once.stages]
    assert twice.rate == pytest.approx(once.rate, rel=0.02)
    first = [span for span in twice.simulation.spans if span.stage == 0 and span.minibatch == 1]
    assert [span.end - span.start for span in first] == [1.0, 1.0, 2.0, 2.0]
    layers = [replace(layer, changes_buffers=True) for layer in profile.layers]
    waits = PlanningProblem(replace(profile, layers=layers), cluster, optimizer=0).estimate(
        cluster.slots[:2], (0, 2), 8
    )
    assert waits.rate < 0.9 * twice.rate


def test_without_limits_everything_is_even_and_nm_has_a_quarter_of_slack() -> None:
    profile, cluster = even(memory=None)
    found = best_plan(PlanningProblem(profile, cluster))
    assert [(stage.first, stage.last) for stage in found.stages] == [(0, 3), (4, 7), (8, 11)]
    assert found.bottleneck == 12.0
    assert found.in_flight == 4  # of three equal stages: fewer leave bubbles, and three do where a stage varies
    assert found.rate * 12.0 == pytest.approx(1.0)
    assert found.fits
    assert found.idle == ()
    assert "slowest" in found.reasons[0]
    assert found.reasons[1] == "Nm = 3 would do if stages always took the same time"


def test_each_plan_that_was_simulated_is_shown() -> None:
    profile, cluster = even(memory=None)
    seen: list[None] = []
    assert best_plan(PlanningProblem(profile, cluster, progress=lambda: seen.append(None))) == best_plan(
        PlanningProblem(profile, cluster)
    )
    assert seen


@explores(50)
@given(profiles(), clusters())
def test_a_brief_search_finds_a_plan_where_the_longer_one_does(profile: Profile, cluster: Cluster) -> None:
    assert (
        best_plan(PlanningProblem(profile, cluster, brief=True)).fits
        == best_plan(PlanningProblem(profile, cluster)).fits
    )


def test_more_in_flight_are_tried_where_one_stage_is_as_fast_with_fewer() -> None:
    """Two stages of 3 s with their transfers are faster than one of 4 s with three in flight, and not with two."""
    layers = [LayerBytes("first", 0, 1, 1), LayerBytes("second", 0, 0, 0)]
    profile = Profile("m", 1, layers, {"a": [Times(0, 2), Times(0, 2)]}, {})
    found = best_plan(PlanningProblem(profile, Cluster([Node(name, ["a"]) for name in ("one", "two")], Link(1.0))))
    assert found.in_flight == 3
    assert found.rate == pytest.approx(1 / 3)


def test_what_would_help_is_looked_for_when_it_is_asked_for() -> None:
    profile, cluster = even(memory=1000)
    simulated: list[None] = []
    found = best_plan(PlanningProblem(profile, cluster, progress=lambda: simulated.append(None)), 50)
    before = len(simulated)
    assert found.help is not None
    assert found.help.in_flight
    assert len(simulated) > before


def test_fewer_in_flight_than_asked_for_where_these_do_not_fit() -> None:
    profile, cluster = even(memory=1000)
    asked = best_plan(PlanningProblem(profile, cluster), 50)
    found = best_plan(PlanningProblem(profile, cluster), 50, fewer=True)
    assert not asked.fits
    assert found.fits
    assert asked.help is not None
    assert found.in_flight == asked.help.in_flight
    assert best_plan(PlanningProblem(profile, cluster), found.in_flight, fewer=True) == found
    assert not best_plan(PlanningProblem(profile, cluster), found.in_flight + 1).fits


@pytest.mark.parametrize("layers", [129, 240])
def test_a_search_that_looks_at_some_boundaries_finds_the_cuts_between(layers: int) -> None:
    """Cuts of equal stages lie between those that it looks at first."""
    times = {"a": [Times(0.001, 0.002)] * layers}
    profile = Profile("deep", 1, [LayerBytes(str(n), 1, 1, 1) for n in range(layers)], times, {})
    cluster = Cluster([Node("box", ["3xa"], Link(1e10))])
    found = best_plan(PlanningProblem(profile, cluster))
    assert max(stage.last - stage.first + 1 for stage in found.stages) == layers // 3


def test_synchronisation_asks_for_more_in_flight() -> None:
    """A wait of one stage time is hidden by about twice as many as there are stages (DESIGN, section 9)."""
    profile, cluster = even(memory=None)
    assert (
        best_plan(PlanningProblem(profile, cluster, synchronise=12.0)).in_flight
        > best_plan(PlanningProblem(profile, cluster)).in_flight
    )


@explores(40)
@given(profile=profiles(5), cluster=clusters(3), optimizer=st.sampled_from([0.0, 2.0]), recompute=st.booleans())
def test_at_one_in_flight_it_is_no_slower_than_the_least_bottleneck_that_fits(
    profile: Profile, cluster: Cluster, optimizer: float, recompute: bool
) -> None:
    """Every stage holds one minibatch then, and one gradient waits at least: the first bound is all there is."""
    found = best_plan(PlanningProblem(profile, cluster, optimizer=optimizer, recompute=recompute), 1)
    every: dict[float, list[float]] = {}
    for stages in divisions(len(profile.layers), cluster.slots, ordered=False):
        slots, splits = [slot for slot, *_ in stages], [first for _, first, _ in stages]
        look = PlanningProblem(profile, cluster, optimizer=optimizer, recompute=recompute).estimate(slots, splits, 1)
        if look.fits:
            every.setdefault(bottleneck(profile, cluster, stages, recompute), []).append(look.rate)
    assert found.fits == bool(every)
    if every:
        assert found.rate * (1 + NEGLIGIBLE) >= min(every[min(every)])
        assert found.help is None
    else:
        assert found.help is not None
        assert found.help.in_flight is None


@explores(40)
@given(profile=profiles(5), cluster=clusters(4, limited=False), stages=st.integers(1, 4), ordered=st.booleans())
def test_with_a_given_number_of_stages_it_is_the_best_of_all_that_have_so_many(
    profile: Profile, cluster: Cluster, stages: int, ordered: bool
) -> None:
    """The strategy took the first devices in their order, whichever were faster."""
    stages = min(stages, len(profile.layers), len(cluster.slots))
    found = best_plan(PlanningProblem(profile, cluster, stages=stages, ordered=ordered), 24)  # which leave no bubbles
    assert len(found.stages) == stages
    all_of_them = divisions(len(profile.layers), cluster.slots, ordered)
    assert found.bottleneck == min(bottleneck(profile, cluster, each) for each in all_of_them if len(each) == stages)


def test_more_stages_than_there_are_devices_cannot_be_planned() -> None:
    profile, cluster = even()
    with pytest.raises(SettingError, match="stages=4 cannot be planned for 3 devices and 12 layers"):
        best_plan(PlanningProblem(profile, cluster, stages=4))


def test_a_given_number_of_stages_that_does_not_fit() -> None:
    """Also the plan that lacks the least, and what would help, have so many."""
    profile, cluster = even()
    found = best_plan(PlanningProblem(profile, cluster, stages=1))
    assert len(found.stages) == 1
    assert "more memory: " in found.ways_out()[-1]


def test_one_stage_has_nothing_to_overlap() -> None:
    """A second minibatch in flight would hide Lightning's step in the simulation, and make weights stale for it."""
    profile, cluster = even(memory=None)
    slow_updates = replace(profile, times={"gpu": [Times(1.0, 2.0, 1.0)] * 12})
    assert best_plan(PlanningProblem(slow_updates, cluster, stages=1)).in_flight == 1
    assert best_plan(PlanningProblem(slow_updates, cluster, stages=3)).in_flight > 3


@explores(40)
@given(profile=profiles(6), cluster=clusters(3), in_flight=st.integers(2, 4), recompute=st.booleans())
def test_a_plan_fits_as_simulated(profile: Profile, cluster: Cluster, in_flight: int, recompute: bool) -> None:
    found = best_plan(PlanningProblem(profile, cluster, recompute=recompute), in_flight)
    assert found.in_flight == in_flight
    assert [stage.first for stage in found.stages] == [0, *(stage.last + 1 for stage in found.stages[:-1])]
    assert found.stages[-1].last == len(profile.layers) - 1
    assert found.simulation.held == tuple(stage.held for stage in found.stages)
    if found.fits:
        assert found.help is None
    else:
        assert found.help is not None
        lacks = [f"{in_bytes(stage.overflow)} on {stage.slot}" for stage in found.stages if stage.overflow]
        assert found.ways_out()[-1] == f"more memory: {' and '.join(lacks)}"


@explores(12)
@given(profile=profiles(5), cluster=clusters(3))
def test_nm_is_the_smallest_that_is_fast_enough(profile: Profile, cluster: Cluster) -> None:
    found = best_plan(PlanningProblem(profile, cluster))
    if not found.fits:
        assert found.in_flight == 1
        return
    every = {n: best_plan(PlanningProblem(profile, cluster), n) for n in range(1, found.in_flight + 3)}
    fast = [each for each in every.values() if each.fits]
    # Plans that are searched for when Nm is not given are within 1% of those when it is.
    least = next(each for each in fast if each.rate >= ENOUGH**2 * max(each.rate for each in fast))
    if found.in_flight > least.in_flight:  # for stages that do not always take the same time
        assert found.rate >= ENOUGH**2 * max(each.rate for each in fast)
    assert found.rate >= ENOUGH**2 * every[found.in_flight].rate


def test_memory_keeps_nm_small_and_recomputing_is_named() -> None:
    profile, cluster = even(kept=80)
    found = best_plan(PlanningProblem(profile, cluster))
    assert found.fits
    assert found.in_flight == 2
    assert any("no plan was found that fits at Nm = 3" in reason for reason in found.reasons)
    assert any("recompute=True would be" in reason for reason in found.reasons)


def test_where_nothing_fits_it_says_what_would_help() -> None:
    profile, cluster = even(layers=6, kept=80, memory=500)
    problem = PlanningProblem(profile, cluster, optimizer=2.0)
    found = best_plan(problem, 6)
    assert not found.fits
    assert found.help is not None
    assert found.help.in_flight == 1
    assert found.help.recompute == 6
    worst = max(stage.overflow for stage in found.stages)
    assert "no plan was found that fits at Nm = 6" in found.reasons[0]
    # With as much memory more it does fit, so that the advice is right.
    larger = Cluster([Node("box", [Device("gpu", 500 + worst)] * 3)])
    assert best_plan(replace(problem, cluster=larger, slots=larger.slots), 6).fits
    # And the nearest lacks no more than twice what any must.
    smaller = Cluster([Node("box", [Device("gpu", 500 + worst // 2)] * 3)])
    assert not best_plan(replace(problem, cluster=smaller, slots=smaller.slots), 6).fits


def test_of_many_in_flight_few_are_tried_to_say_how_many_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Nm below what was asked for was planned in turn: for 1,000 that took minutes."""
    profile, cluster = even(layers=6, kept=80, memory=500)
    tried: list[int] = []
    begin = PlansAt.__init__

    def noted(self: PlansAt, problem: PlanningProblem, in_flight: int) -> None:
        tried.append(in_flight)
        begin(self, problem, in_flight)

    monkeypatch.setattr(PlansAt, "__init__", noted)
    found = best_plan(PlanningProblem(profile, cluster), 30)
    assert found.help is not None
    assert found.help.in_flight == 1
    assert found.help.recompute is not None
    assert not best_plan(PlanningProblem(profile, cluster, recompute=True), found.help.recompute + 1).fits
    assert len(tried) < 15


def test_what_fits_on_no_device_at_all() -> None:
    profile, cluster = even(kept=5000)
    found = best_plan(PlanningProblem(profile, cluster))
    assert not found.fits
    assert found.in_flight == 1
    assert found.help is not None
    assert (found.help.in_flight, found.help.recompute) == (None, None)


def test_devices_that_do_not_help_are_named() -> None:
    layers = [LayerBytes("only", 1, 1, 0)]
    profile = Profile("one layer", 1, layers, {"gpu": [Times(1.0, 1.0)]}, {})
    cluster = Cluster([Node("box", [Device("gpu", speed=0.5), Device("gpu")])])
    found = best_plan(PlanningProblem(profile, cluster))
    assert [stage.slot.number for stage in found.stages] == [1]
    assert [slot.number for slot in found.idle] == [0]


def test_given_an_order_stages_keep_it() -> None:
    profile, cluster = even(memory=None)
    cluster = Cluster([Node("box", [Device("gpu", speed=speed) for speed in (1.0, 3.0, 2.0)])])
    found = best_plan(PlanningProblem(profile, cluster, ordered=True))
    assert [stage.slot.number for stage in found.stages] == [0, 1, 2]


def test_lightnings_step_is_simulated() -> None:
    profile, cluster = even(memory=None)
    slow = replace(profile, times={"gpu": [Times(1.0, 2.0, 3.0)] * 12})
    assert best_plan(PlanningProblem(slow, cluster), 3).rate < best_plan(PlanningProblem(profile, cluster), 3).rate


def test_no_more_is_promised_than_the_slowest_stage_allows() -> None:
    """Versions come in bunches: counted from the end of one to the end of another, it was 102% of what is possible."""
    layers = [LayerBytes(name, 1, 1, 0) for name in "ab"]
    profile = Profile("two", 1, layers, {"gpu": [Times(3.0, 11.0), Times(5.0, 8.0)]}, {})
    found = best_plan(PlanningProblem(profile, Cluster([Node("box", ["gpu", "gpu"])])), 7)
    assert found.rate == 1 / 14
    assert "stage 0 on gpu is the slowest, with 14 s for each minibatch; Nm = 7 reaches 100%" in found.reasons[0]


class TestMemory:
    LAYERS = (LayerBytes("a", 8, 30, 10), LayerBytes("b", 4, 25, 10), LayerBytes("c", 2, 40, 5))

    def test_what_crosses_between_layers_of_a_stage_counts_once(self) -> None:
        for first, weights, kept in ((0, 14, 30 + (25 - 10) + (40 - 10)), (1, 6, 25 + (40 - 10))):
            found = StageBytes(self.LAYERS).stage(first, 3, StageLoad(1, 0), 3)
            assert (found.weights, found.activations, found.workspace) == (weights, kept, 40)

    def test_each_term(self) -> None:
        memory, loads = StageBytes(self.LAYERS, 2.0), [StageLoad(3, 0), StageLoad(2, 2), StageLoad(1, 2)]
        found = max((memory.stage(1, 2, load, 3) for load in loads), key=lambda each: each.total)
        assert memory.totals(loads, 3)[1, 2] == found.total
        # Weights 4; held together heaviest: 3 x 25 and the last step's gradients.
        assert (found.weights, found.versions, found.optimizer) == (4, 12, 8)
        assert (found.activations, found.gradients, found.workspace) == (75, 4, 25)
        assert found.total == 4 + 12 + 8 + 75 + 4 + 25
        assert found.versions + found.moving == 12 + 75

    def test_frozen_weights_are_there_twice(self) -> None:
        """The live ones, and those of all versions; they have neither gradients nor an optimizer's state."""
        layers = [replace(self.LAYERS[0], frozen=8), replace(self.LAYERS[1], frozen=1)]
        found = StageBytes(layers, 2.0).stage(0, 2, StageLoad(0, 2), 3)
        assert (found.weights, found.versions, found.optimizer) == (8 + 4, 8 + 1 + 3 * 3, 2 * 3)
        assert (found.gradients, found.waiting, found.moving) == (3, 2 * 3, 2 * 3)
        spread = StageBytes(layers, "adamw").spread(0, 2)
        assert (spread.weights, spread.versions, spread.gradients, spread.optimizer) == (12, 0, 3, 6)

    def test_computed_again_only_inputs_stay(self) -> None:
        memory = StageBytes(self.LAYERS, recompute=True)
        assert memory.stage(1, 2, StageLoad(3, 0, 1), 3).activations == 3 * 10 + (25 - 10)
        assert memory.stage(1, 2, StageLoad(3, 0, 0), 3).activations == 3 * 10

    def test_optimizers(self) -> None:
        assert optimizer_state("AdamW") == OPTIMIZERS["adamw"] + STEP == 3  # the root of its second moment
        assert optimizer_state("sgd_momentum") == OPTIMIZERS["sgd_momentum"] == 1
        assert optimizer_state("sgd_momentum_weight_decay") == 1 + STEP  # gradients with the decay
        assert optimizer_state(1.5) == 1.5
        with pytest.raises(SettingError, match="optimizer='sgdm' is not known; give one of sgd,"):
            optimizer_state("sgdm")
        with pytest.raises(SettingError, match="optimizer=-1 must be"):
            optimizer_state(-1)
