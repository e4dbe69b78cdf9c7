"""Models that no single device could hold train, are evaluated and resumed on four, within the plan's bytes of each."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.capture import profiling
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.pipeline.engine import Engine
from lightning_hetpipe.pipeline.memory import PlannedMemory
from lightning_hetpipe.pipeline.operands import OperandsTogether
from lightning_hetpipe.placement import measuring, planner
from lightning_hetpipe.placement.spread import spread
from lightning_hetpipe.planning.model.catalogue import FRAGMENTED
from lightning_hetpipe.planning.model.cluster import LEAST_MEMORY
from lightning_hetpipe.planning.model.estimate import Estimate
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.search.choice import best_plan
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.run import first_minibatch
from lightning_hetpipe.run.stale_gradients import CORRECTED
from lightning_hetpipe.strategy.profiling_strategy import ProfilingStrategy
from lightning_hetpipe.strategy.profiling_strategy import profile as profiled
from tests.accelerator.four_devices import DEVICES, LARGE, MARGIN, SHARE, cluster, limit, peaks, trainer_on
from tests.accelerator.large_models import (
    Decoder,
    Evaluated,
    Sees,
    Writes,
    check_pipeline,
    deep_resnet,
    gpt,
    in_a_row,
    resnet,
    times_by_weights,
    translator,
)
from tests.exact.pipelines import Pinned
from tests.exact.running import expect
from tests.oracle import Batch, Outputs, Recipe, State
from tests.support.accelerator import NAME, TestAccelerator, set_limit
from tests.support.captured_models import GPT, ResNet
from tests.support.equality import assert_same
from tests.support.marks import quick
from tests.support.models import ADAMW, SGD, WORDS, Learner, images, words
from tests.support.strategies import stashing
from tests.support.trainers import quiet_trainer

MODELS = [gpt, resnet, translator]


pytestmark = pytest.mark.usefixtures("own_profiles")


@quick("resnet-2")
@pytest.mark.parametrize("in_flight", [2, 4])
@pytest.mark.parametrize("make", MODELS)
def test_in_a_pipeline(
    make: Callable[[], tuple[Learner, DataLoader[Any]]],
    in_flight: int,
    planned: list[Estimate],
    accelerator: TestAccelerator,
    tmp_path: Path,
) -> None:
    # With few layers, stages of measured times are less even than with many.
    check_pipeline(make, in_flight, planned, accelerator, tmp_path, share=2.6)


def test_no_device_has_more_than_its_plan_says(
    planned: list[Estimate], accelerator: TestAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an evaluation between two steps, gradients of all minibatches in flight wait, which no plan has room for."""
    monkeypatch.setattr(profiling, "_times", times_by_weights)

    def small() -> Learner:
        torch.manual_seed(7)
        return Writes(in_a_row(blocks=4, width=96), ADAMW)

    loader, in_flight = words(20, 2), 4
    declared = cluster(*LARGE)
    trainer_on(accelerator, stashing(stages=4, in_flight=in_flight, cluster=declared)).fit(small(), loader)
    said = {stage.slot.number: stage.memory.total for stage in planned[-1].stages}
    room = [said[number] for number in range(DEVICES)]
    task = small()
    expected = expect(task, loader, in_flight, max_epochs=2)
    limit(*room)
    strategy = stashing(stages=4, in_flight=in_flight, cluster=cluster(*room))
    trainer = trainer_on(accelerator, strategy, max_epochs=2, val_check_interval=4)
    trainer.fit(task, loader, loader)
    assert_same(expected.states[-1], State.of(task, trainer.optimizers[0]))
    for stage in planned[-1].stages:
        assert peaks()[stage.slot.number] <= MARGIN * stage.memory.total, str(stage.slot)
    assert any(stage.host_bytes for stage in strategy.last_run.stages)


