"""What a stretch of ``training_step`` has for itself: the lock, requests to stop, autocast, the default dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_hetpipe.errors import SettingError
from tests import oracle
from tests.exact.pipelines import Delays, Pinned, even
from tests.exact.running import Record, fit
from tests.models import CLASSES, SGD, Learner, mlp, vectors
from tests.oracle import Batch, Outputs


def assert_same(one: Record, other: Record) -> None:
    for part in ("outputs", "gradients", "states", "end"):
        found = oracle.difference(getattr(one, part), getattr(other, part), part)
        assert found is None, found


def delayed(strategy: Pinned, seed: int) -> Pinned:
    strategy._before_task = Delays(seed)
    return strategy


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
        if strategy._engine is not None:
            for minibatch in 20 * list(strategy._engine.minibatches.values()):  # a hook that takes its time
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
    assert_same(record, fit(Stops((), early), vectors(26, 4), strategy=even(7, 3, in_flight), max_steps=steps))


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


# Autocast.

bf16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)


def whole(net: nn.Module, x: Tensor) -> Tensor:
    with bf16():
        y: Tensor = net(x)
    return y.float()


def inner(net: nn.Module, x: Tensor) -> Tensor:
    """Off for the model, on for what is around it."""
    with bf16():
        x = x @ torch.eye(6)
        with bf16(enabled=False):
            y: Tensor = net(x.float())
        return (y @ torch.ones(CLASSES, CLASSES)).float()


def off(net: nn.Module, x: Tensor) -> Tensor:
    with bf16(enabled=False):
        y: Tensor = net(x)
    return y


class Casting(Learner):
    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__(SGD)
        self.net = mlp().net
        self.call = call

    def compute(self, batch: Batch) -> Outputs:
        logits = self.call(self.net, batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits.detach()}


def run(make: Callable[[], Learner], strategy: Any, **settings: Any) -> Record:
    torch.manual_seed(4)
    return fit(make(), vectors(26, 4), strategy=strategy, **settings)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("call", "precision"),
    [(whole, "32-true"), (inner, "32-true"), (off, "bf16-mixed"), (inner, "bf16-mixed"), (whole, "bf16-mixed")],
)
def test_autocast_around_the_call_is_the_plain_trainers(
    call: Callable[[nn.Module, Tensor], Tensor], precision: str, stages: int
) -> None:
    settings: dict[str, Any] = {"precision": precision}
    make = functools.partial(Casting, call)
    plain = run(make, "auto", **settings)
    assert_same(plain, run(make, even(7, stages, 1), **settings))
    # It makes a difference.
    other = run(functools.partial(Casting, off if call is whole else whole), "auto", **settings)
    assert precision == "bf16-mixed" or oracle.difference(plain.states[-1], other.states[-1], "end") is not None


@pytest.mark.parametrize("call", [whole, inner])
def test_autocast_around_the_call_on_any_cut(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    make = functools.partial(Casting, call)
    one = run(make, even(7, 1, 4))
    for seed, stages in enumerate((2, 3)):
        assert_same(one, run(make, delayed(even(7, stages, 4), seed)))


# The default dtype.


class Creates(nn.Module):
    """Creates tensors in all the ways that name no dtype."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        x = x * torch.ones(n) + torch.linspace(0, 1, n) / 7 + torch.arange(0.0, n) / 3
        x = x + torch.tensor([0.1]) + torch.full((n,), 0.3) + torch.zeros(n) + torch.eye(n)[0] / 3
        return x.clamp(torch.scalar_tensor(-3.3), torch.as_tensor(3.3))


class Exact(Learner):
    def __init__(self) -> None:
        super().__init__(SGD)
        self.net = nn.Sequential(nn.Linear(6, 8), Creates(), nn.Tanh(), Creates(), nn.Linear(8, CLASSES))

    def compute(self, batch: Batch) -> Outputs:
        logits = self.net(batch[0]) * torch.linspace(0, 1, CLASSES)
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits.detach()}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "32-true"])
def test_layers_that_create_tensors_are_the_plain_trainers(precision: str, stages: int) -> None:
    settings: dict[str, Any] = {"precision": precision}
    assert_same(run(Exact, "auto", **settings), run(Exact, even(5, stages, 1), **settings))
    assert torch.get_default_dtype() is torch.float32


class Promotes(nn.Module):
    """Makes floating-point tensors from whole numbers, and from none."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[-1])
        x = x + places / 3 + torch.where(places > 2, 0.1, 0.7) + torch.tensor(2).sqrt() + places.sigmoid()
        return x - places.float().to(x.dtype) / 7


class Promoted(Exact):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), Promotes(), nn.Tanh(), Promotes(), nn.Linear(8, CLASSES))


@pytest.mark.parametrize("in_flight", [1, 4])
def test_layers_that_make_floats_of_whole_numbers_are_exact_or_refused(in_flight: int) -> None:
    settings: dict[str, Any] = {"precision": "64-true"}
    first = run(Promoted, "auto" if in_flight == 1 else even(5, 1, in_flight), **settings)
    try:
        again = [run(Promoted, delayed(even(5, 3, in_flight), seed), **settings) for seed in (1, 2, 3)]
    except SettingError as error:
        message = str(error)
        assert "dtype" in message, message
        return
    for other in again:
        assert_same(first, other)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_layers_that_create_tensors_repeat(precision: str) -> None:
    settings: dict[str, Any] = {"precision": precision}
    first = run(Exact, delayed(even(5, 3, 4), 1), **settings)
    assert first.outputs[-1]["logits"].dtype is (torch.float64 if precision == "64-true" else torch.bfloat16)
    for seed in (2, 3):
        assert_same(first, run(Exact, delayed(even(5, 2, 4), seed), **settings))
