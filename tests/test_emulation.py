"""Padded stages: how long they take, by a clock of the test's own, and that they compute the same."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from torch import nn

from lightning_hetpipe.emulation import OVERSLEEP, Emulation, Pad
from lightning_hetpipe.errors import SettingError
from tests.exact.pipelines import Delays, even
from tests.exact.running import assert_equal, expect, fit
from tests.pipeline.driving import Line, X
from tests.support.models import SGD, mlp, vectors
from tests.support.padding import padded

PADS = [Pad(0.004, 0.009), Pad(0.005, 0.011)]


class Sleeper:
    """A clock that moves where it sleeps, and where the test computes; sleeps end ``late``."""

    def __init__(self, late: float = 0.0) -> None:
        self.time = 100.0
        self.late = late
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds + self.late


def take(emulation: Emulation, sleeper: Sleeper, stage: int, work: str, computing: float) -> float:
    """Time of a pass that computes for ``computing`` seconds."""
    began = sleeper.time
    after = emulation(stage, work, 1)
    sleeper.time += computing
    after()
    return sleeper.time - began


def test_a_pass_takes_as_long_as_told() -> None:
    sleeper = Sleeper()
    emulation = Emulation(PADS, sleeper.now, sleeper.sleep)
    assert take(emulation, sleeper, 0, "forward", 0.001) == pytest.approx(0.004)
    assert take(emulation, sleeper, 0, "backward", 0.002) == pytest.approx(0.009)
    assert take(emulation, sleeper, 1, "backward", 0.0) == pytest.approx(0.011)
    assert take(emulation, sleeper, 1, "evaluate", 0.001) == pytest.approx(0.005)
    assert sleeper.slept == pytest.approx([0.003, 0.007, 0.011, 0.004])
    assert [stage.overruns for stage in emulation.stages] == [0, 0]


def test_late_alarms_do_not_add_up() -> None:
    sleeper = Sleeper(late=0.0002)
    emulation = Emulation(PADS, sleeper.now, sleeper.sleep)
    took = [take(emulation, sleeper, 1, "forward", 0.001) for _ in range(10)]
    assert sum(took) == pytest.approx(10 * 0.005 + 0.0002)  # and not ten times as much
    assert take(emulation, sleeper, 0, "forward", 0.0) == pytest.approx(0.0042)  # another stage owes nothing
    assert [stage.late for stage in emulation.stages] == pytest.approx([0.0002, 0.0002])


def test_what_is_later_than_an_alarm_stays() -> None:
    sleeper = Sleeper(late=0.003)
    emulation = Emulation(PADS, sleeper.now, sleeper.sleep)
    took = [take(emulation, sleeper, 1, "forward", 0.001) for _ in range(10)]
    assert sum(took) == pytest.approx(10 * 0.008 - 9 * OVERSLEEP)
    assert emulation.stages[1].late == pytest.approx(10 * 0.003 - 9 * OVERSLEEP)


def test_a_stage_that_computes_for_longer_is_said_to() -> None:
    sleeper = Sleeper()
    emulation = Emulation(PADS, sleeper.now, sleeper.sleep)
    for stage in (0, 1):
        take(emulation, sleeper, stage, "forward", 0.001)
    for computing in (0.007, 0.012, 0.010):
        assert take(emulation, sleeper, 0, "backward", computing) == pytest.approx(max(0.009, computing))
    assert emulation.stages[0].passes == 4
    assert emulation.stages[0].overruns == 2
    assert emulation.stages[0].longest == pytest.approx(0.003)
    assert emulation.stages[0].late == pytest.approx(0.003 + 0.001)
    with pytest.warns(
        UserWarning, match=r"stage 0 computed for longer than it is to take in 2 of 4 passes, by up to 3\.0 ms"
    ):
        emulation.check()


def test_the_loss_is_part_of_the_last_stages_time() -> None:
    """As it is of T_max; what comes between it and the passes, a hand-over, is not."""
    sleeper = Sleeper()
    emulation = Emulation(PADS, sleeper.now, sleeper.sleep)
    for loss in (0.003, 0.0):
        began = sleeper.now()
        take(emulation, sleeper, 1, "forward", 0.001)
        take(emulation, sleeper, 1, "loss", loss)
        sleeper.time += 0.25
        take(emulation, sleeper, 1, "backward", 0.001)
        assert sleeper.now() - began == pytest.approx(0.005 + 0.011 + 0.25)
    assert emulation.stages[1].passes == 4


def test_stages_on_one_device_take_turns() -> None:
    """Each had the device for itself, which so was as fast as two."""
    sleeper = Sleeper()
    emulation = Emulation((), sleeper.now, sleeper.sleep)
    emulation.begin([*PADS, Pad(0.002, 0.002)], ["T4:0", "T4:0", "T4:1"])
    began = sleeper.time
    passes = [emulation(stage, "forward", 1) for stage in (0, 1, 2)]
    sleeper.time += 0.001
    ends = []
    for ended in (passes[2], passes[0], passes[1]):
        ended()
        ends.append(sleeper.time - began)
    assert ends == pytest.approx([0.002, 0.004, 0.009])
    assert take(emulation, sleeper, 0, "backward", 0.001) == pytest.approx(0.009)  # nothing else is there by now
    assert not any(stage.overruns for stage in emulation.stages)


class Sleeps(threading.local):
    """A clock for each thread, which moves only where that sleeps, so that all is slept that was told."""

    time = 0.0

    def __init__(self, slept: Counter[tuple[str, float]]) -> None:
        self.slept = slept

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept[threading.current_thread().name, round(seconds, 6)] += 1
        self.time += seconds


def test_each_stage_and_pass_has_its_own_pad_and_computes_the_same() -> None:
    sleeps = Sleeps(Counter())
    strategy = even(7, 2, 3)
    strategy._before_pass = Emulation(PADS, sleeps.now, sleeps.sleep)
    task, loader = mlp(SGD), vectors(10, 2)
    assert_equal(expect(task, loader, 3), fit(task, loader, strategy=strategy))
    passes = len(loader) * 2 - 1  # two epochs, and the watched minibatch is not padded
    assert sleeps.slept == {
        ("hetpipe-stage-0", 0.004): passes,
        ("hetpipe-stage-0", 0.009): passes,
        ("hetpipe-stage-1", 0.005): passes,
        ("hetpipe-stage-1", 0.011): passes,
    }


def test_what_a_layer_raises_comes_through_without_a_sleep() -> None:
    class Fails(nn.Module):
        def forward(self, x: object) -> object:
            raise ArithmeticError("in a layer")

    sleeps = Sleeps(Counter())
    line = Line(nn.Sequential(Fails()), before_pass=Emulation([Pad(1.0, 1.0)], sleeps.now, sleeps.sleep))
    with line.running() as engine:
        engine.submit(1, line.plain(X))
        with pytest.raises(ArithmeticError, match="in a layer"):
            engine.finish(1)
    assert not sleeps.slept


@pytest.mark.filterwarnings("ignore:stage . computed for longer than it is to take")
def test_pads_are_in_place_within_the_context() -> None:
    strategy = even(7, 2, 3)
    strategy._before_pass = earlier = Delays(1)
    with padded(strategy, [Pad(0, 0)] * 2) as emulation:
        fit(mlp(SGD), vectors(10, 2), strategy=strategy, max_epochs=1)
    assert strategy._before_pass is earlier
    assert not earlier.tasks
    assert [stage.passes for stage in emulation.stages] == [2 * (len(vectors(10, 2)) - 1)] * 2


def test_a_stage_without_a_pad_is_refused() -> None:
    strategy = even(7, 3, 3)
    with pytest.raises(SettingError, match="2 stages are padded, and there is a stage 2"), padded(strategy, PADS):
        fit(mlp(SGD), vectors(10, 2), strategy=strategy, max_epochs=1)


def test_a_pad_without_a_stage_is_refused() -> None:
    sleeps = Sleeps(Counter())
    emulation = Emulation([*PADS, Pad(0, 0)], sleeps.now, sleeps.sleep)
    emulation.check()  # nothing has run
    for stage in (0, 1):
        emulation(stage, "forward", 1)()
    with pytest.raises(SettingError, match="3 stages are padded, and there is no stage 2"):
        emulation.check()


@pytest.mark.parametrize("seconds", [-0.001, float("nan"), float("inf")])
def test_a_pad_is_a_time(seconds: float) -> None:
    with pytest.raises(SettingError, match=r"Pad\.backward=.* must be a number of seconds"):
        Pad(0.0, seconds)
