"""A fit with one minibatch in flight is a plain Trainer's, bit for bit, random numbers included (law L7).

It drew from generators of its own, under a dispatch mode, in wrapped forwards: seeds that users set had no effect, and
``torch.cond`` and ``flex_attention`` ended in errors from inside torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.accelerator import default_generators
from tests.support.accelerator import NAME, TestAccelerator
from tests.support.equality import assert_same
from tests.support.trainers import quiet_trainer

WIDTH = 8


class Body(nn.Module):
    """Three layers, with what the ``inside`` of a test does between them."""

    def __init__(self, inside: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.drop = nn.Dropout(0.4)
        self.memory = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(self.inside(self, F.relu(self.first(x))))
        return y


class Model(L.LightningModule):
    """Trains, validates, tests and predicts with one body."""

    def __init__(self, inside: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net, self.head = Body(inside), nn.Sequential(nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
        self.validated: list[Tensor] = []

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.head(self.net(batch)) - torch.rand(())).square().mean()
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net.train()  # with dropout, as in Monte Carlo estimates
        self.validated.append(self.loss(batch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        y: Tensor = self.net(batch) + torch.randn_like(batch)
        return y

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ByHand(Model):
    """Manual optimization, which steps twice with one batch."""

    def __init__(self, inside: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(inside)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class Newton(Model):
    """Evaluates the loss several times in one step, each time with other masks."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def dropped(body: Any, x: Tensor) -> Tensor:
    return F.dropout(body.drop(body.second(body.drop(x))), 0.1, body.training)


def remembering(body: Any, x: Tensor) -> Tensor:
    y: Tensor = body.memory(body.drop(x)[:, None])[0][:, 0]
    return y


def noisy(body: Any, x: Tensor) -> Tensor:
    y: Tensor = body.second(x) + 0.1 * torch.randn_like(x) * torch.rand(())
    return y + random.random() + float(np.random.rand())


def seeded(body: Any, x: Tensor) -> Tensor:
    """The same permutation in all minibatches, and the same mask twice."""
    with torch.random.fork_rng():
        torch.manual_seed(42)
        order = torch.randperm(WIDTH)
    torch.manual_seed(7)
    one = body.drop(x[:, order])
    torch.manual_seed(7)
    assert torch.equal(one, body.drop(x[:, order]))
    y: Tensor = body.second(one)
    return y


def forked(body: Any, x: Tensor) -> Tensor:
    """A seed that holds for one device, from which the layers before it draw, too."""
    own = [x.device.index] if x.is_cuda else []
    with torch.random.fork_rng(devices=own):
        torch.manual_seed(42)
        order = torch.randperm(WIDTH, device=x.device)
        noise = torch.rand_like(x)
    y: Tensor = body.second(body.drop(x[:, order] + noise))
    return y


def branching(body: Any, x: Tensor) -> Tensor:
    y: Tensor = body.drop(torch.cond(x.sum() > 3, lambda v: v.sin(), lambda v: v.cos(), (x,)))
    return y


def branching_in_layers(body: Any, x: Tensor) -> Tensor:
    y: Tensor = torch.cond(x.mean() > 0.3, lambda v: body.second(v), lambda v: v * 2, (x,))
    return y


def attending(body: Any, x: Tensor) -> Tensor:
    if x.device.type == "cpu" and body.training and torch.is_grad_enabled():  # where it has no backward
        return dropped(body, x)
    q = x[:, None, None].expand(-1, 1, 16, -1)
    found: Any = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j))
    y: Tensor = found[:, 0, 0]
    return y


def checkpointed(body: Any, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(lambda v: body.drop(torch.tanh(body.second(v))), x, use_reentrant=False)
    return y


Case = tuple[type[Model], Callable[[Any, Tensor], Tensor]]  # a module, and what its net does inside
CASES: dict[str, Case] = {
    "dropout": (Model, dropped),
    "LSTM": (Model, remembering),
    "noise": (Model, noisy),
    "seeds": (Model, seeded),
    "fork_rng": (Model, forked),
    "cond": (Model, branching),
    "cond with layers": (Model, branching_in_layers),
    "flex_attention": (Model, attending),
    "checkpoint": (Model, checkpointed),
    "LBFGS": (Newton, dropped),
    "manual optimization": (ByHand, dropped),
}


def data() -> Any:
    samples: Any = list(torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1)))
    return DataLoader(samples, batch_size=4, shuffle=True)


def drawn_next() -> list[Any]:
    """The states of all default generators."""
    state: Any = np.random.get_state(legacy=False)
    ours = [generator.get_state() for generator in (torch.default_generator, *default_generators())]
    return [ours, random.getstate(), state["state"]["key"].tolist(), state["state"]["pos"]]


