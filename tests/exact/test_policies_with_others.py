"""Weight policies with what callbacks, optimizers and loss scalers do to parameters and their state."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch import nn

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.run.prediction import prediction_of
from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Batch, Outputs, Recipe
from tests.support.models import ADAMW, Task, decay, mlp, vectors

MOMENTUM = Recipe(lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01), decay)
RECIPES = {"xpipe": ADAMW, "pipeoptim": ADAMW}


class Freezes(L.Callback):
    """Freezes a layer after minibatch 5."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, Task)
        freeze(trainer.fit_loop.epoch_loop.batch_progress.total.ready, pl_module)


def freeze(p: int, model: Task) -> None:
    if p == 5:
        model.net[2].requires_grad_(False)


@pytest.mark.parametrize("policy", ["spectrain", "xpipe", "pipeoptim"])
def test_frozen_weights_are_expected_to_stay(policy: str) -> None:
    """Whatever the optimizer's state says: its steps leave them out."""
    task, loader = mlp(RECIPES.get(policy, MOMENTUM)), vectors(44, 4)
    expected = expect(task, loader, 3, weights=policy, edit=freeze)
    assert_equal(expected, fit(task, loader, [Freezes()], strategy=even(7, 2, 3, weights=policy)))


class Shrinks(torch.optim.SGD):
    """An optimizer of one's own, whose step goes on after torch's."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.mul_(0.999)
        return loss


@pytest.mark.parametrize("asked", [{"weights": "pipeoptim"}, {"weights": "stash", "lr_correction": 7}])
def test_a_step_that_calls_torchs_is_one_step(asked: dict[str, Any]) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)  # from now on its step runs hooks, whoever calls it
    task, loader = mlp(Recipe(lambda model: Shrinks(model.parameters(), 0.05, momentum=0.9))), vectors(44, 4)
    expected = expect(task, loader, 3, **asked)
    assert_equal(expected, fit(task, loader, strategy=even(7, 2, 3, **asked)))


class Signs(torch.optim.Optimizer):
    """A step of one's own: by the sign of an average of gradients, the mean of which is its only state."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                weight.sub_(mean.lerp_(weight.grad, 0.1).sign(), alpha=self.param_groups[0]["lr"])
        return loss


class AdamSigns(Signs, torch.optim.AdamW):
    """Begins as AdamW does."""


class SGDSigns(Signs, torch.optim.SGD):
    """Begins as SGD does."""


@pytest.mark.parametrize(
    ("policy", "optimizer", "state"),
    [("xpipe", AdamSigns, "step"), ("spectrain", functools.partial(SGDSigns, momentum=0.9), "momentum_buffer")],
)
def test_a_step_that_keeps_another_state_is_refused_by_name(policy: str, optimizer: Any, state: str) -> None:
    task = mlp(Recipe(lambda model: optimizer(model.parameters(), lr=0.001)))
    with pytest.raises(SettingError, match=rf"weights='{policy}' predicts by '{state}' .* \w+Signs keeps none; set"):
        fit(task, vectors(44, 4), strategy=even(7, 2, 3, weights=policy))


class Skips(Task):
    """Makes no step at each third minibatch, as in Lightning's example of a step at every other one."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if (batch_idx + 1) % 3:
            optimizer.step(closure=optimizer_closure)
        else:
            assert optimizer_closure is not None
            optimizer_closure()


@pytest.mark.parametrize("policy", ["stash", "spectrain", "xpipe", "pipeoptim"])
def test_a_step_that_the_user_leaves_out_has_changed_nothing(policy: str) -> None:
    task, loader = Skips(mlp().net, RECIPES.get(policy, MOMENTUM)), vectors(44, 4)
    skips = [p for p in range(1, 23) if (p - 1) % 11 % 3 == 2]
    expected = expect(task, loader, 3, weights=policy, skips=skips)
    assert_equal(expected, fit(task, loader, strategy=even(7, 2, 3, weights=policy)))


def test_a_fused_step_that_was_skipped_predicts_nothing() -> None:
    """The optimizer has made its state then."""
    weight = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.AdamW([weight], fused=True), torch.amp.GradScaler("cpu")
    weight.grad = torch.full_like(weight, torch.inf)
    scaler.scale(weight.new_zeros(()))  # makes the scale
    scaler.step(optimizer)
    assert optimizer.state[weight]
    assert not prediction_of("xpipe", optimizer).moves()


class Look:
    """Has minibatch 5, which uses version 2, look at the rate while the third step computes, unless that is kept."""

    def __init__(self) -> None:
        self.strategy: Any = even(7, 2, 3, weights="stash", lr_correction=50)
        self.strategy._before_pass = self.before_pass
        self.stepping, self.looked = threading.Event(), threading.Event()
        self.steps = 0

    def before_pass(self, stage: int, work: str, minibatch: int) -> None:
        if (stage, work, minibatch) == (1, "forward", 5):
            assert self.stepping.wait(60)

    def step(self) -> None:
        self.steps += 1
        if self.steps == 3:
            self.stepping.set()
            lock = self.strategy._run.pipeline.lock
            while not self.looked.is_set() and not (lock.held and lock.wanted()):
                pass


class Waits(torch.optim.SGD):
    """Waits for a look."""

    def __init__(self, model: nn.Module, look: Look) -> None:
        super().__init__(model.parameters(), 0.05)
        self.look = look

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.look.step()
        return loss


class Looks(Task):
    """Its step looks at the learning rate."""

    def compute(self, batch: Batch) -> Outputs:
        outputs = super().compute(batch)
        optimizer: Any = self.optimizers()
        rate, look = optimizer.param_groups[0]["lr"], optimizer.optimizer.look
        if look.stepping.is_set():
            look.looked.set()
        return {**outputs, "lr": torch.tensor(rate)}


def test_user_code_does_not_see_the_rate_of_a_step() -> None:
    look = Look()
    task = Looks(mlp().net, Recipe(lambda model: Waits(model, look)))
    record = fit(task, vectors(44, 4), strategy=look.strategy, max_epochs=1)
    assert {outputs["lr"].item() for outputs in record.outputs} == {torch.tensor(0.05).item()}
    assert look.looked.is_set()


class Rated(Task):
    """A task that a learning rate is searched for."""

    lr = 0.05


def test_what_a_search_has_changed_predicts_nothing_after_it() -> None:
    """It restores weights and the optimizer's state, within the fit."""
    made = Recipe(lambda model: torch.optim.SGD(model.parameters(), model.lr, momentum=0.9))  # type: ignore[arg-type]
    task, loader = Rated(mlp().net, made), vectors(44, 4)
    before = copy.deepcopy(task)
    search = LearningRateFinder(num_training_steps=20)
    record = fit(task, loader, [search], strategy=even(7, 2, 3, weights="pipeoptim"), max_epochs=1)
    before.lr = task.lr
    expected = expect(before, loader, 3, weights="pipeoptim", max_epochs=1)
    assert_equal(expected, record)
