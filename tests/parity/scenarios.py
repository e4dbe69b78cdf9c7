"""Small uses of the Trainer's optimization, callbacks, profilers and tuner, each of which tells what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.callbacks.throughput_monitor import ThroughputMonitor
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, ManualOptimBoringModel, RandomDataset
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from tests.parity.outcomes import Deep, Outcome, Scenario, fitted, told, trainer

SCENARIOS: dict[str, Scenario] = {}


def scenario(run: Scenario) -> Scenario:
    SCENARIOS[run.__name__] = run
    return run


# Optimization.


def with_optimizers(configure: Callable[[Any], Any], base: type = Deep, **methods: Any) -> Scenario:
    def run(strategy: Any, folder: Path) -> Outcome:
        made = type("Made", (base,), {"configure_optimizers": configure, **methods})
        return fitted(strategy, folder, made())

    return run


def adam(module: Any) -> Any:
    return torch.optim.Adam(module.parameters(), lr=0.01)


def plateau(**more: Any) -> Callable[[Any], Any]:
    def configure(module: Any) -> Any:
        optimizer = adam(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer, patience=0), **more}}

    return configure


SCENARIOS |= {
    "no optimizer": with_optimizers(lambda self: None),
    "optimizer in a dict": with_optimizers(lambda self: {"optimizer": adam(self)}),
    "plateau without monitor": with_optimizers(plateau()),
    "plateau on a training metric": with_optimizers(plateau(monitor="foo")),
    "plateau by step": with_optimizers(plateau(monitor="foo", interval="step", frequency=2)),
    "plateau on a validation metric": with_optimizers(plateau(monitor="val")),
    "plateau on nothing": with_optimizers(plateau(monitor="giraffe")),
    "plateau on nothing, not strict": with_optimizers(plateau(monitor="giraffe", strict=False)),
    "unknown interval": with_optimizers(plateau(monitor="foo", interval="never")),
    "unknown configuration": with_optimizers(lambda self: 1),
    "two schedulers": with_optimizers(
        lambda self: (lambda o: ([o], [StepLR(o, 1), {"scheduler": StepLR(o, 2), "interval": "step"}]))(adam(self))
    ),
    "scheduler of another optimizer": with_optimizers(lambda self: ([adam(self)], [StepLR(adam(self), 1)])),
    "two optimizers": with_optimizers(lambda self: [adam(self), adam(self)]),
    "LBFGS": with_optimizers(lambda self: torch.optim.LBFGS(self.parameters(), max_iter=3)),
    "manual": lambda strategy, folder: fitted(strategy, folder, ManualOptimBoringModel()),
    "None": with_optimizers(
        adam, training_step=lambda self, batch, i: None if i == 1 else Deep.training_step(self, batch, i)
    ),
    "own backward": with_optimizers(adam, backward=lambda self, loss, *a, **k: loss.backward(*a, **k)),
    "dataloader_iter": with_optimizers(
        adam, training_step=lambda self, dataloader_iter: Deep.training_step(self, next(dataloader_iter)[0], 0)
    ),
    "loss without a graph": with_optimizers(adam, training_step=lambda self, batch, i: torch.tensor(1.0)),
    "loss of a wrong type": with_optimizers(adam, training_step=lambda self, batch, i: "loss"),
    "dict without loss": with_optimizers(adam, training_step=lambda self, batch, i: {"x": 1}),
    "steps every second batch": with_optimizers(
        adam,
        optimizer_step=lambda self, epoch, i, optimizer, closure: (
            optimizer.step(closure=closure) if i % 2 == 0 else closure()
        ),
    ),
    "own zero_grad": with_optimizers(
        adam, optimizer_zero_grad=lambda self, epoch, i, optimizer: optimizer.zero_grad(set_to_none=False)
    ),
    "own lr_scheduler_step": with_optimizers(
        lambda self: (lambda o: ([o], [StepLR(o, 1)]))(adam(self)),
        lr_scheduler_step=lambda self, scheduler, metric: scheduler.step(epoch=self.current_epoch + 3),
    ),
    "own clipping": with_optimizers(
        adam,
        configure_gradient_clipping=lambda self, optimizer, **k: self.clip_gradients(
            optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value"
        ),
    ),
    "toggles": with_optimizers(
        adam,
        training_step=lambda self, batch, i: (
            self.toggle_optimizer(self.optimizers()),
            Deep.training_step(self, batch, i),
            self.untoggle_optimizer(self.optimizers()),
        )[1],
    ),
}


# Callbacks.


def with_callbacks(make: Callable[[Path], list[L.Callback]], *tell: str, **settings: Any) -> Scenario:
    """Tells the attributes ``tell`` of the first callback, too."""

    def run(strategy: Any, folder: Path) -> Outcome:
        callbacks, module = make(folder), Deep()
        made = trainer(strategy, folder, callbacks=callbacks, **settings)
        made.fit(module)
        return told(made, module, folder, told={name: getattr(callbacks[0], name) for name in tell})

    return run


class Freezes(cb.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layer[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layer[0], optimizer)


SCENARIOS |= {
    "EarlyStopping": with_callbacks(
        lambda f: [cb.EarlyStopping("foo", patience=0, mode="max")],
        "stopped_epoch",
        "best_score",
        "wait_count",
        max_epochs=5,
    ),
    "EarlyStopping by threshold": with_callbacks(
        lambda f: [cb.EarlyStopping("val", divergence_threshold=-100.0)], "stopped_epoch", max_epochs=4
    ),
    "EarlyStopping without its metric": with_callbacks(lambda f: [cb.EarlyStopping("giraffe")]),
    "finetuning": with_callbacks(lambda f: [Freezes()], max_epochs=3),
    "LearningRateMonitor": with_callbacks(lambda f: [cb.LearningRateMonitor(log_momentum=True)], "lrs"),
    "pruning": with_callbacks(lambda f: [cb.ModelPruning("l1_unstructured", amount=0.5)]),
    "pruning, lottery ticket": with_callbacks(
        lambda f: [cb.ModelPruning("random_unstructured", amount=0.25, use_lottery_ticket_hypothesis=True)],
        max_epochs=3,
    ),
    "SWA": with_callbacks(
        lambda f: [cb.StochasticWeightAveraging(0.01, swa_epoch_start=1)], "n_averaged", max_epochs=4
    ),
    "WeightAveraging": with_callbacks(lambda f: [cb.WeightAveraging()]),
    "EMA": with_callbacks(lambda f: [cb.EMAWeightAveraging(decay=0.5, update_every_n_steps=2)]),
    "accumulation": with_callbacks(lambda f: [cb.GradientAccumulationScheduler({0: 2, 1: 3})]),
    "Timer": with_callbacks(lambda f: [cb.Timer(duration={"days": 1})]),
    "DeviceStats": with_callbacks(lambda f: [cb.DeviceStatsMonitor(cpu_stats=False)]),
    "ModelSummary": with_callbacks(lambda f: [cb.ModelSummary(max_depth=2)]),
    "progress": with_callbacks(
        lambda f: [cb.TQDMProgressBar(refresh_rate=1)], "total_train_batches", enable_progress_bar=True
    ),
    "RichModelSummary": with_callbacks(lambda f: [cb.RichModelSummary()]),
    "top 2": with_callbacks(
        lambda f: [
            cb.ModelCheckpoint(
                f / "c", "{epoch}-{step}-{foo:.3f}", monitor="foo", save_top_k=2, every_n_train_steps=2, save_last=True
            )
        ],
        "best_model_score",
        "kth_value",
        "last_model_path",
        "best_model_path",
    ),
    "by validation": with_callbacks(
        lambda f: [cb.ModelCheckpoint(f / "c", "{step}", monitor="val", save_top_k=-1)],
        "best_model_score",
        val_check_interval=2,
    ),
    "weights only": with_callbacks(
        lambda f: [cb.ModelCheckpoint(f / "c", "{step}", save_weights_only=True, every_n_epochs=1, save_top_k=-1)]
    ),
    "monitor that is not there": with_callbacks(lambda f: [cb.ModelCheckpoint(f / "c", monitor="giraffe")]),
    "accumulate and clip": with_callbacks(lambda f: [], accumulate_grad_batches=2, gradient_clip_val=0.01),
    "detect_anomaly": with_callbacks(lambda f: [], detect_anomaly=True),
    "overfit_batches": with_callbacks(lambda f: [], overfit_batches=2),
    "fast_dev_run": with_callbacks(lambda f: [], fast_dev_run=3),
    "max_steps": with_callbacks(lambda f: [], max_steps=7, max_epochs=-1),
    "min_steps": with_callbacks(
        lambda f: [cb.EarlyStopping("foo", patience=0, mode="max")], min_steps=12, max_epochs=8
    ),
    "profiler simple": with_callbacks(lambda f: [], profiler="simple"),
    "batch size finder": with_callbacks(lambda f: [cb.BatchSizeFinder(max_trials=2)]),
}


@scenario
def throughput(strategy: Any, folder: Path) -> Outcome:
    monitor = ThroughputMonitor(batch_size_fn=len, window_size=2)
    made, module = trainer(strategy, folder, callbacks=[monitor]), Deep()
    made.fit(module)
    return {"samples": monitor._samples, "batches": monitor._batches, "keys": sorted(made.logged_metrics)}


@scenario
def predictions(strategy: Any, folder: Path) -> Outcome:
    class Writer(cb.BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch_and_epoch")
            self.seen: list[Any] = []

        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *where: Any) -> None:
            self.seen.append((prediction.clone(), indices, where[1:]))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            self.seen.append((list(predictions), indices))

    writer = Writer()
    made, module = trainer(strategy, folder, callbacks=[writer]), Deep()
    found = made.predict(module, DataLoader(RandomDataset(32, 8), 2))
    return told(made, module, folder, seen=writer.seen, found=found)


@scenario
def lambdas(strategy: Any, folder: Path) -> Outcome:
    called: list[str] = []
    hooks = [name for name in dir(L.Callback) if name.startswith("on_") and "save" not in name and "load" not in name]
    made = trainer(
        strategy, folder, callbacks=[cb.LambdaCallback(**{h: (lambda *a, h=h, **k: called.append(h)) for h in hooks})]
    )
    module = Deep()
    made.fit(module)
    made.validate(module)
    made.test(module)
    made.predict(module)
    return told(made, module, folder, called=called)


# Profilers.


def lightnings(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that a profiler hears in a plain run as well: ours say what they are."""
    return [name for name in names if "[HetPipe]" not in name]


