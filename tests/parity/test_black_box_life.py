"""A Trainer's life around its steps: flags, hooks that fail, copies, what is freed; a strategy from the environment."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import itertools
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint, ThroughputMonitor
from lightning.pytorch.demos.boring_classes import BoringDataModule
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.profilers import Profiler

from lightning_hetpipe import HetPipeStrategy
from tests.parity.black_box import Model, assert_as_plain, describe, end, fitted, trainer
from tests.support.marks import quick

pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.*LeafSpec.*:FutureWarning")


class Verbose(Model):
    """Logs everywhere, and notes in which mode it is evaluated."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch)
        self.log("train", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch)
        self.log("val", loss)
        checking = self.trainer.sanity_checking
        self.seen.append([checking, torch.is_inference_mode_enabled(), torch.is_grad_enabled(), self.training])
        return {"x": loss}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test", self.step(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch)

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))


FLAGS: list[dict[str, Any]] = [
    {"fast_dev_run": True},
    {"fast_dev_run": 3},
    {"limit_train_batches": 0},
    {"limit_val_batches": 0},
    {"limit_train_batches": 0.05, "limit_val_batches": 0.05},
    {"overfit_batches": 2},
    {"val_check_interval": 0.5},
    {"val_check_interval": 3, "check_val_every_n_epoch": None},
    {"check_val_every_n_epoch": 2},
    {"num_sanity_val_steps": -1},
    {"inference_mode": False},
    {"detect_anomaly": True},
    {"max_steps": 3},
    {"max_steps": 0},
    {"max_epochs": 0},
    {"max_epochs": -1, "max_steps": 5},
    {"min_steps": 6, "max_steps": 7},
    {"max_time": "00:01:00:00"},
    {"reload_dataloaders_every_n_epochs": 1},
    {"accumulate_grad_batches": 3, "val_check_interval": 2},
    {"gradient_clip_val": 0.01},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"precision": "bf16-mixed"},
    {"precision": "64-true"},
    {"enable_progress_bar": True, "enable_model_summary": True, "enable_checkpointing": True},
    {"devices": "auto"},
    {"devices": 1},
    {"accelerator": "auto"},
    {"barebones": True},
]


@quick(
    "{'fast_dev_run': True}",
    "{'limit_train_batches': 0}",
    "{'limit_train_batches': 0.05, 'limit_val_batches': 0.05}",
    "{'val_check_interval': 3, 'check_val_every_n_epoch': None}",
    "{'num_sanity_val_steps': -1}",
    "{'inference_mode': False}",
    "{'max_epochs': -1, 'max_steps': 5}",
    "{'accumulate_grad_batches': 3, 'val_check_interval': 2}",
    "{'gradient_clip_val': 0.01, 'gradient_clip_algorithm': 'value'}",
    "{'precision': 'bf16-mixed'}",
    "{'barebones': True}",
)
@pytest.mark.parametrize("settings", FLAGS, ids=str)
def test_a_flag(settings: dict[str, Any], tmp_path: Path) -> None:
    if settings.get("barebones"):  # allows nothing beside it that is False by hand
        settings = {**settings, "logger": None, "enable_progress_bar": None, "enable_model_summary": None}
        settings["enable_checkpointing"] = None

    def story(folder: Path) -> Any:
        module = Verbose()
        return fitted(folder, module, **settings), module.seen

    assert_as_plain(story, tmp_path)


def test_fit_validate_test_and_predict_in_any_order(tmp_path: Path) -> None:
    def story(folder: Path) -> Any:
        made, module, told = trainer(folder, limit_test_batches=2, limit_predict_batches=2), Verbose(), []
        for verb in ("predict", "validate", "fit", "test", "predict", "validate"):
            told += [getattr(made, verb)(module), end(made, module)]
        made.fit_loop.max_epochs = 3
        made.fit(module)
        another = Verbose()
        made.fit_loop.max_epochs = 4
        made.fit(another)  # another module goes on where the first one was
        return told, end(made, module), end(made, another)

    assert_as_plain(story, tmp_path)


