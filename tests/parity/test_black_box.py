"""One layer on one device, chosen by the environment: Lightning's own steps, whatever a ``training_step`` does."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock, patch

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.nn import functional as F

from tests.parity.black_box import Body, Model, assert_as_plain, describe, end, fitted, model_of, trainer
from tests.support.marks import quick


def _raising(error: BaseException) -> Body:
    def body(self: Model, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise error
        return self.step(batch)

    return body


def _logs(self: Model, batch: Any, batch_idx: int) -> Any:
    loss = self.step(batch)
    self.log("plain", loss)
    self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
    self.log_dict({"largest": batch_idx, "mean": 2.0 * batch_idx}, on_step=False, on_epoch=True)
    return {"loss": loss, "extra": loss * 2, "number": batch_idx, "text": "x", "list": [loss.detach()]}


def _random(self: Model, batch: Any, batch_idx: int) -> Any:
    return self.step(batch + torch.randn_like(batch)) * random.random()


def _penalty(self: Model, batch: Any, batch_idx: int) -> Any:
    loss = self.step(batch)
    (gradient,) = torch.autograd.grad(loss, self.layer.weight, create_graph=True)
    return loss + gradient.pow(2).sum()


def _clamps(self: Model, batch: Any, batch_idx: int) -> Any:
    with torch.no_grad():
        self.layer.weight.clamp_(-0.1, 0.1)
    return self.step(batch)


def _keeps(self: Model, batch: Any, batch_idx: int) -> Any:
    self.last = self.step(batch)
    return self.last


def _stops(self: Model, batch: Any, batch_idx: int) -> Any:
    self.trainer.should_stop = batch_idx == 1
    return self.step(batch)


def _freezes(self: Model, batch: Any, batch_idx: int) -> Any:
    self.layer.bias.requires_grad_(batch_idx % 2 == 0)
    return self.step(batch)


def _schedules(self: Model, batch: Any, batch_idx: int) -> Any:
    optimizer: Any = self.optimizers()
    optimizer.param_groups[0]["lr"] = 0.1 / (batch_idx + 1)
    return self.step(batch)


def _switches(self: Model, batch: Any, batch_idx: int) -> Any:
    self.eval()
    loss = self.step(batch)
    self.train()
    return loss


def _saves(self: Model, batch: Any, batch_idx: int) -> Any:
    self.trainer.save_checkpoint(f"inside_{batch_idx}.ckpt")
    return self.step(batch)


STEPS: dict[str, Body] = {
    "a tensor": lambda self, batch, _: self.step(batch),
    "a dict without a loss": lambda self, batch, _: {"a": 5},
    "a number": lambda self, batch, _: 5.0,
    "a loss that is a number": lambda self, batch, _: {"loss": 5.0},
    "a list": lambda self, batch, _: [self.step(batch)],
    "an ordered dict": lambda self, batch, _: OrderedDict(loss=self.step(batch), x=1),
    "a loss without a graph": lambda self, batch, _: self.step(batch).detach(),
    "a constant": lambda self, batch, _: torch.tensor(1.0),
    "a vector": lambda self, batch, _: self.layer(batch),
    "a vector of one": lambda self, batch, _: self.step(batch).reshape(1),
    "NaN": lambda self, batch, _: self.step(batch) * float("nan"),
    "a graph beside the loss": lambda self, batch, _: {"loss": self.step(batch), "other": self.layer(batch)},
    "no module called": lambda self, batch, _: self.layer.weight.pow(2).sum(),
    "weights used directly": lambda self, batch, _: F.linear(batch, self.layer.weight).pow(2).mean(),
    "a layer called twice": lambda self, batch, _: self.loss(self.layer(batch)) + self.loss(self.layer(batch * 2)),
    "more calls each step": lambda self, batch, idx: sum(self.loss(self.layer(batch)) for _ in range(idx + 1)),
    "a gradient's penalty": _penalty,
    "weights changed in place": _clamps,
    "an attribute with a graph": _keeps,
    "modes switched": _switches,
    "a parameter frozen": _freezes,
    "the learning rate set": _schedules,
    "much logged": _logs,
    "random numbers": _random,
    "a stop asked for": _stops,
    "a checkpoint saved": _saves,
    "an error": _raising(ValueError("of the user")),
    "the end of an iteration": _raising(StopIteration()),
    "an interrupt": _raising(KeyboardInterrupt()),
    "an exit": _raising(SystemExit(3)),
}


@quick(
    "3-a loss that is a number",
    "3-a list",
    "3-a vector",
    "3-a graph beside the loss",
    "3-no module called",
    "3-a layer called twice",
    "3-weights changed in place",
    "3-modes switched",
    "3-random numbers",
    "3-the end of an iteration",
    "3-an interrupt",
)
@pytest.mark.parametrize("body", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_a_training_step_does(body: Body, accumulate: int, tmp_path: Path) -> None:
    def story(folder: Path) -> Any:
        module = model_of(body)
        return fitted(folder, module, accumulate_grad_batches=accumulate), module.seen

    assert_as_plain(story, tmp_path)


class WithoutIndex(Model):
    training_step: Any = lambda self, batch: self.step(batch)


class AnyArguments(Model):
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append([describe(args), sorted(kwargs)])
        return self.step(batch)


class OwnOptimizerStep(Model):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.seen.append([epoch, batch_idx, type(optimizer).__name__])
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class ClosureTwice(Model):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step(closure=optimizer_closure)


class NoClosure(Model):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.seen.append(batch_idx)


class NoOptimizer(Model):
    def configure_optimizers(self) -> Any:
        return None


class SeveralOptimizers(Model):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Skipping(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class PatchedForward(Model):
    def __init__(self) -> None:
        super().__init__()
        vars(self.layer)["forward"] = lambda x: F.linear(x, self.layer.weight) * 2


class TorchHooks(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(lambda *_: self.seen.append("forward"))
        self.layer.register_full_backward_hook(lambda *_: self.seen.append("backward"))
        weight: Any = self.layer.weight
        weight.register_hook(lambda gradient: self.seen.append(describe(gradient)))


class Gradients(Model):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._note()

    def on_before_backward(self, loss: Any) -> None:
        self.seen.append(describe(loss))
        self._note()

    def on_after_backward(self) -> None:
        self._note()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._note()

    def _note(self) -> None:
        self.seen.append(describe([parameter.grad for parameter in self.parameters()]))


class Sometimes(Model):
    def __init__(self) -> None:
        super().__init__()
        self.other, self.unused = nn.Linear(32, 2), nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.layer(batch) + self.other(batch) if batch_idx % 2 else self.layer(batch))


class MadeInSetup(Model):
    def setup(self, stage: str) -> None:
        self.new = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.new(self.layer(batch)))


class Edited(Model):
    def on_train_start(self) -> None:
        self.layer.weight.data.zero_()

    def on_train_epoch_start(self) -> None:
        self.layer.weight.data.add_(2)

    def on_train_batch_end(self, *args: Any) -> None:
        self.layer.bias.data.add_(1)


class Traced(Model):
    def __init__(self) -> None:
        super().__init__()
        trace: Any = torch.jit.trace
        self.layer = trace(self.layer, torch.ones(1, 32))


KINDS: list[Callable[[], Model]] = [
    WithoutIndex,
    AnyArguments,
    OwnOptimizerStep,
    ClosureTwice,
    NoClosure,
    NoOptimizer,
    SeveralOptimizers,
    Frozen,
    Skipping,
    PatchedForward,
    TorchHooks,
    Gradients,
    Sometimes,
    MadeInSetup,
    Edited,
    Traced,
]


@quick(
    "WithoutIndex",
    "OwnOptimizerStep",
    "ClosureTwice",
    "SeveralOptimizers",
    "Frozen",
    "Skipping",
    "TorchHooks",
    "Gradients",
    "MadeInSetup",
    "Traced",
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_module_is(kind: Callable[[], Model], tmp_path: Path) -> None:
    def story(folder: Path) -> Any:
        module = kind()
        return fitted(folder, module), module.seen

    assert_as_plain(story, tmp_path)


def test_a_mock_in_place_of_training_step(tmp_path: Path) -> None:
    def story(folder: Path) -> Any:
        module = Model()
        mock = Mock(wraps=module.training_step)
        vars(module)["training_step"] = mock
        return fitted(folder, module), [[describe(call.args), sorted(call.kwargs)] for call in mock.call_args_list]

    assert len(assert_as_plain(story, tmp_path)["told"][1]) == 8


def test_mocks_around_loops_and_strategy(tmp_path: Path) -> None:
    """Whoever replaces a method of a loop, or of the strategy, before ``fit`` sees each call, and it stays replaced."""
    patched = ["setup", "setup_optimizers", "model_to_device", "training_step", "backward", "optimizer_step"]
    patched += [
        "batch_to_device",
        "validation_step",
        "broadcast",
        "reduce_boolean_decision",
        "teardown",
        "on_train_end",
    ]

    def story(folder: Path) -> Any:
        made, module = trainer(folder), Model()
        epoch_loop: Any = made.fit_loop.epoch_loop
        mocks: dict[str, list[Mock]] = {}
        places: list[tuple[Any, str]] = [(epoch_loop, name) for name in ("run", "advance", "on_advance_end")]
        places += [(epoch_loop.val_loop, "run"), *((made.strategy, name) for name in patched)]
        places += [(made.precision_plugin, name) for name in ("backward", "optimizer_step", "clip_gradients")]
        patches = [patch.object(place, name, wraps=getattr(place, name)) for place, name in places]
        for (_, name), each in zip(places, patches, strict=True):
            mocks.setdefault(name, []).append(each.start())
        try:
            made.fit(module)
            replaced = [isinstance(getattr(place, name), Mock) for place, name in places]
        finally:
            for each in patches:
                each.stop()
        calls = {name: [mock.call_count for mock in found] for name, found in mocks.items()}
        return calls, replaced, end(made, module)

    calls, replaced, _ = assert_as_plain(story, tmp_path)["told"]
    assert calls["training_step"] == [8]
    assert all(replaced)


@pytest.mark.parametrize("body", [STEPS["a tensor"], STEPS["an error"]], ids=["to the end", "to an error"])
def test_mocks_in_place_of_methods_of_all_strategies(body: Body, tmp_path: Path) -> None:
    """Whoever replaces a method of Lightning's class ``Strategy`` sees the calls."""
    hooks = ("on_train_start", "on_train_batch_start", "on_train_end", "on_exception")

    def story(folder: Path) -> Any:
        made, module = trainer(folder), model_of(body)
        replaced = patch.multiple(Strategy, **dict.fromkeys(hooks, DEFAULT))
        backward = patch.object(Strategy, "backward", wraps=made.strategy.backward)
        with replaced as mocks, backward as mock, suppress(ValueError):
            made.fit(module)
        return mock.call_count, {hook: mocks[hook].call_count for hook in hooks}, end(made, module)

    calls, mocked, _ = assert_as_plain(story, tmp_path)["told"]
    assert calls == mocked["on_train_batch_start"] - mocked["on_exception"]


def test_a_validation_loop_that_a_test_has_replaced(tmp_path: Path) -> None:
    def story(folder: Path) -> Any:
        made, module = trainer(folder, num_sanity_val_steps=0), Model()
        val_loop: Any = made.fit_loop.epoch_loop.val_loop
        val_loop.run = mock = Mock()
        made.fit(module)
        return mock.call_count, val_loop.run is mock, end(made, module)

    assert assert_as_plain(story, tmp_path)["told"][:2] == [2, True]
