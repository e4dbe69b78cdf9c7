"""Memory model of optimizers: their states, and what their steps make for a while, on a device that counts bytes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_hetpipe.placement.measuring import optimizer_name
from lightning_hetpipe.planning.model.stage_memory import optimizer_state
from tests.support.accelerator import TestAccelerator

KINDS = [
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
    optim.RMSprop,
    optim.Rprop,
    optim.Adafactor,
    optim.Muon,
]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.01},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"amsgrad": True},
    {"centered": True},
    {"momentum": 0.9, "centered": True},
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, each) for kind in KINDS for each in OPTIONS if each.keys() <= inspect.signature(kind).parameters.keys()],
)
def test_a_step_takes_no_more_than_planned(kind: Any, options: dict[str, Any], accelerator: TestAccelerator) -> None:
    weights = [nn.Parameter(torch.ones(64, 64, device="testacc:1")) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = kind(weights, lr=0.01, **options)
    held, bytes_of_weights = torch.accelerator.memory_allocated(1), sum(weight.nbytes for weight in weights)
    torch.accelerator.reset_peak_memory_stats(1)
    for _ in range(3):
        optimizer.step()
    taken = torch.accelerator.max_memory_allocated(1) - held
    name = optimizer_name(optimizer)
    assert name is not None
    most = optimizer_state(name)
    assert most - 0.75 <= taken / bytes_of_weights <= 1.01 * most
