"""Outcome of a small use of the Trainer, told so that two strategies can be compared."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from tests.parity.warning_caches import forget_warnings
from tests.support.trainers import quiet_trainer

Outcome = dict[str, Any]
Scenario = Callable[[Any, Path], Outcome]


class Deep(BoringModel):
    """BoringModel with layers enough for a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output: Any = super().training_step(batch, batch_idx)
        self.log("foo", output["loss"], on_step=True, on_epoch=True, prog_bar=True, batch_size=1)
        return output

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        output: Any = super().validation_step(batch, batch_idx)
        self.log("val", output["x"], batch_size=1)
        return output


def trainer(strategy: Any, folder: Path, **settings: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "limit_train_batches": 5,
        "limit_val_batches": 2,
        "limit_test_batches": 2,
        "limit_predict_batches": 2,
        "enable_checkpointing": None,  # as Lightning does unless it is told
        "num_sanity_val_steps": None,
        "log_every_n_steps": 1,
    }
    settings = {**defaults, **settings}
    settings.setdefault("logger", CSVLogger(folder, name="csv", version=0))
    return quiet_trainer(strategy, default_root_dir=folder, **settings)


def logged(file: Path) -> list[dict[str, str]]:
    """The lines of a CSVLogger's ``file``, without the metrics that a pipeline logs beside the user's."""
    if not file.exists():
        return []
    with file.open() as lines:
        rows = [{k: v for k, v in row.items() if v and not k.startswith("hetpipe/")} for row in csv.DictReader(lines)]
    return [row for row in rows if row.keys() != {"step"}]


def told(trained: L.Trainer, module: L.LightningModule, folder: Path, **more: Any) -> Outcome:
    """Outcome of a run: weights, counts, metrics, files, and ``more``."""
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "step": trained.global_step,
        "epoch": trained.current_epoch,
        "metrics": dict(trained.callback_metrics),
        "logged": dict(trained.logged_metrics),
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
        "log": logged(folder / "csv/version_0/metrics.csv"),
        "status": str(trained.state),
        **more,
    }


def fitted(strategy: Any, folder: Path, module: Any = None, **settings: Any) -> Outcome:
    module = Deep() if module is None else module
    made = trainer(strategy, folder, **settings)
    made.fit(module)
    return told(made, module, folder)


def outcome_of(run: Scenario, strategy: Any, folder: Path) -> Outcome:
    """The outcome of ``run``; an exception and the warnings are part of it."""
    forget_warnings()
    torch.manual_seed(5)
    L.seed_everything(5, verbose=False)
    folder.mkdir(parents=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = run(strategy, folder)
        except Exception as error:
            found = {"error": type(error), "message": str(error)}
    found["warnings"] = sorted({f"{w.category.__name__}: {w.message}" for w in caught})
    return found
