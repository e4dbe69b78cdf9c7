"""Autocast around the call of a piece, and layers that create tensors: dtypes are the plain Trainer's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe.errors import SettingError
from tests.exact.pipelines import delayed, even
from tests.exact.running import Record, assert_same_run, fit
from tests.oracle import Batch, Outputs
from tests.support.equality import difference
from tests.support.marks import fewer, quick, slow_except
from tests.support.models import CLASSES, SGD, Learner, mlp, vectors

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


def run(make: Callable[[], Learner], strategy: Any, samples: int = 20, **settings: Any) -> Record:
    torch.manual_seed(4)
    return fit(make(), vectors(samples, 4), strategy=strategy, **settings)


@quick("whole-32-true-2", "inner-32-true-1", "off-bf16-mixed-2", "inner-bf16-mixed-2", "whole-bf16-mixed-1")
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
    assert_same_run(plain, run(make, even(7, stages, 1), **settings))
    # It makes a difference.
    other = run(functools.partial(Casting, off if call is whole else whole), "auto", **settings)
    assert precision == "bf16-mixed" or difference(plain.states[-1], other.states[-1], "end") is not None


@pytest.mark.parametrize("call", [whole, inner])
def test_autocast_around_the_call_on_any_cut(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    make = functools.partial(Casting, call)
    one = run(make, even(7, 1, 4))
    for seed, stages in enumerate((2, 3)):
        assert_same_run(one, run(make, delayed(even(7, stages, 4), seed)))


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


@pytest.mark.parametrize("stages", slow_except([1, 2], 2))
@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "32-true"])
def test_layers_that_create_tensors_are_the_plain_trainers(precision: str, stages: int) -> None:
    settings: dict[str, Any] = {"precision": precision, "samples": 18 if precision == "32-true" else 20}
    assert_same_run(run(Exact, "auto", **settings), run(Exact, even(5, stages, 1), **settings))
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


@quick("4")
@pytest.mark.parametrize("in_flight", [1, 4])
def test_layers_that_make_floats_of_whole_numbers_are_exact_or_refused(in_flight: int) -> None:
    settings: dict[str, Any] = {"precision": "64-true"}
    first = run(Promoted, "auto" if in_flight == 1 else even(5, 1, in_flight), **settings)
    try:
        again = [run(Promoted, delayed(even(5, 3, in_flight), seed), **settings) for seed in fewer((1, 2, 3), (1, 2))]
    except SettingError as error:
        message = str(error)
        assert "dtype" in message, message
        return
    for other in again:
        assert_same_run(first, other)


@quick("bf16-true")
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_layers_that_create_tensors_repeat(precision: str) -> None:
    settings: dict[str, Any] = {"precision": precision}
    first = run(Exact, delayed(even(5, 3, 4), 1), **settings)
    assert first.outputs[-1]["logits"].dtype is (torch.float64 if precision == "64-true" else torch.bfloat16)
    for seed in fewer((2, 3), (2,)):
        assert_same_run(first, run(Exact, delayed(even(5, 2, 4), seed), **settings))