def test_two_buffers_fit_where_stashing_does_not(
    planned: list[Estimate], accelerator: TestAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_times", times_by_weights)

    def small() -> Learner:
        torch.manual_seed(7)
        return Writes(in_a_row(blocks=4, width=96), ADAMW)

    def strategy(weights: str, memory: Sequence[int]) -> HetPipeStrategy:
        return stashing(stages=4, in_flight=4, weights=weights, cluster=cluster(*memory))

    loader, buffered = words(20, 2), {"accumulate_grad_batches": 4}
    trainer_on(accelerator, strategy("2bw", LARGE), **buffered).fit(small(), loader)
    room = [max(stage.memory.total for stage in planned[-1].stages)] * DEVICES
    with pytest.raises(SettingError, match="does not fit into the memory of its devices"):
        trainer_on(accelerator, strategy("stash", room)).fit(small(), loader)
    task = small()
    expected = expect(task, loader, 4, max_epochs=1, accumulate=4, weights="2bw")
    limit(*room)
    trainer = trainer_on(accelerator, strategy("2bw", room), **buffered)
    trainer.fit(task, loader)
    assert_same(expected.states[-1], State.of(task, trainer.optimizers[0]))


NESTEROV = Recipe(lambda model: torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9, nesterov=True))


class Four(Evaluated):
    """Four layers, of which four stages can be made in one way only."""

    def __init__(self) -> None:
        super().__init__(NESTEROV)
        self.net = nn.Sequential(*[nn.Linear(192, 192) for _ in range(4)])

    def compute(self, batch: Batch) -> Outputs:
        (x,) = batch
        return {"loss": F.mse_loss(self.net(x), x.roll(1, -1))}


