"""One stage with one minibatch in flight: Lightning's own steps, of which nothing is restricted."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.strategy.planned_devices import PlannedDevices
from tests.support.ahead import Memory
from tests.support.captured_models import UNet, Whole
from tests.support.equality import assert_same, difference
from tests.support.models import vectors
from tests.support.small import Learner, batches
from tests.support.trainers import quiet_trainer


class Dropping(nn.Module):
    """Draws in a module of torch's own, in its own forward, and in one module that stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.net = nn.Sequential(nn.Linear(8, 8), self.drop, nn.ReLU(), self.drop, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x) + torch.rand_like(x)
        return y


class Draws(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Sequential(nn.ReLU(), nn.Dropout(0.2)))
        self.second = Dropping()
        self.third = nn.LSTM(8, 8, num_layers=2, dropout=0.4, batch_first=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output, _ = self.third(self.second(self.first(batch))[:, None])
        loss: Tensor = output.square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(strategy: Any, module: L.LightningModule) -> list[Tensor]:
    torch.manual_seed(5)
    data: Any = list(torch.randn(24, 8))
    quiet_trainer(strategy).fit(module, DataLoader(data, batch_size=4))
    return [parameter.detach() for parameter in module.parameters()]


def test_random_numbers_are_those_of_a_plain_run() -> None:
    """Law L7: torch's default generators draw without a pipeline; with one, generators of the minibatch do.

    Until issue 49 a spread run had the pipeline's numbers, at the price of a mode and of wrappers around modules.
    """
    plain = trained("auto", Draws())
    assert_same(plain, trained(HetPipeStrategy(stages=1, in_flight=1), Draws()))
    assert_same(plain, trained(HetPipeStrategy(stages=3, in_flight=1), Draws()))
    pipelined = trained(HetPipeStrategy(stages=3, in_flight=1, recompute=True), Draws())
    assert difference(plain, pipelined) is not None
    assert_same(pipelined, trained(HetPipeStrategy(stages=2, in_flight=1, recompute=True), Draws()))


def test_naming_modules_changes_no_random_number() -> None:
    plain = trained("auto", Draws())
    assert_same(plain, trained(HetPipeStrategy(stages=2, in_flight=1, module=["first", "second"]), Draws()))


class Free(L.LightningModule):
    """Does in ``training_step`` what a pipeline could not do as it does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(8, 8)
        self.threads: set[int | None] = set()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.threads.add(threading.get_ident())
        assert "forward" not in vars(self.net)
        y: Tensor = self.net(self.net(batch).tanh())
        if y.sum() > 0 or batch_idx == 2:
            self.net.weight.data.mul_(0.9)
            y = self.net(y)
        (slope,) = torch.autograd.grad(y.sum(), y, retain_graph=True)
        return (y * slope).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_nothing_is_restricted() -> None:
    module = Free()
    alone = trained(HetPipeStrategy(stages=1), module)
    assert module.threads == {threading.get_ident()}
    assert_same(alone, trained("auto", Free()))


def test_arguments_of_a_module_may_have_any_name() -> None:
    class Net(nn.Linear):
        def forward(self, input: Tensor, batch: int = 0, name: float = 1.0, chance: float = 1.0) -> Tensor:
            return super().forward(input) * name * chance + batch

    class Named(Free):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(8, 8)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(batch, batch=1, name=2.0, chance=0.5).square().mean()
            return loss

    alone = trained(HetPipeStrategy(), Named())
    assert_same(alone, trained("auto", Named()))


class Parallel(nn.Module):
    """Calls its layers in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return torch.cat(list(pool.map(self.layers, x.chunk(2))))


def test_layers_that_a_piece_calls_in_a_thread_are_no_pieces() -> None:
    task = Learner(net=Parallel())
    trainer = quiet_trainer(HetPipeStrategy(stages=1, in_flight=1))
    trainer.fit(task, batches(3))
    assert isinstance(trainer.strategy, HetPipeStrategy)
    report = trainer.strategy.last_run
    assert report is not None
    assert [stage.layers for stage in report.stages] == [["net"]]


def test_a_loss_without_a_module() -> None:
    class Bare(Free):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (batch * self.scale).square().mean()

    alone = trained(HetPipeStrategy(), Bare())
    assert_same(alone, trained("auto", Bare()))


def test_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise AssertionError(f"{thread.name} was started")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    trained(HetPipeStrategy(), Free())


def test_boring_model_is_one_stage_and_a_warning_says_so() -> None:
    with pytest.warns(UserWarning, match="one layer, so HetPipeStrategy trains it as one stage"):
        L.Trainer(strategy="hetpipe", accelerator="cpu", fast_dev_run=True, enable_progress_bar=False).fit(
            BoringModel()
        )


def test_a_module_that_would_be_captured_is_not_said_to_be_one_layer() -> None:
    with pytest.warns(UserWarning, match="there is one device, .* for more, set stages"):
        quiet_trainer(HetPipeStrategy(), limit_train_batches=2).fit(Whole(UNet()), vectors(14, 4))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(Learner):
    """A step takes a second by ``clock``, and one of a validation a hundred."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 1.0
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 100.0


@pytest.mark.parametrize("stages", [1, 2])
def test_the_report_counts_the_time_of_training_alone(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without validation, and without the first minibatch of the fit."""
    clock = Clock()
    monkeypatch.setattr("lightning_hetpipe.reporting.report.perf_counter", clock)
    strategy = HetPipeStrategy(stages=stages, in_flight=1)
    settings: Any = {"max_epochs": 2, "val_check_interval": 2, "num_sanity_val_steps": 1}
    quiet_trainer(strategy, **settings).fit(Timed(clock), batches(6), batches(1))
    assert strategy.last_run.samples_per_second == pytest.approx(4.0)


def test_loggers_get_nothing_of_ours() -> None:
    """There is no pipeline whose stages could be busy; such a run logs what a plain Trainer does."""
    memory = Memory()
    quiet_trainer(HetPipeStrategy(), logger=memory, log_every_n_steps=1).fit(Learner(), batches(4))
    assert not any(name.startswith("hetpipe/") for _, row in memory.logged for name in row)


def test_the_report() -> None:
    strategy = HetPipeStrategy()
    quiet_trainer(strategy).fit(Learner(), batches(4))
    report = strategy.last_run
    assert report is not None
    assert (report.in_flight, report.minibatches, len(report.stages)) == (1, 3, 1)
    (stage,) = report.stages
    assert stage.layers == ["net.0", "net.1", "net.2", "net.3"][: len(stage.layers)]
    assert stage.layer_types[0] == "Linear"
    assert report.samples_per_second > 0
    assert stage.busy is not None
    assert 0 < stage.busy <= 1
    assert stage.time_s > 0


def test_a_named_module_that_is_never_called() -> None:
    class Two(Free):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 8)

    with pytest.raises(SettingError, match="module=\\['other'\\] names 'other', which training_step did not call"):
        trained(HetPipeStrategy(module="other"), Two())


