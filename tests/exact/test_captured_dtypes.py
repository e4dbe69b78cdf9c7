"""Captured models under precision plugins that make another dtype the default one, and other things that they bake."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exact.pipelines import delayed, even
from tests.exact.running import assert_equal, assert_same_run, expect, fit
from tests.oracle import Batch, Outputs
from tests.support.captured_models import Whole
from tests.support.marks import fewer, quick
from tests.support.models import CLASSES, SGD, Learner, vectors
from tests.support.small import assert_refused, pipeline


class Creates(nn.Module):
    """Makes tensors without naming a dtype, of whole numbers too, one of them in a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x * torch.linspace(0.1, 1, 6, device=x.device) + torch.full((6,), 1 / 3))
        with torch.no_grad():
            scale = torch.ones(8) / 3 + torch.arange(8) / 7
        z: Tensor = self.two(torch.tanh(y) * scale)
        return z


@quick("bf16-true")
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_one_in_flight_is_the_plain_trainer(precision: Any) -> None:
    torch.manual_seed(5)
    model, loader = Creates(), vectors(18, 4)
    plain, one = (
        fit(Whole(model_of(model)), loader, strategy=strategy, precision=precision)
        for strategy in ("auto", even(2, 2, 1))
    )
    assert_same_run(plain, one)


def model_of(model: nn.Module) -> nn.Module:
    made = Creates()
    made.load_state_dict(model.state_dict())
    return made


@quick("bf16-true")
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_several_in_flight_repeat(precision: Any) -> None:
    torch.manual_seed(5)
    model, loader = Creates(), vectors(18, 4)
    runs = [
        fit(Whole(model_of(model)), loader, strategy=delayed(even(2, 2, 4), seed), precision=precision)
        for seed in fewer((1, 2, 3), (1, 2))
    ]
    for run in runs[1:]:
        assert_same_run(runs[0], run)


class Keeps(nn.Module):
    def __init__(self, chance: Any) -> None:
        super().__init__()
        self.linear, self.chance = nn.Linear(6, CLASSES), chance

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * float(self.chance.random())
        return y


@pytest.mark.parametrize("chance", [random.Random(3), np.random.default_rng(3), np.random.RandomState(3)])
@pytest.mark.parametrize("captured", [True, False])
def test_random_generators_of_others_are_refused(chance: Any, captured: bool) -> None:
    model = Keeps(chance) if captured else nn.Sequential(Keeps(chance))
    settings: dict[str, Any] = {"strategy": pipeline(1, module=["model"]), "loader": vectors(18, 4)}
    assert_refused(Whole(model), "keeps a random generator of its own (in Keeps)", **settings)


class Named(nn.Module):
    """Names its parameters as our layers name theirs."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("take", "held", "device"):
            self.register_parameter(name, nn.Parameter(torch.rand(6)))
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for name in ("take", "held", "device"):
            x = x * self.get_parameter(name)
        y: Tensor = self.out(x if scale != scale else x * scale)
        return y


def test_names_of_parameters() -> None:
    task, loader = Whole(Named()), vectors(18, 4)
    assert_equal(expect(task, loader, 3), fit(task, loader, strategy=even(1, 1, 3)))


class Scaled(Whole):
    def compute(self, batch: Batch) -> Outputs:
        return {"loss": F.cross_entropy(self.model(batch[0], scale=float("nan")), batch[1])}


def test_an_argument_that_is_not_a_number() -> None:
    """It was captured anew each time, until there were too many graphs."""
    task, loader = Scaled(Named()), vectors(44, 4)
    assert_equal(expect(task, loader, 3), fit(task, loader, strategy=even(1, 1, 3)))


class Casts(Learner):
    """Opens autocast itself, with its cache, around a model that uses a weight twice."""

    def __init__(self) -> None:
        super().__init__(SGD)
        first = nn.Linear(6, 6)
        self.net = nn.Sequential(first, nn.Tanh(), first, nn.Tanh(), nn.Linear(6, CLASSES))

    def compute(self, batch: Batch) -> Outputs:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.net(batch[0])
        return {"loss": F.cross_entropy(logits.float(), batch[1])}


@pytest.mark.slow
def test_autocast_with_its_cache_repeats() -> None:
    torch.manual_seed(5)
    weights, loader = Casts().state_dict(), vectors(44, 4)
    runs = []
    for seed in (1, 2, 3, 4):
        task = Casts()
        task.load_state_dict(weights)
        runs.append(fit(task, loader, strategy=delayed(even(5, 2, 4), seed)))
    for run in runs[1:]:
        assert_same_run(runs[0], run)


class Rounds(nn.Module):
    """Asks a tensor for its dtype, which autocast may have chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        z: Tensor = self.two(torch.softmax(y.float(), -1).to(y.dtype))
        return z


class AutocastByData(Whole):
    """Opens autocast for some minibatches."""

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(x[0, 0] > 0)):
            logits = self.model(x)
        return {"loss": F.cross_entropy(logits.float(), y), "logits": logits.float().detach()}


def test_autocast_of_some_calls() -> None:
    """A graph kept the dtype that the first call had."""
    task, loader = AutocastByData(Rounds()), vectors(44, 4)
    assert len({bool(x[0, 0] > 0) for x, _ in loader}) == 2
    assert_equal(expect(task, loader, 3), fit(task, loader, strategy=even(2, 2, 3, module=["model"])))


class WithoutAutocast(Whole):
    """Runs the model in full precision, and what the Trainer is set to around it."""

    def compute(self, batch: Batch) -> Outputs:
        with torch.autocast("cpu", enabled=False):
            logits = self.model(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits.detach()}


def test_autocast_that_training_step_turns_off() -> None:
    """The model was captured as if it were on."""
    task, loader = WithoutAutocast(Rounds()), vectors(18, 4)
    strategy = even(2, 2, 3, module=["model"])
    assert_equal(expect(task, loader, 3), fit(task, loader, strategy=strategy, precision="bf16-mixed"))
