"""Trouble of the look-ahead: batches that fail, changes outside the pieces, parameters that are not their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.exact.pipelines import Delays, even
from tests.support.marks import quick
from tests.support.small import Learner, assert_clean, assert_refused, batches, pipeline
from tests.support.trainers import quiet_trainer

# Batches that fail.


class Damaged(Dataset[Any]):
    """Ten batches of four; one sample of batch ``at`` cannot be read."""

    def __init__(self, at: int) -> None:
        self.bad = 4 * (at - 1) + 2
        self.samples = list(batches(10).dataset)  # type: ignore[call-overload]  # it has a length

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise OSError(f"sample {index} cannot be read")
        return self.samples[index]


class Steps(L.Callback):
    """Counts the steps that are over."""

    def __init__(self) -> None:
        self.done = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.done += 1


def weights(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def left_by(steps: int, in_flight: int) -> list[Tensor]:
    """The weights after ``steps`` steps of a run in which nothing fails."""
    torch.manual_seed(2)
    module = Learner()
    quiet_trainer(pipeline(in_flight), max_steps=steps).fit(module, batches(10))
    return weights(module)


def assert_fails_at(at: int, module: Learner, loader: Any, in_flight: int, error: type[Exception], match: str) -> None:
    """``fit`` ends with the user's error when step ``at`` is due, and all steps before are done."""
    steps = Steps()
    strategy = even(4, 2, in_flight)
    strategy._before_pass = Delays(at)
    trainer = quiet_trainer(strategy, callbacks=[steps])
    with pytest.raises(error, match=match):
        trainer.fit(module, loader)
    assert (steps.done, trainer.global_step) == (at - 1, at - 1)
    for found, expected in zip(weights(module), left_by(at - 1, in_flight), strict=True):
        assert torch.equal(found, expected)
    assert_clean(trainer, module)


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("at", [2, 6, 10])
def test_a_sample_that_cannot_be_read(at: int, in_flight: int) -> None:
    torch.manual_seed(2)
    loader = DataLoader(Damaged(at), 4)
    assert_fails_at(at, Learner(), loader, in_flight, OSError, f"^sample {4 * at - 2} cannot be read$")


@quick("1-on_before_batch_transfer", "4-transfer_batch_to_device", "4-on_after_batch_transfer")
@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"])
@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_transfer_hook_that_fails(in_flight: int, hook: str) -> None:
    calls: list[None] = []

    class Fails(Learner):
        pass

    def fail(self: Any, batch: Any, *args: Any) -> Any:
        calls.append(None)
        if len(calls) == 6:
            raise ValueError(f"in {hook}")
        return batch

    setattr(Fails, hook, fail)
    torch.manual_seed(2)
    assert_fails_at(6, Fails(), batches(10), in_flight, ValueError, f"^in {hook}$")
    assert len(calls) == 6


# What lies outside the pieces.


class Taught(Learner):
    """Learns from a frozen teacher too, whose scale is a buffer."""

    def __init__(self, in_step: Callable[[Any], None] | None = None, at: int = 3) -> None:
        super().__init__(teaching_step)
        self.teacher = nn.Linear(6, 3).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.in_step, self.at = in_step, at


def teaching_step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    if module.in_step is not None and batch_idx == module.at:
        module.in_step(module)
    return F.cross_entropy(module.net(x) + module.teacher(x) * module.scale, y)


def scale_weight(module: Any) -> None:
    module.teacher.weight.data.mul_(0.99)


def exchange_weight(module: Any) -> None:
    module.teacher.weight.data = module.teacher.weight.data * 0.99


def exchange_bias(module: Any) -> None:
    module.teacher.bias.data = module.teacher.bias.data + 1.0


CHANGES = [(scale_weight, "teacher.weight"), (exchange_weight, "teacher.weight"), (exchange_bias, "teacher.bias")]


class Changes(L.Callback):
    def __init__(self, change: Callable[[Any], None], at: int = 3) -> None:
        self.change, self.at = change, at

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            self.change(pl_module)


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_a_teacher_that_a_callback_changes(change: Callable[[Any], None], name: str) -> None:
    module = Taught()
    assert_refused(module, f"'{name}'", "set in_flight=1", loader=batches(10), callbacks=[Changes(change)])


@pytest.mark.parametrize(("change", "name"), CHANGES)
@pytest.mark.parametrize("at", [0, 3])
def test_a_teacher_that_a_step_changes(at: int, change: Callable[[Any], None], name: str) -> None:
    assert_refused(Taught(change, at), f"'{name}'", "set in_flight=1", loader=batches(10))


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_a_teacher_that_changes_with_one_minibatch_in_flight(change: Callable[[Any], None], name: str) -> None:
    found = []
    for strategy in ("auto", pipeline(1)):
        torch.manual_seed(2)
        module = Taught(change, 2)
        quiet_trainer(strategy, callbacks=[Changes(change)]).fit(module, batches(10))
        found.append(weights(module))
    for plain, ours in zip(*found, strict=True):
        assert torch.equal(plain, ours)


@pytest.mark.parametrize(
    "value",
    [
        torch.full((4,), torch.nan),
        torch.tensor(torch.nan),
        torch.tensor([]),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.ones(4, 4, dtype=torch.bfloat16).T[::2],
    ],
)
def test_buffers_of_all_kinds_that_do_not_change(value: Tensor) -> None:
    """NaN is not equal to itself, and yet no change."""
    module = Learner()
    module.register_buffer("kept", value)
    trainer = quiet_trainer(pipeline(3))
    trainer.fit(module, batches(10))
    assert trainer.global_step == 10


# Parameters that are not their own.


@pytest.mark.parametrize("names", [["0.weight", "0.bias"], ["0.weight"], ["3.weight"], ["2.bias"]])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_functional_call_is_refused(in_flight: int, names: list[str]) -> None:
    def step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        own = dict(module.net.named_parameters())
        return F.cross_entropy(torch.func.functional_call(module.net, {n: own[n] * 0.5 for n in names}, (x,)), y)

    assert_refused(Learner(step), "layer 'net.", "torch.func.functional_call", strategy=pipeline(in_flight))
