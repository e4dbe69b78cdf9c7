"""Weight policies with what callbacks, optimizers and loss scalers do to parameters and their state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.exact.pipelines import even
from tests.exact.running import assert_equal, expect, fit
from tests.oracle import Recipe
from tests.support.models import mlp, vectors


class Shrinks(torch.optim.SGD):
    """An optimizer of one's own, whose step goes on after torch's."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.mul_(0.999)
        return loss


@pytest.mark.parametrize("asked", [{"weights": "pipeoptim"}, {"weights": "stash", "lr_correction": 7}])
def test_a_step_that_calls_torchs_is_one_step(asked: dict[str, Any]) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)  # from now on its step runs hooks, whoever calls it
    task, loader = mlp(Recipe(lambda model: Shrinks(model.parameters(), 0.05, momentum=0.9))), vectors(44, 4)
    expected = expect(task, loader, 3, **asked)
    assert_equal(expected, fit(task, loader, strategy=even(7, 2, 3, **asked)))
