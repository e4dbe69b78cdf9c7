"""Changes between epochs beside weights: contents of attributes, modules that come later, frozen parameters."""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Batch, Outputs
from tests.support.captured_models import Whole
from tests.support.marks import quick, slow_except
from tests.support.models import CLASSES, SGD, Learner, Task, vectors
from tests.support.small import assert_refused, pipeline


class Settings:
    def __init__(self) -> None:
        self.slope = 0.1


class Bends(nn.Module):
    """Reads a dict, an object, a list and a tensor that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.options, self.config, self.slopes = {"slope": 0.1}, Settings(), [0.1]
        self.factor = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.leaky_relu(self.linear(x), self.options["slope"]) * self.config.slope
        return F.leaky_relu(y, self.slopes[0]) * self.factor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bends, self.out = Bends(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.bends(x))
        return y


def bends_of(task: Any) -> Any:
    return task.model.bends if isinstance(task, Whole) else task.net[0]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a dict": lambda bends: bends.options.update(slope=0.9),
    "an object": lambda bends: setattr(bends.config, "slope", 0.9),
    "a list": lambda bends: bends.slopes.__setitem__(0, 0.9),
    "a tensor": lambda bends: bends.factor.mul_(2),
}


class AtEpoch(L.Callback):
    def __init__(self, epoch: int, change: Callable[[Any], Any]) -> None:
        self.epoch, self.change = epoch, change

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            self.change(pl_module)


@quick("False-a dict-3", "False-a tensor-3", "True-an object-3", "True-a list-3")
@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("captured", [False, True])
def test_contents_that_change_between_epochs_are_followed(captured: bool, change: str, in_flight: int) -> None:
    task: Learner = Whole(Model()) if captured else Task(nn.Sequential(Bends(), nn.Linear(8, CLASSES)))
    loader = vectors(20, 4)

    def edit(p: int, model: Any) -> None:
        if p == 5:
            CHANGES[change](bends_of(model))

    expected = expect(task, loader, in_flight, edit=edit)
    callback = AtEpoch(1, lambda module: CHANGES[change](bends_of(module)))
    assert_equal(expected, fit(task, loader, [callback], strategy=even(2, 2, in_flight)))


class AtStep(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            bends_of(pl_module).config.slope = 0.7


def test_contents_that_change_while_minibatches_are_in_flight_are_refused() -> None:
    task = Task(nn.Sequential(Bends(), nn.Linear(8, CLASSES)))
    settings: dict[str, Any] = {"strategy": pipeline(3), "loader": vectors(18, 4), "callbacks": [AtStep()]}
    assert_refused(task, "'net.0.config.slope'", "changed", "at the start", **settings)


class Late(Task):
    """Learns from a copy of itself, which a callback makes later."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)))
        self.teacher: Any = None

    def compute(self, batch: Batch) -> Outputs:
        outputs = super().compute(batch)
        if self.teacher is not None:
            outputs["loss"] = outputs["loss"] + F.mse_loss(outputs["logits"], self.teacher(batch[0]))
        return outputs


class Teaches(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.teacher = copy.deepcopy(pl_module.net).requires_grad_(False)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        if pl_module.teacher is not None:
            for mean, weight in zip(pl_module.teacher.parameters(), pl_module.net.parameters(), strict=True):
                mean.data.lerp_(weight.data, 0.1)


def test_a_module_that_comes_later_is_watched_too() -> None:
    settings: dict[str, Any] = {"loader": vectors(18, 4), "callbacks": [Teaches()], "max_epochs": 2}
    assert_refused(Late(), "'teacher.0.weight'", "outside", strategy=pipeline(3), **settings)
    fit(Late(), vectors(18, 4), [Teaches()], strategy=even(3, 2, 1))


class Scaled(Task):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)), SGD)
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)

    def compute(self, batch: Batch) -> Outputs:
        return {"loss": F.cross_entropy(self.net(batch[0]) * self.scale, batch[1])}


@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
def test_a_parameter_outside_that_is_unfrozen_between_epochs(in_flight: int) -> None:
    task, loader = Scaled(), vectors(18, 4)

    def edit(p: int, model: Any) -> None:
        if p == 5:
            model.scale.requires_grad_(True)

    expected = expect(task, loader, in_flight, edit=edit)
    callback = AtEpoch(1, lambda module: module.scale.requires_grad_(True))
    assert_equal(expected, fit(task, loader, [callback], strategy=even(3, 2, in_flight)))


SETTING: contextvars.ContextVar[int] = contextvars.ContextVar("SETTING", default=0)


@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
def test_context_variables_that_were_set_before(in_flight: int) -> None:
    seen = SimpleNamespace(values=[])

    class Looks(Task):
        def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
            seen.values.append(SETTING.get())
            return self.compute(batch)

    token = SETTING.set(5)
    try:
        fit(Looks(nn.Sequential(nn.Linear(6, CLASSES))), vectors(18, 4), strategy=even(1, 1, in_flight), max_epochs=1)
    finally:
        SETTING.reset(token)
    assert seen.values == [5] * 5
