"""A module and data that tell what happened to them, the same with virtual workers and with ddp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric

from tests.support.models import CLASSES


class Rows(Dataset[Any]):
    """(6,) values, a label and the row's number."""

    def __init__(self, rows: int, seed: int = 1) -> None:
        chance = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows, 6, generator=chance)
        self.y = torch.randint(CLASSES, (rows,), generator=chance)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row], self.y[row], row


class Stream(IterableDataset[Any]):
    """As many rows as it is told, of which each virtual worker makes its own; of no known length."""

    def __init__(self, rows: int, first: int = 0) -> None:
        self.rows = rows
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        rows = Rows(self.first + self.rows)
        return (rows[self.first + row] for row in range(self.rows))


def rows(count: int, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(count), batch_size, **options)


class Told(L.LightningModule):
    """Writes down what it sees; with a learning rate of 0 its losses are those of any other strategy.

    Args:
        lr: Learning rate.
        scores: What ``score`` is in each epoch, by rank; the last one stays.
        schedule: "step", "epoch" or "plateau".
    """

    def __init__(self, lr: float = 0.0, scores: Any = ((0.0,),), schedule: str | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.scores = scores
        self.schedule = schedule
        torch.manual_seed(5)
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES)
        )
        self.mean = MeanMetric()
        self.sums = MetricCollection({"a": SumMetric(), "b": MeanMetric()})
        self.all = CatMetric()
        self.seen: dict[str, list[list[int]]] = {"train": [], "val": [], "test": [], "predict": []}
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.has_process_group = False

    def loss(self, batch: Any) -> Tensor:
        x, y, _ = batch
        loss: Tensor = F.cross_entropy(self.net(x), y)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch["a"] if isinstance(batch, dict) else batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("own", float(self.global_rank), on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_start(self) -> None:
        self.seen["train"].append([])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(batch, (list, tuple)) and len(batch) == 3:
            self.seen["train"][-1] += batch[2].tolist()
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self) -> None:
        self.has_process_group = torch.distributed.is_initialized()
        self.log("train_score", self.score(), sync_dist=True)

    def score(self) -> float:
        mine = self.scores[min(self.global_rank, len(self.scores) - 1)]
        return float(mine[min(self.current_epoch, len(mine) - 1)])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate("test", batch)

    def evaluate(self, what: str, batch: Any) -> None:
        loss = self.loss(batch)
        self.log(f"{what}_loss", loss, sync_dist=True)
        self.mean(loss)
        self.sums(loss)
        self.all(batch[2].float())
        self.log(f"{what}_mean", self.mean)
        self.log_dict({f"{what}_{name}": metric for name, metric in self.sums.items(keep_base=True)})
        self.seen[what][-1] += batch[2].tolist()

    def on_validation_epoch_start(self) -> None:
        self.seen["val"].append([])
        self.steps.append(self.global_step)

    def on_test_epoch_start(self) -> None:
        self.seen["test"].append([])

    def on_validation_epoch_end(self) -> None:
        self.at_end("val")

    def on_test_epoch_end(self) -> None:
        self.at_end("test")

    def at_end(self, what: str) -> None:
        self.log(f"{what}_score", self.score(), sync_dist=True)
        self.log(f"{what}_rows", float(self.all.compute().numel()))
        self.all.reset()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.net(batch[0])
        rows: Tensor = batch[2].clone()
        return rows

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=self.lr)
        if self.schedule is None:
            return optimizer
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_score"}}
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": self.schedule}}
