"""Chance on a device: seeds of its own generator, and kernels whose last bits vary.

Only the CPU's generator was asked whether a seed was set and whether a module drew, so that masks on a GPU were not
the numbers of the user's seed.
"""

from __future__ import annotations

import itertools
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from tests.exact.running import fit
from tests.support.accelerator import NAME, TestAccelerator
from tests.support.equality import assert_same
from tests.support.models import CLASSES, vectors
from tests.support.trainers import quiet_trainer

CALLS = itertools.count()


@torch.library.custom_op("hetpipe_tests::by_chance", mutates_args=())
def by_chance(x: Tensor, size: float) -> Tensor:
    """Another sum in each call, as where atomic operations add."""
    return x * (1 + size * (next(CALLS) % 2))


@by_chance.register_fake
def _(x: Tensor, size: float) -> Tensor:
    return torch.empty_like(x)


class Net(nn.Module):
    """Three layers; an effect between the first two."""

    def __init__(self, effect: Any) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.effect = effect

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(self.second(self.effect(self.first(x).relu())).relu())
        return out


class Task(L.LightningModule):
    """Classifies with its net."""

    def __init__(self, effect: Any, seed: Any = None) -> None:
        super().__init__()
        self.net, self.seed = Net(effect), seed
        self.validated: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.seed is not None:
            self.seed(7)
        return {"loss": F.cross_entropy(self.net(batch[0]), batch[1])}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(strategy: Any, accelerator: Any, effect: Any, seed: Any = None, devices: int = 2) -> Any:
    L.seed_everything(3, verbose=False)
    task = Task(effect, seed)
    quiet_trainer(strategy, accelerator=accelerator, devices=devices).fit(task, vectors(24, 4))
    return task.state_dict()


def of_device(seed: int) -> None:
    """A seed for the device alone."""
    torch.get_device_module(NAME).manual_seed(seed)


def shuffled(h: Tensor) -> Tensor:
    of_device(42)
    return h + 0.1 * torch.rand_like(h)


def drawn_twice(h: Tensor) -> Tensor:
    module = torch.get_device_module(NAME)
    state = module.get_rng_state(h.device)
    noise = torch.rand_like(h)
    module.set_rng_state(state, h.device)
    return h + noise - torch.rand_like(h)


def synchronous() -> HetPipeStrategy:
    return HetPipeStrategy(stages=2, in_flight=3, weights="sync")


@pytest.mark.parametrize("effect", [shuffled, drawn_twice])
def test_seeds_and_states_of_a_device_in_a_forward_rule_with_one_in_flight(
    accelerator: TestAccelerator, effect: Any
) -> None:
    plain = trained(SingleDeviceStrategy(torch.device(NAME, 0)), accelerator, effect, devices=1)
    assert_same(plain, trained(HetPipeStrategy(stages=1, in_flight=1), accelerator, effect, devices=1))


@pytest.mark.parametrize(
    ("effect", "seed", "sentence"),
    [
        (shuffled, None, "sets a seed|after training_step has set a seed"),
        (drawn_twice, None, r"sets the state of a default random generator"),
        (nn.Dropout(0.5), of_device, "draws random numbers after training_step has set a seed"),
        (nn.Dropout(0.5), torch.manual_seed, "draws random numbers after training_step has set a seed"),
    ],
)
def test_they_are_noticed_in_a_pipeline(accelerator: TestAccelerator, effect: Any, seed: Any, sentence: str) -> None:
    """Modules that draw may run as user code, and then draw the numbers of the seed."""
    with pytest.raises(SettingError, match=sentence):
        trained(HetPipeStrategy(stages=2, in_flight=3, weights="sync", module=["net"]), accelerator, effect, seed)


def test_last_bits_that_vary_are_no_other_values(accelerator: TestAccelerator) -> None:
    """A graph of such a module was refused, as it gave other values in the watched minibatch."""

    def varying(h: Tensor) -> Tensor:
        y: Tensor = h + by_chance(h.detach(), 2**-22)
        return y

    strategy = HetPipeStrategy(stages=2, in_flight=3, weights="stash", module=["net"])
    fit(Task(varying), vectors(24, 4), strategy=strategy, accelerator=accelerator, devices=2)
    assert strategy.last_run is not None
    assert len(strategy.last_run.stages) == 2


def test_other_values_than_by_rounding_are_refused(accelerator: TestAccelerator) -> None:
    def varying(h: Tensor) -> Tensor:
        y: Tensor = h + by_chance(h.detach(), 0.5)
        return y

    with pytest.raises(SettingError, match="gives other values than the module itself"):
        trained(HetPipeStrategy(stages=2, in_flight=3, weights="stash", module=["net"]), accelerator, varying)
