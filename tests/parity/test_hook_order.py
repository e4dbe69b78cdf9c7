"""Which hooks there are, and where they come, with several minibatches in flight."""

from __future__ import annotations

import inspect
from itertools import pairwise
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers import Logger

from tests.exact.pipelines import even
from tests.parity.comparing import Scenario, tell
from tests.parity.modules import BATCHES, Watched
from tests.parity.observing import CALLBACK_HOOKS, LOGGER_METHODS, MODULE_HOOKS, NO_HOOKS, TRANSFERS, Event, methods

IN_FLIGHT = 3


def test_every_method_of_a_module_is_a_hook_or_known_not_to_be() -> None:
    """A hook that Lightning adds is compared from then on, or this test says that it is not."""
    known = {*MODULE_HOOKS, *NO_HOOKS}
    assert set(methods(L.LightningModule, ModelHooks, DataHooks, CheckpointHooks)) == known


def test_every_method_of_a_logger_is_noted() -> None:
    found = {name for name, value in vars(Logger).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert found <= set(LOGGER_METHODS)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    folder: Path = tmp_path_factory.mktemp("order") / "ours"
    scenario = Scenario(Watched, settings={"max_epochs": 1, "limit_val_batches": 0})
    return tell(scenario, even(6, 2, IN_FLIGHT), folder, running_ahead=True).events


def test_what_runs_ahead_does_so_as_far_as_it_may(events: list[Event]) -> None:
    """The first minibatch runs as in a plain run; with the second the pipeline fills, and it drains as data ends."""
    begun, when = 0, []
    for event in events:
        if (event.owner, event.hook) == ("callback", "on_train_batch_start"):
            begun += 1
        elif event.hook == "on_before_batch_transfer":
            when.append(begun)
    assert when == [max(0, min(p, BATCHES) - IN_FLIGHT) if p > 3 else min(p - 1, 1) for p in range(1, BATCHES + 1)]


def test_each_stream_keeps_its_order(events: list[Event]) -> None:
    for hook in (*TRANSFERS, "training_step"):
        numbers = [event.minibatch for event in events if event.hook == hook and event.ahead_in_training]
        assert numbers == list(range(1, BATCHES + 1)), hook


def test_a_step_comes_between_its_transfer_and_its_end(events: list[Event]) -> None:
    """Whatever runs ahead: a minibatch is transferred, computed, differentiated, stepped."""
    order = ["on_after_batch_transfer", "training_step", "on_before_backward", "on_before_optimizer_step"]
    order.append("on_train_batch_end")
    for p in range(1, BATCHES + 1):
        places = []
        for hook in order:
            found = [i for i, event in enumerate(events) if event.owner == "module" and event.hook == hook]
            places.append(found[p - 1])
        assert all(one < other for one, other in pairwise(places)), f"minibatch {p}"


def test_each_hook_of_the_callback_is_one_that_exists(events: list[Event]) -> None:
    called = {event.hook for event in events if event.owner == "callback"}
    assert called <= set(CALLBACK_HOOKS)
    assert {"on_train_batch_start", "on_after_backward", "on_before_zero_grad", "on_train_end"} <= called