def test_devices_are_discovered_at_the_start() -> None:
    """They were for each batch."""
    found = []
    for count in (2, 5):
        strategy = HetPipeStrategy(in_flight=1)
        with mock.patch.object(PlannedDevices, "found", autospec=True, side_effect=PlannedDevices.found) as discovered:
            quiet_trainer(strategy).fit(Learner(), batches(count))
        found.append(discovered.call_count)
    assert found[0] == found[1]


# What no pipeline can train.


class Adversaries(L.LightningModule):
    """Two optimizers, and one that evaluates the loss several times; steps that are skipped; a penalty on gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.makes = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.judges = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        making, judging = optimizers
        if batch_idx % 2:
            self.toggle_optimizer(making)
            loss = -self.judges(self.makes(batch)).mean()
            making.zero_grad()
            self.manual_backward(loss)
            making.step()
            self.untoggle_optimizer(making)
            return
        real = batch.clone().requires_grad_(True)
        loss = self.judges(self.makes(batch).detach()).mean() - self.judges(real).mean()
        (slope,) = torch.autograd.grad(self.judges(real).sum(), real, create_graph=True)
        judging.zero_grad()
        self.manual_backward(loss + (slope.norm(dim=1) - 1).square().mean())
        judging.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.makes.parameters()), torch.optim.SGD(self.judges.parameters(), 0.1)


class Newton(Free):
    """The loss is evaluated several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch) - batch).square().mean()
        return loss


