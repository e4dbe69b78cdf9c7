"""Settings and callbacks of the Trainer that meet in one run: plain with one minibatch in flight, else the oracle's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    timer,
)
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.exact.pipelines import even
from tests.parity.comparing import Scenario, assert_as_oracle, assert_as_plain
from tests.parity.modules import Watched
from tests.support.marks import slow_except
from tests.support.models import CLASSES, vectors


def compare(scenario: Scenario, in_flight: int, folder: Path, layers: int = 6) -> Any:
    check = assert_as_plain if in_flight == 1 else assert_as_oracle
    return check(scenario, even(layers, 2, in_flight), folder)


NM = pytest.mark.parametrize("in_flight", [pytest.param(1, marks=pytest.mark.slow), 3])
"""By default the harder half: with one in flight, ``test_against_plain`` and this."""


def saved(*savers: dict[str, Any]) -> Callable[[Path], list[L.Callback]]:
    """Makes a ModelCheckpoint of each, in a folder of its own."""
    return lambda folder: [ModelCheckpoint(folder / str(index), **saver) for index, saver in enumerate(savers)]


ACCUMULATION: dict[str, tuple[Callable[[], L.LightningModule], dict[str, Any]]] = {
    "step": (partial(Watched, "step"), {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
    "every second step": (partial(Watched, "step", 2), {"accumulate_grad_batches": 2}),
    "epoch": (
        partial(Watched, "epoch"),
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    ),
    "plateau": (partial(Watched, "plateau"), {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
    "plateau by step": (partial(Watched, "plateau by step"), {"accumulate_grad_batches": 3, "val_check_interval": 3}),
}


@NM
@pytest.mark.parametrize("case", slow_except(ACCUMULATION, "plateau by step"))
def test_accumulation_clipping_and_schedulers(tmp_path: Path, case: str, in_flight: int) -> None:
    module, settings = ACCUMULATION[case]
    callbacks = saved({"every_n_train_steps": 2, "save_top_k": -1})
    story = compare(
        Scenario(module, callbacks, settings={**settings, "enable_checkpointing": True}), in_flight, tmp_path
    )
    rates = {str(event.seen["schedulers"]) for event in story.events if "schedulers" in event.seen}
    assert len(rates) > 2  # one before any is made


VALIDATION: dict[str, tuple[Callable[[Path], Sequence[L.Callback]], dict[str, Any]]] = {
    "by count": (
        saved({"monitor": "val_loss", "save_top_k": 2, "save_last": True}),
        {"val_check_interval": 2, "num_sanity_val_steps": 2},
    ),
    "by fraction": (
        lambda folder: [
            EarlyStopping("val_loss", patience=1, min_delta=0.2),
            *saved({"monitor": "val_loss", "mode": "max", "every_n_train_steps": 2, "save_top_k": 1})(folder),
        ],
        {"val_check_interval": 0.5, "max_epochs": 4},
    ),
    "across epochs": (
        saved({"monitor": "val_loss", "save_top_k": -1}),
        {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 3},
    ),
    "averaged weights": (
        lambda folder: [
            EMAWeightAveraging(decay=0.5),
            EarlyStopping("val_loss", patience=2, min_delta=0.1),
            *saved({"monitor": "val_loss", "save_top_k": 2, "save_weights_only": True})(folder),
        ],
        {"val_check_interval": 3, "max_epochs": 3},
    ),
    "averaged from an epoch on": (
        lambda folder: [
            StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1),
            *saved({"every_n_epochs": 1, "save_top_k": -1})(folder),
        ],
        {"max_epochs": 4, "val_check_interval": 3},
    ),
    "by loss of training": (
        lambda folder: [
            EarlyStopping("loss_epoch", min_delta=0.3, patience=0, check_on_train_epoch_end=True),
            *saved({"monitor": "loss_epoch", "save_on_train_epoch_end": True, "save_top_k": 1})(folder),
            LearningRateMonitor(),
        ],
        {"max_epochs": 6, "min_epochs": 3, "check_val_every_n_epoch": 2},
    ),
    "every second epoch": (
        saved({"monitor": "val_loss", "save_last": True}, {"monitor": "accuracy", "save_on_train_epoch_end": True}),
        {"check_val_every_n_epoch": 2, "max_epochs": 4, "limit_val_batches": 2, "limit_train_batches": 0.6},
    ),
}


@NM
@pytest.mark.parametrize("case", slow_except(VALIDATION, "by fraction"))
def test_validation_and_what_depends_on_it(tmp_path: Path, case: str, in_flight: int) -> None:
    callbacks, settings = VALIDATION[case]
    settings = {"enable_checkpointing": True, **settings}
    story = compare(Scenario(partial(Watched, "step"), callbacks, settings=settings), in_flight, tmp_path)
    assert story.checkpoints


STOPS: dict[str, dict[str, Any]] = {
    "in mid-flight": {"max_steps": 9, "max_epochs": -1},
    "in the first minibatch": {"max_steps": 1, "max_epochs": -1},
    "in mid-accumulation": {"max_steps": 3, "accumulate_grad_batches": 3, "max_epochs": -1},
    "at the end of an epoch": {"max_steps": 7, "max_epochs": -1, "val_check_interval": 3},
    "no steps": {"max_steps": 0},
    "no epochs": {"max_epochs": 0},
    "no time": {"max_time": timedelta(0)},
    "one batch": {"fast_dev_run": True},
    "some batches": {"fast_dev_run": 3},
    "few batches": {"overfit_batches": 3, "max_epochs": 3},
    "a share of the batches": {"limit_train_batches": 0.5, "limit_val_batches": 0},
    "no batches": {"limit_train_batches": 0},
}


@NM
@pytest.mark.parametrize(
    "case",
    slow_except(STOPS, "in mid-flight", "in mid-accumulation"),
)
def test_where_a_run_ends(tmp_path: Path, case: str, in_flight: int) -> None:
    settings = STOPS[case]
    callbacks = saved({"every_n_train_steps": 1, "save_last": True}) if not settings.get("fast_dev_run") else list_none
    settings = {
        "enable_checkpointing": callbacks is not list_none,
        "detect_anomaly": case == "in mid-accumulation",
        **settings,
    }
    compare(Scenario(partial(Watched, "step"), callbacks, settings=settings), in_flight, tmp_path)


def list_none(folder: Path) -> list[L.Callback]:
    return []


class Ticking:
    """Takes the place of the module ``time`` in the Timer: each look at the clock takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1
        return self.now


