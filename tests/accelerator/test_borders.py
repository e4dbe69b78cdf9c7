"""Layers of two devices meet in Python that no function mode sees: gradients have the bits of a plain run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.operands import OperandsTogether
from tests.exact.running import expect
from tests.exact.test_default_settings import made, words
from tests.exact.test_direct import Recomputes, Scaled
from tests.oracle import Batch, Outputs, State
from tests.support.accelerator import NAME, TestAccelerator
from tests.support.calling_models import Checkpoints
from tests.support.equality import assert_same
from tests.support.models import ADAMW, CLASSES, Learner, vectors, whole_batches
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer


class Product(torch.autograd.Function):
    """Uses each of its operands twice in its backward, which can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        (gradient,) = gradients
        return gradient * y + 0 * x, gradient * x + 0 * y


product: Any = Product.apply
"""Taken before any run, as people do."""


class Blocks(Learner):
    """Five layers on as many devices as there are, with ``between`` what user code does with their outputs."""

    def __init__(self, between: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(ADAMW)
        torch.manual_seed(7)
        self.between = between
        self.blocks = nn.ModuleList([nn.Linear(6, 8), *(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, CLASSES)])

    def compute(self, batch: Batch) -> Outputs:
        x, y = batch
        logits = self.between(self.blocks, x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits.detach()}


def functions(blocks: Any, x: Tensor) -> Any:
    a = blocks[0](x)
    b = blocks[1](a).tanh()
    c = product(a, blocks[2](b))
    return blocks[4](product(c, blocks[3](b)) + a)


def penalised(blocks: Any, x: Tensor) -> Any:
    a = blocks[0](x)
    c = product(a, blocks[3](blocks[1](a).tanh()))
    (slope,) = torch.autograd.grad(c.square().sum(), a, create_graph=True)
    return blocks[4](c + slope)


def checkpointed(reentrant: bool) -> Callable[[Any, Tensor], Any]:
    def between(blocks: Any, x: Tensor) -> Any:
        a = blocks[0](x)

        def inner(a: Tensor) -> Any:
            b = blocks[1](a).tanh()
            return product(blocks[2](b), a) + blocks[3](b + a)

        b: Any = checkpoint(inner, a, use_reentrant=reentrant)
        return blocks[4](b + a)

    return between


USES: dict[str, tuple[Callable[[Any, Tensor], Any], int]] = {
    "functions": (functions, 1),
    "functions in flight": (functions, 3),
    "penalised": (penalised, 1),
    "checkpoint": (checkpointed(False), 1),
    "reentrant checkpoint": (checkpointed(True), 1),
}
"""With as many in flight as a pipeline allows."""


@pytest.mark.parametrize("use", USES)
def test_user_code_over_layers(use: str, accelerator: TestAccelerator) -> None:
    between, in_flight = USES[use]
    check(Blocks(between), vectors(20, 4), accelerator, 4, in_flight)


def test_user_code_around_pieces(accelerator: TestAccelerator) -> None:
    for task, loader in ((Recomputes(), vectors(18, 4)), (Scaled(product), vectors(20, 4))):
        check(task, loader, accelerator, 2, 3)
    check(made(Checkpoints), whole_batches(words()), accelerator, 2, 3)


def check(task: Learner, loader: DataLoader[Any], accelerator: TestAccelerator, stages: int, in_flight: int) -> None:
    expected = expect(task, loader, in_flight, max_epochs=1)
    trainer = quiet_trainer(stashing(stages, in_flight), accelerator=accelerator, devices=4, max_epochs=1)
    trainer.fit(task, loader)
    assert_same(expected.states[-1], State.of(task, trainer.optimizers[0]))


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(0 * self.linear(x) + self.linear.bias)
        return y


class ChecksMasks(Learner):
    """Each layer's gradient is the mask of its dropout: of the layer's own one, or of one in user code."""

    def __init__(self, inside: bool, reentrant: bool) -> None:
        super().__init__(ADAMW)
        torch.manual_seed(7)
        self.reentrant = reentrant
        self.layers = nn.ModuleList([Drops() if inside else nn.Linear(6, 6) for _ in range(6)])
        self.inside = inside
        for layer in self.layers.modules():
            if isinstance(layer, nn.Linear):
                nn.init.ones_(layer.bias)

    def compute(self, batch: Batch) -> Outputs:
        x: Any = batch[0].clone().requires_grad_()
        self.found = list[tuple[nn.Parameter, Tensor]]()
        loss: Any = 0
        layer: Any
        for layer in self.layers:
            bias: Any = layer.linear.bias if self.inside else layer.bias

            def inner(x: Tensor, layer: Any = layer) -> Tensor:
                return layer(x) if self.inside else F.dropout(0 * layer(x) + layer.bias, 0.5)

            x = checkpoint(inner, x, use_reentrant=self.reentrant)
            self.found.append((bias, (x.detach() / bias.detach()).sum(0)))
            loss = loss + x.sum()
        return {"loss": loss}

    def on_after_backward(self) -> None:
        for parameter, mask in self.found:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, mask)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_dropout_under_a_checkpoint(inside: bool, reentrant: bool, accelerator: TestAccelerator) -> None:
    """Another mask in the second run would make gradients wrong, and nobody would see it."""
    task = ChecksMasks(inside, reentrant)
    trainer = quiet_trainer(HetPipeStrategy(stages=4, in_flight=1), accelerator=accelerator, devices=4)
    trainer.fit(task, vectors(20, 4))
    assert trainer.global_step == 5


def test_global_pruning(accelerator: TestAccelerator) -> None:
    """The smallest of all weights together are taken, after each epoch."""

    def pruned(strategy: Strategy, devices: int) -> State:
        seen = set[torch.device]()

        def between(blocks: Any, x: Tensor) -> Any:
            seen.update(block.weight.device for block in blocks)
            for block in blocks:
                x = block(x)
            return x

        task = Blocks(between)
        pruning = ModelPruning("l1_unstructured", amount=0.3)
        trainer = quiet_trainer(strategy, accelerator=accelerator, devices=devices, max_epochs=2, callbacks=[pruning])
        trainer.fit(task, vectors(20, 4))
        assert len(seen) == min(devices, 3)
        return State.of(task, trainer.optimizers[0])

    plain = pruned(SingleDeviceStrategy(torch.device(NAME, 0)), 1)
    assert_same(plain, pruned(HetPipeStrategy(stages=3, in_flight=1), 4))


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(y)


@pytest.mark.usefixtures("accelerator")
def test_a_function_that_changes_what_it_is_given() -> None:
    """A copy of it would have been changed."""
    double: Any = Doubles.apply
    one, other = torch.ones(3, device=f"{NAME}:0"), torch.ones(4, 3, device=f"{NAME}:1")
    with OperandsTogether([one.device, other.device]):
        assert double(other, one).device == other.device
        with pytest.raises(SettingError, match="apply changes a tensor in place that lies on"):
            double(one, other[0])
