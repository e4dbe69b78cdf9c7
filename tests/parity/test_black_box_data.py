"""Data of every kind, loggers, checkpoints and resumed runs, under a strategy that the environment chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import RandomDataset
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.parity.black_box import Model, assert_as_plain, describe, end, fitted, trainer
from tests.support.marks import quick, slow_except

pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.*LeafSpec.*:FutureWarning")


class Stream(IterableDataset[Tensor]):
    def __init__(self, count: int = 5) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.full((32,), float(index)) for index in range(self.count)])


class OwnBatch:
    """A batch that Lightning moves by its ``to``."""

    def __init__(self, samples: list[Tensor]) -> None:
        self.samples = torch.stack(samples)

    def to(self, *args: Any, **kwargs: Any) -> OwnBatch:
        return self


class Resumable:
    """Goes on behind the batch that was last when its state was taken, and then begins anew."""

    def __init__(self, count: int = 4) -> None:
        self.index, self.first, self.count = 0, 0, count

    def __iter__(self) -> Iterator[Tensor]:
        first, self.first = self.first, 0
        for index in range(first, self.count):
            self.index = index
            yield torch.ones(2, 32) * index

    def __len__(self) -> int:
        return self.count

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["index"] + 1


class Failing:
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(1, 32)
        yield torch.ones(1, 32)
        raise ValueError("of the data")


class WithoutLength:
    def __iter__(self) -> Iterator[Tensor]:
        yield from [torch.ones(1, 32)] * 3

    def __len__(self) -> int:
        raise NotImplementedError


class EveryOtherNone:
    """Collates every other batch to None."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[Tensor]) -> Tensor | None:
        self.calls += 1
        return None if self.calls % 2 else torch.stack(samples)


def loader(count: int, **settings: Any) -> DataLoader[Tensor]:
    return DataLoader(RandomDataset(32, count), **settings)


def _seven_by_two() -> DataLoader[Tensor]:
    return loader(7, batch_sampler=BatchSampler(RandomSampler(range(7)), 2, drop_last=False))


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: loader(9, shuffle=True, batch_size=2),
    "last dropped": lambda: loader(9, batch_size=4, drop_last=True),
    "batch sampler": _seven_by_two,
    "stream": lambda: DataLoader(Stream()),
    "dataset itself": Stream,
    "generator": lambda: (torch.ones(1, 32) * index for index in range(5)),
    "list": lambda: [torch.ones(1, 32)] * 3,
    "failing": Failing,
    "length that fails": WithoutLength,
    "several": lambda: [loader(3), loader(5)],
    "named": lambda: {"a": loader(3), "b": [loader(2), loader(4)]},
    "shortest": lambda: CombinedLoader([loader(3), loader(5)], "min_size"),
    "longest": lambda: CombinedLoader([loader(3), loader(5)], "max_size"),
    "cycled": lambda: CombinedLoader({"a": loader(3), "b": DataLoader(Stream(2))}, "max_size_cycle"),
    "one after the other": lambda: CombinedLoader([loader(3), loader(5)], "sequential"),
    "own batches": lambda: loader(5, collate_fn=OwnBatch),
    "None at times": lambda: loader(6, collate_fn=EveryOtherNone()),
    "None always": lambda: loader(3, collate_fn=lambda samples: None),
    "empty": lambda: loader(0),
    "empty stream": lambda: DataLoader(Stream(0)),
    "resumable": Resumable,
    "texts": lambda: ["a", "b"],
    "None": lambda: None,
}


class Eater(Model):
    """Trains on whatever tensors it finds in a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append([describe(batch), batch_idx])
        return sum(self.step(each) for each in self._tensors(batch))

    def _tensors(self, batch: Any) -> list[Any]:
        if isinstance(batch, dict):
            return [found for each in batch.values() for found in self._tensors(each)]
        if isinstance(batch, (list, tuple)):
            return [found for each in batch for found in self._tensors(each)]
        return [] if batch is None else [batch.samples if isinstance(batch, OwnBatch) else batch]


class Progress(Callback):
    """Notes what a callback can see of fetching."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        fetcher: Any = trainer.fit_loop._data_fetcher
        self.told.append([fetcher.fetched, fetcher.done, trainer.is_last_batch, type(fetcher).__name__])


