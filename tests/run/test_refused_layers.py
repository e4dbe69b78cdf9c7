"""Ways out of the golden table's refusals of layers and of state outside of them: they train as a plain run does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from lightning_hetpipe import HetPipeStrategy
from tests.support.small import Learner, batches, layers, pipeline, plain_step
from tests.support.trainers import quiet_trainer


def counts(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    module.seen += len(x)
    return plain_step(module, x, y, batch_idx)


def replaces(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    module.seen = module.seen + len(x)
    return plain_step(module, x, y, batch_idx)


def with_buffer(step: Callable[..., Any]) -> Learner:
    module = Learner(step)
    module.register_buffer("seen", torch.zeros(()))
    return module


@pytest.mark.parametrize("step", [counts, replaces])
def test_such_a_buffer_with_nothing_in_flight(step: Callable[..., Any]) -> None:
    module = with_buffer(step)
    quiet_trainer(pipeline(1)).fit(module, batches())
    assert torch.equal(module.get_buffer("seen"), torch.tensor(20.0))


class Teacher(L.Callback):
    """Moves a teacher towards the student after each step, as in self-distillation."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            for mine, theirs in zip(pl_module.teacher.parameters(), pl_module.net.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)


def distil(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    with torch.no_grad():
        target = module.teacher(x)
    return F.mse_loss(module.net(x), target)


@pytest.mark.parametrize(("step", "teacher"), [(counts, None), (replaces, None), (distil, Teacher)])
def test_such_changes_with_synchronous_weights(step: Callable[..., Any], teacher: type[Teacher] | None) -> None:
    """Nothing runs ahead there, as the error says."""
    found = list[dict[str, Tensor]]()
    for strategy in ("auto", HetPipeStrategy(stages=2, in_flight=3, weights="sync")):
        torch.manual_seed(0)
        module = Learner(step, teacher=layers().requires_grad_(False))
        module.register_buffer("seen", torch.zeros(()))
        quiet_trainer(strategy, callbacks=[teacher()] if teacher else []).fit(module, batches())
        found.append(module.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def follows(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    """As self-supervised models of libraries do it: the teacher follows where the step begins."""
    with torch.no_grad():
        for mine, its in zip(module.teacher.parameters(), module.net.parameters(), strict=True):
            mine.lerp_(its, 0.1)
    return distil(module, x, y, batch_idx)


def test_that_remedy() -> None:
    module = Learner(distil, teacher=layers().requires_grad_(False))
    strategy = HetPipeStrategy(stages=2, in_flight=3, module=["net", "teacher"])
    quiet_trainer(strategy, callbacks=[Teacher()]).fit(module, batches())
    assert strategy.last_run.in_flight == 3


def test_such_a_teacher_with_nothing_in_flight_is_that_of_a_plain_run() -> None:
    weights = list[dict[str, Tensor]]()
    for strategy in ("auto", pipeline(1)):
        torch.manual_seed(0)
        module = Learner(follows, teacher=layers().requires_grad_(False))
        quiet_trainer(strategy).fit(module, batches())
        weights.append(module.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_such_a_teacher_with_nothing_in_flight() -> None:
    module = Learner(distil, teacher=layers().requires_grad_(False))
    before = module.get_parameter("teacher.0.weight").clone()
    quiet_trainer(pipeline(1), callbacks=[Teacher()]).fit(module, batches())
    assert not torch.equal(module.get_parameter("teacher.0.weight"), before)


class Gaussian(nn.Module):
    """Gives a distribution, which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Normal:
        return Normal(self.second(self.first(x).tanh()), 1.0)


def likely(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return -module.net(x).log_prob(F.one_hot(y, 3)).mean()


def test_the_remedy_for_that() -> None:
    weights = list[dict[str, Tensor]]()
    for strategy in ("auto", pipeline(1, module=["net.first", "net.second"])):
        torch.manual_seed(0)
        module = Learner(likely, net=Gaussian())
        quiet_trainer(strategy).fit(module, batches())
        weights.append(module.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


class ReadFirst(nn.Module):
    """Reads a buffer in its first layer, and changes it behind its last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.second((self.first(x) - self.mean).tanh())
        y: Tensor = self.third(h)
        if self.training:
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return y


def test_the_remedy_for_such_a_buffer() -> None:
    weights = list[dict[str, Tensor]]()
    parts = ["net.first", "net.second", "net.third"]
    for strategy in ("auto", pipeline(3, weights="sync", module=parts)):
        torch.manual_seed(0)
        module = Learner(net=ReadFirst())
        quiet_trainer(strategy).fit(module, batches())
        weights.append(module.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
