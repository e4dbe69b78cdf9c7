"""Uses of the Trainer by two processes: epochs, batches, data, evaluations."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.utilities import CombinedLoader, rank_zero_only
from torch.utils.data import DataLoader

from tests.wsp.featured import Rows, Stream, Told, rows
from tests.wsp.uses import Use, told

USES: dict[str, Use] = {}


def use(run: Use) -> Use:
    USES[run.__name__] = run
    return run


@use
def intervals(bench: Any) -> dict[str, Any]:
    found = {}
    settings: dict[str, dict[str, Any]] = {
        "count": {"val_check_interval": 3},
        "fraction": {"val_check_interval": 0.5},
        "epochs": {"check_val_every_n_epoch": 2, "max_epochs": 4},
        "across": {"val_check_interval": 6, "check_val_every_n_epoch": None, "max_epochs": 3},
        "sanity": {"num_sanity_val_steps": 2},
    }
    for name, each in settings.items():
        trainer = bench.trainer(**each)
        module = Told()
        trainer.fit(module, rows(16), rows(8))
        found[name] = told(trainer, module)
    return found


@use
def limits(bench: Any) -> dict[str, Any]:
    found = {}
    settings: dict[str, dict[str, Any]] = {
        "fractions": {"limit_train_batches": 0.5, "limit_val_batches": 0.5},
        "counts": {"limit_train_batches": 3, "limit_val_batches": 1, "limit_test_batches": 1},
        "overfit": {"overfit_batches": 2},
        "fast": {"fast_dev_run": 2},
        "steps": {"max_steps": 6, "max_epochs": -1},
        "min steps": {"max_steps": 3, "min_epochs": 2},
    }
    for name, each in settings.items():
        trainer = bench.trainer(**each)
        module = Told()
        trainer.fit(module, rows(16, shuffle=True), rows(8))
        found[name] = told(trainer, module)
        if each.get("limit_test_batches"):
            trainer.test(module, rows(8), verbose=False)
            found[name]["tested"] = module.seen["test"]
    return found


@use
def time_limit(bench: Any) -> dict[str, Any]:
    """Both end in the same step, whatever their clocks say."""

    class Slow(Told):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            if batch_idx == 2:
                time.sleep(1.1 if self.global_rank == 0 else 0.0)

    trainer = bench.trainer(max_time={"seconds": 1}, max_epochs=-1)
    module = Slow()
    trainer.fit(module, rows(64))
    found = told(trainer, module)
    del found["metrics"]
    everyone = trainer.strategy.all_gather(torch.tensor(float(trainer.global_step)))
    return {"agree": found["agree"], "together": len(set(everyone.tolist())) == 1}


@use
def loaders(bench: Any) -> dict[str, Any]:
    found = {}
    for mode in ("min_size", "max_size", "max_size_cycle"):
        trainer = bench.trainer(max_epochs=2)
        module = Told()
        train = CombinedLoader({"a": rows(8), "b": rows(12)}, mode) if mode != "max_size" else rows(12)
        trainer.fit(module, train, [rows(8), rows(4)])
        found[mode] = told(trainer, module)
    return found


@use
def evaluations(bench: Any) -> dict[str, Any]:
    class Writer(cb.BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch_and_epoch")
            self.batches: list[Any] = []
            self.epochs: list[Any] = []

        def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, indices: Any, *rest: Any) -> None:
            self.batches.append([prediction.tolist(), indices])

        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, indices: Any) -> None:
            self.epochs.append([[each.tolist() for each in predictions], indices])

    writer = Writer()
    trainer = bench.trainer(writer)
    module = Told()
    validated = trainer.validate(module, rows(10), verbose=False)
    tested = trainer.test(module, [rows(10), rows(6)], verbose=False)
    predicted = trainer.predict(module, rows(11))
    assert predicted is not None
    rounded = [{name: round(value, 4) for name, value in each.items()} for each in (*validated, *tested)]
    return told(
        trainer,
        module,
        evaluated=rounded,
        predicted=[torch.as_tensor(each).tolist() for each in predicted],
        batches=writer.batches,
        epochs=writer.epochs,
    )


@use
def data(bench: Any) -> dict[str, Any]:
    class Data(L.LightningDataModule):
        def __init__(self, per_node: bool) -> None:
            super().__init__()
            self.prepare_data_per_node = per_node
            self.calls: list[str] = []

        def prepare_data(self) -> None:
            time.sleep(0.3)
            (bench.folder / "prepared").touch()
            self.calls.append("prepare_data")

        def setup(self, stage: str) -> None:
            self.calls.append(f"setup {(bench.folder / 'prepared').exists()}")

        def train_dataloader(self) -> Any:
            return rows(17, 3, shuffle=True)

        def val_dataloader(self) -> Any:
            return rows(9)

        def predict_dataloader(self) -> Any:
            return DataLoader(Rows(9), batch_size=2)

    found = {}
    for per_node in (True, False):
        trainer = bench.trainer()
        module, source = Told(), Data(per_node)
        trainer.fit(module, datamodule=source)
        found[str(per_node)] = told(trainer, module, calls=source.calls)
        sampler = trainer.train_dataloader.sampler
        found[str(per_node)]["sampler"] = [type(sampler).__name__, sampler.shuffle, sampler.epoch, sampler.num_replicas]
    found["who"] = {
        "ranks": [trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size, trainer.num_nodes],
        "zero": [trainer.is_global_zero, vars(rank_zero_only)["rank"]],
    }
    L.seed_everything(7, workers=True)
    trainer = bench.trainer(max_epochs=1)
    module = Told()
    trainer.fit(module, rows(8, num_workers=1, shuffle=True))
    found["seeded"] = told(trainer, module)
    return found


@use
def resumed(bench: Any) -> dict[str, Any]:
    path = bench.folder / "one.ckpt"
    trainer = bench.trainer(max_epochs=1)
    module = Told(0.05)
    trainer.fit(module, rows(16))
    trainer.save_checkpoint(path)
    again = bench.trainer(max_epochs=3)
    module = Told(0.05)
    again.fit(module, rows(16), ckpt_path=path)
    found = told(again, module)
    del found["metrics"]
    return found


@use
def streams(bench: Any) -> dict[str, Any]:
    """Loaders of another length on each: an epoch ends when both have nothing left. (ddp would hang.)"""

    class Streams(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            assert self.trainer is not None
            return DataLoader(Stream(12 if self.trainer.global_rank else 6), batch_size=2)

        def val_dataloader(self) -> Any:
            assert self.trainer is not None
            return DataLoader(Stream(4 if self.trainer.global_rank else 8), batch_size=2)

    trainer = bench.trainer(max_epochs=3)
    module = Told(0.05)
    trainer.fit(module, datamodule=Streams())
    found = {"whole": told(trainer, module)}
    stop = cb.EarlyStopping("val_score", mode="max", patience=0)
    trainer = bench.trainer(stop, max_epochs=9, val_check_interval=5)
    module = Told(0.05, ((0.3, 0.2, 0.1), (0.3, 0.2, 0.1)))
    trainer.fit(module, datamodule=Streams())
    found["stopped"] = told(trainer, module)
    trainer = bench.trainer(max_epochs=-1, max_steps=9)
    module = Told(0.05)
    trainer.fit(module, datamodule=Streams())
    found["steps"] = told(trainer, module)
    return found
