"""Python values from outside a captured module, which its graph has frozen: a change is noticed, and refused by name
where it makes a difference."""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe.capture.effects import FrozenValues
from lightning_hetpipe.capture.noticed_calls import is_users
from lightning_hetpipe.capture.parity_check import MOST_NEEDLESS
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.placement.layout import Layout
from tests.exact.pipelines import Pinned
from tests.exact.running import Record, assert_equal, expect, fit
from tests.oracle import Batch, Outputs
from tests.support.marks import quick, slow_except
from tests.support.models import CLASSES, SGD, Learner, vectors
from tests.support.trainers import quiet_trainer

Case = tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], None], str]

SCALE = 1.0
TABLE = {"scale": 1.0}


class Config:
    scale = 1.0

    def __init__(self) -> None:
        self.inner: Any = None


CONFIG = Config()
CONFIG.inner = Config()


@dataclass(slots=True)
class Slots:
    scale: float = 1.0


class Scaler:
    def __init__(self) -> None:
        self.scale = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale


class Loads(dict[str, float]):
    """As Hugging Face's tables, which import what they are asked for."""

    def __iter__(self) -> Any:
        raise AssertionError("nobody asked for all")

    keys = values = items = __iter__


SLOTS = Slots()
NAMESPACE = argparse.Namespace(scale=1.0)
SCALED = Scaler().scaled
PARTIAL = partial(lambda x, settings: x * settings["scale"], settings={"scale": 1.0})
LOADS = Loads(scale=1.0)
DETACHED: list[bool] = [False]


def helper(x: Tensor) -> Tensor:
    return x * SCALE


class Body(nn.Module):
    """Not an nn.Sequential, so that it is captured; ``scale`` says what its forward reads."""

    factor: float = 1.0

    def __init__(self, scale: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.scale = scale
        self.owner: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.other(torch.tanh(self.scale(self, self.one(x))))
        return y


class Model(Learner):
    def __init__(self, scale: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(SGD)
        self.net = Body(scale)
        self.level = 1.0

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits.detach()}


class Change(L.Callback):
    """Changes a value after the step of minibatch ``after``."""

    def __init__(self, after: int, change: Callable[[Any], None]) -> None:
        self.after, self.change = after, change

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.after:
            self.change(pl_module)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setitem(TABLE, "scale", 1.0)
    monkeypatch.setattr(Config, "scale", 1.0)
    monkeypatch.setattr(Body, "factor", 1.0)
    monkeypatch.setattr(SLOTS, "scale", 1.0)
    monkeypatch.setattr(NAMESPACE, "scale", 1.0)
    monkeypatch.setattr(SCALED.__self__, "scale", 1.0)  # type: ignore[attr-defined]
    monkeypatch.setitem(PARTIAL.keywords["settings"], "scale", 1.0)
    LOADS.update(scale=1.0)
    DETACHED[0] = False
    CONFIG.inner = Config()


def set_inner(_: Any) -> None:
    CONFIG.inner = type("Other", (Config,), {"scale": 2.0})()


def set_level(module: Any) -> None:
    module.level = 2.0


def a_closure() -> Case:
    level = 1.0

    def scale(body: Any, x: Tensor) -> Tensor:
        return x * level

    def change(_: Any) -> None:
        nonlocal level
        level = 2.0

    return scale, change, "'level' in the closure"


def a_default() -> Case:
    def scale(body: Any, x: Tensor, levels: list[float] = [1.0]) -> Tensor:  # noqa: B006  # what people do
        return x * levels[0]

    def change(_: Any) -> None:
        assert scale.__defaults__ is not None
        scale.__defaults__[0][0] = 2.0

    return scale, change, "a default of "


KINDS: dict[str, Callable[[], Case]] = {
    "a global": lambda: (
        lambda body, x: x * SCALE,
        lambda _: globals().update(SCALE=2.0),
        r"SCALE \(it was 1.0, and is 2.0\)",
    ),
    "a global of a helper": lambda: (lambda body, x: helper(x), lambda _: globals().update(SCALE=2.0), "SCALE"),
    "an item of a global": lambda: (lambda body, x: x * TABLE["scale"], lambda _: TABLE.update(scale=2.0), "TABLE"),
    "a closure": a_closure,
    "a default": a_default,
    "an object's own instead of its class's": lambda: (
        lambda body, x: x * CONFIG.inner.scale,
        lambda _: setattr(CONFIG.inner, "scale", 2.0),
        "CONFIG.inner.scale",
    ),
    "a class attribute": lambda: (lambda body, x: x * body.factor, lambda _: setattr(Body, "factor", 2.0), "Body.f"),
    "an attribute of a class": lambda: (
        lambda body, x: x * CONFIG.scale,
        lambda _: setattr(Config, "scale", 2.0),
        "Config.scale",
    ),
    "an object's object": lambda: (lambda body, x: x * CONFIG.inner.scale, set_inner, "CONFIG.inner"),
    "slots": lambda: (lambda body, x: x * SLOTS.scale, lambda _: setattr(SLOTS, "scale", 2.0), "SLOTS.scale"),
    "a namespace": lambda: (
        lambda body, x: x * getattr(NAMESPACE, "scale"),  # noqa: B009  # what people do
        lambda _: setattr(NAMESPACE, "scale", 2.0),
        "NAMESPACE.scale",
    ),
    "a method": lambda: (
        lambda body, x: SCALED(x),
        lambda _: setattr(SCALED.__self__, "scale", 2.0),  # type: ignore[attr-defined]
        "SCALED.scale",
    ),
    "a partial": lambda: (
        lambda body, x: PARTIAL(x),
        lambda _: PARTIAL.keywords["settings"].update(scale=2.0),
        "PARTIAL",
    ),
    "a table that loads": lambda: (lambda body, x: x * LOADS["scale"], lambda _: LOADS.update(scale=2.0), "LOADS"),
    "the owner's attribute": lambda: (lambda body, x: x * body.owner[0].level, set_level, r"level \(it was 1.0"),
    "the global step": lambda: (lambda body, x: x * (1 + body.owner[0].global_step), lambda _: None, "completed"),
}


def fitted(task: Model, change: Callable[[Any], None], in_flight: int = 3, after: int = 4, **settings: Any) -> Record:
    task.net.owner.append(task)
    strategy = Pinned((0, 1), in_flight)
    return fit(task, vectors(48, 4), [Change(after, change)], strategy=strategy, **{"max_epochs": 1, **settings})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "the global step"])
