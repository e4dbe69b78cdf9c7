"""Uses of the Trainer that several virtual workers refuse, or that end in an error."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.tuner import Tuner
from torch import nn

from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.planning.plan.planned_worker import PlannedStage, PlannedWorker
from tests.wsp.featured import Told, rows
from tests.wsp.uses import Use

REFUSED: dict[str, tuple[Use, str]] = {}
"""Each use, and what is said of it."""


def refused(said: str) -> Callable[[Use], Use]:
    def add(run: Use) -> Use:
        REFUSED[run.__name__] = run, said
        return run

    return add


@refused("SettingError: sync_batchnorm=True joins statistics of concurrent workers")
def joined_batchnorm(bench: Any) -> dict[str, Any]:
    bench.trainer(sync_batchnorm=True).fit(Told(), rows(8))
    return {}


@refused("The Batch size finder is not supported with distributed strategies")
def batch_size(bench: Any) -> dict[str, Any]:
    bench.trainer(cb.BatchSizeFinder()).fit(Told(), rows(8))
    return {}


@refused("Tuning the batch size is currently not supported with distributed strategies")
def batch_size_search(bench: Any) -> dict[str, Any]:
    Tuner(bench.trainer()).scale_batch_size(Told(), rows(8))
    return {}


@refused("SettingError: val_check_interval is a time, 5 s")
def validation_by_time(bench: Any) -> dict[str, Any]:
    bench.trainer(val_check_interval=timedelta(seconds=5)).fit(Told(), rows(8), rows(4))
    return {}


@refused("SettingError: Told uses manual optimization")
def manual(bench: Any) -> dict[str, Any]:
    module = Told()
    module.automatic_optimization = False
    bench.trainer().fit(module, rows(8))
    return {}


@refused("SettingError: configure_optimizers returned several optimizers")
def two_optimizers(bench: Any) -> dict[str, Any]:
    class Two(Told):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]

    bench.trainer().fit(Two(), rows(8))
    return {}


@refused("SettingError: training_step returned None to skip the step")
def no_loss(bench: Any) -> dict[str, Any]:
    class Skips(Told):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 2 else super().training_step(batch, batch_idx)

    bench.trainer().fit(Skips(), rows(16))
    return {}


@refused("SettingError: all_gather waits for the other virtual workers in a step that runs ahead of Lightning's loop")
def gather_in_step(bench: Any) -> dict[str, Any]:
    class Gathers(Told):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.all_gather(loss.detach())
            return loss

    bench.trainer().fit(Gathers(), rows(16))
    return {}


@refused("SettingError: all_gather(sync_grads=True) joins the backward passes")
def gather_gradients(bench: Any) -> dict[str, Any]:
    class Gathers(Told):
        def on_train_epoch_end(self) -> None:
            self.all_gather(next(self.parameters()).sum(), sync_grads=True)

    bench.trainer().fit(Gathers(), rows(8))
    return {}


@refused("virtual worker 0 called trainer.save_checkpoint")
def call_of_one(bench: Any) -> dict[str, Any]:
    class Alone(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.is_global_zero:
                trainer.save_checkpoint(bench.folder / "alone.ckpt")

    bench.trainer(Alone()).fit(Told(), rows(8))
    return {}


@refused("SettingError: virtual worker 0 gave the others a value that cannot be sent between processes")
def strange_value(bench: Any) -> dict[str, Any]:
    class Broadcasts(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.strategy.broadcast(timedelta(seconds=1))

    bench.trainer(Broadcasts()).fit(Told(), rows(8))
    return {}


@refused("parameter 'net.3.weight' is float")
def another_model(bench: Any) -> dict[str, Any]:
    class Wider(Told):
        def setup(self, stage: str) -> None:
            if self.global_rank == 1:
                self.net[3] = nn.Linear(8, 8).double()

    bench.trainer().fit(Wider(), rows(8))
    return {}


@refused("in_flight=")
def other_settings(bench: Any) -> dict[str, Any]:
    trainer = bench.trainer()
    if trainer.global_rank == 1:
        trainer.strategy.in_flight = 2
    trainer.fit(Told(), rows(8))
    return {}


@refused("weights=")
def other_policies(bench: Any) -> dict[str, Any]:
    trainer = bench.trainer()
    if trainer.global_rank == 1:
        trainer.strategy.weights = "sync"
    trainer.fit(Told(), rows(8))
    return {}


@refused("lr_correction=")
def other_rates(bench: Any) -> dict[str, Any]:
    trainer = bench.trainer()
    if trainer.global_rank == 1:
        trainer.strategy.lr_correction = 7
    trainer.fit(Told(), rows(8))
    return {}


@refused("'checksum of plan=None'")
def other_plans(bench: Any) -> dict[str, Any]:
    """One has a plan, of which the others know nothing."""
    trainer = bench.trainer()
    if trainer.global_rank == 1:
        stages = [PlannedStage("box", f"cpu:{number}", 0, 0, 0.1, 1, None) for number in range(2)]
        workers = tuple(PlannedWorker(10.0, (stage,)) for stage in stages)
        trainer.strategy.plan = Plan("Told", 1, 1, 0, 0.1, 20.0, workers, ("net",))
    trainer.fit(Told(), rows(8))
    return {}


@refused("ValueError: a callback of one")
def failing_callback(bench: Any) -> dict[str, Any]:
    class Fails(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.global_rank == 1:
                raise ValueError("a callback of one")

    bench.trainer(Fails()).fit(Told(), rows(8), rows(4))
    return {}
