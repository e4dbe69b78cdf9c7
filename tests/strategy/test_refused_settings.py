"""Settings of the strategy that are taken: the golden table has those that are refused."""

from __future__ import annotations

import inspect
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_hetpipe import HetPipeStrategy, WSPCallback
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.strategy import relations
from tests.placement.test_plans import planned
from tests.support.small import Learner, assert_clean, assert_refused, batches
from tests.support.trainers import quiet_trainer


@pytest.mark.parametrize(("value", "seconds"), [(3, 3.0), (0.5, 0.5), (timedelta(minutes=2), 120.0)])
def test_timeouts(value: Any, seconds: float) -> None:
    assert HetPipeStrategy(timeout=value).timeout == seconds


def test_an_allocation_is_that_of_a_plan() -> None:
    HetPipeStrategy(allocation="np", plan=replace(planned(0, 1), allocation="np"))


def test_refusals_are_misconfigurations() -> None:
    """Lightning's users already catch it."""
    with pytest.raises(MisconfigurationException):
        HetPipeStrategy(stages=0)


def test_stages_of_each_are_counted_when_all_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    stages = [1, 2, 3, 4]
    of_all, of_node = (HetPipeStrategy(virtual_workers=2, stages=stages[:count]) for count in (4, 2))
    for strategy in (of_all, of_node):
        quiet_trainer(strategy, num_nodes=2)
    assert (of_all.stages, of_node.stages) == (3, 1)


def test_a_second_fit_after_a_refusal() -> None:
    """Whoever takes the way out goes on in the same process, with the same module."""
    module = Learner()
    assert_refused(module, "stages=5", strategy=HetPipeStrategy(stages=5))
    strategy = HetPipeStrategy(stages=4)
    trainer = quiet_trainer(strategy)
    trainer.fit(module, batches())
    assert trainer.global_step == 5
    assert strategy.last_run.stages
    assert_clean(trainer, module)


def test_one_virtual_worker_trains_on_windows() -> None:
    relations.check_platform(1, "win32")
    relations.check_platform(2, "darwin")


def test_one_wsp_callback_is_enough() -> None:
    given = WSPCallback(clock_distance=1)
    assert relations.only_wsp([given]) is given
    assert relations.only_wsp([]) is None


def test_a_setting_that_is_set_later_counts() -> None:
    strategy = HetPipeStrategy(stages=2, in_flight=3)
    strategy.in_flight, strategy.recompute = 2, True
    quiet_trainer(strategy).fit(Learner(), batches())
    assert strategy.last_run.in_flight == 2
    assert strategy._asked().recompute


def test_a_subclass_may_have_settings_of_its_own() -> None:
    unknown: dict[str, Any] = {"stagess": 1}
    assert Own(width=1).width == 1
    assert Passing(depth=1, stages=2).depth == 1
    with pytest.raises(SettingError, match=r"Own\.stagess is not a setting; did you mean Own\.stages\?"):
        Own(1, **unknown)
    assert "in_flight" in inspect.signature(HetPipeStrategy).parameters, "LightningCLI and help() ask for it"


class Own(HetPipeStrategy):
    def __init__(self, width: int, stages: int = 1) -> None:
        super().__init__(stages=stages)
        self.width = width


class Passing(HetPipeStrategy):
    def __init__(self, depth: int, **others: Any) -> None:
        super().__init__(**others)
        self.depth = depth