def test_a_change_is_noticed_and_named(kind: str) -> None:
    scale, change, named = KINDS[kind]()
    task = Model(scale)
    task.net.owner.append(task)
    frozen = FrozenValues(task.net)
    with frozen.noted():
        task.net(torch.ones(1, 6))
    before = frozen.reached.now()
    assert frozen.changed(before) is None
    change(task)
    assert re.search(named, frozen.changed(before) or "nothing")


def test_another_profiler_of_python_is_told_of() -> None:
    """Nothing is noticed beside it."""
    frozen = FrozenValues(nn.Linear(1, 1))
    sys.setprofile(lambda *_: None)
    try:
        with pytest.warns(UserWarning, match=r"profiler of Python \(function\) .* set in_flight=1"), frozen.noted():
            pass
    finally:
        sys.setprofile(None)


@quick("3-an object's object", "3-the owner's attribute", "3-the global step")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_change_that_makes_a_difference_is_refused_by_name(kind: str, in_flight: int) -> None:
    """These ran on with the value of the first minibatch, without a word."""
    scale, change, named = KINDS[kind]()
    with pytest.raises(SettingError, match=rf"'net' computes other values in minibatch \d+ .*{named}.* tensor arg"):
        fitted(Model(scale), change, in_flight)


def partly_detached(body: Any, x: Tensor) -> Tensor:
    return x * 0.5 + (x.detach() if DETACHED[0] else x) * 0.5


