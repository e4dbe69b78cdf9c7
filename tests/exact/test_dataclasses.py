"""Dataclasses go through the pipeline as tuples and dicts do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Batch, Outputs
from tests.support.captured_models import Whole
from tests.support.marks import slow_except
from tests.support.models import CLASSES, Learner, Task, vectors


@dataclasses.dataclass
class Hidden:
    x: Tensor
    shortcuts: list[Tensor] = dataclasses.field(default_factory=list)
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Answer:
    hidden: Hidden
    logits: Tensor | None = None


class Wraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Hidden:
        return Hidden(torch.tanh(self.linear(x)), [x], note="wrapped")


class Unwraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(14, CLASSES)

    def forward(self, hidden: Hidden) -> Tensor:
        assert hidden.note == "wrapped"
        y: Tensor = self.linear(torch.cat([hidden.x, *hidden.shortcuts], -1))
        return y


class Model(nn.Module):
    """Takes one, and gives one in another."""

    def __init__(self) -> None:
        super().__init__()
        self.wraps, self.unwraps = Wraps(), Unwraps()

    def forward(self, given: Answer) -> Answer:
        hidden = self.wraps(given.hidden.x)
        return Answer(hidden, self.unwraps(hidden))


class Answers(Whole):
    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        answer = self.model(Answer(Hidden(x)))
        assert isinstance(answer, Answer)
        assert isinstance(answer.hidden, Hidden)
        assert answer.logits is not None
        return {"loss": F.cross_entropy(answer.logits, y) + answer.hidden.x.square().mean()}


MAKERS: list[Callable[[], Learner]] = [lambda: Task(nn.Sequential(Wraps(), Unwraps())), lambda: Answers(Model())]


@pytest.mark.parametrize("in_flight", slow_except([1, 3], 3))
@pytest.mark.parametrize("make", MAKERS)
def test_dataclasses_cross_cuts(make: Callable[[], Learner], in_flight: int) -> None:
    task, loader = make(), vectors(22, 4)
    assert_equal(expect(task, loader, in_flight), fit(task, loader, strategy=even(2, 2, in_flight)))
