"""Models of which most weights are frozen take of each device what their plan says, and train where that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.capture import profiling
from lightning_hetpipe.planning.model.estimate import Estimate, StageEstimate
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.strategy.profiling_strategy import ProfilingStrategy
from lightning_hetpipe.strategy.profiling_strategy import profile as profiled
from tests.accelerator.four_devices import DEVICES, LARGE, MARGIN, SHARE, cluster, limit, peaks, trainer_on
from tests.accelerator.large_models import Evaluated, Writes, in_a_row, times_by_weights
from tests.exact.running import expect
from tests.oracle import Batch, Outputs, Recipe, State
from tests.support.accelerator import TestAccelerator
from tests.support.captured_models import GPT
from tests.support.equality import assert_same
from tests.support.marks import quick
from tests.support.models import ADAMW, Learner, words
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer

pytestmark = pytest.mark.usefixtures("own_profiles")

RANK = 2

LEAST = 0.8
"""Part of the bytes that its plan says which a device holds at least."""


class Adapted(nn.Module):
    """A linear layer with frozen weights, and two small trained matrices beside them (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(base.weight.detach(), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(base.out_features), requires_grad=False)
        self.down = nn.Parameter(0.1 * torch.randn(RANK, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.down), self.up)


def adapt(module: nn.Module) -> None:
    """Freeze ``module``, and give each linear layer in it adapters."""
    module.requires_grad_(False)
    for parent in [*module.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and name != "head":
                setattr(parent, name, Adapted(child))


def adapters() -> Learner:
    torch.manual_seed(7)
    model = GPT(blocks=4, width=128)
    adapt(model)
    return Writes(model, ADAMW)


@pytest.fixture(autouse=True)
def equal_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of equal bytes."""
    monkeypatch.setattr(profiling, "_times", times_by_weights)


def check(stages: Sequence[StageEstimate], least: float = LEAST) -> None:
    for stage in stages:
        assert least * stage.memory.total <= peaks()[stage.slot.number] <= MARGIN * stage.memory.total, str(stage.slot)


class AfterTheFirst(L.Callback):
    """Forgets what devices have held until the pipeline is full: with room for all, the first minibatch is spread by
    bytes, and a device may hold more then than what its stage takes, where few weights are trained."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            limit(*LARGE)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [2, 4])
@pytest.mark.parametrize("weights", ["stash", "2bw", "pipeoptim"])
def test_a_pipeline_takes_what_its_plan_says(
    weights: str, in_flight: int, planned: list[Estimate], accelerator: TestAccelerator
) -> None:
    limit(*LARGE)
    strategy = HetPipeStrategy(stages=4, in_flight=in_flight, weights=weights, cluster=cluster(*LARGE))
    every = 4 if weights == "2bw" else 1
    trainer = trainer_on(accelerator, strategy, accumulate_grad_batches=every, callbacks=[AfterTheFirst()])
    trainer.fit(adapters(), words(20, 2))
    check(planned[-1].stages)


def test_a_model_that_fits_as_most_of_it_is_frozen(planned: list[Estimate], accelerator: TestAccelerator) -> None:
    loader, in_flight = words(12, 2), 3
    profile, optimizer, _ = profiled(quiet_trainer(ProfilingStrategy()), adapters(), train_dataloaders=loader)
    assert optimizer is not None

    def planned_for(memory: int, profile: Profile = profile) -> Estimate:
        return best_plan(
            PlanningProblem(profile, cluster(*[memory] * DEVICES), optimizer=optimizer, stages=4), in_flight
        )

    room = int(sum(stage.memory.total for stage in planned_for(LARGE[0]).stages) / SHARE)
    assert planned_for(room).fits
    assert not planned_for(room, replace(profile, layers=[replace(each, frozen=0) for each in profile.layers])).fits
    task = adapters()
    expected = expect(task, loader, in_flight, max_epochs=1)
    limit(*[room] * DEVICES)
    strategy = stashing(stages=4, in_flight=in_flight, cluster=cluster(*[room] * DEVICES))
    trainer = trainer_on(accelerator, strategy)
    trainer.fit(task, loader, loader)
    assert_same(expected.states[-1], State.of(task, trainer.optimizers[0]))
    check(planned[-1].stages)


class Translates(Evaluated):
    """Its encoder is frozen; one layer of its decoder takes as much as four of the encoder."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        self.encoder = nn.Sequential(*[nn.Linear(96, 96) for _ in range(24)]).requires_grad_(False)
        self.decoder = nn.Sequential(*[nn.Linear(96, 96) for _ in range(8)])

    def compute(self, batch: Batch) -> Outputs:
        (x,) = batch
        return {"loss": F.mse_loss(self.decoder(self.encoder(x)), x)}


def translator() -> tuple[Learner, DataLoader[Any]]:
    torch.manual_seed(7)
    chance = torch.Generator().manual_seed(3)
    return Translates(), DataLoader(TensorDataset(torch.randn(24, 96, generator=chance)), 4)


def test_a_spread_run_with_a_frozen_encoder(accelerator: TestAccelerator) -> None:
    """Divided by the bytes of weights alone, the decoder and its optimizer state would lie on one device of four."""
    task, loader = translator()
    plain, _ = translator()
    quiet_trainer(max_epochs=2).fit(plain, loader)
    limit(*LARGE)
    trainer_on(accelerator, HetPipeStrategy(stages=4, in_flight=1), max_epochs=2).fit(task, loader)
    assert_same(dict(plain.named_parameters()), dict(task.named_parameters()))
    assert max(peaks()) < sum(peaks()) / SHARE


@pytest.mark.slow
def test_a_spread_run_takes_what_its_plan_says(accelerator: TestAccelerator) -> None:
    loader = words(20, 2)
    profile, optimizer, _ = profiled(quiet_trainer(ProfilingStrategy()), adapters(), train_dataloaders=loader)
    assert optimizer is not None
    choice = best_plan(PlanningProblem(profile, cluster(*LARGE), optimizer=optimizer, stages=DEVICES, spread=True), 1)
    limit(*LARGE)
    trainer_on(accelerator, HetPipeStrategy(stages=4, in_flight=1, cluster=cluster(*LARGE))).fit(adapters(), loader)
    check(choice.stages)


def between(module: L.LightningModule) -> list[nn.Module]:
    """The layers between the first and the last ones."""
    return [*module.get_submodule("model").children()][1:-2]


class Unfreezes(BaseFinetuning):
    """Trains all weights from the second epoch on."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(between(pl_module))

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(between(pl_module), optimizer)


@quick("3")
@pytest.mark.parametrize("in_flight", [1, 3])
def test_weights_that_are_trained_later_have_room_from_the_start(
    in_flight: int, planned: list[Estimate], accelerator: TestAccelerator
) -> None:
    """A callback of Lightning's says that some will be, but not which."""
    torch.manual_seed(7)
    task = Writes(in_a_row(blocks=4, width=96), Recipe(trained_ones))
    limit(*LARGE)
    strategy = stashing(stages=4, in_flight=in_flight, cluster=cluster(*LARGE))
    trainer_on(accelerator, strategy, max_epochs=2, callbacks=[Unfreezes()]).fit(task, words(20, 2))
    if in_flight > 1:
        check(planned[-1].stages)
    else:
        assert max(peaks()) < sum(peaks()) / SHARE


def trained_ones(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.01)