def without_gradients(body: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(not DETACHED[0]):
        return torch.sin(x)


@pytest.mark.parametrize("scale", [partly_detached, without_gradients])
def test_a_change_of_gradients_alone_is_refused(scale: Callable[[Any, Tensor], Tensor]) -> None:
    """They were those of the first minibatch's graph, and outputs were equal."""
    with pytest.raises(SettingError, match=r"computes other gradients in minibatch 5 than its graph.*DETACHED"):
        fitted(Model(scale), lambda _: DETACHED.__setitem__(0, True), 1)


class Replace(L.Callback):
    """Another object with the same values comes first, whose value changes later."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            CONFIG.inner = type("Other", (Config,), {})()
        elif trainer.global_step == 8:
            CONFIG.inner.scale = 2.0


def test_an_object_that_was_replaced_is_watched() -> None:
    task = Model(lambda body, x: x * CONFIG.inner.scale)
    with pytest.raises(SettingError, match=r"in minibatch 9 than its graph.*CONFIG\.inner\.scale"):
        fit(task, vectors(48, 4), [Replace()], strategy=Pinned((0, 1), 1), max_epochs=1)


class WithNumber(Body):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), SCALE


def test_a_number_in_the_output_is_compared() -> None:
    class Takes(Model):
        def compute(self, batch: Batch) -> Outputs:
            logits, scale = self.net(batch[0])
            return {"loss": F.cross_entropy(logits * scale, batch[1]), "logits": logits.detach()}

    task = Takes(lambda body, x: x)
    task.net = WithNumber(lambda body, x: x)
    with pytest.raises(SettingError, match=r"other values in minibatch 5 .*SCALE"):
        fitted(task, lambda _: globals().update(SCALE=2.0), 1)


def test_a_comparison_that_fails_leaves_buffers_alone() -> None:
    def scale(body: Any, x: Tensor) -> Tensor:
        y: Tensor = body.norm(x)
        if SCALE == 2.0:
            raise ArithmeticError("no such scale")
        return y

    task = Model(scale)
    task.net.norm = nn.BatchNorm1d(8)
    left: list[Tensor] = []
    mean = task.net.norm.running_mean
    assert isinstance(mean, Tensor)

    def change(_: Any) -> None:
        globals().update(SCALE=2.0)
        left.append(mean.clone())

    with pytest.raises(ArithmeticError, match="no such scale"):
        fitted(task, change, 1)
    assert torch.equal(left[0], mean)


def test_whose_functions_are_looked_at() -> None:
    """Packages whose names begin as torch's are not torch's."""

    def code(file: Path) -> CodeType:
        return compile("1", str(file), "eval")

    packages = Path(torch.__file__).parent.parent
    assert is_users(code(packages / "torchvision" / "ops" / "misc.py"))
    assert not is_users(code(packages / "torch" / "nn" / "functional.py"))


def test_equal_functions_of_two_files() -> None:
    """Their code is equal, and their globals are not."""
    source = "def scaled(x):\n    return x * SCALE\n"
    one, other = ({"SCALE": 1.0, "__name__": name} for name in ("one", "other"))
    for space in (one, other):
        exec(compile(source, f"{space['__name__']}.py", "exec"), space)
    scaled: list[Any] = [one["scaled"], other["scaled"]]
    with pytest.raises(SettingError, match=r"in minibatch 5 .*other.SCALE \(it was 1.0"):
        fitted(Model(lambda body, x: scaled[1](scaled[0](x))), lambda _: other.update(SCALE=2.0), 1)


def test_layers_that_have_hold_of_their_owner_are_captured() -> None:
    """Their copies in stages had a copy of the owner, whose attributes were those of the first minibatch."""
    task = Model(lambda body, x: x * body.owner[0].level)
    task.net.owner.append(task)
    task.add_module("net", nn.Sequential(task.net, nn.Linear(CLASSES, CLASSES)))
    with pytest.raises(SettingError, match=r"'net' computes other values in minibatch \d+ .*level \(it was 1.0"):
        fit(task, vectors(48, 4), [Change(4, set_level)], strategy=Pinned((0, 1), 3), max_epochs=1)


def test_a_change_that_makes_no_difference_is_all_right() -> None:
    """A value that forward reads and does not compute with, such as one that it only logs."""

    def scale(body: Any, x: Tensor) -> Tensor:
        repr(body.owner[0].global_step)
        return x

    task = Model(scale)
    task.net.owner.append(task)
    expected = expect(task, vectors(48, 4), 3, max_epochs=1)
    assert_equal(expected, fitted(task, lambda _: globals().update(SCALE=2.0)))


class Counts(L.Callback):
    """Sets a value after each step that ``forward`` reads."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        CONFIG.inner.scale = trainer.global_step


@pytest.mark.parametrize(
    ("steps", "warned"), slow_except([(MOST_NEEDLESS, False), (MOST_NEEDLESS + 1, True)], (MOST_NEEDLESS + 1, True))
)
def test_a_value_that_always_changes_is_warned_of(steps: int, warned: bool) -> None:
    """Each time the pipeline stops for a comparison."""

    def scale(body: Any, x: Tensor) -> Tensor:
        repr(CONFIG.inner.scale)
        return x

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Model(scale), vectors(4 * steps, 4), [Counts()], strategy=Pinned((0, 1), 1), max_epochs=1)
    said = [str(warning.message) for warning in caught if "stops to compare" in str(warning.message)]
    assert len(said) == warned
    assert all(
        "the forward of 'net' may read, last tests.exact.test_frozen_values.CONFIG.inner.scale" in s for s in said
    )


def test_what_pythons_collector_runs_is_none_of_forwards() -> None:
    """Its callbacks run in the midst of any function, and keep times that change."""
    clock = {"ticks": 0}

    def tick(*_: Any) -> None:
        clock["ticks"] += 1

    def scale(body: Any, x: Tensor) -> Tensor:
        held = [[index] for index in range(10_000)]  # more than the collector lets pass
        return x * (len(held) / 10_000)

    frozen = FrozenValues(nn.Identity())
    gc.callbacks.append(tick)
    try:
        with frozen.noted():
            scale(None, torch.ones(1))
        before = frozen.reached.now()
        clock["ticks"] += 1
        assert frozen.changed(before) is None
    finally:
        gc.callbacks.remove(tick)
    assert gc.isenabled()


