"""Models of which most weights are frozen take of each device what their plan says, and train where that fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetpipe.capture import profiling
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.model.profile import Times
from tests.accelerator.four_devices import DEVICES, LARGE, MARGIN, SHARE, cluster, limit, peaks, trainer_on
from tests.accelerator.test_larger_than_a_device import Writes
from tests.exact.running import expect
from tests.oracle import State
from tests.support.accelerator import TestAccelerator
from tests.support.captured_models import GPT
from tests.support.equality import assert_same
from tests.support.models import ADAMW, Learner, words
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer

pytestmark = pytest.mark.usefixtures("own_profiles")

RANK = 2


class Adapted(nn.Module):
    """A linear layer with frozen weights, and two small trained matrices beside them (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(base.weight.detach(), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(base.out_features), requires_grad=False)
        self.down = nn.Parameter(0.1 * torch.randn(RANK, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.down), self.up)


def adapt(module: nn.Module) -> None:
    """Freeze ``module``, and give each linear layer in it adapters."""
    module.requires_grad_(False)
    for parent in [*module.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and name != "head":
                setattr(parent, name, Adapted(child))


def adapters(blocks: int = 12, width: int = 96) -> Learner:
    torch.manual_seed(7)
    model = GPT(blocks=blocks, width=width)
    adapt(model)
    return Writes(model, ADAMW)


@pytest.mark.parametrize("in_flight", [2, 4])
def test_a_pipeline_takes_what_its_plan_says(
    in_flight: int, planned: list[Estimate], accelerator: TestAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = words(40, 8)
    strategy = stashing(stages=4, in_flight=in_flight, cluster=cluster(*LARGE))
    limit(*LARGE)
    trainer = trainer_on(accelerator, strategy)
    trainer.fit(adapters(), loader)
    for stage in planned[-1].stages:
        print(stage.slot, peaks()[stage.slot.number], stage.memory.total, peaks()[stage.slot.number]/stage.memory.total, stage.memory)
