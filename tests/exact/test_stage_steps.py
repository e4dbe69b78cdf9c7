"""Stages that step their own weights leave the bits of a whole step, and everybody else sees one step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.nn import functional as F

from lightning_hetpipe.run.stage_steps import StageSteps, steps_by_weight
from tests.exact.pipelines import delayed, even
from tests.exact.running import Record, assert_equal, assert_same_run, expect, fit
from tests.oracle import Batch, Outputs, Recipe
from tests.support.models import Learner, Task, mlp, recurring, sentences, tied_language_model, vectors


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices by Muon, one by one, and other weights by AdamW."""
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    others = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return pytorch_optimizer.Muon(groups, foreach=False)


def schedule_free(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    optimizer: Any = kind(model.parameters(), lr=0.01)
    optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def simple(name: str, model: nn.Module) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    return found


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    **{
        name: partial(simple, name)
        for name in "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()  # noqa: SIM905
    },
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True, amsgrad=True),
    "fused": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "Muon": lambda model: torch.optim.Muon([each for each in model.parameters() if each.ndim == 2], lr=0.01),
    "other Muon": muon,
    "SOAP": lambda model: pytorch_optimizer.SOAP(model.parameters(), lr=0.01, precondition_frequency=2),
    "Lion": lambda model: pytorch_optimizer.Lion(model.parameters(), lr=0.01),
    "ScheduleFreeSGD": partial(schedule_free, pytorch_optimizer.ScheduleFreeSGD),
    "ScheduleFreeAdamW": partial(schedule_free, pytorch_optimizer.ScheduleFreeAdamW),
    "ScheduleFreeRAdam": partial(schedule_free, pytorch_optimizer.ScheduleFreeRAdam),
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of threads in which stages step. All steps in a pipeline are by stages."""
    found: list[str] = []
    step = StageSteps._step

    def noted(self: StageSteps, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        found.append(threading.current_thread().name)
        step(self, groups)

    monkeypatch.setattr(StageSteps, "_step", noted)
    monkeypatch.setattr(StageSteps, "divides", lambda self: steps_by_weight(self.optimizer))
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_are_those_of_whole_steps(name: str, threads: list[str]) -> None:
    task, loader = mlp(Recipe(OPTIMIZERS[name])), vectors(18, 3)
    expected = expect(task, loader, 3, max_epochs=1, stages=2)
    assert_equal(expected, fit(task, loader, strategy=even(7, 2, 3), max_epochs=1))
    assert set(threads) == {"hetpipe-stage-0", "hetpipe-stage-1"}


@pytest.mark.parametrize("make", [recurring, tied_language_model])
def test_a_weight_on_two_stages_is_stepped_once(make: Callable[[Recipe], Task], threads: list[str]) -> None:
    task, loader = make(Recipe(OPTIMIZERS["AdamW"])), (sentences if make is tied_language_model else vectors)(18, 3)
    layers = len(list(task.net.children()))
    expected = expect(task, loader, 3, max_epochs=1, stages=2)
    assert_equal(expected, fit(task, loader, strategy=even(layers, 2, 3), max_epochs=1))
    assert threads


def test_hooks_and_schedulers_see_one_step_of_all_weights(threads: list[str]) -> None:
    class Watched(L.Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, int]] = []

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            (optimizer,) = trainer.optimizers
            whole = optimizer.param_groups[0]["params"]

            def hook(name: str, *_: Any) -> None:
                assert optimizer.param_groups[0]["params"] is whole
                self.seen.append((name, len(whole)))

            optimizer.register_step_pre_hook(partial(hook, "before"))
            optimizer.register_step_post_hook(partial(hook, "after"))

    def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2)

    task, loader, watched = mlp(Recipe(OPTIMIZERS["Adam"], stepped)), vectors(18, 3), Watched()
    expected = expect(task, loader, 3, max_epochs=1, stages=2)
    assert_equal(expected, fit(task, loader, [watched], strategy=even(7, 2, 3), max_epochs=1))
    assert watched.seen == [("before", 8), ("after", 8)] * 6
    assert len(threads) == 2 * 5


def test_a_failure_in_a_stage_is_raised_and_groups_are_whole(
    threads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ArithmeticError("no step")

    monkeypatch.setattr(StageSteps, "_step", fails)
    task = mlp(Recipe(OPTIMIZERS["SGD"]))
    optimizer = OPTIMIZERS["SGD"](task)
    monkeypatch.setattr(task, "configure_optimizers", lambda: optimizer)
    with pytest.raises(ArithmeticError, match="no step"):
        fit(task, vectors(18, 3), strategy=even(7, 2, 3), max_epochs=1)
    assert len(optimizer.param_groups[0]["params"]) == 8


class Outside(Learner):
    """Has a large weight on no stage, and a loss that looks at all weights of the optimizer."""

    def __init__(self) -> None:
        super().__init__(Recipe(OPTIMIZERS["Adam"]))
        self.net = mlp().net
        self.outside = nn.Parameter(torch.ones(512, 512))
        self.seen: set[int] = set()

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        if self._trainer is not None:
            self.seen.add(len(self.trainer.optimizers[0].param_groups[0]["params"]))
        return {"loss": F.cross_entropy(self.net(x), y) + self.outside.square().mean()}


def test_user_code_sees_whole_groups(threads: list[str]) -> None:
    torch.manual_seed(5)
    task, loader = Outside(), vectors(40, 4)
    expected = expect(task, loader, 4, max_epochs=1)
    assert_equal(expected, fit(task, loader, strategy=delayed(even(7, 2, 4), 3), max_epochs=1))
    assert threads
    assert task.seen == {9}


class Replaces(L.Callback):
    """Gives the trainer another optimizer."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.strategy.optimizers = [torch.optim.Adam(pl_module.parameters(), lr=0.05)]


