"""Runs one scenario under several strategies, and compares all that Lightning and its users see of them, bit for bit.

With one minibatch in flight a pipeline is compared with the plain single-device strategy, and nothing may differ. With
more it is compared with the oracle's strategy (:mod:`tests.parity.stale`), and only those hooks move that DESIGN names.
"""

from __future__ import annotations

import marshal
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.data import warning_cache

from tests.parity.describing import describe, digest
from tests.parity.observing import CALLBACK_HOOKS, MODULE_HOOKS, Event, Memory, Notes, observed
from tests.parity.stale import Stale
from tests.support.equality import assert_same, difference
from tests.support.trainers import quiet_trainer

ADDRESS = re.compile(" at 0x[0-9a-f]+")
Run = Callable[[L.Trainer, L.LightningModule], None]


def fit(trainer: L.Trainer, module: L.LightningModule) -> None:
    trainer.fit(module)


@dataclass(frozen=True)
class Scenario:
    """Subject of a comparison: all of it is made anew for each run.

    Attributes:
        module: Makes the module, which holds its data.
        callbacks: Makes the callbacks; some write into the folder that they are given.
        run: What is called.
        settings: The Trainer's.
        draws: Whether fetching a batch draws from the default generators, which look-ahead does earlier.
    """

    module: Callable[[], L.LightningModule]
    callbacks: Callable[[Path], Sequence[L.Callback]] = lambda folder: []
    run: Run = fit
    settings: dict[str, Any] = field(default_factory=dict)
    draws: bool = False


@dataclass
class Story:
    """A run from outside."""

    events: list[Event]
    checkpoints: dict[str, Any]
    end: dict[str, Any]
    warned: list[str]

    def __repr__(self) -> str:
        return f"Story of {len(self.events)} events"


def tell(scenario: Scenario, strategy: Strategy | str, folder: Path, running_ahead: bool) -> Story:
    """Runs ``scenario``; sights of what may run ahead are confined to what holds for them there."""
    folder.mkdir(parents=True)
    notes = Notes(folder, running_ahead)
    torch.manual_seed(5)
    plain = scenario.module()
    module = plain
    module.__class__ = observed(type(plain), MODULE_HOOKS, "module", notes)
    witness = observed(L.Callback, CALLBACK_HOOKS, "callback", notes)()
    callbacks = [*scenario.callbacks(folder), witness]
    settings = {
        "max_epochs": 2,
        "logger": Memory(notes),
        "default_root_dir": folder,
        "log_every_n_steps": 2,
        **scenario.settings,
    }
    warning_cache.clear()  # which Lightning keeps for the whole process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = notes.trainer = quiet_trainer(strategy, callbacks=callbacks, **settings)
        scenario.run(trainer, module)
    told = [str(one.message) for one in caught]
    told = [each for each in told if not each.startswith("stale gradients may keep")]  # as only ours are
    warned = sorted({ADDRESS.sub("", describe(each, folder)) for each in told})
    return Story(notes.events, _checkpoints(folder), _end(trainer, module), warned)


def _checkpoints(folder: Path) -> dict[str, Any]:
    paths = sorted(folder.rglob("*.ckpt"))
    return {str(path.relative_to(folder)): describe(torch.load(path, weights_only=False), folder) for path in paths}


def _end(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    return {
        "weights": {name: digest(weight) for name, weight in module.state_dict().items()},
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "state": [str(trainer.state.status), str(trainer.state.stage), trainer.should_stop],
        "loops": describe(trainer.fit_loop.state_dict()),
        "callback_metrics": describe(trainer.callback_metrics),
        "logged_metrics": describe(trainer.logged_metrics),
        "progress_bar_metrics": describe(trainer.progress_bar_metrics),
    }


def assert_as_plain(scenario: Scenario, strategy: Strategy, folder: Path) -> Story:
    """A pipeline with one minibatch in flight is the plain single-device strategy, for whoever looks."""
    plain = tell(scenario, "auto", folder / "plain", running_ahead=False)
    ours = tell(scenario, strategy, folder / "ours", running_ahead=False)
    assert_same_story(plain, ours)
    return plain


def assert_as_oracle(scenario: Scenario, strategy: Any, folder: Path) -> Story:
    """A pipeline with several in flight is the oracle, but that transfers and ``training_step`` come earlier, and that
    checkpoints say how many there are."""
    oracle = tell(scenario, Stale(strategy.in_flight), folder / "oracle", running_ahead=True)
    ours = tell(scenario, strategy, folder / "ours", running_ahead=True)
    ours.events = without_discarded(ours.events, strategy.in_flight)
    for (
        checkpoint
    ) in ours.checkpoints.values():  # a resumed run is to know; a loss of the first minibatch saves earlier
        assert checkpoint.pop("hetpipe", {"in_flight": strategy.in_flight}) == {"in_flight": strategy.in_flight}
    if scenario.draws:
        for event in (*oracle.events, *ours.events):
            event.seen.pop("chance", None)
    assert_same_story(_apart(oracle), _apart(ours))
    return oracle


def _apart(story: Story) -> Story:
    """Events that do not run ahead, then each stage's steps and transfers, each stream in its own order."""
    events = sorted(story.events, key=lambda event: event.ahead)
    return Story(events, story.checkpoints, story.end, story.warned)


def without_discarded(events: list[Event], in_flight: int) -> list[Event]:
    """Without what ran ahead of Lightning's loop and was given up, as an epoch or the run ended early.

    Nothing runs further ahead than the pipeline allows, nor later than its own minibatch's step.
    """
    begun, discarded, waiting = 0, set(), []
    for index, event in enumerate(events):
        if event.ahead_in_training:
            assert begun <= event.minibatch <= begun + in_flight, f"{event} when {begun} minibatches had begun"
            if event.minibatch > begun:
                waiting.append(index)
        elif event.owner == "callback" and event.hook == "on_train_batch_start":
            begun = event.minibatch
            waiting = [index for index in waiting if events[index].minibatch > begun]
        elif event.owner == "callback" and event.hook in ("on_train_epoch_end", "on_fit_start"):
            discarded.update(waiting)
            waiting, begun = [], event.minibatch
    return [event for index, event in enumerate(events) if index not in discarded]


def assert_same_story(expected: Story, actual: Story) -> None:
    """The message names the first hook, or the first value, that differs."""
    for index, (one, other) in enumerate(zip(expected.events, actual.events, strict=False)):
        before = f"after {expected.events[index - 1]}" if index else "at the start"
        assert (one.owner, one.hook) == (other.owner, other.hook), f"{other} came instead of {one}, {before}"
        for part in ("arguments", "seen", "returned"):
            one_part, other_part = getattr(one, part), getattr(other, part)
            if marshal.dumps(one_part, 2) == marshal.dumps(other_part, 2):  # of plain data; cheaper than to look for it
                continue
            found = difference(one_part, other_part, part, ordered=True)
            assert found is None, f"{found} in {one}, {before}"
    missing, extra = expected.events[len(actual.events) :], actual.events[len(expected.events) :]
    assert not missing, f"{missing[0]} and {len(missing)} in all did not come"
    assert not extra, f"{extra[0]} and {len(extra)} in all came too"
    for part in ("checkpoints", "end", "warned"):
        assert_same(getattr(expected, part), getattr(actual, part), part, ordered=True)
