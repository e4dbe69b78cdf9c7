"""Trains one model of :mod:`benchmarks.models_list` for :mod:`benchmarks.models_table`; prints a line of JSON."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor

from benchmarks.model_fits import equality, fit
from benchmarks.models_list import Batch, Model, models, still
from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError

MINIBATCHES = 3


class Module(L.LightningModule):
    """One of the models, as users write its module."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = still(model.make()).train()
        self.loss = model.loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class Told(logging.Handler):
    """Collects what the strategy says of a model that it has taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "taken apart" in record.getMessage():
            self.lines.append(record.getMessage())


def fitted(model: Model, batches: list[Batch], strategy: Any) -> Mapping[str, Tensor]:
    """Weights and buffers after training."""
    module = Module(model)
    fit(module, batches, strategy)
    return module.state_dict()


def row(model: Model) -> dict[str, str]:
    """Row of one model in the table, by what becomes of it.

    Returns:
        "outcome" (captured, partly, refused, or error where the plain run fails), "said" of the strategy, "equal".
    """
    torch.manual_seed(1)
    batches = [model.batch() for _ in range(MINIBATCHES)]
    try:
        plain = fitted(model, batches, "auto")
    except Exception as error:
        return {"outcome": "error", "said": f"a plain Trainer fails: {sentence(error)}", "equal": ""}
    told = Told()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(told)
    try:
        piped = fitted(model, batches, HetPipeStrategy(stages=2, in_flight=1))
    except SettingError as error:
        return {"outcome": "refused", "said": sentence(error), "equal": ""}
    except Exception as error:
        return {"outcome": "error", "said": f"{type(error).__name__}: {sentence(error)}", "equal": ""}
    outcome = "partly" if told.lines else "captured"
    return {"outcome": outcome, "said": " ".join(told.lines), "equal": equality(plain, piped)}


def sentence(error: Exception) -> str:
    return " ".join(str(error).split())


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(json.dumps(row(models()[sys.argv[1]])))