# Hooks.


def _public(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def _note_calls(owner: Any, who: str, names: set[str], calls: list[Any]) -> None:
    """Puts functions that note their calls over the methods ``names``, as hook tests of others do."""
    for name in sorted(names):
        method = getattr(owner, name)

        def noted(*args: Any, _method: Callable[..., Any] = method, _name: str = name, **kwargs: Any) -> Any:
            result = _method(*args, **kwargs)
            calls.append([who, _name, [type(each).__name__ for each in args], sorted(kwargs)])
            return result

        setattr(owner, name, functools.update_wrapper(noted, method))


OF_STRATEGY = {
    "setup_environment",
    "connect",
    "setup",
    "setup_optimizers",
    "model_to_device",
    "training_step",
    "backward",
    "pre_backward",
    "post_backward",
    "optimizer_step",
    "batch_to_device",
    "validation_step",
    "on_train_start",
    "on_train_batch_start",
    "on_train_end",
    "on_validation_start",
    "on_validation_end",
    "optimizer_state",
    "lightning_module_state_dict",
    "save_checkpoint",
    "barrier",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_boolean_decision",
    "process_dataloader",
    "teardown",
}


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate_grad_batches": 2}, {"precision": "64-true"}, {"val_check_interval": 1}],
    ids=str,
)
def test_every_call_of_every_hook(settings: dict[str, Any], tmp_path: Path) -> None:
    """Calls of module, callback, data and strategy; ``backward`` is noted, too, which replaces it on the module."""
    of_module = _public(L.LightningModule) - {"optimizers", "log", "log_dict"} - _public(torch.nn.Module)
    of_module |= {"forward", "zero_grad", "train"}

    def story(folder: Path) -> Any:
        calls: list[Any] = []
        module, witness, data = Model(), Callback(), BoringDataModule()
        _note_calls(module, "module", of_module, calls)
        _note_calls(witness, "callback", _public(Callback), calls)
        _note_calls(data, "data", _public(L.LightningDataModule), calls)
        checkpoints = ModelCheckpoint(folder)
        made = trainer(folder, callbacks=[witness, checkpoints], enable_checkpointing=True, **settings)
        _note_calls(made.strategy, "strategy", OF_STRATEGY, calls)
        made.fit(module, datamodule=data)
        made.validate(module, datamodule=data)
        return calls

    names = [each[1] for each in assert_as_plain(story, tmp_path)["told"]]
    assert names.count("backward") == 2 * 8


ONCE = ("setup", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_end", "on_fit_end", "teardown")
OFTEN = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "transfer_batch_to_device",
    "training_step",
    "forward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
    "validation_step",
    "on_validation_end",
    "on_train_epoch_end",
)


@quick(
    "ValueError-setup",
    "ValueError-training_step",
    "ValueError-on_before_backward",
    "ValueError-on_train_batch_end",
    "ValueError-validation_step",
    "ValueError-on_train_end",
)
@pytest.mark.parametrize("hook", ONCE + OFTEN)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_hook_that_fails(hook: str, error: type[BaseException], tmp_path: Path) -> None:
    """The same error, checkpoint and state; the logger hears of it; and the next ``fit`` of the module works."""

    class Witness(Callback):
        def __init__(self) -> None:
            self.exceptions: list[Any] = []

        def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
            self.exceptions.append(describe(exception))

    def story(folder: Path) -> Any:
        module, calls = Verbose(), [0]
        method = getattr(module, hook)

        @functools.wraps(method)
        def failing(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] > 1 or hook in ONCE:
                raise error("of the hook")
            return method(*args, **kwargs)

        setattr(module, hook, failing)
        witness, logger = Witness(), Mock(spec=Logger, save_dir=str(folder), version="0", log_dir=str(folder))
        logger.name = "mock"
        callbacks = [witness, OnExceptionCheckpoint(folder)]
        failed = fitted(folder, module, callbacks=callbacks, logger=logger, enable_checkpointing=True)
        logged = [call[0] for call in logger.method_calls]
        delattr(module, hook)
        return failed, witness.exceptions, logged, fitted(folder, module)

    assert_as_plain(story, tmp_path)


