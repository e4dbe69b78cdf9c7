"""Failures in a step that runs ahead, or in a stage, end ``fit`` with their error; or they are refused."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe.errors import SettingError
from tests import oracle
from tests.exact.pipelines import Delays, even
from tests.exact.running import Recorder, assert_equal, expect, fit
from tests.oracle import Batch, Outputs
from tests.support.equality import assert_same
from tests.support.marks import quick, slow_except
from tests.support.models import ADAMW, CLASSES, SGD, WORDS, Task, mlp, sentences, vectors
from tests.support.trainers import quiet_trainer


class Failing(Task):
    """Fails in one minibatch: before it calls the model, or after."""

    def __init__(self, at: int, early: bool) -> None:
        super().__init__(mlp().net, ADAMW)
        self.at = at
        self.early = early
        self.steps = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        self.steps += 1
        p = self.steps
        if self.early:
            self.check(p)
        outputs = self.compute(batch)
        self.check(p)
        return outputs

    def check(self, p: int) -> None:
        if p == self.at:
            raise ArithmeticError(f"minibatch {p}")


@quick("1-True-1", "2-False-1", "6-True-1", "10-False-1")
@pytest.mark.parametrize("seed", slow_except([1, 2, 3], 1))
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("at", [1, 2, 4, 5, 6, 10])
def test_an_error_in_the_step(at: int, early: bool, seed: int) -> None:
    """It is raised with the user's own traceback, and no later minibatch, nor half of one, has changed a weight."""
    task, loader = Failing(at, early), vectors(18, 4)
    plain = mlp(ADAMW)
    plain.load_state_dict(task.state_dict())
    expected = expect(plain, loader, 4)
    strategy = even(7, 3, 4)
    strategy._before_pass = Delays(seed)
    recorder = Recorder()
    trainer = quiet_trainer(strategy, callbacks=[recorder], max_epochs=2)
    with pytest.raises(ArithmeticError, match=f"^minibatch {at}$") as caught:
        trainer.fit(task, loader)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "training_step" in frames
    assert frames[-1] == "check"
    done = len(recorder.record.outputs)
    assert done < at
    left = {name: weight.detach() for name, weight in task.named_parameters()}
    assert_same(expected.states[done].weights, left, f"what {done} minibatches left")


class Breaking(torch.autograd.Function):
    """Does nothing, and fails in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ArithmeticError("in the backward")


class Fragile(nn.Module):
    """Fails in a forward, or in the backward, of one minibatch."""

    forwards: Iterator[int]  # of the class, so that copies count together; nobody sees how far a generator is

    def __init__(self, at: int, backward: bool) -> None:
        super().__init__()
        self.at = at
        self.backward = backward
        Fragile.forwards = (forward for forward in itertools.count(1))

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():  # as it decides by its data, the net has no graph: stages run this code
            return x
        if next(Fragile.forwards) == self.at:
            if not self.backward:
                raise ArithmeticError("in the forward")
            return Breaking.apply(x)  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped
        return x


@quick("8-1-False", "8-4-True", "11-4-False")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("position", [1, 4])
@pytest.mark.parametrize("at", [8, 11])
def test_an_error_in_a_layer(at: int, position: int, backward: bool) -> None:
    layers: list[nn.Module] = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    layers.insert(position, Fragile(at, backward))
    with pytest.raises(ArithmeticError, match="in the backward" if backward else "in the forward"):
        fit(Task(nn.Sequential(*layers)), vectors(40, 4), strategy=even(6, 3, 4))


def test_a_fit_after_a_failed_one() -> None:
    task, loader = Failing(6, early=False), vectors(18, 4)
    with pytest.raises(ArithmeticError):
        fit(task, loader, strategy=even(7, 3, 4))
    expected = expect(task, loader, 4)
    assert_equal(expected, fit(task, loader, strategy=even(7, 3, 4)))


class Counting(Task):
    """Changes a buffer of its own in each step, in place or by putting another in its place."""

    ema: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__(mlp().net, SGD)
        self.register_buffer("ema", torch.zeros(()))
        self.in_place = in_place

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        with torch.no_grad():
            if self.in_place:
                self.ema.lerp_(loss, 0.1)
            else:
                self.ema = torch.lerp(self.ema, loss, 0.1)
        return {"loss": loss - self.ema}


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("in_flight", [1, 4])
def test_buffers_outside_of_the_pieces_are_exact_or_refused(in_flight: int, in_place: bool) -> None:
    task, loader = Counting(in_place), vectors(18, 4)
    expected = expect(task, loader, in_flight)
    try:
        record = fit(task, loader, strategy=even(7, 3, in_flight))
    except SettingError as error:
        message = str(error)
        assert in_flight > 1, message
        assert "ema" in message, message
        return
    assert_equal(expected, record)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_sparse_gradients_are_exact_or_refused(in_flight: int) -> None:
    net = nn.Sequential(nn.Embedding(WORDS, 8, sparse=True), nn.LayerNorm(8), nn.Linear(8, WORDS))
    task, loader = Task(net, oracle.Recipe(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))), sentences(22, 4)
    expected = expect(task, loader, in_flight)
    try:
        record = fit(task, loader, strategy=even(3, 2, in_flight))
    except SettingError as error:
        message = str(error)
        assert "net.0" in message, message
        return
    assert_equal(expected, record)
