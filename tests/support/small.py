"""A module whose step a test writes, an optimizer without hooks, and what every refusal must leave behind: nothing."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from tests.support.models import labelled
from tests.support.strategies import stashing
from tests.support.traces import ours_in
from tests.support.trainers import quiet_trainer

Step = Callable[[Any, Tensor, Tensor, int], Any]


def plain_step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
    return F.cross_entropy(module.net(x), y)


class Learner(L.LightningModule):
    """Trains ``self.net``, or what its ``step`` calls."""

    def __init__(
        self, step: Step = plain_step, net: nn.Module | None = None, **children: nn.Module | nn.Parameter
    ) -> None:
        super().__init__()
        self.step = step
        self.net = layers() if net is None else net
        for name, child in children.items():
            setattr(self, name, child)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.step(self, *batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Wraps(torch.optim.Optimizer):
    """Wraps ``inner``, as Lookahead does, and never calls ``Optimizer.__init__``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


class Validated(Learner):
    """Learner, with a validation that computes nothing."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))


def batches(count: int = 5) -> DataLoader[Any]:
    return labelled(4 * count, 4, 6, classes=3)


def pipeline(in_flight: int, **settings: Any) -> HetPipeStrategy:
    """Two stages, which with one minibatch in flight have something to do only where they compute forwards again."""
    return stashing(**{"stages": 2, "in_flight": in_flight, "recompute": in_flight == 1, **settings})


@contextmanager
def refused(*fragments: str, error: type[Exception] = SettingError) -> Iterator[None]:
    """Expects ``error`` with one sentence that holds every one of ``fragments``."""
    with pytest.raises(error) as caught:
        yield
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message, f"{fragment!r} is not in: {message}"
    assert "\n" not in message
    assert not re.search(r"[.!?]\s+[A-Z]", message), f"more than a sentence: {message}"
    assert not message.endswith(".")


def assert_refused(
    module: L.LightningModule, *fragments: str, strategy: Any = None, loader: Any = None, **settings: Any
) -> None:
    """``fit`` is refused with ``fragments`` in the message, and leaves nothing behind."""
    trainer = quiet_trainer(strategy or pipeline(3), **settings)
    before = set(threading.enumerate())
    torch.set_num_threads(2)
    with refused(*fragments):
        trainer.fit(module, loader if loader is not None else batches())
    assert_clean(trainer, module)
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []
    assert torch.get_num_threads() == 2


def assert_clean(trainer: L.Trainer, module: nn.Module) -> None:
    """No stand-ins remain. (That no threads do, every test checks.)"""
    # The LightningModule refers to its Trainer, and that to the strategy; all else must be free of us.
    assert ours_in(module) == []
    epoch_loop = trainer.fit_loop.epoch_loop
    for owner in (epoch_loop, epoch_loop.val_loop, trainer.fit_loop._combined_loader):
        ours = [
            name
            for name, value in (vars(owner) if owner is not None else {}).items()
            if type(value).__module__.startswith("lightning_hetpipe")
        ]
        assert ours == []
