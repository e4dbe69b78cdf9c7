"""Modules that a pipeline would not compute as they do are left to themselves, and a warning says why."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.evaluation.evaluating import Model, pipeline
from tests.support.equality import assert_same
from tests.support.marks import quick, slow_except
from tests.support.models import vectors
from tests.support.trainers import quiet_trainer


def predicted(module: Model, strategy: Any) -> Any:
    return quiet_trainer(strategy).predict(module, vectors(23, 4))


def twice(module: Model, x: Tensor, batch_idx: int) -> Any:
    return module.net(x) + module.net(x * 2)


def as_often_as_it_likes(module: Model, x: Tensor, batch_idx: int) -> Any:
    for _ in range(batch_idx):
        x = module.net(x)
    return x


def sometimes(module: Model, x: Tensor, batch_idx: int) -> Any:
    return module.net(x) if batch_idx != 3 else x


def parts(module: Model, x: Tensor, batch_idx: int) -> Any:
    y = module.net(x)
    return module.net[2](y)


def parameters(module: Model, x: Tensor, batch_idx: int) -> Any:
    return module.net(x) * module.net[0].weight.mean()


def with_gradients(module: Model, x: Tensor, batch_idx: int) -> Any:
    with torch.inference_mode(False), torch.enable_grad():
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module.net(x).sum(), x)
    return slope


def gradients_later(module: Model, x: Tensor, batch_idx: int) -> Any:
    return with_gradients(module, x, batch_idx) if batch_idx > 1 else module.net(x)


def functional(module: Model, x: Tensor, batch_idx: int) -> Any:
    return torch.nn.functional.linear(x, module.net[0].weight)


def other_shapes(module: Model, x: Tensor, batch_idx: int) -> Any:
    return module.net(x[0] if batch_idx == 2 else x[None, :, None] if batch_idx == 4 else x)


STEPS = [
    twice,
    as_often_as_it_likes,
    sometimes,
    parts,
    parameters,
    with_gradients,
    gradients_later,
    functional,
    other_shapes,
]


class Captured(nn.Module):
    """No ``nn.Sequential``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)])

    def __getitem__(self, index: int) -> nn.Module:
        return self.blocks[index]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


@quick(
    "twice-<lambda>-True",
    "twice-Captured-True",
    "as_often_as_it_likes-Captured-True",
    "sometimes-<lambda>-True",
    "parts-Captured-True",
    "parameters-<lambda>-True",
    "with_gradients-Captured-True",
    "gradients_later-<lambda>-True",
    "functional-Captured-True",
    "other_shapes-<lambda>-True",
)
@pytest.mark.parametrize("inference_mode", slow_except([True, False], True))
@pytest.mark.parametrize("net", [lambda: None, Captured])
@pytest.mark.parametrize("step", STEPS)
def test_steps_of_any_kind(step: Callable[..., Any], net: Callable[[], Any], inference_mode: bool) -> None:
    class Steps(Model):
        def step(self, x: Tensor, batch_idx: int) -> Any:
            return step(self, x, batch_idx)

    def run(strategy: Any) -> Any:
        torch.manual_seed(5)
        trainer = quiet_trainer(strategy, inference_mode=inference_mode)
        return trainer.predict(Steps(net()), vectors(23, 4))

    assert_same(run("auto"), run(pipeline()))


class Trains(Model):
    def on_predict_start(self) -> None:
        self.net.train()


class Hooked(Model):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.seen: list[Any] = []
        self.net[2].register_forward_hook(lambda m, i, o: self.seen.append(o.sum()))

    def step(self, x: Tensor, batch_idx: int) -> Any:
        output = super().step(x, batch_idx)
        return output, self.seen.pop()


class Counts(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x) * self.calls
        return y


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x) * self.calls
        return y


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if y.sum() > 0 else -y


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Trains, "'net' does not run in the pipeline: it is in training mode"),
        (lambda: Hooked(), "'net' does not run in the pipeline: layer 'net.2' has a hook"),
        (lambda: Model(nn.Sequential(Counts(), nn.ReLU())), "it changes its buffers"),
        (lambda: Model(nn.Sequential(Remembers(), nn.ReLU())), "it changes its attribute 'calls'"),
        (lambda: Model(Decides()), "'net' decides by the values of its data"),
    ],
)
def test_a_warning_says_why(make: Callable[[], Model], reason: str) -> None:
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match=reason):
        found = predicted(make(), pipeline())
    torch.manual_seed(5)
    assert_same(predicted(make(), "auto"), found)


def test_nothing_is_said_where_all_runs_in_the_pipeline() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        predicted(Model(), pipeline())
    assert not [str(warning.message) for warning in said if "pipeline" in str(warning.message)]


def test_frozen_modules_and_those_without_gradients_run_in_it() -> None:
    class Freezes(Model):
        def __init__(self) -> None:
            super().__init__()
            self.freeze()

    strategy = pipeline()
    stages: set[int] = set()
    strategy._before_pass = lambda stage, work, batch: stages.add(stage)
    assert_same(predicted(Freezes(), "auto"), predicted(Freezes(), strategy))
    assert stages == {0, 1}