@quick(
    "accumulated-generator",
    "accumulated-failing",
    "accumulated-named",
    "accumulated-cycled",
    "accumulated-None at times",
    "accumulated-empty stream",
    "accumulated-resumable",
    "accumulated-texts",
)
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow, id="plain"),
        pytest.param(
            {"accumulate_grad_batches": 2, "val_check_interval": 2, "check_val_every_n_epoch": None}, id="accumulated"
        ),
    ],
)
def test_training_on(make: Callable[[], Any], settings: dict[str, Any], tmp_path: Path) -> None:
    def story(folder: Path) -> Any:
        module, progress = Eater(), Progress()
        made = trainer(folder, limit_train_batches=None, callbacks=[progress], **settings)
        error: Exception | None = None
        try:
            made.fit(module, make(), loader(2))
        except Exception as raised:
            error = raised
        return describe(error), end(made, module), module.seen, progress.told

    assert_as_plain(story, tmp_path)


@quick("False-True", "True-False")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("failing", [False, True])
def test_workers_end_when_they_do_plainly(persistent: bool, failing: bool, tmp_path: Path) -> None:
    def story(folder: Path) -> Any:
        made = trainer(folder)
        ends: list[tuple[str, int]] = []

        class Watched(_MultiProcessingDataLoaderIter):
            name = ""

            def _shutdown_workers(self) -> None:
                ends.append((self.name, made.current_epoch))
                super()._shutdown_workers()

        class Watching(DataLoader[Tensor]):
            def _get_iterator(self) -> Any:
                iterator = Watched(self)
                iterator.name = "train" if self.batch_size == 2 else "val"
                return iterator

        class Fails(Callback):
            def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
                if failing and trainer.current_epoch == 1:
                    raise ValueError("of the callback")

        data: list[Any] = [
            Watching(RandomDataset(32, 8), batch_size=size, num_workers=1, persistent_workers=persistent)
            for size in (2, 4)
        ]
        made.callbacks.append(Fails())  # type: ignore[attr-defined]
        error: Exception | None = None
        try:
            made.fit(Model(), *data)
        except ValueError as raised:
            error = raised
        return ends, describe(error)

    assert_as_plain(story, tmp_path)


# Checkpoints.


def _checkpoints(folder: Path) -> Any:
    return {path.name: describe(torch.load(path, weights_only=True)) for path in sorted(folder.glob("*.ckpt"))}


@quick("False-1-3", "True-2-3")
@pytest.mark.parametrize("step", slow_except([1, 3, 4], 3))
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("resumable", [False, True])
def test_a_resumed_run(step: int, accumulate: int, resumable: bool, tmp_path: Path) -> None:
    """From within an epoch and from its end: the same batches, states and checkpoints, and the same warning."""

    def data() -> Any:
        return Resumable() if resumable else DataLoader(TensorDataset(torch.arange(4.0)[:, None].repeat(1, 32)))

    def story(folder: Path) -> Any:
        told = []
        for part, path in (("first", None), ("resumed", folder / "first")):
            checkpoints = ModelCheckpoint(folder / part, every_n_train_steps=1, save_top_k=-1)
            settings = {"enable_checkpointing": True, "limit_train_batches": None, "val_check_interval": 2}
            made = trainer(folder, callbacks=[checkpoints], accumulate_grad_batches=accumulate, **settings)
            module = Eater()
            start = None if path is None else next(path.glob(f"*-step={step}.ckpt"))
            made.fit(module, data(), loader(2), ckpt_path=start)
            told += [end(made, module), module.seen, _checkpoints(folder / part)]
        return told

    assert_as_plain(story, tmp_path)