@pytest.mark.parametrize("declared", [True, False])
def test_weights_are_stashed_where_a_prediction_lacks_room(
    declared: bool, planned: list[Estimate], accelerator: TestAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default; what the last step has changed is a copy of the weights more."""

    def small() -> Learner:
        torch.manual_seed(7)
        return Four()

    told = list[str]()
    monkeypatch.setattr("lightning_hetpipe.run.first_minibatch.rank_zero_info", told.append)
    loader = DataLoader(TensorDataset(torch.randn(40, 192, generator=torch.Generator().manual_seed(3))), 4)
    estimate = planner._estimate

    def noting(*args: Any) -> Estimate:
        planned.append(estimate(*args))
        return planned[-1]

    monkeypatch.setattr(planner, "_estimate", noting)
    monkeypatch.setattr(measuring, "layer_seconds", lambda *_: [1e-3] * 4)  # as measured times differ from fit to fit
    stashed = stashing(stages=4, in_flight=4, cluster=cluster(*LARGE) if declared else None)
    trainer_on(accelerator, stashed).fit(small(), loader)
    # With half a copy to spare, of the four that are stashed.
    room = [max(stage.memory.total + stage.memory.versions // 8 for stage in planned[-1].stages)] * DEVICES
    task = small()
    expected = expect(task, loader, 4, max_epochs=1, weights="stash", lr_correction=CORRECTED)
    for index, each in enumerate(room):
        set_limit(index, int((MARGIN if declared else 1 / (1 - FRAGMENTED)) * each) + 4096)
    strategy = HetPipeStrategy(stages=4, in_flight=4, cluster=cluster(*room) if declared else None)
    trainer = trainer_on(accelerator, strategy)
    trainer.fit(task, loader)
    assert_same(expected.states[-1], State.of(task, trainer.optimizers[0]))
    assert any("is 'stash', as devices have no room for what 'pipeoptim' predicts" in line for line in told)


class Distils(Evaluated):
    """Its loss and its teacher take more of the last device than its layers do."""

    def __init__(self) -> None:
        super().__init__(ADAMW)
        self.net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(7)], nn.Linear(64, 2000))
        self.teacher = nn.Linear(64, 2000).requires_grad_(False)

    def compute(self, batch: Batch) -> Outputs:
        (x,) = batch
        logits = self.net(x)
        wanted = self.teacher(x).softmax(-1)
        return {"loss": (wanted * (wanted.log() - logits.log_softmax(-1))).sum(-1).mean(), "logits": logits.detach()}


@pytest.mark.parametrize("declared", [True, False])
def test_user_code_counts_on_the_last_device(
    declared: bool, accelerator: TestAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where devices are all the same, and stages are equal."""
    loader = DataLoader(TensorDataset(torch.randn(96, 64, generator=torch.Generator().manual_seed(3))), 16)
    torch.manual_seed(7)
    task = Distils()
    expected = expect(task, loader, 3, max_epochs=1)
    trainer = trainer_on(accelerator, stashing(stages=4, in_flight=3, cluster=cluster(*LARGE) if declared else None))
    said = list[PlannedMemory | None]()
    begin = Engine.begin

    def noting(engine: Engine, *args: Any, **kwargs: Any) -> None:
        said.append(engine.stages[-1].memory.planned)
        begin(engine, *args, **kwargs)

    monkeypatch.setattr(Engine, "begin", noting)
    trainer.fit(task, loader)
    assert_same(expected.states[-1], State.of(task, trainer.optimizers[0]))
    assert said[0] is not None
    assert peaks()[-1] / MARGIN <= said[0].total < 1.5 * peaks()[-1]


def test_equal_stages_that_may_take_too_much_are_warned_of(accelerator: TestAccelerator) -> None:
    """Results depend on Nm, so that it is not lowered silently; what waits goes to the host as long as that helps."""
    torch.manual_seed(7)
    task, loader = Writes(GPT(blocks=5, width=80), ADAMW), words(20, 2)
    for index in range(DEVICES):
        set_limit(index, 4_950_000)
    strategy = Pinned((0, 3, 4, 5), 5)
    with pytest.warns(UserWarning, match="5 minibatches in flight may take more memory .* set in_flight="):
        trainer_on(accelerator, strategy).fit(task, loader)
    assert max(stage.host_bytes for stage in strategy.last_run.stages)


# One minibatch in flight: a spread run.


class Adversaries(L.LightningModule):
    """Two optimizers, a penalty on gradients, and a module that two layers of the other one surround."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.makes = nn.Sequential(*[nn.Linear(96, 96) for _ in range(12)])
        self.judges = nn.Sequential(*[nn.Linear(96, 96) for _ in range(12)], nn.Linear(96, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        optimizers: Any = self.optimizers()
        making, judging = optimizers
        real = real + 0.1 * self.makes(real)
        if batch_idx % 2:
            loss = -self.judges(real).mean()
            making.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(making, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            making.step()
            return
        leaf = real.detach().requires_grad_(True)
        judged = self.judges(leaf)
        (slope,) = torch.autograd.grad(judged.sum(), leaf, create_graph=True)
        judging.zero_grad()
        self.manual_backward(judged.mean() + (slope.norm(dim=1) - 1).square().mean())
        judging.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.makes.parameters()), torch.optim.SGD(self.judges.parameters(), 0.01, momentum=0.9)


def adversaries() -> tuple[L.LightningModule, DataLoader[Any]]:
    chance = torch.Generator().manual_seed(3)
    return Adversaries(), DataLoader(TensorDataset(torch.randn(24, 96, generator=chance)), 4)


@quick("gpt", "adversaries")
@pytest.mark.parametrize("make", [*MODELS, adversaries])
def test_with_one_in_flight(
    make: Callable[[], tuple[L.LightningModule, DataLoader[Any]]], accelerator: TestAccelerator, tmp_path: Path
) -> None:
    task, loader = make()
    trainer_on(accelerator, HetPipeStrategy(stages=4, in_flight=1)).fit(task, loader)
    room = int(sum(peaks()) / SHARE)
    plain, _ = make()
    quiet_trainer(max_epochs=2).fit(plain, loader)
    task, _ = make()
    limit(*[room] * DEVICES)
    declared = cluster(*[room] * DEVICES)
    trainer = trainer_on(accelerator, HetPipeStrategy(stages=4, in_flight=1, cluster=declared))
    trainer.fit(task, loader)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    again, _ = make()
    strategy = HetPipeStrategy(stages=4, in_flight=1, cluster=declared)
    resumed = trainer_on(accelerator, strategy, max_epochs=2)
    resumed.fit(again, loader, ckpt_path=str(tmp_path / "half.ckpt"))
    assert_same(dict(plain.named_parameters()), dict(again.named_parameters()))
    assert_same(dict(plain.named_buffers()), dict(again.named_buffers()))
    assert len(strategy.last_run.stages) == DEVICES


@quick("gpt-plan", "deep_resnet-in_flight")
@pytest.mark.parametrize("following", ["plan", "in_flight"])
@pytest.mark.parametrize("make", [gpt, deep_resnet, translator])
def test_a_spread_run_takes_what_its_plan_says(
    make: Callable[[], tuple[Learner, DataLoader[Any]]], following: str, accelerator: TestAccelerator
) -> None:
    """On devices that have less than a pipeline of one minibatch takes; bytes are those that a CPU has shown."""
    task, loader = make()
    profile, optimizer, _ = profiled(quiet_trainer(ProfilingStrategy()), task, train_dataloaders=loader)
    assert optimizer is not None

    def planned_for(memory: Sequence[int], spread: bool = True) -> Estimate:
        return best_plan(
            PlanningProblem(profile, cluster(*memory), optimizer=optimizer, stages=DEVICES, spread=spread), 1
        )

    room = [max(LEAST_MEMORY, stage.memory.total) for stage in planned_for(LARGE).stages]
    if following == "in_flight":
        room = [max(room)] * DEVICES
    choice = planned_for(room)
    assert choice.fits
    assert choice.spread
    assert not planned_for(room, spread=False).fits
    names = [layer.name for layer in profile.layers]
    plan = Plan.of(choice, profile.model, names, cluster(*room))
    plain, _ = make()
    quiet_trainer(max_epochs=2).fit(plain, loader)
    task, _ = make()
    limit(*room)
    given: Any = {"plan": plan} if following == "plan" else {"in_flight": 1, "cluster": cluster(*room)}
    strategy = HetPipeStrategy(**given)
    trainer_on(accelerator, strategy, max_epochs=2).fit(task, loader)
    assert_same(dict(plain.named_parameters()), dict(task.named_parameters()))
    assert len(strategy.last_run.stages) == DEVICES
    for peak, stage in zip(peaks(), choice.stages, strict=True):
        assert peak <= MARGIN * stage.memory.total, str(stage.slot)


class Heads(Decoder):
    """Its six decoders need not wait for each other, and those on the first devices have the most to do."""

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.encoder[0](self.words(source)), self.words(target)
        found = [block(x.repeat(1, 1 + 20 * (6 - n), 1), memory).mean(1) for n, block in enumerate(self.decoder)]
        y: Tensor = self.head(torch.stack(found))
        return y


@pytest.mark.parametrize("kind", [Decoder, Heads])
def test_an_output_that_six_layers_on_three_devices_use(kind: type[Decoder], accelerator: TestAccelerator) -> None:
    """With a queue for each device, a backward adds the six gradients in the order of their arrival."""
    devices = [torch.device(NAME, index) for index in range(3)]
    for seed in range(50):
        torch.manual_seed(seed)
        model, source, target = kind(width=16), torch.randint(WORDS, (4, 7)), torch.randint(WORDS, (4, 6))
        if kind is Heads:
            del model.encoder[1:]
        expected = torch.autograd.grad(model(source, target).square().sum(), list(model.parameters()))
        spread(model, devices, [1.0, 1.0, 1.0])
        with OperandsTogether(devices):
            loss = model(source.to(devices[-1]), target.to(devices[-1])).square().sum()
            found = torch.autograd.grad(loss, list(model.parameters()))
        assert {parameter.device for parameter in model.parameters()} == set(devices)
        assert_same(expected, tuple(gradient.cpu() for gradient in found), f"seed {seed}")


def test_a_fit_frees_what_an_earlier_one_has_left_in_cycles(
    accelerator: TestAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, check = list[list[int]](), first_minibatch.check_memory

    def noting(*args: Any) -> None:
        held.append([torch.accelerator.memory_allocated(index) for index in range(DEVICES)])
        check(*args)

    monkeypatch.setattr(first_minibatch, "check_memory", noting)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            task, loader = Sees(ResNet(blocks=1), SGD), images(20, 4)
            trainer_on(accelerator, stashing(stages=4, in_flight=2)).fit(task, loader)
    finally:
        gc.enable()
    assert held[0] == held[1]


def test_nothing_of_a_module_stays_on_devices_after_a_fit(accelerator: TestAccelerator) -> None:
    """Gradients of linear layers are views; what they are views of must go where they go."""
    task, loader = Writes(GPT(blocks=1), ADAMW), words(20, 4)
    trainer = trainer_on(accelerator, stashing(stages=4, in_flight=2))
    trainer.fit(task, loader)
    gc.collect()
    assert all(parameter.grad is not None for parameter in trainer.lightning_module.parameters())
    assert [torch.accelerator.memory_allocated(index) for index in range(DEVICES)] == [0] * DEVICES
