"""States of the module from step to step, and hooks before a step: plain's values, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe import HetPipeStrategy
from tests.support.small import Learner, batches, layers, refused
from tests.support.trainers import quiet_trainer


def in_order() -> HetPipeStrategy:
    return HetPipeStrategy(stages=2, in_flight=3, weights="sync")


def stashed(in_flight: int = 3) -> HetPipeStrategy:
    return HetPipeStrategy(stages=2, in_flight=in_flight, weights="stash")


def weights_after(module: L.LightningModule, strategy: Any, **settings: Any) -> list[Tensor]:
    quiet_trainer(strategy, **settings).fit(module, batches(8))
    return [parameter.detach().clone() for parameter in module.parameters()]


def assert_as_plain(made: Callable[[], Any], strategy: Any, **settings: Any) -> None:
    found = []
    for each in ("auto", strategy):
        torch.manual_seed(3)
        module = made()
        found.append((weights_after(module, each, **settings), getattr(module, "seen", None)))
    (plain, seen), (ours, ours_seen) = found
    assert all(map(torch.equal, plain, ours))
    assert seen == ours_seen


# Hooks before a step.


def freezes(module: Any, batch_idx: int) -> None:
    module.net[0].requires_grad_(batch_idx % 2 == 0)


def cools(module: Any, batch_idx: int) -> None:
    module.temperature = 1.0 / (1 + batch_idx)


def perturbs(module: Any, batch_idx: int) -> None:
    with torch.no_grad():
        module.net[0].weight.add_(0.1)


def configures(module: Any, batch_idx: int) -> None:
    module.options["temperature"] = 1.0 / (1 + batch_idx)


class Prepared(Learner):
    """Does something right before each step, and notes in which order its hooks run."""

    def __init__(self, prepare: Callable[[Any, int], None]) -> None:
        super().__init__(prepared_step)
        self.prepare, self.temperature, self.options = prepare, 1.0, {"temperature": 1.0}
        self.seen: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append("transfer")
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(f"start {batch_idx}")
        self.prepare(self, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(f"end {batch_idx}")


def prepared_step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    module.seen.append(f"step {batch_idx}")
    return F.cross_entropy(module.net(x) / (module.temperature * module.options["temperature"]), y)


@pytest.mark.parametrize("prepare", [freezes, cools, perturbs, configures])
def test_what_a_hook_does_before_a_step_is_there_in_it(prepare: Callable[[Any, int], None]) -> None:
    assert_as_plain(lambda: Prepared(prepare), in_order())


def test_an_emulated_pipeline_with_one_minibatch_in_flight() -> None:
    assert_as_plain(lambda: Prepared(freezes), HetPipeStrategy(stages=2, in_flight=1, recompute=True))


# A state that a step hands on to the next.


class Recurrent(Learner):
    """Begins each batch with the hidden state that the last one has left."""

    def __init__(self) -> None:
        super().__init__(recurrent_step)
        self.hidden: Tensor | None = None
        self.last, self.seen = -1, list[int]()


def recurrent_step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    module.seen.append(module.last)
    if module.hidden is not None:
        x = x + module.hidden
    logits = module.net(x)
    module.hidden, module.last = logits.detach().mean(), batch_idx
    return F.cross_entropy(logits, y)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_recurrent_state_comes_from_the_batch_before(accumulate: int) -> None:
    settings = {"accumulate_grad_batches": accumulate}
    assert_as_plain(Recurrent, HetPipeStrategy(stages=2, in_flight=1), **settings)
    if accumulate == 1:
        assert_as_plain(Recurrent, in_order())
    for strategy in (stashed(), *([in_order()] if accumulate > 1 else [])):
        with refused("of Recurrent is read by the step of batch", "set in_flight=1"):
            weights_after(Recurrent(), strategy, **settings)


# What steps put into containers and tensors.


class Collects(L.LightningModule):
    """Fills containers in each step; hooks read and empty them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()
        self.outputs: list[int] = []
        self.counts: dict[str, Any] = {"batches": 0, "all": []}
        self.center, self.kept = torch.zeros(3), [torch.zeros(1)]
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.outputs.append(batch_idx)
        self.counts["batches"] += 1
        self.counts["all"].append(batch_idx)
        self.kept[0].add_(1)
        loss = F.cross_entropy(logits, batch[1])
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(([*self.outputs], self.counts["batches"], [*self.counts["all"]], self.kept[0].item()))
        self.outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])
        self.outputs.append(batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.seen.append([*self.outputs])
        self.outputs.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])
        self.outputs.append(batch_idx)

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append([*self.outputs])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("settings", [{}, {"max_steps": 5}, {"accumulate_grad_batches": 4}])
def test_a_hook_sees_what_its_own_minibatch_has_put_in(settings: dict[str, Any]) -> None:
    seen = []
    for strategy in ("auto", stashed(), in_order()):
        module, trainer = Collects(), quiet_trainer(strategy, **settings)
        trainer.fit(module, batches(8), batches(6))
        trainer.predict(module, batches(6))
        seen.append(module.seen)
    assert seen[0] == seen[1] == seen[2]


class Centres(Learner):
    """Subtracts a moving average of its outputs, which it changes in place."""

    def __init__(self) -> None:
        super().__init__(centred_step)
        self.center, self.seen = torch.zeros(3), list[float]()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(self.center.sum().item())


def centred_step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    logits = module.net(x)
    module.center.mul_(0.9).add_(logits.detach().mean(0), alpha=0.1)
    return F.cross_entropy((logits - module.center) * (1 + module.center), y)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_tensor_that_is_changed_in_place(accumulate: int) -> None:
    """Within an optimizer step all minibatches use the same weights, and each one the average up to itself."""
    assert_as_plain(Centres, in_order(), accumulate_grad_batches=accumulate)


def test_such_runs_repeat() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        module = Centres()
        found.append((weights_after(module, stashed()), module.seen))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1]


class Part(nn.Module):
    """Decides by its data, so that it is taken apart, and counts in its own attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = layers(), nn.Linear(3, 3)
        self.last, self.means = 0.0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net(x)
        if hidden.sum() > 1e9:
            hidden = -hidden
        y: Tensor = self.out(hidden - self.last)
        self.last = hidden.detach().mean().item()
        return y


def test_a_part_that_runs_as_user_code() -> None:
    assert_as_plain(lambda: Learner(net=Part()), in_order())
    with refused("'last' of Part is read by the step of batch"):
        weights_after(Learner(net=Part()), stashed())