@quick("1-0-0", "1-2-1", "2-2-0")
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_loops_after_an_error_and_resumed(epoch: int, batch: int, accumulate: int, tmp_path: Path) -> None:
    class Fails(Model):
        failing = True

        def training_step(self, batch_: Any, batch_idx: int) -> Any:
            if self.failing and (self.current_epoch, batch_idx) == (epoch, batch):
                raise ValueError("of the step")
            return self.step(batch_)

    def story(folder: Path) -> Any:
        settings = {"limit_val_batches": 0, "accumulate_grad_batches": accumulate, "limit_train_batches": 3}
        made, module = (
            trainer(folder, callbacks=OnExceptionCheckpoint(folder), enable_checkpointing=True, **settings),
            Fails(),
        )
        with pytest.raises(ValueError, match="of the step"):
            made.fit(module)
        failed, saved = end(made, module), _checkpoints(folder)
        made.fit_loop.load_state_dict(torch.load(folder / "on_exception.ckpt", weights_only=True)["loops"]["fit_loop"])
        made.fit_loop.reset()
        made.fit_loop.epoch_loop.reset()
        reset = describe(made.fit_loop.state_dict())
        made, module = trainer(folder, **settings), Fails()
        module.failing = False
        made.fit(module, ckpt_path=folder / "on_exception.ckpt")
        return failed, saved, reset, end(made, module)

    assert_as_plain(story, tmp_path)


# Loggers.


class Talker(Model):
    """Logs in every hook that may."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch)
        self.log("step", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", float(batch_idx), on_step=False, on_epoch=True, reduce_fx=max)
        self.log("summed", 2.0, sync_dist=True, reduce_fx="sum", on_epoch=True)
        self.log("sized", loss, batch_size=7, on_epoch=True)
        if self.logger is not None:
            self.logger.log_metrics({"direct": float(batch_idx)}, step=batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"val": self.step(batch), "val_step": float(batch_idx)}, on_step=True, on_epoch=True)

    def on_train_start(self) -> None:
        self.log("start", 1.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch", float(batch_idx))

    def on_after_backward(self) -> None:
        gradient = self.layer.weight.grad
        assert gradient is not None
        self.log("norm", gradient.norm())

    def on_train_epoch_end(self) -> None:
        self.log_dict({"epoch": 3.0, "tensor": torch.tensor(2.0)}, prog_bar=True)


@quick("{'log_every_n_steps': 3, 'accumulate_grad_batches': 2}", "{'log_every_n_steps': 0}")
@pytest.mark.parametrize(
    "settings",
    [
        {"log_every_n_steps": 1},
        {"log_every_n_steps": 3, "accumulate_grad_batches": 2},
        {"log_every_n_steps": 0},
        {"log_every_n_steps": 2, "val_check_interval": 1},
    ],
    ids=str,
)
def test_every_call_of_two_loggers(settings: dict[str, Any], tmp_path: Path) -> None:
    def story(folder: Path) -> Any:
        loggers = [Mock(spec=Logger, save_dir=str(folder), version="0", log_dir=str(folder)) for _ in range(2)]
        for index, logger in enumerate(loggers):
            logger.name = f"mock{index}"
        made, module = trainer(folder, logger=loggers, callbacks=[LearningRateMonitor()], **settings), Talker()
        made.fit(module)
        calls = [
            [[call[0], describe(call.args), describe(call.kwargs)] for call in each.method_calls] for each in loggers
        ]
        return calls, end(made, module)

    assert_as_plain(story, tmp_path)


def test_the_file_that_a_logger_writes(tmp_path: Path) -> None:
    def story(folder: Path) -> Any:
        fitted(folder, Talker(), logger=CSVLogger(folder, "name", "version"), log_every_n_steps=1)
        return (folder / "name" / "version" / "metrics.csv").read_text()

    assert "hetpipe/" not in assert_as_plain(story, tmp_path)["told"]


WRONG: dict[str, Callable[[Any], object]] = {
    "other arguments": lambda module: (module.log("a", 1.0), module.log("a", 2.0, on_epoch=True)),
    "neither step nor epoch": lambda module: module.log("a", 1.0, on_step=False, on_epoch=False),
    "a text": lambda module: module.log("a", "x"),
    "a vector": lambda module: module.log("a", torch.ones(2)),
    "a reserved name": lambda module: module.log("a/dataloader_idx_0", 1.0),
    "an unknown reduction": lambda module: module.log("a", 1.0, reduce_fx="unknown", on_epoch=True),
    "a graph": lambda module: module.log("a", module.layer.weight.sum(), prog_bar=True, on_epoch=True),
}


@pytest.mark.parametrize("log", WRONG.values(), ids=WRONG.keys())
def test_what_may_not_be_logged(log: Callable[[Any], object], tmp_path: Path) -> None:
    class Wrong(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            log(self)
            return self.step(batch)

    assert_as_plain(lambda folder: fitted(folder, Wrong(), log_every_n_steps=1), tmp_path)
