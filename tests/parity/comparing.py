"""Runs one scenario under several strategies, and compares all that Lightning and its users see of them, bit for bit.

With one minibatch in flight a pipeline is compared with the plain single-device strategy, and nothing may differ. With
more it is compared with the oracle's strategy (:mod:`tests.parity.stale`), and exactly the hooks that DESIGN names move.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy

from tests.exact.running import make_trainer
from tests.parity.describing import describe, digest
from tests.parity.observing import CALLBACK_HOOKS, MODULE_HOOKS, Event, Memory, Notes, observed
from tests.parity.stale import Stale

Run = Callable[[L.Trainer, L.LightningModule], None]


def fit(trainer: L.Trainer, module: L.LightningModule) -> None:
    trainer.fit(module)


@dataclass(frozen=True)
class Scenario:
    """What is run: all of it is made anew for each run.

    Attributes:
        module: Makes the module, which holds its data.
        callbacks: Makes the callbacks; some write into the folder that they are given.
        run: What is called.
        settings: The Trainer's.
    """

    module: Callable[[], L.LightningModule]
    callbacks: Callable[[Path], Sequence[L.Callback]] = lambda folder: []
    run: Run = fit
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Story:
    """A run from outside."""

    events: list[Event]
    checkpoints: dict[str, Any]
    end: dict[str, Any]
    warned: list[str]


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
    settings = {"logger": Memory(notes), "default_root_dir": folder, "log_every_n_steps": 2, **scenario.settings}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = notes.trainer = make_trainer(callbacks, strategy=strategy, **settings)
        scenario.run(trainer, module)
    return Story(
        notes.events, _checkpoints(folder), _end(trainer, module), sorted({str(one.message) for one in caught})
    )


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
    """A pipeline with several in flight is the oracle, but that transfers and ``training_step`` come earlier."""
    oracle = tell(scenario, Stale(strategy.in_flight), folder / "oracle", running_ahead=True)
    ours = tell(scenario, strategy, folder / "ours", running_ahead=True)
    assert_moved(oracle.events, ours.events, strategy.in_flight)
    assert_same_story(_apart(oracle), _apart(ours))
    return oracle


def _apart(story: Story) -> Story:
    """Transfers, then ``training_step``, then all else, each in its own order."""
    events = sorted(story.events, key=lambda event: event.ahead)
    return Story(events, story.checkpoints, story.end, story.warned)


def assert_moved(oracle: list[Event], ours: list[Event], in_flight: int) -> None:
    """No minibatch is further ahead of Lightning's loop than the pipeline allows, and none lags behind it."""
    begun = _begun_before_steps(oracle)
    for step, (plainly, now) in enumerate(zip(begun, _begun_before_steps(ours), strict=True), start=1):
        assert plainly - in_flight < now <= plainly, f"training_step {step} ran when {now} minibatches had begun"


def _begun_before_steps(events: list[Event]) -> list[int]:
    """For each ``training_step``, how many minibatches had begun by then."""
    begun, found = 0, []
    for event in events:
        begun += event.owner == "callback" and event.hook == "on_train_batch_start"
        if event.hook == "training_step":
            found.append(begun)
    return found


def assert_same_story(expected: Story, actual: Story) -> None:
    """The message names the first hook, or the first value, that differs."""
    for index, (one, other) in enumerate(zip(expected.events, actual.events, strict=False)):
        before = f"after {expected.events[index - 1]}, " if index else ""
        assert (one.owner, one.hook) == (other.owner, other.hook), f"{before}{other} came instead of {one}"
        for part in ("arguments", "seen", "returned"):
            found = difference(getattr(one, part), getattr(other, part), part)
            assert found is None, f"{before}{one}: {found}"
    missing = [str(event) for event in expected.events[len(actual.events) :]]
    extra = [str(event) for event in actual.events[len(expected.events) :]]
    assert not missing, missing[0]
    assert not extra, extra[0]
    for part in ("checkpoints", "end", "warned"):
        found = difference(getattr(expected, part), getattr(actual, part), part)
        assert found is None, found


def difference(expected: Any, actual: Any, where: str) -> str | None:
    """The first place at which two descriptions differ."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        if list(expected) != list(actual):
            return f"{where} has {list(actual)} instead of {list(expected)}"
        pairs = ((f"{where}[{key!r}]", expected[key], actual[key]) for key in expected)
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = ((f"{where}[{index}]", a, b) for index, (a, b) in enumerate(zip(expected, actual, strict=True)))
    else:
        return None if expected == actual else f"{where} is {actual!r} instead of {expected!r}"
    return next((found for place, a, b in pairs if (found := difference(a, b, place)) is not None), None)
