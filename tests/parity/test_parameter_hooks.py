"""Hooks on parameters are called once for each backward pass, as in a plain run."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from tests.exact.pipelines import even
from tests.exact.running import expect, fit
from tests.exact.test_captured import CASES, made
from tests.support.equality import assert_same
from tests.support.marks import quick
from tests.support.models import Learner, mlp, vectors


def simple() -> tuple[Learner, DataLoader[Any], str, Any]:
    return mlp(), vectors(26, 4), "net.0.weight", even(7, 3, 3)


def captured() -> tuple[Learner, DataLoader[Any], str, Any]:
    task, (_, loader, layers) = made("resnet"), CASES["resnet"]
    return task, loader, next(name for name, _ in task.named_parameters()), even(layers, 3, 3)


@quick("simple")
@pytest.mark.parametrize("make", [simple, captured])
def test_layers_are_timed_without_the_hooks_of_their_parameters(make: Any) -> None:
    """They were called on each rehearsal's gradients, too, which nothing is trained on."""
    task, loader, name, strategy = make()
    expected = expect(task, loader, 3)
    seen: list[Tensor] = []
    task.get_parameter(name).register_hook(lambda gradient: seen.append(gradient.clone()))
    fit(task, loader, strategy=strategy)
    assert_same([gradients[name] for gradients in expected.gradients.values()], seen)
