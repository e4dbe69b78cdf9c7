"""Bytes that user code takes beside the modules that a watched step calls."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_hetpipe.capture.watch import TrainingWatch
from lightning_hetpipe.pipeline.random.generators import RandomGenerators
from lightning_hetpipe.planning.model.profile import UserBytes

ROWS, WIDTH, CLASSES = 6, 8, 10


class Distils(L.LightningModule):
    """Learns from a frozen teacher, with a scale of its own before the net and a temperature behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
        self.teacher = nn.Linear(WIDTH, CLASSES).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x * self.scale)
        loss: Tensor = F.cross_entropy(logits, y) + (logits.log_softmax(1) * self.teacher(x).softmax(1)).sum()
        return loss


def watched(module: Any) -> tuple[TrainingWatch, Tensor]:
    """The watch of a step of ``module``, and the loss of the step."""
    watch = TrainingWatch(module, None, RandomGenerators(0), 1)
    batch = torch.randn(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)
    with watch.watching():
        loss = module.training_step(batch, 0)
    watch.check(loss, (batch,))
    return watch, loss


def test_what_a_step_takes() -> None:
    watch, loss = watched(Distils())
    log, chances = ROWS * CLASSES * 4, ROWS * CLASSES * 4
    assert watch.user == UserBytes(
        trained=4 * WIDTH,
        frozen=4 * (WIDTH * CLASSES + CLASSES + 3),
        batch=ROWS * WIDTH * 4 + ROWS * 8,
        kept=0,  # the product keeps the batch and the scale, which are counted
        loss=2 * log + chances + 4,  # both log_softmax, what the teacher says, and the total weight of nll_loss
    )
    torch.autograd.backward(loss)  # looking at the graph has not used it up


class Between(Distils):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        return self.net[1](self.net[0](x.exp() * self.scale).sigmoid()).sum()  # type: ignore[no-any-return]


def test_user_code_between_modules_counts_for_each_minibatch_in_flight() -> None:
    module = Between()
    watch = TrainingWatch(module, ["net.0", "net.1"], RandomGenerators(0), 1)
    batch = torch.randn(ROWS, WIDTH), torch.zeros(0)
    with watch.watching():
        loss = module.training_step(batch, 0)
    watch.check(loss, (batch,))
    assert (watch.user.kept, watch.user.loss) == (2 * ROWS * WIDTH * 4, 0)  # of exp and of sigmoid
    assert UserBytes(kept=5, batch=3, loss=7, trained=10, frozen=1).total(4, 2.0) == 4 * (5 + 3) + 14 + 10 * 9 + 1


class Checkpointed(L.LightningModule):
    """Computes a part of its loss again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
        self.runs = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = checkpoint(self.scored, self.net(batch[0]), batch[1], use_reentrant=False)
        return loss

    def scored(self, logits: Tensor, y: Tensor) -> Tensor:
        self.runs += 1
        return F.cross_entropy(logits.exp(), y)


def test_what_is_checkpointed_is_not_computed_again() -> None:
    module = Checkpointed()
    watched(module)
    assert module.runs == 1
