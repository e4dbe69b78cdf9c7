"""Exclusiveness of a section of ``training_step``: the lock over user code, and requests to stop."""

from __future__ import annotations

import threading
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.exact.pipelines import delayed, even
from tests.exact.running import assert_equal, assert_same_run, expect, fit
from tests.oracle import Batch, Outputs, Recipe
from tests.support.marks import quick
from tests.support.models import CLASSES, SGD, Learner, Task, mlp, vectors
from tests.support.small import Wraps

# The lock.


class Registers(L.Callback):
    """Registers the user's hooks around the optimizer's step, and takes down whose ``training_step`` they see run."""

    def __init__(self) -> None:
        self.calls = 0
        self.running: list[int] = []
        self._trainer: L.Trainer | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._trainer = trainer
        optimizer = trainer.optimizers[0]
        optimizer.register_step_pre_hook(self.look)
        optimizer.register_step_post_hook(self.look)
        self._of_all = register_optimizer_step_post_hook(self.look)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._of_all.remove()

    def look(self, *_: Any) -> None:
        assert self._trainer is not None
        strategy: Any = self._trainer.strategy
        self.calls += 1
        for minibatch in 20 * [*strategy._run._minibatches()]:  # a hook that takes its time
            if minibatch.in_user_code:
                self.running.append(minibatch.number)


class Busy(Learner):
    """Its ``training_step`` is a lot of Python, and its optimizer has many parameters to go through."""

    def __init__(self) -> None:
        super().__init__(SGD)
        self.net = nn.Sequential(nn.Linear(6, 8), *(nn.Linear(8, 8) for _ in range(10)), nn.Linear(8, CLASSES))

    def compute(self, batch: Batch) -> Outputs:
        for _ in range(2000):
            pass
        logits = self.net(batch[0])
        for _ in range(2000):
            pass
        return {"loss": F.cross_entropy(logits, batch[1])}


def test_hooks_of_the_optimizer_never_run_beside_a_step() -> None:
    callback = Registers()
    fit(Busy(), vectors(100, 1), [callback], strategy=even(12, 2, 4), max_epochs=1)
    assert callback.calls == 3 * 100
    assert callback.running == []


class Meeting:
    """Lets the output of minibatch 3 arrive while the user's hook after the optimizer's second step runs."""

    def __init__(self) -> None:
        self.steps = 0
        self.stepping = threading.Event()
        self.looked = threading.Event()
        self.running: list[int] = []
        self.strategy: Any = even(7, 2, 3)
        self.strategy._before_pass = self.before_pass

    def before_pass(self, stage: int, work: str, minibatch: int) -> None:
        if (stage, work, minibatch) == (1, "forward", 3):
            assert self.stepping.wait(60)

    def after_step(self, *_: Any) -> None:
        self.steps += 1
        if self.steps != 2:
            return
        self.stepping.set()
        engine = self.strategy._run.pipeline
        while not self.running and not engine.lock.wanted():
            self.running += [m.number for m in list(engine.minibatches.values()) if m.in_user_code]
        self.looked.set()


class Meets(Learner):
    def __init__(self, meeting: Meeting) -> None:
        super().__init__(SGD)
        self.net = mlp().net
        self.meeting = meeting

    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        logits = self.net(batch[0])
        if batch_idx == 2:
            assert self.meeting.looked.wait(60)
        return {"loss": F.cross_entropy(logits, batch[1])}

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.meeting.after_step)
        return optimizer


def test_an_output_that_arrives_during_a_hook_waits() -> None:
    meeting = Meeting()
    fit(Meets(meeting), vectors(26, 4), strategy=meeting.strategy, max_epochs=1)
    assert meeting.looked.is_set()
    assert meeting.running == []


def test_an_optimizer_that_takes_no_hooks() -> None:
    """It was called without the attributes that every optimizer has."""
    task, loader = Task(mlp().net, Recipe(lambda module: Wraps(SGD.optimizer(module)))), vectors(26, 4)
    assert_equal(expect(task, loader, 3), fit(task, loader, strategy=even(7, 2, 3)))


# Requests to stop.


