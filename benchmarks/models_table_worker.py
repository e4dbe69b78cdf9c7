"""Trains one model of :mod:`benchmarks.models_list` for :mod:`benchmarks.models_table`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.models_list import Batch, Model, models, still
from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.errors import SettingError
from tests import oracle

MINIBATCHES, EVALUATED, IN_FLIGHT = 5, 3, 3
RECIPE = oracle.Recipe(lambda module: torch.optim.SGD(module.parameters(), lr=0.001, momentum=0.9))
EVALUATION_WARNING = "does not run in the pipeline: "


@dataclass(frozen=True)
class Found:
    """Results for one model.

    Attributes:
        outcome: "captured"; "partly", if it was taken apart; "refused"; "error", where a plain run fails, too.
        said: The strategy's sentence where it is not captured as a whole.
        plain: Whether two stages with one minibatch in flight equal a plain run: "equal", else by how much not.
        oracle: The same for three minibatches in flight, and the oracle.
        evaluation: The same for the losses of a validation; with the reason where it was not pipelined.
    """

    outcome: str
    said: str = ""
    plain: str = ""
    oracle: str = ""
    evaluation: str = ""


class Module(L.LightningModule):
    """One of the models, as users write its module."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = still(model.make()).train()
        self.loss = model.loss
        self.evaluated: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(self.model, batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluated.append(self.loss(self.model, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return RECIPE.optimizer(self)


def fitted(model: Model, batches: Sequence[Batch], evaluated: Sequence[Batch], strategy: Any) -> Module:
    """The module after it was trained on ``batches`` once, and then validated on those ``evaluated``."""
    module = Module(model)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = [DataLoader(each, batch_size=None) for each in (batches, evaluated)]  # type: ignore[arg-type]  # a list is a dataset
    trainer.fit(module, data[0], data[1] if evaluated else None)
    return module


def equality(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """ "equal" if all tensors of ``expected`` are equal to the bit, else the largest difference."""
    if all(torch.equal(tensor, found[name]) for name, tensor in expected.items()):
        return "equal"
    differs = max((tensor - found[name]).abs().max().item() for name, tensor in expected.items())
    return f"differs by up to {differs:.0e}"


def row(model: Model) -> Found:
    """Train ``model`` plainly, in two stages, and by the oracle."""
    torch.manual_seed(1)
    batches = [model.batch() for _ in range(MINIBATCHES)]
    evaluated = [model.batch() for _ in range(EVALUATED)]
    try:
        plain = fitted(model, batches, [], "auto").state_dict()
    except Exception as error:
        return Found("error", f"a plain Trainer fails: {sentence(error)}")
    alone = HetPipeStrategy(stages=2, in_flight=1)
    ahead = HetPipeStrategy(stages=2, in_flight=IN_FLIGHT, weights="stash")
    try:
        equal = equality(plain, fitted(model, batches, [], alone).state_dict())
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            piped = fitted(model, batches, evaluated, ahead)
    except SettingError as error:
        return Found("refused", sentence(error))
    except Exception as error:
        return Found("error", f"{type(error).__name__}: {sentence(error)}")
    stale, losses = by_oracle(model, batches, evaluated)
    evaluation = equality(_numbered(losses), _numbered(piped.evaluated))
    reasons = [str(each.message) for each in warned if EVALUATION_WARNING in str(each.message)]
    apart = ahead.last_run.taken_apart
    return Found(
        outcome="partly" if apart else "captured",
        said="; ".join(f"'{name}': {reason}" for name, reason in apart.items()),
        plain=equal,
        oracle=equality(stale, piped.state_dict()),
        evaluation="; ".join([evaluation, *(reason.partition(EVALUATION_WARNING)[2] for reason in reasons)]),
    )


def by_oracle(
    model: Model, batches: Sequence[Batch], evaluated: Sequence[Batch]
) -> tuple[Mapping[str, Tensor], list[Tensor]]:
    """Weights and buffers after training by the oracle's plain loop, and the losses of a validation with them."""

    def step(module: Module, batch: Batch) -> oracle.Outputs:
        return {"loss": module.training_step(batch, 0)}

    *_, (_, trained) = oracle.minibatches(oracle.Run(), Module(model), step, [batches], RECIPE, IN_FLIGHT)
    trained.eval()
    with torch.no_grad():
        for batch in evaluated:
            trained.validation_step(batch, 0)
    return trained.state_dict(), trained.evaluated


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(number): tensor for number, tensor in enumerate(tensors)}


def sentence(error: Exception) -> str:
    return " ".join(str(error).split())


def send(name: str, results: Connection) -> None:
    """Send the row of the model ``name`` to ``results``, from a process of its own."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results.send(row(models()[name]))
