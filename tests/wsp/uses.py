"""Uses of the Trainer by two processes, each of which tells what it saw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import SimpleProfiler
from torch import nn

from tests.wsp.featured import Told, rows

Use = Callable[[Any], dict[str, Any]]
"""Takes a :class:`tests.wsp.features_worker.Bench`."""

USES: dict[str, Use] = {}


def use(run: Use) -> Use:
    USES[run.__name__] = run
    return run


def told(trainer: L.Trainer, module: Told, **more: Any) -> dict[str, Any]:
    """Values that everybody can compare, and whether all processes hold the same."""
    state = torch.cat([value.detach().double().flatten() for value in module.state_dict().values()])
    all_states = trainer.strategy.all_gather(state)
    return {
        "metrics": {name: round(value.item(), 5) for name, value in sorted(trainer.callback_metrics.items())},
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches": trainer.fit_loop.epoch_loop.batch_progress.total.completed,
        "seen": module.seen,
        "steps": module.steps,
        "process_group": module.has_process_group or torch.distributed.is_initialized(),
        "agree": all(torch.equal(all_states[0], each) for each in all_states[1:]),
        **more,
    }


def files(bench: Any, trainer: L.Trainer) -> list[str]:
    """Below the use's folder, once all have written theirs."""
    trainer.strategy.barrier("files")
    return sorted(str(path.relative_to(bench.folder)) for path in bench.folder.rglob("*") if path.is_file())


@use
def checkpoints(bench: Any) -> dict[str, Any]:
    best = cb.ModelCheckpoint(
        bench.folder / "best", "{epoch}-{val_score:.2f}", monitor="val_score", mode="max", save_top_k=2, save_last=True
    )
    second = cb.ModelCheckpoint(bench.folder / "second", "{epoch}", every_n_epochs=2, save_top_k=-1)
    steps = cb.ModelCheckpoint(bench.folder / "steps", "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = bench.trainer(best, second, steps, max_epochs=4, enable_checkpointing=True)
    module = Told(0.05, scores=((0.1, 0.5, 0.3, 0.2), (0.5, 0.3, 0.3, 0.2)))
    trainer.fit(module, rows(16), rows(8))
    found = told(trainer, module, files=files(bench, trainer), best=Path(best.best_model_path).name)
    found["top"] = sorted(Path(path).name for path in best.best_k_models)
    tested = trainer.test(module, rows(8), ckpt_path="best", verbose=False)
    found["tested"] = sorted(tested[0])
    loaded = Told.load_from_checkpoint(best.best_model_path)
    found["loads"] = all(torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True))
    del found["metrics"]["loss"], found["metrics"]["loss_epoch"], found["metrics"]["loss_step"]
    found["metrics"] = {name: value for name, value in found["metrics"].items() if "score" in name or "rows" in name}
    return found


@use
def stopping(bench: Any) -> dict[str, Any]:
    """One process's own metric gets worse, and ends it for both."""

    class Own(Told):
        def at_end(self, what: str) -> None:
            self.log(f"{what}_score", self.score())

    stop = cb.EarlyStopping("val_score", mode="max", patience=1)
    trainer = bench.trainer(stop, max_epochs=9)
    module = Own(scores=((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), (0.5, 0.4, 0.3)))
    trainer.fit(module, rows(8), rows(8))
    return told(trainer, module, stopped=stop.stopped_epoch)


@use
def loggers(bench: Any) -> dict[str, Any]:
    csv, board = CSVLogger(bench.folder / "csv"), TensorBoardLogger(str(bench.folder / "board"))
    monitor = cb.LearningRateMonitor("step")
    trainer = bench.trainer(monitor, logger=[csv, board], log_every_n_steps=1, max_epochs=2)
    module = Told(0.0, schedule="step")
    trainer.fit(module, rows(16), rows(8))
    names = [name.partition("events.out")[0] for name in files(bench, trainer)]
    text = (bench.folder / "csv/lightning_logs/version_0/metrics.csv").read_text()
    header = text.splitlines()[0].split(",")
    return told(
        trainer,
        module,
        files=names,
        columns=[name for name in header if not name.startswith("hetpipe/")],
        hetpipe_only=sorted(name for name in header if name.startswith("hetpipe/")),
        log_dir=str(Path(trainer.log_dir or "").relative_to(bench.folder)),
        rates=module.rates,
    )


@use
def averaging(bench: Any) -> dict[str, Any]:
    found = {}
    averages: dict[str, Callable[[], L.Callback]] = {
        "ema": lambda: cb.EMAWeightAveraging(decay=0.5),
        "swa": lambda: cb.StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1),
    }
    for name, average in averages.items():
        callback = average()
        trainer = bench.trainer(callback, max_epochs=4)
        module = Told(0.05)
        trainer.fit(module, rows(16), rows(8))
        found[name] = {
            key: value for key, value in told(trainer, module).items() if key in ("step", "epoch", "agree", "seen")
        }
        averaged = list(vars(callback)["_average_model"].parameters())
        found[name]["is the average"] = all(map(torch.allclose, averaged, module.parameters()))
    return found


@use
def finetuning(bench: Any) -> dict[str, Any]:
    class Backbone(Told):
        @property
        def backbone(self) -> nn.Module:
            return self.net[0]

    unfreeze = cb.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)
    trainer = bench.trainer(unfreeze, cb.GradientAccumulationScheduler({0: 2, 1: 1}), max_epochs=3)
    module = Backbone(0.05)
    trainer.fit(module, rows(16))
    found = told(trainer, module, groups=len(trainer.optimizers[0].param_groups))
    del found["metrics"]
    return found


@use
def bars(bench: Any) -> dict[str, Any]:
    class Bar(cb.TQDMProgressBar):
        shown: tuple[int, int] = (0, 0)

        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            super().on_train_epoch_end(trainer, pl_module)
            self.shown = (int(self.train_progress_bar.n), int(self.train_progress_bar.total))

    bar = Bar(refresh_rate=1)
    profiler = SimpleProfiler(bench.folder, "profile")
    trainer = bench.trainer(bar, enable_progress_bar=True, profiler=profiler, max_epochs=1, enable_model_summary=True)
    module = Told()
    trainer.fit(module, rows(16), rows(8))
    return told(trainer, module, shown=bar.shown, disabled=bar.is_disabled, files=files(bench, trainer))


@use
def precisions(bench: Any) -> dict[str, Any]:
    found = {}
    for precision in ("64-true", "bf16-mixed", "bf16-true"):
        trainer = bench.trainer(precision=precision, max_epochs=1)
        module = Told()
        trainer.fit(module, rows(8), rows(8))
        seen = told(trainer, module, dtype=str(next(module.parameters()).dtype))
        seen["metrics"] = {name: round(value, 2) for name, value in seen["metrics"].items()}
        found[precision] = seen
    return found


@use
def schedulers(bench: Any) -> dict[str, Any]:
    found = {}
    for schedule in ("step", "epoch", "plateau"):
        trainer = bench.trainer(max_epochs=3, gradient_clip_val=0.5, accumulate_grad_batches=2)
        module = Told(0.0 if schedule != "plateau" else 1e-9, ((1.0, 0.9, 0.8), (0.0, 0.3, 0.1)), schedule)
        trainer.fit(module, rows(16), rows(4))
        found[schedule] = told(trainer, module, rates=module.rates)
    return found
