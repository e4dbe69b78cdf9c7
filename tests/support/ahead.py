"""A strategy that runs ``training_step`` ahead of Lightning's loop, a model for it, and what outsiders see of a run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score, MulticlassPrecision
from torchmetrics.regression import MeanSquaredError

from lightning_hetpipe.pipeline.user.minibatch import Minibatch
from lightning_hetpipe.run.extensions.replay import Replay
from lightning_hetpipe.torch_private.tensors import pytree
from tests.support.trainers import quiet_trainer

CLASSES = 3
Batch = tuple[Tensor, Tensor]


def make_batches() -> list[Batch]:
    """Seven minibatches, the last one smaller."""
    generator = torch.Generator().manual_seed(3)
    sizes = [5, 5, 5, 5, 5, 5, 2]
    return [
        (torch.randn(n, CLASSES, generator=generator), torch.randint(CLASSES, (n,), generator=generator)) for n in sizes
    ]


_numbers = count(1)


@contextmanager
def recording(replay: Replay) -> Iterator[int]:
    """Runs the next minibatch's step inside; gives its number."""
    number = next(_numbers)
    with replay.user_step(number):
        yield number


def replayed(replay: Replay, number: int) -> None:
    """Lightning's loop is at that minibatch."""
    replay.finished(cast(Minibatch, SimpleNamespace(number=number)), ())


class AheadStrategy(SingleDeviceStrategy):
    """Runs ``training_step`` in another thread, up to ``ahead`` minibatches before Lightning's loop is there."""

    def __init__(self, batches: list[Any], ahead: int = 3) -> None:
        super().__init__(device="cpu")
        self.batches, self.ahead = batches, ahead
        self.replay: Replay | None = None
        self.waiting: deque[tuple[int, Any]] = deque()
        self.begun = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        batch_idx = args[1]
        if self.replay is None:
            self.replay = Replay(module)
            return module.training_step(*args, **kwargs)  # the first minibatch of a run is never ahead
        if batch_idx == 0:
            self.begun = 0
        self.begun = max(self.begun, batch_idx)
        while self.begun < min(batch_idx + 1 + self.ahead, len(self.batches)):
            self.waiting.append(self._run(module, self.begun))
            self.begun += 1
        record, output = self.waiting.popleft()
        replayed(self.replay, record)
        return output

    def _run(self, module: L.LightningModule, batch_idx: int) -> tuple[int, Any]:
        result: list[Any] = []

        def work() -> None:
            assert self.replay is not None
            try:
                with recording(self.replay) as record:
                    result.append((record, module.training_step(self.batches[batch_idx], batch_idx)))
            except Exception as error:
                result.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if isinstance(result[0], Exception):
            raise result[0]
        done: tuple[int, Any] = result[0]
        return done

    def teardown(self) -> None:
        if self.replay is not None:
            self.replay.closed()
        super().teardown()


class Memory(DummyLogger):
    """Keeps what Lightning logs."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, dict(metrics)))


class Watch(L.Callback):
    """Takes down what a callback sees after each step and each epoch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def _look(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seen: dict[str, Any] = {}
        for kind in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            values = getattr(trainer, kind)
            seen[kind] = {name: float(value) for name, value in values.items()}
        for name, metric in pl_module.named_modules():
            if isinstance(metric, Metric):
                seen[name] = (metric.update_count, pytree.tree_map(lambda t: t.detach().clone(), metric.metric_state))
        self.seen.append(seen)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._look(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._look(trainer, pl_module)


Step = Callable[[Any, Tensor, Tensor, int], None]


class Model(L.LightningModule):
    """A frozen network, so that a step that runs ahead sees what a plain one sees, and one trained weight."""

    def __init__(self, step: Step, **metrics: Any) -> None:
        super().__init__()
        self.step = step
        torch.manual_seed(1)
        self.net = nn.Linear(CLASSES, CLASSES)
        self.weight = nn.Parameter(torch.zeros(1))
        for name, metric in metrics.items():
            setattr(self, name, metric)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        self.step(self, self.net(x), y, batch_idx)
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=0.1)


def fit(model: L.LightningModule, ahead: int | None, *callbacks: L.Callback) -> tuple[Watch, Memory]:
    """Two epochs; plain for ``ahead=None``."""
    batches, watch, memory = make_batches(), Watch(), Memory()
    strategy = "auto" if ahead is None else AheadStrategy(batches, ahead)
    settings: dict[str, Any] = {"logger": memory, "log_every_n_steps": 1, "callbacks": [watch, *callbacks]}
    trainer = quiet_trainer(strategy, max_epochs=2, **settings)
    torch.manual_seed(7)
    dataset: Any = batches
    trainer.fit(model, DataLoader(dataset, batch_size=None))
    return watch, memory


class ClassError(MeanSquaredError):
    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds.argmax(1) if preds.ndim == 2 else preds, target)


def accuracy() -> MulticlassAccuracy:
    return MulticlassAccuracy(CLASSES, average="micro")


def auroc() -> MulticlassAUROC:
    return MulticlassAUROC(CLASSES, thresholds=None)


def scores() -> MetricCollection:
    members: dict[str, Metric | MetricCollection] = {
        "f1": MulticlassF1Score(CLASSES),
        "precision": MulticlassPrecision(CLASSES),
        "mse": ClassError(),
    }
    return MetricCollection(members, prefix="extra_")


def log_accuracy(m: Any, out: Tensor, y: Tensor, i: int) -> None:
    m.log("batch", m.acc(out, y))
    m.log("acc", m.acc, on_step=False, on_epoch=True)