# Copies.


class Copies(Callback):
    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.copy(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if args[-1] == 2:
            self.copy(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.copy(trainer, pl_module)

    def copy(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        others = [each for each in getattr(trainer, "callbacks", []) if each is not self]
        made: list[Any] = [others, pl_module, trainer.fit_loop, trainer.optimizers]
        made = [copy.deepcopy(each) for each in made]
        self.told.append([describe(made), describe(made[1].state_dict())])
        try:
            self.told.append(type(pickle.loads(pickle.dumps(pl_module.layer))).__name__)
        except Exception as error:
            self.told.append(describe(error))


def test_copies_made_at_any_time(tmp_path: Path) -> None:
    """Copies of callbacks, which hold the Trainer, of module, loop and optimizers; a copy of the Trainer trains."""

    def story(folder: Path) -> Any:
        copies = Copies()
        made, module = trainer(folder, enable_progress_bar=True, callbacks=[copies]), Model()
        pickle.loads(pickle.dumps(made))
        made.fit(module)
        again = copy.deepcopy(made)
        again.fit_loop.max_epochs = 3
        again.fit(again.lightning_module)
        told = [end(again, again.lightning_module), end(made, module)]
        return told, copies.told, fitted(folder, copy.deepcopy(module))

    assert_as_plain(story, tmp_path)


def test_all_is_freed_with_its_last_name(tmp_path: Path) -> None:
    def story(folder: Path) -> Any:
        made, module = trainer(folder), Verbose()
        made.fit(module)
        things = [made, made.strategy, made.fit_loop, module, module.layer.weight]
        left = [weakref.ref(thing) for thing in things]
        del made, module, things
        gc.collect()
        return [each() is None for each in left]

    assert assert_as_plain(story, tmp_path)["told"] == [True] * 5


def test_losses_are_freed_as_soon_as_plainly(tmp_path: Path) -> None:
    class Watched(Model):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[weakref.ref[Any]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.step(batch)
            self.losses.append(weakref.ref(loss))
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen.append([each() is not None for each in self.losses])

    def story(folder: Path) -> Any:
        module = Watched()
        return fitted(folder, module), module.seen

    assert_as_plain(story, tmp_path)


# Profilers.


class Actions(Profiler):
    """Notes what is profiled, in order; the strategy's own name, which Lightning puts in, is no difference."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def start(self, action_name: str) -> None:
        self.told.append(f"start {self._unnamed(action_name)}")

    def stop(self, action_name: str) -> None:
        self.told.append(f"stop {self._unnamed(action_name)}")

    def _unnamed(self, action: str) -> str:
        return action.replace(HetPipeStrategy.__name__, "Strategy").replace("SingleDeviceStrategy", "Strategy")


def test_what_a_profiler_sees(tmp_path: Path) -> None:
    def story(folder: Path) -> Any:
        profiler = Actions()
        made = trainer(folder, profiler=profiler, val_check_interval=2)
        made.fit(Verbose())
        return profiler.told

    assert "start [Strategy]Strategy.training_step" in assert_as_plain(story, tmp_path)["told"]


def test_a_clock_that_a_test_has_scripted(tmp_path: Path) -> None:
    """Lightning's ThroughputMonitor reads it once for each batch; whoever read it too would use its times up."""

    def story(folder: Path) -> Any:
        monitor = ThroughputMonitor(batch_size_fn=len, window_size=3)
        times = itertools.count()
        with patch("time.perf_counter", side_effect=times):
            made = trainer(
                folder, callbacks=monitor, logger=CSVLogger(folder), log_every_n_steps=1, limit_val_batches=0
            )
            made.fit(Model())
        return next(times), describe(dict(made.logged_metrics))

    assert assert_as_plain(story, tmp_path)["told"][0] > 8