@NM
def test_time_that_runs_out(tmp_path: Path, in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def callbacks(folder: Path) -> list[L.Callback]:
        monkeypatch.setattr(timer, "time", Ticking())
        return []

    scenario = Scenario(partial(Watched, "step"), callbacks, settings={"max_time": timedelta(seconds=10)})
    story = compare(scenario, in_flight, tmp_path)
    assert 1 < story.end["global_step"] < 14


class Asking(L.Callback):
    """Asks for a stop after a few steps, again and again."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= 4:
            trainer.should_stop = True


LEAST = [{"min_steps": 9}, {"min_epochs": 2}, {"min_steps": 2, "min_epochs": 1}]


@NM
@pytest.mark.parametrize("least", slow_except(LEAST, {"min_steps": 9}))
def test_a_run_that_must_go_on_for_a_while(tmp_path: Path, least: dict[str, int], in_flight: int) -> None:
    settings = {"max_epochs": 3, "val_check_interval": 2, **least}
    compare(Scenario(Watched, lambda folder: [Asking()], settings=settings), in_flight, tmp_path)


# Data.


class Combined(Watched):
    """Trains on two loaders of 7 and 3 batches."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def train_dataloader(self) -> Any:
        loaders = {"long": vectors(26, 4), "short": vectors(10, 4, seed=8)}
        return CombinedLoader(loaders, cast(Any, self.mode))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        given = [part for part in batch.values() if part is not None] if isinstance(batch, dict) else [batch]
        x, y = (torch.cat([part[index] for part in given]) for index in (0, 1))
        return super().training_step((x, y), batch_idx)


@NM
@pytest.mark.parametrize("mode", slow_except(["min_size", "max_size", "max_size_cycle"], "max_size_cycle"))
def test_loaders_side_by_side(tmp_path: Path, mode: str, in_flight: int) -> None:
    settings = {"accumulate_grad_batches": 2, "val_check_interval": 2}
    draws = mode == "max_size_cycle"  # a loader that starts again seeds its workers
    compare(Scenario(partial(Combined, mode), settings=settings, draws=draws), in_flight, tmp_path)


class Stream(IterableDataset[Any]):
    """Batches whose number nobody knows."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Streaming(Watched):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(list(vectors(26, 4))), batch_size=None)

    def val_dataloader(self) -> Any:
        return [vectors(10, 4, seed=9), DataLoader(Stream(list(vectors(6, 4, seed=3))), batch_size=None)]


@NM
@pytest.mark.parametrize(
    "settings",
    slow_except(
        [{"accumulate_grad_batches": 4}, {"val_check_interval": 3}, {"max_steps": 9}], {"val_check_interval": 3}
    ),
)
def test_a_stream_and_several_loaders_of_validation(tmp_path: Path, settings: dict[str, Any], in_flight: int) -> None:
    # A loader of validation that begins draws a seed for its workers.
    compare(Scenario(Streaming, settings={"max_epochs": 2, **settings}, draws=True), in_flight, tmp_path)


class Reloaded(Watched):
    """New data every epoch."""

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        return vectors(18 + 4 * epoch, 4, seed=epoch)

    def val_dataloader(self) -> Any:
        return vectors(6, 4, seed=20 + self.trainer.current_epoch)


@pytest.mark.slow
@NM
def test_loaders_that_are_made_anew(tmp_path: Path, in_flight: int) -> None:
    settings = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3, "val_check_interval": 2}
    compare(Scenario(Reloaded, settings=settings), in_flight, tmp_path)


class Shuffled(Watched):
    def train_dataloader(self) -> Any:
        return DataLoader(vectors(26, 4).dataset, batch_size=4, shuffle=True, num_workers=1)


@pytest.mark.slow  # tests/exact/test_data.py compares such data with the oracle
@NM
def test_shuffled_data_from_workers(tmp_path: Path, in_flight: int) -> None:
    compare(Scenario(Shuffled, settings={"val_check_interval": 3}), in_flight, tmp_path)


# Callbacks that change what is trained, and when.


class TwoParts(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        self.net = nn.Sequential(self.backbone, self.head)


@pytest.mark.slow  # tests/exact/test_callbacks.py does the same on any cut
@NM
def test_a_backbone_that_is_unfrozen(tmp_path: Path, in_flight: int) -> None:
    def callbacks(folder: Path) -> list[L.Callback]:
        finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, train_bn=False)
        return [finetuning, LearningRateMonitor("step"), *saved({"every_n_epochs": 1, "save_top_k": -1})(folder)]

    settings = {"max_epochs": 3, "enable_checkpointing": True}
    compare(Scenario(TwoParts, callbacks, settings=settings), in_flight, tmp_path, layers=2)


@NM
def test_accumulation_that_changes(tmp_path: Path, in_flight: int) -> None:
    def callbacks(folder: Path) -> list[L.Callback]:
        return [GradientAccumulationScheduler({0: 3, 1: 1, 2: 2}), Timer(timedelta(hours=1))]

    compare(Scenario(partial(Watched, "step"), callbacks, settings={"max_epochs": 3}), in_flight, tmp_path)


class Late(Watched):
    """Makes its layers in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))


