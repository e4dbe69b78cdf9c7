"""Refusals of what a LightningModule may not do, by name where it happens; the pipeline leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetpipe import Cluster, HetPipeStrategy, Node
from lightning_hetpipe.errors import SettingError
from tests.support.small import Learner, assert_clean, assert_refused, batches, layers, pipeline, plain_step
from tests.support.trainers import quiet_trainer

IN_FLIGHT = [1, 3]


# How it is optimized.


def test_manual_optimization() -> None:
    module = Learner()
    module.automatic_optimization = False
    assert_refused(module, "Learner uses manual optimization", "automatic_optimization=True")


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


def test_several_optimizers() -> None:
    class Two(Learner):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([parameter], lr=0.1) for parameter in list(self.parameters())[:2]]

    # Lightning's own refusal advises manual optimization, which would be refused next.
    assert_refused(
        Two(), "configure_optimizers returned several optimizers", "use one optimizer with several parameter"
    )


def test_lbfgs() -> None:
    class Newton(Learner):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    assert_refused(Newton(), "LBFGS evaluates the loss several times in one step", "use another optimizer")


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_another_optimizer_that_evaluates_the_loss_again(in_flight: int) -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    class Again(Learner):
        def configure_optimizers(self) -> Any:
            return Twice(self.parameters(), lr=0.1)

    assert_refused(Again(), "Twice evaluates the loss several times", strategy=pipeline(in_flight))


def test_an_overridden_backward() -> None:
    class Backward(Learner):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            super().backward(loss, *args, **kwargs)

    assert_refused(Backward(), "Backward overrides backward", "remove the override")


def test_dataloader_iter() -> None:
    class Iterating(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers()

        def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
            (x, _), _, _ = next(dataloader_iter)
            loss: Tensor = self.net(x).sum()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    assert_refused(Iterating(), "Iterating.training_step takes dataloader_iter", "take (batch, batch_idx)")


def test_a_compiled_module() -> None:
    """Lightning refuses it for strategies that it does not know."""
    module = Learner()
    compiled: Any = torch.compile(module)
    trainer = quiet_trainer(pipeline(3))
    with pytest.raises(RuntimeError, match=r"incompatible with the current strategy: `HetPipeStrategy`.*avoid passing"):
        trainer.fit(compiled, batches())
    assert_clean(trainer, module)


# What training_step returns.


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("when", [0, 1, 4])
def test_no_loss(when: int, in_flight: int) -> None:
    """By the first minibatch, which is watched, and by later ones."""

    def step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        loss = plain_step(module, x, y, batch_idx)
        return None if batch_idx == when else loss

    assert_refused(Learner(step), "training_step returned None", "return a loss", strategy=pipeline(in_flight))


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (Tensor.detach, "depends on no parameter that requires a gradient"),
        (lambda loss: loss.expand(3), "is of shape (3,); return a single number"),
    ],
)
def test_a_loss_without_a_backward_pass(changed: Any, message: str, when: int, in_flight: int) -> None:
    """Later minibatches summed a vector in silence, and ended with an error of autograd's."""

    def step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        loss = plain_step(module, x, y, batch_idx)
        return changed(loss) if batch_idx == when else loss

    assert_refused(Learner(step), "the loss that training_step returned", message, strategy=pipeline(in_flight))


def test_parameters_without_a_shape() -> None:
    module = Learner(head=nn.LazyLinear(3))
    assert_refused(module, "the parameter 'head.weight' has no shape yet", "run the model on an example in setup")


