"""Plans of spread runs: what a device holds, and the division that the run itself makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_hetpipe.planning.model.cluster import Cluster, Device, Node
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.profile import LayerBytes, Profile, Times, UserBytes
from lightning_hetpipe.planning.model.stage_memory import StageBytes, StageMemory
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.planning.search.split_points import spread_plan

MIB = 1 << 20


def profile(*layers: tuple[int, int], user: UserBytes | None = None) -> Profile:
    """Layers with so many MiB of weights, and of what their forward keeps; nothing is shared between two."""
    own = [LayerBytes(f"layer {n}", weights * MIB, kept * MIB, 0) for n, (weights, kept) in enumerate(layers)]
    return Profile("m", 1, own, {"gpu": [Times(1.0, 2.0, 0.5)] * len(own)}, {}, user=user or UserBytes())


def box(*memory: int, names: str = "gpu gpu gpu gpu") -> Cluster:
    """Devices with so many MiB each."""
    pairs = zip(names.split(), memory, strict=False)
    return Cluster([Node("box", [Device(name, each * MIB, speed=1.0) for name, each in pairs], "1 TB/s")])


def spread(given: Profile, cluster: Cluster, **settings: Any) -> Estimate:
    in_flight = settings.pop("in_flight", 1)
    return best_plan(PlanningProblem(given, cluster, **{"optimizer": "adamw", "spread": True, **settings}), in_flight)


def layers(found: Estimate) -> list[tuple[int, int, int]]:
    """The number of each stage's device, and its layers."""
    return [(stage.slot.number, stage.first, stage.last) for stage in found.stages]


