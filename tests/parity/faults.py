"""A run in which one call of one hook fails, and what it leaves behind: in the process, the module and the Trainer."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.parity.describing import chance, digest
from tests.parity.observing import CALLBACK_HOOKS, DATA_HOOKS, MODULE_HOOKS, Memory, Notes, observed
from tests.support.models import CLASSES, vectors
from tests.support.traces import ours_in
from tests.support.trainers import quiet_trainer

Address = tuple[str, str]
"""An owner, and its hook."""


class Fault(Exception):
    """The user's own."""


@dataclass
class Mine(Notes):
    """Notes down calls alone. The call number ``at`` of ``address`` fails with ``error``."""

    address: Address | None = None
    at: int = 0
    error: Callable[[], BaseException] = Fault
    calls: list[Address] = field(default_factory=list)
    counted: Counter[Address] = field(default_factory=Counter)

    def observe(self, owner: str, hook: str, arguments: Any, call: Callable[[], Any]) -> Any:
        address = (owner, hook)
        self.calls.append(address)
        self.counted[address] += 1
        if address == self.address and self.counted[address] == self.at:
            self.fail()
        return call()

    def fail(self) -> None:
        raise self.error()


class Module(L.LightningModule):
    """Its optimizer and scheduler are observed as well."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.kinds = (
            observed(torch.optim.SGD, ["step", "zero_grad", "state_dict"], "optimizer", notes),
            observed(torch.optim.lr_scheduler.ExponentialLR, ["step"], "scheduler", notes),
        )

    def _loss(self, batch: tuple[Tensor, Tensor], name: str) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log(name, loss)
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch, "loss")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._loss(batch, "val_loss")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._loss(batch, "test_loss")

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.net(batch[0])
        return logits

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = self.kinds
        made = optimizer(self.parameters(), lr=0.1)
        return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler(made, 0.9), "interval": "step"}}


class Data(L.LightningDataModule):
    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.kind = observed(TensorDataset, ["__getitem__"], "dataset", notes)

    def loader(self, samples: int) -> DataLoader[Any]:
        dataset: Dataset[Any] = self.kind(*vectors(samples, 2).dataset.tensors)  # type: ignore[attr-defined]
        return DataLoader(dataset, batch_size=2)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(10)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(4)

    test_dataloader = predict_dataloader = val_dataloader


def everything(trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule) -> None:
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)


@dataclass
class Aftermath:
    """Remains of a run that has failed.

    Attributes:
        calls: Every hook that was called, in order.
        process: The state of the process: environment, handlers, threads, random numbers, files.
        things: The names of attributes of the module, the data, the Trainer and its loops.
    """

    error: BaseException
    calls: list[Address]
    process: dict[str, Any]
    things: dict[str, list[str]]
    notes: Mine
    module: Module
    data: Data
    trainer: L.Trainer


def build(notes: Mine) -> tuple[Module, Data]:
    torch.manual_seed(5)
    module: Module = observed(Module, MODULE_HOOKS, "module", notes)(notes)
    data: Data = observed(Data, [*DATA_HOOKS], "data", notes)(notes)
    return module, data


def trainer_for(notes: Mine, strategy: Strategy | str, **settings: Any) -> L.Trainer:
    callback = observed(L.Callback, CALLBACK_HOOKS, "callback", notes)()
    checkpoint = ModelCheckpoint(notes.folder, every_n_train_steps=4)
    given: dict[str, Any] = {"callbacks": [callback, checkpoint], "enable_checkpointing": True, "val_check_interval": 2}
    given |= {"logger": Memory(notes), "log_every_n_steps": 1, "num_sanity_val_steps": 1, **settings}
    return quiet_trainer(strategy, default_root_dir=notes.folder, **given)


def fail(notes: Mine, strategy: Strategy | str) -> Aftermath:
    """Runs all of it; the fault is to end it."""
    notes.folder.mkdir(parents=True)
    module, data = build(notes)
    trainer = trainer_for(notes, strategy)
    try:
        everything(trainer, module, data)
    except BaseException as error:
        return Aftermath(
            error, notes.calls, process(notes.folder), things(trainer, module, data), notes, module, data, trainer
        )
    raise AssertionError(f"nothing failed in {notes.address}")


def process(folder: Path) -> dict[str, Any]:
    return {
        "environment": dict(os.environ) | {"PYTEST_CURRENT_TEST": ""},
        "handlers": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
        "hooks": [str(hook) for hook in (sys.excepthook, threading.excepthook, sys.unraisablehook)],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "torch": [
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_anomaly_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        ],
        "chance": chance(),
        "files": sorted(path.name for path in folder.rglob("*")),
        "here": sorted(os.listdir()),
    }


def things(trainer: L.Trainer, module: nn.Module, data: L.LightningDataModule) -> dict[str, list[str]]:
    assert ours_in(module) == []
    fit = trainer.fit_loop
    owners: dict[str, Any] = {
        **{f"module {name}": part for name, part in module.named_modules()},
        "data": data,
        "trainer": trainer,
        "fit_loop": fit,
        "epoch_loop": fit.epoch_loop,
        "val_loop": fit.epoch_loop.val_loop,
        "optimization": fit.epoch_loop.automatic_optimization,
    }
    found = {}
    for name, owner in owners.items():
        for attribute, value in vars(owner).items():
            ours = type(value).__module__.startswith("lightning_hetpipe")
            assert not ours, f"{name} holds a {type(value).__name__} as {attribute}"
        found[name] = sorted(vars(owner))
    return found


def weights(module: nn.Module) -> dict[str, str]:
    return {name: digest(value) for name, value in module.state_dict().items()}