def outcome(case: Case, strategy: Any, **settings: Any) -> list[Any]:
    """Everything that a fit, a test and a prediction leave, of a Trainer with these ``settings``."""
    kind, inside = case
    L.seed_everything(5, verbose=False)
    module = kind(inside)
    trainer = quiet_trainer(strategy, max_epochs=2, num_sanity_val_steps=1, limit_val_batches=2, **settings)
    trainer.fit(module, data(), data())
    fitted = [{name: value.clone() for name, value in module.state_dict().items()}, drawn_next()]
    optimizers: Any = module.optimizers()
    fitted.append(optimizers.state_dict())
    trainer.test(module, data(), verbose=False)
    return [*fitted, module.validated, trainer.predict(module, data()), drawn_next()]


@cache
def plain(case: str) -> list[Any]:
    return outcome(CASES[case], "auto")


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_fit_with_one_minibatch_in_flight_is_a_plain_fit(case: str, stages: int) -> None:
    """So are its validations, and a test and a prediction after it; whoever draws next draws the same, too."""
    torch.compiler.reset()  # a function that was compiled too often runs uncompiled, as flex_attention must not
    assert_same(plain(case), outcome(CASES[case], HetPipeStrategy(stages=stages, in_flight=1)), case)


@pytest.mark.parametrize("stages", [1, 2])
def test_modules_run_as_they_are(stages: int) -> None:
    """No mode is on, and no module's forward is replaced, in whatever loop."""
    seen: list[str] = []

    def inside(body: Any, x: Tensor) -> Tensor:
        seen.extend(name for name, module in model.named_modules() if {"forward", "__call__"} & vars(module).keys())
        seen.extend(type(mode).__name__ for mode in modes())
        return dropped(body, x)

    model = Model(inside)
    trainer = quiet_trainer(HetPipeStrategy(stages=stages, in_flight=1, module=["net"]))
    trainer.fit(model, data(), data())
    trainer.validate(model, data(), verbose=False)
    trainer.test(model, data(), verbose=False)
    trainer.predict(model, data())
    assert not seen


def modes() -> list[Any]:
    """The function modes and the dispatch modes that are on."""
    functions: Any = torch.overrides._get_current_function_mode_stack
    dispatches: Any = torch.utils._python_dispatch._get_current_dispatch_mode_stack
    return [*functions(), *dispatches()]


def test_threads_are_those_of_a_plain_run() -> None:
    """Sums depend on them, and a plain run has all of the machine's."""
    seen: list[int] = []

    def inside(body: Any, x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return dropped(body, x)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        quiet_trainer(HetPipeStrategy(stages=1, in_flight=1)).fit(Model(inside), data(), data())
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {2}


def test_a_compiled_module_stays_compiled() -> None:
    """It was looked through where something in it draws."""
    compiled: list[bool] = []

    def inside(body: Any, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            compiled.append(True)
        y: Tensor = body.drop(body.second(x))
        return y

    def trained(strategy: Any) -> dict[str, Tensor]:
        torch._dynamo.reset()
        model = Model(inside)
        model.net.compile(backend="eager")
        quiet_trainer(strategy).fit(model, data())
        return model.state_dict()

    L.seed_everything(5, verbose=False)
    expected = trained("auto")
    count = len(compiled)
    L.seed_everything(5, verbose=False)
    assert_same(expected, trained(HetPipeStrategy(stages=1, in_flight=1)))
    assert len(compiled) == 2 * count > 0


def test_a_run_that_stays_on_one_stage_is_plain_from_its_second_minibatch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first minibatch, which is watched, draws as a pipeline's; the default generators are as before it."""
    monkeypatch.setattr("lightning_hetpipe.run.first_minibatch.without_gain", lambda *_: "the test says so")
    states: list[Tensor] = []

    class Notes(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            states.append(torch.get_rng_state())

    def trained(strategy: Any, devices: int) -> None:
        L.seed_everything(5, verbose=False)
        quiet_trainer(strategy, devices=devices, callbacks=[Notes()]).fit(Model(dropped), data())

    trained("auto", 1)
    plainly = states[:]
    states.clear()
    trained(HetPipeStrategy(), 2)
    assert torch.equal(states[0], states[1])
    assert torch.equal(plainly[0], states[0])
    assert [torch.equal(one, other) for one, other in zip(plainly[:-1], states[1:], strict=True)] == [True] * 2


def test_seeds_rule_on_several_devices(accelerator: TestAccelerator) -> None:
    """Each device has a default generator, which the seed is for as in a plain run on one of them."""

    def inside(body: Any, x: Tensor) -> Tensor:
        torch.manual_seed(7)
        y: Tensor = body.drop(body.second(x))
        torch.manual_seed(8)
        return y + 0.1 * torch.randn_like(y)

    def trained(strategy: Any, devices: int) -> dict[str, Tensor]:
        L.seed_everything(5, verbose=False)
        model = Model(inside)
        model.head = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        quiet_trainer(strategy, accelerator=accelerator, devices=devices).fit(model, data())
        return model.state_dict()

    expected = trained(SingleDeviceStrategy(torch.device(NAME, 0)), 1)
    assert_same(expected, trained(HetPipeStrategy(stages=3, in_flight=1), 3))
