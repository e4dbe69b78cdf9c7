"""Uses of the Trainer by two processes: what they tell each other, and what configures them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.tuner import Tuner
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from lightning_hetpipe import HetPipeStrategy
from tests.wsp.featured import Told, rows
from tests.wsp.uses import Use, files, told

USES: dict[str, Use] = {}


def use(run: Use) -> Use:
    USES[run.__name__] = run
    return run


@use
def logged(bench: Any) -> dict[str, Any]:
    class Logs(Told):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            rank = float(self.global_rank + 1)
            for how in ("mean", "sum", "min", "max"):
                self.log(
                    f"e_{how}", rank * (batch_idx + 1), reduce_fx=how, sync_dist=True, on_epoch=True, on_step=False
                )
            self.log("s", rank, sync_dist=True, on_step=True, on_epoch=True)
            self.log("z", rank, rank_zero_only=True)
            self.log("n", rank)
            return loss

        def on_validation_epoch_end(self) -> None:
            self.log("only", 7.0, rank_zero_only=True)
            self.log("v", float(self.global_rank), sync_dist=True, reduce_fx="max")

    trainer = bench.trainer(max_epochs=1)
    module = Logs()
    trainer.fit(module, rows(12), rows(8))
    return told(trainer, module)


@use
def together(bench: Any) -> dict[str, Any]:
    class Gathers(Told):
        def __init__(self) -> None:
            super().__init__()
            self.found: dict[str, Any] = {}

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx, dataloader_idx)
            gathered: Any = self.all_gather(batch[2])
            self.found.setdefault("in step", []).append(gathered.tolist())

        def on_train_epoch_end(self) -> None:
            rank = self.global_rank
            gathered: Any = self.all_gather({"a": torch.tensor([rank]), "b": float(rank)})
            self.found["gathered"] = {name: value.tolist() for name, value in gathered.items()}
            strategy = self.trainer.strategy
            strategy.barrier()
            self.found["told"] = [
                strategy.broadcast(f"from {rank}"),
                strategy.broadcast({"rank": rank, "list": [1, (2, None)]}, src=1),
                str(strategy.broadcast(Path(f"p{rank}"))),
                strategy.broadcast(torch.tensor([rank + 1.0])).tolist(),
            ]
            for how in ("mean", "sum"):
                self.found[how] = strategy.reduce(torch.tensor([rank + 1.0, 3.0]), reduce_op=how).tolist()
            self.found["all"] = strategy.reduce_boolean_decision(rank == 0, all=True)
            self.found["any"] = strategy.reduce_boolean_decision(rank == 0, all=False)

        def on_fit_end(self) -> None:
            self.found["at end"] = self.trainer.strategy.broadcast(self.global_rank)

    trainer = bench.trainer()
    module = Gathers()
    trainer.fit(module, rows(16), rows(8))
    module.found["after"] = trainer.strategy.broadcast(trainer.global_rank + 5)
    if trainer.is_global_zero:
        time.sleep(0.3)  # whoever does not wait for the file misses it
    trainer.save_checkpoint(bench.folder / "after.ckpt")
    module.found["saved"] = (bench.folder / "after.ckpt").exists()
    return told(trainer, module, found=module.found)


@use
def metrics(bench: Any) -> dict[str, Any]:
    """Wherever they are held, they compute over both processes."""

    class Holder(cb.Callback):
        def __init__(self) -> None:
            self.rows = CatMetric()
            self.found: list[Any] = []

        def on_validation_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            self.rows.update(batch[2].float())

        def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.found.append(sorted(self.rows.compute().tolist()))
            self.rows.reset()

        on_test_batch_end = on_validation_batch_end
        on_test_epoch_end = on_validation_epoch_end

    class Data(L.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.ranks = MeanMetric()

        def train_dataloader(self) -> Any:
            return rows(8)

        val_dataloader = test_dataloader = train_dataloader

    class Made(Told):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[float] = []

        def setup(self, stage: str) -> None:
            self.late = MeanMetric()
            self.cloned = self.late.clone()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.late(float(self.global_rank))
            self.log("late", self.late, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.cloned.update(float(self.global_rank))
            data.ranks.update(float(self.global_rank))
            local = MeanMetric(sync_on_compute=False)
            local.update(float(self.global_rank))
            for metric in (self.cloned, data.ranks, local):
                self.found.append(metric.compute().item())

    holder = Holder()
    trainer = bench.trainer(holder)
    module = Made()
    data = Data()
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    after = MeanMetric()
    after.update(float(trainer.global_rank))
    return told(trainer, module, held=holder.found, made=module.found, after=after.compute().item())


@use
def configured(bench: Any) -> dict[str, Any]:
    class Late(Told):
        def __init__(self) -> None:
            super().__init__(0.05)
            del self.net

        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                torch.manual_seed(self.global_rank)  # all are to start from the first one's
                self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))

    trainer = bench.trainer()
    module = Late()
    trainer.fit(module, rows(16), rows(8))
    found = told(trainer, module)
    del found["metrics"]
    return found


@use
def rate_search(bench: Any) -> dict[str, Any]:
    trainer = bench.trainer(max_epochs=2)
    module = Told(0.01)
    before = [p.detach().clone() for p in module.parameters()]
    finder = Tuner(trainer).lr_find(module, rows(64), min_lr=1e-5, max_lr=0.1, num_training=15)
    assert finder is not None
    restored = all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    trainer.fit(module, rows(16))
    found = {"points": len(finder.results["lr"]), "tuned": told(trainer, module)["agree"], "restored": restored}
    rates = trainer.strategy.all_gather(torch.tensor(module.lr))
    found["same"] = bool((rates == rates[0]).all())

    class Begins(L.Callback):
        def __init__(self) -> None:
            self.first: list[torch.Tensor] = []

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.first = [p.detach().clone() for p in pl_module.parameters()]

    begins = Begins()
    trainer = bench.trainer(cb.LearningRateFinder(1e-5, 0.1, num_training_steps=15), begins, max_epochs=2)
    module = Told(0.01)
    before = [p.detach().clone() for p in module.parameters()]
    trainer.fit(module, rows(64))
    found["begins"] = all(torch.equal(a, b) for a, b in zip(before, begins.first, strict=True))
    found["found"] = {k: v for k, v in told(trainer, module).items() if k in ("step", "epoch", "agree")}
    found["moved"] = max((a - b).abs().max().item() for a, b in zip(before, module.parameters(), strict=True)) < 2
    found["files"] = files(bench, trainer)
    return found


@use
def command_line(bench: Any) -> dict[str, Any]:
    from jsonargparse.typing import lazy_instance
    from lightning.pytorch.cli import LightningCLI

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return rows(8)

    root = {"default_root_dir": str(bench.folder), "max_epochs": 1, "enable_progress_bar": False, "logger": True}
    root |= {"accelerator": "cpu", "devices": 2 if bench.kind == "ddp" else 1, "enable_model_summary": False}
    if bench.kind == "ddp":
        strategy: Any = "ddp"
    else:
        strategy = lazy_instance(HetPipeStrategy, virtual_workers=2, **bench.settings)
    cli = LightningCLI(Told, Data, trainer_defaults={**root, "strategy": strategy}, args=["fit", "--model.lr=0.01"])
    names = [name for name in files(bench, cli.trainer) if "events.out" not in name]
    return told(cli.trainer, cli.model, files=names) | {"metrics": {}}