def test_all_that_changed_is_named() -> None:
    def change(_: Any) -> None:
        globals().update(SCALE=2.0)
        NAMESPACE.scale = 3.0

    with pytest.raises(
        SettingError, match=r"SCALE \(it was 1.0, and is 2.0\).*NAMESPACE.scale \(it was 1.0, and is 3.0"
    ):
        fitted(Model(lambda body, x: x * NAMESPACE.scale * SCALE), change, 1)


def test_a_module_that_differs_from_itself_is_not_refused() -> None:
    """Its graph cannot be told from it. Nobody watches what a generator counts."""
    calls, since = (call for call in itertools.count(1)), [8]

    def scale(body: Any, x: Tensor) -> Tensor:
        call = next(calls)
        return x * (1 + call * 1e-3) if call > since[0] else x

    record = fitted(Model(scale), lambda _: since.append(0))
    assert len(record.outputs) == 12


def test_what_nobody_watches_is_noticed_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """At minibatches 2, 4, 8, ... graphs are compared with their modules in any case."""
    monkeypatch.setenv("HETPIPE_TEST_SCALE", "1")
    task = Model(lambda body, x: x * float(os.environ["HETPIPE_TEST_SCALE"]))
    with pytest.raises(SettingError, match=r"in minibatch 8 than its graph.*: something changed"):
        fitted(task, lambda _: monkeypatch.setenv("HETPIPE_TEST_SCALE", "2"), 1)


def test_and_at_the_first_minibatch_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETPIPE_TEST_SCALE", "1")
    task = Model(lambda body, x: x * float(os.environ["HETPIPE_TEST_SCALE"]))
    with pytest.raises(SettingError, match="in minibatch 13 than its graph"):
        fitted(task, lambda _: monkeypatch.setenv("HETPIPE_TEST_SCALE", "2"), 3, 12, max_epochs=2)


class Predicts(Model):
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        globals().update(SCALE=float(batch_idx // 2))
        logits: Tensor = self.net(batch[0])
        return logits


class Validates(Model):
    def __init__(self) -> None:
        super().__init__(lambda body, x: x * SCALE)
        self.seen: list[Tensor] = []

    def on_validation_start(self) -> None:
        globals().update(SCALE=float(2 + len(self.seen)))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.seen.append(self.net(batch[0]))

    def on_validation_end(self) -> None:
        globals().update(SCALE=1.0)


def test_an_evaluation_across_devices_goes_on_with_the_module_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs ran there with the values of the first evaluation. (One device does for several here.)"""
    monkeypatch.setattr(Layout, "is_spread", lambda self: True)
    found: list[list[Tensor]] = []
    for strategy in ("auto", Pinned((0, 1), 1)):
        torch.manual_seed(3)
        task = Validates()
        fit(task, vectors(12, 4), val_loader=vectors(8, 4), max_epochs=3, strategy=strategy)
        found.append(task.seen)
    assert len(found[0]) == 6
    assert all(map(torch.equal, *found))


class Steps(L.Callback):
    def on_predict_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        CONFIG.inner.scale += 1


def test_a_comparison_in_an_evaluation_is_no_change_of_buffers() -> None:
    """It ended with the error that callbacks had changed weights."""

    def scale(body: Any, x: Tensor) -> Tensor:
        y: Tensor = body.norm(x)
        return y * torch.ones(2)[int(CONFIG.inner.scale > 100)]

    class Predicts(Model):
        def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
            logits: Tensor = self.net(batch[0])
            return logits

    results: list[list[Tensor]] = []
    for strategy in ("auto", Pinned((0, 1), 3)):
        torch.manual_seed(3)
        task = Predicts(scale)
        task.net.norm = nn.BatchNorm1d(8)
        found: Any = quiet_trainer(strategy, callbacks=[Steps()]).predict(task, vectors(48, 4))
        results.append(found)
    assert all(map(torch.equal, *results))


def test_an_evaluation_goes_on_with_the_module_itself() -> None:
    results: list[list[Tensor]] = []
    for strategy in ("auto", Pinned((0, 1), 3)):
        torch.manual_seed(3)
        found: Any = quiet_trainer(strategy).predict(Predicts(lambda body, x: x * SCALE), vectors(24, 4))
        results.append(found)
    assert all(map(torch.equal, *results))