class Skips(Free):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx in (0, 3) else super().training_step(batch, batch_idx)


class Backward(Free):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(2 * loss, *args, **kwargs)


class Iterates(Free):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]  # Lightning looks at its name
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("make", "stages"),
    [(Free, 1), (Adversaries, 1), (Adversaries, 3), (Newton, 1), (Skips, 1), (Backward, 1), (Iterates, 1)],
)
def test_with_one_minibatch_in_flight_all_is_as_without_us(make: Any, stages: int) -> None:
    ours = trained(HetPipeStrategy(stages=stages, in_flight=1), make())
    assert_same(ours, trained("auto", make()))


def test_more_stages_than_layers() -> None:
    with pytest.raises(SettingError, match="stages=2 is more than the 1 layer of the pipelined module"):
        trained(HetPipeStrategy(stages=2, in_flight=1), Free())


@pytest.mark.parametrize("calls", [(), ("net.0",), ("other",)])
def test_layers_that_the_first_step_leaves_out_are_layers_too(calls: tuple[str, ...]) -> None:
    """Such as those of a GAN's second network, or all, where the first batch is skipped."""

    def step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Any:
        names = calls if batch_idx == 0 else ("net", "other")
        return sum(module.get_submodule(name)(x).square().mean() for name in names) if names else None

    def trained_with(strategy: Any) -> list[Tensor]:
        torch.manual_seed(3)
        module = Learner(step, other=nn.Linear(6, 6))
        quiet_trainer(strategy).fit(module, batches(3))
        return [parameter.detach() for parameter in module.parameters()]

    assert_same(trained_with("auto"), trained_with(HetPipeStrategy(stages=2, in_flight=1)))


def test_an_output_that_is_none_of_lightnings_is_refused_by_lightning() -> None:
    module = Learner(lambda module, x, y, batch_idx: 1)
    with pytest.raises(MisconfigurationException, match="must return a Tensor, a dict, or None"):
        quiet_trainer(HetPipeStrategy(stages=2, in_flight=1)).fit(module, batches(3))


def test_the_report_names_what_can_be_called() -> None:
    """It comes from the modules alone, as nothing watches their calls: containers compute nothing themselves."""
    names = {"first": nn.ModuleList([nn.Linear(6, 6)]), "second": nn.ModuleDict({"a": nn.Sequential(nn.Linear(6, 3))})}

    def step(module: Any, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(module.second["a"](module.first[0](x)), y)

    strategy = HetPipeStrategy(in_flight=1)
    quiet_trainer(strategy).fit(Learner(step, nn.Identity(), **names), batches(3))
    assert [stage.layers for stage in strategy.last_run.stages] == [["first.0", "second.a.0"]]


def test_the_report_of_several_stages() -> None:
    strategy = HetPipeStrategy(stages=2, in_flight=1)
    quiet_trainer(strategy).fit(Learner(), batches(4))
    report = strategy.last_run
    assert [layer for stage in report.stages for layer in stage.layers] == ["net.0", "net.1", "net.2", "net.3"]
    assert [stage.busy for stage in report.stages] == [None, None]  # not known of each
    assert report.minibatches == 3
    assert str(report).startswith("Trained as a spread run of 2 stages, 1 minibatch in flight\n")