@scenario
def simple_profiler(strategy: Any, folder: Path) -> Outcome:
    profiler = SimpleProfiler(folder, "simple")
    made, module = trainer(strategy, folder, profiler=profiler), Deep()
    made.fit(module)
    name = type(made.strategy).__name__
    durations = profiler.recorded_durations
    counts = {action.replace(name, "Strategy"): len(durations[action]) for action in lightnings(durations)}
    return told(made, module, folder, counts=counts)


@scenario
def advanced_profiler(strategy: Any, folder: Path) -> Outcome:
    profiler = AdvancedProfiler(folder, "advanced")
    made, module = trainer(strategy, folder, profiler=profiler), Deep()
    made.fit(module)
    name = type(made.strategy).__name__
    actions = sorted(a.replace(name, "Strategy") for a in lightnings(profiler.profiled_actions))
    return told(made, module, folder, actions=actions)


@scenario
def pytorch_profiler(strategy: Any, folder: Path) -> Outcome:
    profiler = PyTorchProfiler(folder, "pytorch", schedule=None)
    made, module = trainer(strategy, folder, profiler=profiler, max_epochs=1), BoringModel()
    made.fit(module)
    name = type(made.strategy).__name__
    names = lightnings(event.name for event in profiler.function_events or [] if "[" in event.name)
    return {"events": sorted({found.replace(name, "Strategy") for found in names})}


