"""Operations on tensors of several devices give what they give on one, and write where they are to write."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe.pipeline.operands import OperandsTogether
from tests.exact.running import expect
from tests.oracle import Batch, Outputs, State
from tests.support.accelerator import NAME, TestAccelerator
from tests.support.equality import assert_same
from tests.support.models import ADAMW, CLASSES, Learner, vectors
from tests.support.strategies import stashing
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


def with_operator(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    def operation(a: Tensor, b: Tensor) -> Tensor:
        numbers: Any = a.int().abs() if name in ("iand", "ior", "ixor", "ilshift", "irshift") else a.abs()
        seen = numbers
        numbers = getattr(operator, name)(numbers, b.abs().to(numbers.dtype) + 1)
        assert numbers is seen
        return cast(Tensor, seen)

    return operation


IN_PLACE = [
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "iand",
    "ior",
    "ixor",
    "ilshift",
    "irshift",
]


def of_lists(a: Tensor, b: Tensor) -> Tensor:
    one, other = torch._foreach_addcmul([a, b], [b, a], (b, b), value=2.0)
    torch._foreach_mul_([one], b[0, 0])
    torch._foreach_copy_([a], [b])
    return torch.cat([one + a, other])


def grid(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack(torch.meshgrid(a[0], b[0], indexing="ij"))


def from_a_vector(a: Tensor, b: Tensor) -> Tensor:
    one, other = nn.Parameter(a), nn.Parameter(b)
    vector = torch.nn.utils.parameters_to_vector([one, other, one])
    torch.nn.utils.vector_to_parameters(2 * vector[:40], [one, other])
    assert (one.device, other.device) == (a.device, b.device)
    return one + torch.cat([vector, vector]).max()


def seen_as(a: Tensor, b: Tensor) -> Tensor:
    a.view_as(b).add_(1)
    return a


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
    *((with_operator(name), 0) for name in IN_PLACE),
    (of_lists, 1),
    (grid, 1),
    (from_a_vector, 0),
    (seen_as, 0),
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


def gradients_of(compute: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> list[Tensor]:
    weight = torch.tensor([0.1, 0.2, 0.3, 0.4])
    for each in (a, b):
        each.requires_grad_()
    total: Any = (compute(a, b).sin() * weight.to(b.device)[:, None, None]).sum()
    total.backward()
    return [each.grad.cpu() for each in (a, b) if each.grad is not None]


def test_gradients_of_several_uses_are_added_in_the_order_of_one_device() -> None:
    torch.manual_seed(3)
    a, b = torch.randn(64, 65), torch.randn(64, 65)

    def stacked(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([a, b, a, a])

    expected = gradients_of(stacked, a.clone(), b.clone())
    with OperandsTogether([device(0), device(1)]):
        assert_same(expected, gradients_of(stacked, a.to(device(0)), b.to(device(1))))


def test_given_gradients_come_to_their_outputs() -> None:
    weight = torch.ones(3, device=device(0), requires_grad=True)
    other = torch.full((3,), 2.0, device=device(1))
    with OperandsTogether([device(0), device(1)]):
        for outputs, given in ((weight * 2, other), ([weight * 1, weight * 1], [other, None])):
            if given is not other:
                outputs = [outputs[0], outputs[1].sum()]
            (found,) = torch.autograd.grad(outputs, weight, grad_outputs=given)
            assert found.cpu().tolist() == ([4.0] * 3 if given is other else [3.0] * 3)
        double: Any = weight * 2
        double.backward(other, retain_graph=True)
        double.backward(gradient=other)
        torch.autograd.backward([weight * 2, weight * 0], grad_tensors=(other, other))
    assert weight.grad is not None
    assert weight.grad.cpu().tolist() == [12.0] * 3


def test_the_norm_of_interleaved_gradients_in_user_code() -> None:
    torch.manual_seed(4)
    plain = [nn.Parameter(torch.zeros(7, 11)) for _ in range(47)]
    for place, each in enumerate(plain):
        each.grad = torch.randn(7, 11) * (1 + place % 5)
    apart = [nn.Parameter(each.detach().to(device(place % 3))) for place, each in enumerate(plain)]
    for each, its in zip(apart, plain, strict=True):
        assert its.grad is not None
        each.grad = its.grad.to(each.device)
    with OperandsTogether([device(0), device(1), device(2)]):
        for norm_type in (1.0, 2.0):
            expected = torch.nn.utils.clip_grad_norm_(plain, 1.0, norm_type)
            assert_same(expected, torch.nn.utils.clip_grad_norm_(apart, 1.0, norm_type).cpu())
    assert_same([each.grad for each in plain], [each.grad.cpu() for each in apart if each.grad is not None])


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
    strategy = stashing(stages=3, in_flight=in_flight)
    trainer = quiet_trainer(strategy, accelerator=accelerator, devices=4)
    trainer.fit(task, loader)
    assert_same(expected.states[-1], State.of(task, trainer.optimizers[0]))
