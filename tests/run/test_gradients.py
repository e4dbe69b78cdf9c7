"""Gradients as a plain backward pass leaves them on the live parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.run import fit
from lightning_hetpipe.run.around_step import deliver
from tests.support.models import mlp, vectors
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer


def test_gradients_are_added_to_those_that_are_there() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    deliver({parameter: torch.ones(2)})
    deliver({parameter: torch.ones(2)}, factor=0.5)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.5, 1.5]


def test_each_parameter_has_memory_of_its_own() -> None:
    """Autograd gives one tensor to both parameters of a sum."""
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    shared = torch.ones(2)
    deliver({one: shared, other: shared})
    assert one.grad is not None
    assert other.grad is not None
    one.grad.mul_(2)
    assert (one.grad.tolist(), other.grad.tolist()) == ([2.0, 2.0], [1.0, 1.0])


def test_a_gradient_is_laid_out_as_its_parameter() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    deliver({parameter: torch.arange(6.0).reshape(3, 2).t()})
    assert parameter.grad is not None
    assert parameter.grad.is_contiguous()
    assert parameter.grad.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


def test_a_parameter_that_was_frozen_meanwhile_gets_none() -> None:
    parameter = nn.Parameter(torch.zeros(2), requires_grad=False)
    deliver({parameter: torch.ones(2)})
    assert parameter.grad is None


def test_hooks_of_the_parameter_run_once() -> None:
    parameter: Any = nn.Parameter(torch.zeros(2))
    seen: list[list[float]] = []
    parameter.register_hook(lambda gradient: seen.append(gradient.tolist()))
    deliver({parameter: torch.ones(2)}, factor=2.0)
    assert seen == [[2.0, 2.0]]
    assert parameter.grad.tolist() == [2.0, 2.0]


def test_no_finished_minibatch_keeps_gradients_that_weights_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would lie beside those of the next step."""
    handed = list[Mapping[nn.Parameter, Tensor]]()

    def noting(gradients: Mapping[nn.Parameter, Tensor], factor: float = 1.0) -> None:
        assert gradients
        handed.append(gradients)
        deliver(gradients, factor)

    monkeypatch.setattr(fit, "deliver", noting)
    quiet_trainer(stashing(stages=2, in_flight=2)).fit(mlp(), vectors(20, 4))
    assert len(handed) == 4  # the first minibatch runs in Lightning's own thread
    assert not any(handed)
