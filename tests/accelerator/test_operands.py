"""Operations on tensors of several devices give what they give on one, and write where they are to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.pipeline.operands import OperandsTogether
from lightning_hetpipe.run.clipping import total_norm
from tests.exact.running import expect
from tests.oracle import Batch, Outputs, State
from tests.support.accelerator import NAME, TestAccelerator
from tests.support.equality import assert_same
from tests.support.models import ADAMW, CLASSES, Learner, vectors
from tests.support.trainers import quiet_trainer

pytestmark = pytest.mark.usefixtures("accelerator")


def device(index: int) -> torch.device:
    return torch.device(NAME, index)


def added_in_place(a: Tensor, b: Tensor) -> Tensor:
    a += b
    return a


def set_part(a: Tensor, b: Tensor) -> Tensor:
    a[1:] = b[1:]
    return a


def written_out(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty_like(a)
    torch.mul(b, a, out=out)
    return out


OPERATIONS: list[tuple[Callable[[Tensor, Tensor], Any], int]] = [
    (lambda a, b: a + b, 1),  # of equal operands the later device
    (lambda a, b: b[:1] * a, 0),  # where most bytes are
    (lambda a, b: torch.cat([a, b, a]), 1),
    (lambda a, b: F.cross_entropy(a, b.argmax(1)), 0),
    (lambda a, b: torch.where(a > 0, a, b), 1),
    (added_in_place, 0),
    (set_part, 0),
    (written_out, 0),
    (lambda a, b: a.clone().copy_(b), 0),
]


@pytest.mark.parametrize(("operation", "where"), OPERATIONS)
def test_an_operation(operation: Callable[[Tensor, Tensor], Tensor], where: int) -> None:
    torch.manual_seed(1)
    a, b = torch.randn(4, 5), torch.randn(4, 5)
    expected = operation(a.clone(), b.clone())
    one, other = a.to(device(0)), b.to(device(1))
    with OperandsTogether([device(0), device(1)]):
        found = operation(one, other)
    assert found.device == device(where)
    assert_same(expected, found.cpu())


def test_statistics_are_those_of_the_module() -> None:
    """Nobody would see it if a moved copy of them was changed."""
    norm = nn.BatchNorm1d(5, affine=False).to(device(0))
    plain = nn.BatchNorm1d(5, affine=False)
    x = torch.randn(6, 5)
    with OperandsTogether([device(0), device(1)]):
        found = norm(x.to(device(1)))
    assert_same(plain(x), found.cpu())
    assert_same(dict(plain.named_buffers()), {name: each.cpu() for name, each in norm.named_buffers()})


def test_nothing_is_moved_to_or_from_other_devices() -> None:
    with OperandsTogether([device(0), device(1)]), pytest.raises(RuntimeError, match="same device"):
        torch.ones(3) + torch.ones(3, device=device(0))
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=device(1)) + torch.ones(3, device=device(0))


def test_the_norm_of_gradients_on_devices_in_turn() -> None:
    torch.manual_seed(2)
    gradients = [torch.randn(7, 11) * 10**place for place in range(6)]
    found = total_norm([each.to(device(place % 3)) for place, each in enumerate(gradients)])
    assert found.device == device(0)
    assert_same(torch.nn.utils.get_total_norm(gradients), found.cpu())


class Outside(Learner):
    """A learned scale and a frozen one, which no stage holds."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        torch.manual_seed(7)
        self.learned = nn.Parameter(torch.ones(CLASSES))
        self.frozen = nn.Parameter(torch.full((CLASSES,), 0.5), requires_grad=False)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        logits = self.net(x) * self.learned * self.frozen
        return {"loss": F.cross_entropy(logits, y), "logits": logits.detach()}


@pytest.mark.parametrize("in_flight", [1, 3])
def test_parameters_outside_of_the_layers(in_flight: int, accelerator: TestAccelerator) -> None:
    """To be moved counted as a change by training_step."""
    loader = vectors(20, 4)
    expected, task = expect(Outside(), loader, in_flight, max_epochs=1), Outside()
    strategy = HetPipeStrategy(stages=3, in_flight=in_flight)
    trainer = quiet_trainer(strategy, accelerator=accelerator, devices=4)
    trainer.fit(task, loader)
    assert_same(expected.states[-1], State.of(task, trainer.optimizers[0]))