@NM
def test_layers_made_in_configure_model(tmp_path: Path, in_flight: int) -> None:
    compare(Scenario(Late), in_flight, tmp_path, layers=3)


def everything(trainer: L.Trainer, module: L.LightningModule) -> None:
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    trainer.predict(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)


@NM
def test_all_entry_points_and_a_second_fit(tmp_path: Path, in_flight: int) -> None:
    settings = {"num_sanity_val_steps": 1, "val_check_interval": 3, "max_epochs": 1}
    compare(Scenario(Watched, run=everything, settings=settings), in_flight, tmp_path)


class OwnOptimization(Watched):
    """Overrides what Lightning lets it override around a step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (self.trainer.global_step + 1) / 5)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def on_after_backward(self) -> None:
        for weight in self.parameters():
            if weight.grad is not None:
                weight.grad.mul_(0.5)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x + (self.trainer.global_step if self.trainer.training else 0), y)


@NM
def test_a_module_that_steps_itself(tmp_path: Path, in_flight: int) -> None:
    settings = {"accumulate_grad_batches": 2, "val_check_interval": 3}
    compare(Scenario(partial(OwnOptimization, "step"), settings=settings), in_flight, tmp_path)


class Resumable:
    """A loader that can be saved and resumed in the middle of an epoch."""

    def __init__(self) -> None:
        self.batches = list(vectors(26, 4))
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        self.given %= len(self.batches)
        while self.given < len(self.batches):
            self.given += 1
            yield self.batches[self.given - 1]

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Resumed(Watched):
    def train_dataloader(self) -> Any:
        return Resumable()


def resume(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Stops after five minibatches, goes on from a checkpoint in the middle of the first epoch."""
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(module)
    trainer.fit_loop.epoch_loop.max_steps = -1
    assert trainer.default_root_dir
    trainer.fit(module, ckpt_path=str(Path(trainer.default_root_dir) / "0" / "epoch=0-step=4.ckpt"))


@NM
@pytest.mark.parametrize("module", slow_except([Resumed, Watched], Resumed))
def test_going_on_in_mid_epoch(tmp_path: Path, module: type[Watched], in_flight: int) -> None:
    callbacks = saved({"every_n_train_steps": 2, "save_top_k": -1})
    settings = {"enable_checkpointing": True, "max_epochs": 2, "val_check_interval": 3}
    compare(Scenario(partial(module, "step"), callbacks, resume, settings), in_flight, tmp_path)


class Lonely(Watched):
    """No validation, a loss alone as output, accumulated by hand-written weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Tensor = super().training_step(batch, batch_idx)["loss"]
        return loss * (batch_idx % 2)

    def val_dataloader(self) -> Any:
        return []


@pytest.mark.slow  # the modules of tests/run give one
@NM
def test_a_loss_alone(tmp_path: Path, in_flight: int) -> None:
    compare(Scenario(Lonely), in_flight, tmp_path)