class Recomputes(nn.Module):
    """Computes its layers again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layers, x.requires_grad_(), use_reentrant=True)


def recomputing_step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    h = module.net[:2](x)
    h = h if batch_idx < module.first else checkpoint(module.net[2], h, use_reentrant=True)
    return F.cross_entropy(module.net[3](h), y)


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize(
    ("module", "names"),
    [
        (lambda: Learner(net=Recomputes()), None),
        (lambda: Learner(net=Recomputes()), ["net"]),
        (lambda: Learner(net=nn.Sequential(Recomputes(), nn.Linear(3, 3))), None),
        (lambda: with_first(0), None),
        (lambda: with_first(2), None),
    ],
)
def test_reentrant_checkpoints(module: Callable[[], Learner], names: Any, in_flight: int) -> None:
    """Also where the first minibatch has none, so that one is met in a backward pass."""
    strategy = pipeline(in_flight, module=names)
    assert_refused(module(), "calls torch.utils.checkpoint with use_reentrant=True", "in_flight=1", strategy=strategy)


def with_first(first: int) -> Learner:
    """Calls a checkpoint in ``training_step`` from minibatch ``first`` on."""
    module = Learner(recomputing_step)
    module.first = first  # type: ignore[assignment]  # nn.Module knows tensors and modules only
    return module


# Which modules are called.


def test_a_named_module_that_is_never_called() -> None:
    module = Learner(head=nn.Sequential(nn.Linear(3, 3)))
    strategy = pipeline(3, module=["net", "head"])
    assert_refused(module, "names 'head', which training_step did not call", "leave it out", strategy=strategy)


def test_nothing_to_pipeline() -> None:
    def functional(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        return F.cross_entropy(F.linear(x, module.net[0].weight), y)

    module = Learner(functional)
    assert_refused(module, "training_step called no module with trainable parameters", "call one, or set in_flight=1")


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_weights_that_training_step_changes(in_flight: int) -> None:
    def clamps(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        with torch.no_grad():
            module.net[0].weight.clamp_(-0.1, 0.1)
        return plain_step(module, x, y, batch_idx)

    message = "training_step changes the parameter 'net.0.weight' in place"
    assert_refused(Learner(clamps), message, "in a callback or hook", strategy=pipeline(in_flight))


def test_a_whole_after_a_part_of_it() -> None:
    def both(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        return module.net[0](x).square().mean() + F.cross_entropy(module.net(x), y)

    assert_refused(
        Learner(both), "calls 'net' and, before it, 'net.0', which is a part of it", "call the whole, or its"
    )


def calls_twice(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.net(x), y) + module.net(x).square().mean()


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        (plain_step, calls_twice, "the pipelined module 'net' was called more often than once; call the"),
        (calls_twice, plain_step, "called the pipelined module 'net' once, and twice in the first minibatch; call the"),
    ],
)
@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_a_module_called_more_or_less_often(
    first: Callable[..., Any], later: Callable[..., Any], message: str, in_flight: int
) -> None:
    def step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        return (later if batch_idx >= 2 else first)(module, x, y, batch_idx)

    assert_refused(Learner(step), message, strategy=pipeline(in_flight))


def in_order(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.decoder(module.net(x)), y)


def out_of_order(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.decoder(x[:, :3]), y) + module.net(x).square().mean()


def one_missing(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.net(x), y)


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize(
    ("later", "message"),
    [
        (out_of_order, "the pipelined module 'decoder' was called out of order; call the"),
        (one_missing, "training_step did not call the pipelined module 'decoder' this time; call the same modules"),
    ],
)
def test_pieces_that_change_from_minibatch_to_minibatch(
    later: Callable[..., Any], message: str, in_flight: int
) -> None:
    def step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        return (later if batch_idx == 2 else in_order)(module, x, y, batch_idx)

    decoder = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    assert_refused(Learner(step, decoder=decoder), message, strategy=pipeline(in_flight))


# Leaves that the loss reaches and that are no parameters.


class Unregistered(Learner):
    """Keeps a parameter in a plain list, which only its optimizer knows."""

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__(step)
        self.scales = [nn.Parameter(torch.ones(3))]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.scales], lr=0.1)


def scaled(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.net(x) * module.scales[0], y)


def input_gradients(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.net(x.requires_grad_()), y)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize(("step", "shape"), [(scaled, "(3,)"), (input_gradients, "(4, 6)")])
def test_leaves_that_are_no_parameters(step: Callable[..., Any], shape: str, in_flight: int, first: int) -> None:
    def run(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        return (step if batch_idx >= first else plain_step)(module, x, y, batch_idx)

    message = f"the loss depends on a tensor of shape {shape} that requires a gradient"
    assert_refused(Unregistered(run), message, "register a parameter in a module", strategy=pipeline(in_flight))


# Gradients of the user's own.


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
    with pytest.raises(RuntimeError, match=r"a gradient through a pipelined module was asked for inside training_step"):
        trainer.fit(module, batches())
    assert_clean(trainer, module)


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_a_gradient_of_a_parameter(in_flight: int) -> None:
    """With allow_unused=True it would be None, silently: the weights are not in the graph around the pipeline."""

    def step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        loss = F.cross_entropy(module.net(x), y)
        if batch_idx == 2:
            torch.autograd.grad(loss, list(module.net.parameters()), retain_graph=True, allow_unused=True)
        return loss

    message = "training_step asks for the gradient of the parameter 'net.0.weight'"
    assert_refused(Learner(step), message, "on_before_optimizer_step", strategy=pipeline(in_flight))


# Data.


def test_batches_that_are_none() -> None:
    class Gaps(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for index, batch in enumerate(batches()):
                yield None if index == 2 else batch

    loader: DataLoader[Any] = DataLoader(Gaps(), batch_size=None)
    assert_refused(Learner(), "train_dataloader yielded None", "leave such batches out", loader=loader)
