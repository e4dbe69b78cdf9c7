"""A run repeats bit for bit, whatever the threads' timing (laws L1, L2, L7)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from tests.exact.pipelines import Delays, even
from tests.exact.running import Record, assert_equal, expect, fit
from tests.oracle import Batch, Outputs
from tests.support.equality import assert_same
from tests.support.marks import fewer, quick, slow_except
from tests.support.models import ADAMW, CLASSES, MODELS, Pieces, Task, vectors


@quick("transformer-1")
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_delays_change_nothing(model: str, seed: int) -> None:
    make_task, make_loader = MODELS[model]
    task, loader = make_task(ADAMW), make_loader(21, 3)
    expected = expect(task, loader, 4)
    strategy = even(len(list(task.net.children())), 3, 4)
    strategy._before_pass = delays = Delays(seed)
    assert_equal(expected, fit(task, loader, strategy=strategy))
    for stage in range(3):
        # FIFO: one order of forwards and one of backwards on each stage. The first minibatch runs before there are any.
        for work in ("forward", "backward"):
            assert [p for j, kind, p in delays.tasks if (j, kind) == (stage, work)] == list(range(2, 15))
    # The last stage has turns: a minibatch's forward, loss and backward are one task.
    turns = [(kind, p) for j, kind, p in delays.tasks if j == 2]
    assert turns == [(kind, p) for p in range(2, 15) for kind in ("forward", "loss", "backward")]


@quick("4")
@pytest.mark.parametrize("seed", [4, 5])
def test_delays_change_nothing_in_pieces(seed: int) -> None:
    task, loader = Pieces(ADAMW), vectors(20, 3)
    expected = expect(task, loader, 5)
    strategy = even(7, 4, 5)
    strategy._before_pass = Delays(seed)
    assert_equal(expected, fit(task, loader, strategy=strategy))


class Logging(Task):
    """Logs values and metrics, and keeps a list of its own, in each step."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, CLASSES)))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.order: list[int] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Outputs:
        self.order.append(batch_idx)
        outputs = self.compute(batch)
        self.accuracy(outputs["logits"], batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"loss": outputs["loss"], "norm": outputs["logits"].norm()}, on_step=True, on_epoch=True)
        return outputs


@pytest.mark.parametrize("in_flight", slow_except([1, 4], 4))
def test_logging_repeats(in_flight: int) -> None:
    def run(seed: int | None) -> tuple[Record, dict[str, torch.Tensor], list[int]]:
        torch.manual_seed(11)
        task = Logging()
        strategy: Any = even(4, 3, in_flight)
        if seed is not None:
            strategy._before_pass = Delays(seed)
        record = fit(task, vectors(22, 4), strategy=strategy)
        assert record.trainer is not None
        return record, dict(record.trainer.callback_metrics), task.order

    record, metrics, order = run(None)
    assert order == 2 * list(range(6))
    assert {"accuracy_step", "accuracy_epoch", "loss_step", "loss_epoch", "norm_epoch"} <= metrics.keys()
    for seed in fewer((1, 2), (1,)):
        again, again_metrics, again_order = run(seed)
        assert_equal(record, again)
        assert_same(metrics, again_metrics, "metrics", ordered=True)
        assert again_order == order