# The tuner.


class Sized(Deep):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.lr = 1e-3

    def loader(self) -> DataLoader[Any]:
        return DataLoader(RandomDataset(32, 64), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def scaled(method: str, mode: str) -> Scenario:
    def run(strategy: Any, folder: Path) -> Outcome:
        made, module = trainer(strategy, folder), Sized()
        before = made.fit_loop.state_dict()
        found = Tuner(made).scale_batch_size(module, mode=mode, max_trials=3, method=method)  # type: ignore[arg-type]
        assert made.fit_loop.state_dict() == before
        size = module.batch_size
        made.fit(module)
        return told(made, module, folder, found=found, size=size)

    return run


def lr_found(mode: str) -> Scenario:
    def run(strategy: Any, folder: Path) -> Outcome:
        made, module = trainer(strategy, folder), Sized()
        finder = Tuner(made).lr_find(module, num_training=20, mode=mode)
        assert finder is not None
        outcome = {"results": finder.results, "suggestion": finder.suggestion(), "lr": module.lr}
        made.fit(module)
        return told(made, module, folder, **outcome)

    return run


SCENARIOS |= {
    f"batch size, {m}, {how}": scaled(m, how)
    for m in ("fit", "validate", "test", "predict")
    for how in ("power", "binsearch")
}
SCENARIOS |= {f"lr_find, {mode}": lr_found(mode) for mode in ("exponential", "linear")}


def lr_finder_callback(strategy: Any, folder: Path) -> Outcome:
    finder = cb.LearningRateFinder(num_training_steps=10)
    made, module = trainer(strategy, folder, callbacks=[finder]), Sized()
    made.fit(module)
    return told(made, module, folder, lr=module.lr)


SCENARIOS["LearningRateFinder"] = lr_finder_callback


@scenario
def datamodule(strategy: Any, folder: Path) -> Outcome:
    made, module = trainer(strategy, folder), Deep()
    data = BoringDataModule()
    made.fit(module, datamodule=data)
    tested = made.test(module, datamodule=data, verbose=False)
    return told(made, module, folder, tested=tested)