def holding(kept: int, user: UserBytes | None = None, optimizer: str | float = "AdamW") -> StageMemory:
    """Memory of a device for layers with 100 bytes of weights, of which each keeps up to 20 of the bytes ``kept``."""
    layers = [LayerBytes("weights", 100, 20, 0), *[LayerBytes("", 0, 10, 0)] * ((kept - 20) // 10)]
    return StageBytes(layers, optimizer).spread(0, len(layers), user)


class TestMemory:
    def test_activations_are_there_before_what_the_step_makes(self) -> None:
        weigh = holding(30)
        assert (weigh.weights, weigh.versions, weigh.gradients, weigh.optimizer) == (100, 0, 100, 200)
        assert weigh.total == 4 * 100 + 100  # the step makes more than 30 + 20
        keep = holding(90)
        assert keep.total == 4 * 100 + 90 + 20

    def test_user_code(self) -> None:
        user = UserBytes(trained=10, frozen=3, batch=2, kept=20, loss=40)
        found = holding(30, user)
        assert found.weights == 113
        assert found.total == 4 * 110 + 3 + 2 + 30 + 20 + 20 + 2 * 40

    def test_optimizers(self) -> None:
        for optimizer, lasting, step in (("AdamW", 200, 100 - 30), ("sgd_momentum", 100, 20), (1.5, 150, 20)):
            found = holding(30, optimizer=optimizer)
            assert (found.optimizer, found.workspace) == (lasting, step)


def test_what_a_pipeline_has_no_room_for() -> None:
    given, cluster = profile(*[(10, 1)] * 4), box(100, 100)
    found = spread(given, cluster)
    assert found.fits
    assert found.spread
    assert [stage.memory.total for stage in found.stages] == [100 * MIB] * 2  # five copies of 20 MiB
    pipeline = spread(given, cluster, spread=False)
    assert not pipeline.fits
    assert not pipeline.spread


def test_devices_work_one_after_another() -> None:
    found = spread(profile(*[(10, 1)] * 4), box(1000, 1000))
    assert found.rate == pytest.approx(1 / (4 * 3.0 + 2 * 0.5), rel=1e-3)
    assert found.reasons == ("devices compute one after another, 12 s for each minibatch, as one is in flight",)
    alone = spread(profile(*[(10, 1)] * 4), box(1000))
    assert alone.reasons == ("all layers on gpu take 12 s for each minibatch",)


def test_layers_are_divided_by_their_weights_and_the_devices_memory() -> None:
    given = profile(*[(10, 1)] * 8)
    assert layers(spread(given, box(600, 200))) == [(0, 0, 5), (1, 6, 7)]
    assert layers(spread(given, box(200, 600))) == [(0, 0, 1), (1, 2, 7)]
    unlimited = Cluster([Node("box", [Device("gpu"), Device("gpu", "1 GiB")], "1 TB/s")])
    assert layers(spread(given, unlimited)) == [(0, 0, 3), (1, 4, 7)]


def test_modules_beside_the_pieces_are_weights_of_the_last_device() -> None:
    given = profile(*[(10, 1)] * 8, user=UserBytes(trained=40 * MIB))
    assert layers(spread(given, box(1000, 1000))) == [(0, 0, 5), (1, 6, 7)]


def test_frozen_weights_count_a_quarter() -> None:
    """Neither gradients nor an optimizer's state come with them."""
    given = profile(*[(10, 1)] * 32)
    frozen = [replace(each, frozen=each.parameters) for each in given.layers[:24]]
    partly = replace(given, layers=[*frozen, *given.layers[24:]])
    assert layers(spread(partly, box(1000, 1000))) == [(0, 0, 24), (1, 25, 31)]
    user = replace(given, user=UserBytes(frozen=160 * MIB))
    assert layers(spread(user, box(1000, 1000))) == [(0, 0, 17), (1, 18, 31)]


def test_as_many_devices_as_stages() -> None:
    """Those with the most memory, of devices that differ; of equal ones the first."""
    given = profile(*[(10, 1)] * 4)
    assert layers(spread(given, box(300, 400, 500), stages=2)) == [(0, 0, 1), (1, 2, 3)]
    other = replace(given, times={**given.times, "other": given.times["gpu"]})
    mixed = box(300, 400, 500, names="gpu other gpu")
    assert layers(spread(other, mixed, stages=2)) == [(1, 0, 1), (2, 2, 3)]


def test_weights_go_on_where_activations_fill_a_device() -> None:
    """As in the run, which keeps a margin if it can."""
    heavy = profile((2, 40), (2, 40), (2, 40), (2, 4), (20, 2), (20, 2))
    roomy, tight = spread(heavy, box(160, 300)), spread(heavy, box(100, 320))
    assert layers(roomy)[0] == (0, 0, 1)
    assert layers(tight)[0] == (0, 0, 0)
    assert roomy.fits
    assert tight.fits


def test_a_device_without_room_for_a_layer_is_passed_over() -> None:
    found = spread(profile((2, 40), (2, 40), (2, 40)), box(200, 50, 200))
    assert found.fits
    assert layers(found) == [(0, 0, 1), (2, 2, 2)]


def test_what_does_not_fit_says_what_is_lacking() -> None:
    found = spread(profile(*[(10, 1)] * 4), box(90, 90))
    assert not found.fits
    assert found.help is not None
    assert (found.help.in_flight, found.help.recompute) == (None, None)
    assert [stage.overflow for stage in found.stages] == [10 * MIB, 10 * MIB]


@pytest.mark.parametrize("asked", [None, 2])
def test_it_is_the_way_out_of_a_pipeline_that_does_not_fit(asked: int | None) -> None:
    found = spread(profile(*[(10, 1)] * 4), box(100, 100), in_flight=asked)
    assert not found.fits
    assert found.help is not None
    assert found.help.in_flight == 1


def test_forwards_of_several_stages_that_are_computed_again_are_a_pipelines() -> None:
    given = profile(*[(10, 1)] * 4)
    assert not spread(given, box(1000, 1000), recompute=True).spread
    assert spread(given, box(1000), recompute=True).spread


def test_one_device_has_no_pipeline() -> None:
    found = spread(profile(*[(10, 1)] * 4), box(200), in_flight=None)
    assert found.fits
    assert found.spread
    assert found.in_flight == 1


def test_more_layers_take_no_longer_to_plan_than_their_square() -> None:
    """A model of 1,200 layers that fits nowhere has all divisions tried."""
    given, cluster = profile(*[(10, 1)] * 1200), box(100, 100, 100, 100)
    assert not spread_plan(PlanningProblem(given, cluster, optimizer="adamw")).fits