class Stops(Learner):
    """Asks to stop in given minibatches of its epoch, before or after it calls the model."""

    def __init__(self, at: tuple[int, ...], early: bool) -> None:
        super().__init__(SGD)
        self.net = mlp().net
        self.at = at
        self.early = early

    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        if self.early and batch_idx in self.at:
            self.trainer.should_stop = True
        outputs = self.compute(batch)
        if not self.early and batch_idx in self.at:
            self.trainer.should_stop = True
        return outputs

    def compute(self, batch: Batch) -> Outputs:
        return {"loss": F.cross_entropy(self.net(batch[0]), batch[1])}


@quick("at0-4-4-True-1", "at0-4-1-True-2", "at1-5-4-False-2", "at2-1-4-True-1", "at3-7-4-False-1")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize(("at", "steps"), [((3,), 4), ((5, 4), 5), ((0,), 1), ((6,), 7)])
def test_a_step_that_asks_to_stop_is_the_last(
    at: tuple[int, ...], steps: int, in_flight: int, early: bool, seed: int
) -> None:
    torch.manual_seed(3)
    record = fit(Stops(at, early), vectors(26, 4), strategy=delayed(even(7, 3, in_flight), seed))
    assert len(record.outputs) == steps
    torch.manual_seed(3)
    assert_same_run(record, fit(Stops((), early), vectors(26, 4), strategy=even(7, 3, in_flight), max_steps=steps))


def test_a_step_sees_its_own_request_to_stop_only() -> None:
    """Not that of another minibatch, which may or may not have run by then."""
    seen: dict[int, tuple[bool, bool]] = {}

    class Looks(Stops):
        def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
            before = self.trainer.should_stop
            outputs = super().training_step(batch, batch_idx)
            seen[batch_idx] = before, self.trainer.should_stop
            return outputs

    fit(Looks((4,), True), vectors(26, 4), strategy=even(7, 3, 4))
    own = seen.pop(4)
    assert own == (False, True)
    assert set(seen.values()) == {(False, False)}


# Attributes of the LightningModule.


class Keeps(Learner):
    """Keeps its batch on itself, as many do, counts before and after the model's call, and averages its losses."""

    def __init__(self) -> None:
        super().__init__(SGD)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.begun, self.ended, self.mean = 0, 0, 0.0
        self.wrong: list[int] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        self.x, self.y = batch
        self.begun += 1
        number = self.begun
        logits = self.net(self.x)
        if self.y is not batch[1] or self.begun != number:
            self.wrong.append(batch_idx)
        loss = F.cross_entropy(logits, self.y)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        self.ended += 1
        return {"loss": loss / (1 + self.mean), "logits": logits.detach()}


def test_attributes_that_training_step_sets_belong_to_its_minibatch() -> None:
    """Others ran in between, and it went on with their labels."""
    records, modules = [], []
    for seed in (1, 2, 3):
        torch.manual_seed(0)
        modules.append(Keeps())
        strategy = delayed(even(3, 1 + seed % 3, 4), seed)
        records.append(fit(modules[-1], vectors(26, 4), strategy=strategy, max_epochs=2))
    for record in records[1:]:
        assert_same_run(records[0], record)
    for module in modules:
        assert module.wrong == []
        assert (module.begun, module.ended) == (14, 14)
        assert module.mean == modules[0].mean


# Counters of Lightning's loop.


class Counts(Learner):
    """Takes down what the loop's counters say, before and after it calls the model."""

    def __init__(self) -> None:
        super().__init__(SGD)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.seen: list[tuple[int, ...]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        before = self.look()
        logits = self.net(batch[0])
        assert self.look() == before
        self.seen.append((batch_idx, *before))
        return {"loss": F.cross_entropy(logits, batch[1])}

    def look(self) -> tuple[int, ...]:
        epoch_loop = self.trainer.fit_loop.epoch_loop
        return self.global_step, self.current_epoch, epoch_loop.batch_idx, epoch_loop.total_batch_idx


class Watches(L.Callback):
    """The same, as callbacks see it."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.seen.append(pl_module.look())


@quick("1-1", "2-3")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("seed", [1, 2])
def test_counters_are_those_of_a_plain_run(seed: int, accumulate: int) -> None:
    """A weight annealed by self.global_step made runs differ."""
    found = []
    for strategy in ("auto", delayed(even(3, 3, 4), seed)):
        module, watches = Counts(), Watches()
        fit(module, vectors(30, 4), [watches], strategy=strategy, max_epochs=3, accumulate_grad_batches=accumulate)
        found.append((sorted(module.seen, key=lambda seen: seen[-1]), watches.seen))
    assert found[0] == found[1]
    assert len(found[0][0]) == 24
