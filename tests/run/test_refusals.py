"""Refusals besides those of the golden table: of Lightning's, of a gradient's, and what no refusal meets."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe import Cluster, HetPipeStrategy, Node
from lightning_hetpipe.errors import SettingError
from tests.support.small import Learner, assert_clean, batches, pipeline
from tests.support.trainers import quiet_trainer

IN_FLIGHT = [1, 3]


def test_a_way_out_on_declared_devices() -> None:
    """A cluster that is not emulated is no plan: with one in flight nothing is refused there."""
    cluster = Cluster([Node("box", ["cpu", "cpu"])])
    for strategy, refused in (
        (HetPipeStrategy(cluster=cluster), True),
        (HetPipeStrategy(1, 1, cluster=cluster), False),
    ):
        module = Learner()
        module.automatic_optimization = False
        with pytest.raises(SettingError, match=r"or set in_flight=1$") if refused else nullcontext():
            quiet_trainer(strategy).fit(module, batches())


def test_a_compiled_module() -> None:
    """Lightning refuses it for strategies that it does not know."""
    module = Learner()
    compiled: Any = torch.compile(module)
    trainer = quiet_trainer(pipeline(3))
    with pytest.raises(RuntimeError, match=r"incompatible with the current strategy: `HetPipeStrategy`.*avoid passing"):
        trainer.fit(compiled, batches())
    assert_clean(trainer, module)


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_a_gradient_through_a_piece(in_flight: int) -> None:
    """A penalty on gradients: it would need the pipeline's backward twice."""

    def step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        hidden = module.net(x)
        logits = module.decoder(hidden)
        if batch_idx == 2:
            torch.autograd.grad(logits.sum(), hidden, create_graph=True)
        return F.cross_entropy(logits, y)

    decoder = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    trainer, module = quiet_trainer(pipeline(in_flight)), Learner(step, decoder=decoder)
    with pytest.raises(
        SettingError, match=r"a gradient through a pipelined module was asked.*, or (set in_flight|leave recompute)"
    ):
        trainer.fit(module, batches())
    assert_clean(trainer, module)
