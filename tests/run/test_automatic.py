"""``weights="auto"``: a prediction where there is a rule for the optimizer, stashed weights otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from omegaconf import ListConfig
from torch import nn
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.placement.measuring import optimizer_name
from lightning_hetpipe.planning.model.stage_memory import planned_policies
from lightning_hetpipe.rules.versions import STASH
from lightning_hetpipe.run.stale_gradients import CORRECTED, automatic_policy
from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Recipe
from tests.support.models import ADAMW, decay, mlp, vectors
from tests.support.small import Wraps
from tests.support.trainers import quiet_trainer

MOMENTUM = Recipe(lambda model: SGD(model.parameters(), 0.05, momentum=0.9), decay)
RMSPROP = Recipe(lambda model: RMSprop(model.parameters(), 0.001, momentum=0.9), decay)
PLAIN = Recipe(lambda model: SGD(model.parameters(), 0.05), decay)
Told = list[str]


class Lion(Optimizer):
    """An optimizer of one's own, that averages gradients."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.1, "betas": (0.9, 0.99)})


class Signed(Adam):
    """A subclass of a known one, with another step and no state."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                self.state[weight]["step"] = torch.ones(())
                weight.sub_(weight.grad.sign(), alpha=0.01)
        return loss


class Renamed(AdamW):
    """A subclass that steps as the known one does."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Lines at the start of a fit."""
    found: Told = []
    monkeypatch.setattr("lightning_hetpipe.run.first_minibatch.rank_zero_info", found.append)
    return found