def test_an_optimizer_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(divides: bool) -> Record:
        torch.manual_seed(5)
        monkeypatch.setattr(StageSteps, "divides", lambda self: divides)
        task = mlp(Recipe(OPTIMIZERS["SGD"]))
        return fit(task, vectors(32, 4), [Replaces()], strategy=even(7, 2, 3), max_epochs=1)

    assert_same_run(run(False), run(True))


@pytest.mark.parametrize("by_stages", [False, True])
def test_a_patched_step_may_give_its_closure_by_position(by_stages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock over user code was released before the closure ran, and the fit waited for ever."""

    def patched(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own = optimizer.step
        optimizer.step = lambda closure=None: own(closure)  # type: ignore[method-assign]
        return optimizer

    monkeypatch.setattr(StageSteps, "divides", lambda self: by_stages)
    task, loader = mlp(Recipe(patched)), vectors(18, 3)
    expected = expect(task, loader, 3, max_epochs=1)
    assert_equal(expected, fit(task, loader, strategy=even(7, 2, 3), max_epochs=1))


def test_the_faster_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step, both ways are timed by turns, twice for ten steps each. Then the shorter way goes on."""
    for seconds, goes_on in [(0.8, True), (0.95, False)]:
        now, divided = [0.0], list[bool]()
        monkeypatch.setattr("lightning_hetpipe.run.stage_steps.perf_counter", lambda now=now: now[0])
        engine: Any = SimpleNamespace(computing=nullcontext, stages=[])
        steps = StageSteps(engine, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), ())
        for _ in range(50):
            divided.append(steps.divides())
            with steps.stepping():
                now[0] += seconds if divided[-1] else 1.0
        assert divided == [False] * 11 + ([True] * 10 + [False] * 10 + [True] * 10) + [goes_on] * 9


class Own(torch.optim.SGD):
    """May do anything in its step."""


def test_which_optimizers_step_by_weight() -> None:
    weights = [nn.Parameter(torch.ones(2, 2))]
    assert steps_by_weight(torch.optim.Adam(weights))
    assert steps_by_weight(torch.optim.SparseAdam(weights))
    assert not steps_by_weight(Own(weights))
    assert not steps_by_weight(torch.optim.LBFGS(weights))
    assert not steps_by_weight(pytorch_optimizer.Prodigy(weights))
    assert not steps_by_weight(pytorch_optimizer.Muon([{"params": weights, "use_muon": True}]))  # stacks of matrices
    assert not steps_by_weight(torch.optim.Adam(weights, lr=torch.tensor(0.1)))
    scheduled, compiled = torch.optim.Adam(weights), torch.optim.Adam(weights)
    torch.optim.lr_scheduler.StepLR(scheduled, 2)
    assert steps_by_weight(scheduled)
    compiled.step = torch.compile(compiled.step)  # type: ignore[method-assign]
    assert not steps_by_weight(compiled)
