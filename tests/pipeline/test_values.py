"""Values that cross a cut: nested, detached, with the gradients on their way back."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetpipe.pipeline import values
from lightning_hetpipe.pipeline.values import Value, all_equal, gradients, tensors_of

CPU = torch.device("cpu")
A, B, C = torch.tensor([1.0, 2.0]), torch.tensor([3.0]), torch.tensor([4, 5])
Pair = namedtuple("Pair", ["left", "right"])

TREES: dict[str, tuple[Any, int]] = {
    "a tensor": (A, 1),
    "a tuple": ((A, B), 2),
    "nested": ({"x": [A, {"y": (B, C)}], "z": B * 2}, 4),
    "one tensor twice": ({"x": [A, {"y": (B, A)}], "z": A}, 2),
    "with others": ((A, None, "text", 7, {"mask": None, "scale": 2.5}), 1),
    "a named tuple": (Pair(A, B), 2),
    "an ordered dict": (OrderedDict(b=B, a=A), 2),
    "no tensor": (("text", 3), 0),
    "nothing": (None, 0),
    "empty": ([], 0),
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", TREES)
def test_the_nesting_comes_back(name: str) -> None:
    tree, count = TREES[name]
    value = Value.of(tree)
    assert len(value.tensors) == len(tensors_of(tree)) == count
    assert equal(value.tree(value.tensors), tree)


@pytest.mark.parametrize("name", TREES)
def test_other_tensors_in_the_same_nesting(name: str) -> None:
    tree, count = TREES[name]
    new = [torch.full((1,), float(index)) for index in range(count)]
    assert all(found is given for found, given in zip(tensors_of(Value.of(tree).tree(new)), new, strict=True))


def test_it_is_detached_and_remembers_what_required_a_gradient() -> None:
    leaf = A.clone().requires_grad_()
    value = Value.of({"grown": leaf * 2, "leaf": leaf, "constant": B, "numbers": C})
    assert not any(tensor.requires_grad for tensor in value.tensors)
    assert value.requires_grad == (True, True, False, False)  # in the order of the dict


def test_fresh_leaves() -> None:
    leaf = A.clone().requires_grad_()
    value = Value.of((leaf * 2, C))
    fresh, numbers = value.leaves(CPU)
    assert fresh.is_leaf
    assert fresh.requires_grad
    assert not numbers.requires_grad
    assert torch.equal(fresh, leaf * 2)
    # Nothing is computed twice over the same graph: a gradient ends at the leaf.
    torch.autograd.backward((fresh * 3).sum())
    assert torch.equal(fresh.grad if fresh.grad is not None else B, torch.tensor([3.0, 3.0]))
    assert leaf.grad is None


def test_leaves_are_fresh_each_time() -> None:
    value = Value.of(A.clone().requires_grad_())
    (one,), (other,) = value.leaves(CPU), value.leaves(CPU)
    torch.autograd.backward(one.sum())
    assert other.grad is None


NAN = torch.tensor([1.0, float("nan")])


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    ("pairs", "same"),
    [
        ([], True),
        ([(A, A.clone()), (C, C.clone())], True),
        ([(A, A.clone()), (C, C + 1)], False),
        ([(NAN, NAN.clone()), (C, C.clone())], True),
        ([(A, NAN)], False),
        ([(B, B.expand(2))], False),
        ([(A[:0], A[:0])], True),
    ],
)
def test_all_are_equal(
    monkeypatch: pytest.MonkeyPatch, pairs: list[tuple[Tensor, Tensor]], same: bool, waits: bool
) -> None:
    """On a GPU, where all are asked for at once, as on the host."""
    monkeypatch.setattr(values, "_waits", lambda tensor: waits)
    assert all_equal(pairs) is same


class TestGradients:
    x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)

    def test_they_are_autograds(self) -> None:
        out = self.x * self.y
        found = gradients([out], [torch.tensor([1.0, 10.0])], [self.x, self.y])
        assert equal(found, [torch.tensor([3.0, 30.0]), torch.tensor([21.0])])
        assert self.x.grad is None

    def test_several_outputs_are_summed(self) -> None:
        found = gradients([self.x * 2, self.x * self.y], [torch.ones(2), torch.ones(2)], [self.x])
        assert equal(found, [torch.tensor([5.0, 5.0])])

    def test_outputs_without_a_gradient_count_nothing(self) -> None:
        found = gradients([self.x * 2, self.x * self.y], [None, torch.ones(2)], [self.x])
        assert equal(found, [torch.tensor([3.0, 3.0])])

    def test_outputs_that_need_none_are_left_out(self) -> None:
        found = gradients([self.x * 2, C], [torch.ones(2), None], [self.x])
        assert equal(found, [torch.tensor([2.0, 2.0])])
        found = gradients([self.x * 2, B], [torch.ones(2), torch.ones(1)], [self.x])
        assert equal(found, [torch.tensor([2.0, 2.0])])

    def test_none_reaches_what_was_not_used(self) -> None:
        assert equal(gradients([self.x * 2], [torch.ones(2)], [self.y, self.x]), [None, torch.tensor([2.0, 2.0])])

    def test_inputs_that_need_none(self) -> None:
        out = self.x * B
        found = gradients([out], [torch.ones(2)], [B, self.x, C])
        assert equal(found, [None, torch.tensor([3.0, 3.0]), None])

    def test_nothing_to_differentiate(self) -> None:
        assert gradients([B * 2], [torch.ones(1)], [self.x]) == [None]
        assert gradients([self.x * 2], [None], [self.x, self.y]) == [None, None]
        assert gradients([self.x * 2], [torch.ones(2)], [B, C]) == [None, None]
        assert gradients([], [], [self.x]) == [None]