@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (lambda weights: SGD(weights, 0.1, momentum=0.9), "spectrain"),
        (lambda weights: SGD(weights, 0.1, momentum=0.9, nesterov=True), "pipeoptim"),
        (lambda weights: SGD(weights, 0.1, momentum=0.9, dampening=0.9), "pipeoptim"),
        (lambda weights: SGD(weights, 0.1, momentum=0.5), "stash"),
        (lambda weights: SGD(weights, 0.1), "stash"),
        (lambda weights: SGD([{"params": weights[:1], "momentum": 0.9}, {"params": weights[1:]}], 0.1), "pipeoptim"),
        (lambda weights: AdamW(weights), "xpipe"),
        (lambda weights: AdamW(weights, betas=(torch.tensor(0.9), torch.tensor(0.999)), foreach=False), "xpipe"),
        (lambda weights: AdamW(weights, betas=cast(Any, ListConfig([0.9, 0.999]))), "xpipe"),
        (lambda weights: Adam(weights, betas=(0.0, 0.99)), "stash"),
        *((make, "pipeoptim") for make in (NAdam, RAdam, Adamax, Rprop)),
        (lambda weights: RMSprop(weights, 0.1), "stash"),
        (lambda weights: RMSprop(weights, 0.1, momentum=0.9), "pipeoptim"),
        (lambda weights: torch.optim.Adagrad(weights), "stash"),
        (lambda weights: Lion(weights), "stash"),
        (lambda weights: Signed(weights), "stash"),
        (lambda weights: Renamed(weights), "xpipe"),
        (lambda weights: Wraps(SGD(weights, 0.1, momentum=0.9)), "stash"),
    ],
)
def test_policies_by_optimizer(make: Callable[[list[nn.Parameter]], Optimizer], policy: str) -> None:
    optimizer = make(list(nn.Linear(2, 2).parameters()))
    chosen = automatic_policy(optimizer, clipped=False)
    assert chosen.policy.name == policy
    corrected = CORRECTED if policy in ("spectrain", "pipeoptim") else None
    assert chosen.lr_correction == corrected
    shortens = isinstance(optimizer, SGD)
    assert automatic_policy(optimizer, clipped=True).lr_correction == (None if shortens else corrected)
    assert type(optimizer).__name__ in chosen.told(chosen.policy)


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: SGD(weights, 0.1),
        lambda weights: SGD(weights, 0.1, momentum=0.9),
        lambda weights: SGD(weights, 0.1, momentum=0.9, weight_decay=0.1),
        lambda weights: RMSprop(weights, momentum=0.9),
        lambda weights: RMSprop(weights, momentum=0.9, centered=True),
        lambda weights: RMSprop(weights),
        *(
            getattr(torch.optim, name)
            for name in (
                "Adam",
                "AdamW",
                "Adamax",
                "NAdam",
                "RAdam",
                "Rprop",
                "Adagrad",
                "Adadelta",
                "Adafactor",
                "Muon",
                "ASGD",
            )
        ),
    ],
)
def test_plans_choose_as_runs_do(make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    optimizer = make([nn.Parameter(torch.ones(2, 2))])
    name = optimizer_name(optimizer)
    assert name is not None
    first, *_ = policies = planned_policies(name)
    assert first is automatic_policy(optimizer, clipped=False).policy
    assert policies[-1] is STASH


@pytest.mark.parametrize(
    ("recipe", "policy", "clip"),
    [
        (MOMENTUM, "spectrain", None),
        (ADAMW, "xpipe", None),
        (PLAIN, "stash", None),
        (MOMENTUM, "spectrain", 0.1),
        (RMSPROP, "pipeoptim", 0.1),
        (Recipe(lambda model: Signed(model.parameters())), "stash", None),
    ],
)
def test_a_fit_by_default(recipe: Recipe, policy: str, clip: float | None, told: Told) -> None:
    task, loader = mlp(recipe), vectors(44, 4)
    corrected = CORRECTED if policy == "pipeoptim" or (policy == "spectrain" and clip is None) else None
    options: dict[str, Any] = {} if clip is None else {"clip_norm": clip}
    expected = expect(task, loader, 3, weights=policy, lr_correction=corrected, **options)
    strategy = HetPipeStrategy(stages=2, in_flight=3)
    assert_equal(expected, fit(task, loader, strategy=strategy, gradient_clip_val=clip))
    (line,) = [line for line in told if "weights='auto'" in line]
    assert f"is '{policy}'" in line
    assert ("weights='stash' to predict" in line) == (policy != "stash")
    assert (f"first {CORRECTED.updates} updates; set" in line) == (corrected is not None)
    assert ("lr_correction=None to lower" in line) == (corrected is not None)


def test_the_users_own_correction_holds(told: Told) -> None:
    task, loader = mlp(MOMENTUM), vectors(44, 4)
    expected = expect(task, loader, 3, weights="spectrain", lr_correction=5)
    assert_equal(expected, fit(task, loader, strategy=HetPipeStrategy(stages=2, in_flight=3, lr_correction=5)))
    task = mlp(MOMENTUM)
    expected = expect(task, loader, 3, weights="spectrain")
    assert_equal(expected, fit(task, loader, strategy=HetPipeStrategy(stages=2, in_flight=3, lr_correction=None)))


@pytest.mark.parametrize("settings", [{"stages": 1}, {"stages": 2, "in_flight": 1, "recompute": True}])
def test_nothing_is_predicted_or_corrected_without_staleness(settings: dict[str, Any], told: Told) -> None:
    task, loader = mlp(MOMENTUM), vectors(20, 4)
    expected = expect(task, loader, 1)
    assert_equal(expected, fit(task, loader, strategy=HetPipeStrategy(**settings)))
    assert not any("weights=" in line for line in told)


def test_an_optimizer_without_hooks_is_trained(told: Told) -> None:
    task, loader = mlp(Recipe(lambda model: Wraps(SGD(model.parameters(), 0.05, momentum=0.9)))), vectors(20, 4)
    quiet_trainer(HetPipeStrategy(stages=2, in_flight=3), max_epochs=1, enable_checkpointing=False).fit(task, loader)
    assert any("is 'stash', as Wraps takes no hooks" in line for line in told)
