"""Run of hetpipe-train: build model, data and Trainer, train, test and print a summary."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, SupportsFloat

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ModelSummary, ProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, open_dict

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.cli.targets import built, hyperparameters
from lightning_hetpipe.launch import launcher
from lightning_hetpipe.reporting.report import RunReport

LISTS: Mapping[str, type[Any]] = {"logger": Logger, "callbacks": L.Callback}
"""Arguments that are lists for the Trainer, and sections by name in a configuration, with the class of their items."""

_SWITCHES: dict[str, type] = {
    "enable_progress_bar": ProgressBar,
    "enable_checkpointing": Checkpoint,
    "enable_model_summary": ModelSummary,
    "logger": LearningRateMonitor,
}
"""Configured callbacks that are left out if this switch of the Trainer is off."""


def job(config: DictConfig) -> float | None:
    """Run, and end all processes that this job started, before the next job of a sweep begins."""
    try:
        outcome = run(config)
    except BaseException as error:
        # If this is virtual worker 0 and was left out, the others end as well, and may be saving the run.
        launcher.finish(failed=not isinstance(error, launcher.WasLeftOut))
        raise
    launcher.finish()
    return outcome


def run(config: DictConfig) -> float | None:
    """Train, test the best checkpoint and print the summary. Return the best value of the monitored metric, if any.

    Raises:
        SIGTERMException: if the process was told to end. Lightning has cleaned up by then.
    """
    if config.get("seed") is not None:
        L.seed_everything(config.seed, workers=True, verbose=False)
    config = deepcopy(config)  # attribution of errors reads the caller's config, unchanged
    if config.trainer.get("barebones") is True:  # it excludes these, by Lightning's own list
        with open_dict(config):
            config.trainer.update({**dict.fromkeys(_SWITCHES, False), "log_every_n_steps": 0})
    model = built(config, "model", L.LightningModule)
    data = built(config, "data", L.LightningDataModule)
    settings = hyperparameters(config)
    trainer = built(config, "trainer", L.Trainer, **_lists(config))
    try:
        for logger in trainer.loggers:
            getattr(logger, "experiment", None)  # create it first, so that an error says what cannot be created
            logger.log_hyperparams(settings)
        trainer.fit(model, datamodule=data, ckpt_path=config.get("ckpt_path"))
    except BaseException:
        _end_progress_bars(trainer)
        raise
    last_run = trainer.strategy.last_run if isinstance(trainer.strategy, HetPipeStrategy) else None
    checkpoint: Any = trainer.checkpoint_callback
    best: str = getattr(checkpoint, "best_model_path", "")
    metrics = dict(trainer.callback_metrics)
    if config.get("test", True) and is_overridden("test_step", model) and is_overridden("test_dataloader", data):
        trainer.test(model, datamodule=data, ckpt_path=best or None, verbose=False)
        metrics = dict(trainer.callback_metrics)
    if trainer.is_global_zero:
        threads = None if isinstance(trainer.strategy, HetPipeStrategy) else torch.get_num_threads()
        print(summary(last_run, metrics, threads, best, trainer.loggers))
    best_score = getattr(checkpoint, "best_model_score", None)
    return None if best_score is None else float(best_score)


def _lists(config: DictConfig) -> dict[str, Any]:
    """Build the lists of loggers and callbacks for Lightning from their sections by name."""
    lists: dict[str, Any] = {}
    for name, kind in LISTS.items():
        named = config.trainer.get(name)
        if isinstance(named, DictConfig) and "_target_" not in named:
            lists[name] = [built(config, f"{name}.{key}", kind) for key in map(str, named) if named[key] is not None]
    settings = {**config.trainer, **lists}
    off = tuple(kind for switch, kind in _SWITCHES.items() if settings.get(switch) in (False, []))
    if "callbacks" in lists:
        lists["callbacks"] = [callback for callback in lists["callbacks"] if not isinstance(callback, off)]
    with open_dict(config):
        for name in lists:
            del config.trainer[name]  # instantiate would merge, and a mapping does not merge with a list
    return lists


def _end_progress_bars(trainer: L.Trainer) -> None:
    """Close progress bars, so that an error begins on a line of its own and no bar is drawn over it."""
    shown = trainer.progress_bar_callback
    if isinstance(shown, TQDMProgressBar):
        for name in ("val_progress_bar", "train_progress_bar"):
            with suppress(TypeError):  # none was made yet
                getattr(shown, name).close()


def summary(
    run: RunReport | None,
    metrics: Mapping[str, SupportsFloat],
    torch_threads: int | None = None,
    checkpoint: str = "",
    loggers: Sequence[Logger] = (),
) -> str:
    """Return several lines of text on a run that has ended.

    Args:
        run: Report of the strategy, or None to leave out the table of stages.
        metrics: Lightning's metrics by name, of which :func:`results` are shown.
        torch_threads: Threads of each torch operation in a run without the pipeline, or None to leave out the line.
        checkpoint: Path of the best checkpoint, or "".
        loggers: Loggers of the Trainer. The text has the places of TensorBoard's files and of metrics as CSV.
    """
    lines = [""]
    rows: list[tuple[str, str]] = []
    if run is not None:
        lines += [run.table, ""]
        rows.append(("samples per second", run.throughput))
    rows += results(metrics)
    if torch_threads is not None:
        rows.append(("torch threads", f"{torch_threads}; stages of a pipeline use OMP_NUM_THREADS each, by default 1"))
    if checkpoint:
        rows.append(("checkpoint", _relative(checkpoint)))
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            rows.append(("metrics", _relative(logger.experiment.metrics_file_path)))
        elif isinstance(logger, TensorBoardLogger):
            rows.append(("to see the curves", f"{_tensorboard()} --logdir {shlex.quote(_relative(logger.log_dir))}"))
    width = max((len(label) for label, _ in rows), default=0)
    return "\n".join(lines + [f"{label:<{width}}   {value}" for label, value in rows])


def results(metrics: Mapping[str, SupportsFloat]) -> list[tuple[str, str]]:
    """Return names and values, as text, of the metrics of the last part of the run (test, else val, else train)."""
    for part in ("test", "val", "train"):
        found = [(name, float(value)) for name, value in metrics.items() if name.startswith(part)]
        if found:
            return [(_words(name), f"{value:.2%}" if _is_accuracy(name) else f"{value:.4g}") for name, value in found]
    return []


def _is_accuracy(name: str) -> bool:
    return "acc" in name.replace("/", "_").lower().split("_") or "accuracy" in name.lower()


def _words(name: str) -> str:
    words = name.replace("/", " ").replace("_", " ").split()
    return " ".join("accuracy" if word == "acc" else word for word in words)


def _relative(path: str) -> str:
    """Return a path relative to the working directory, if that is shorter."""
    try:
        return min(os.path.relpath(path), path, key=len)
    except ValueError:  # another drive
        return path


def _tensorboard() -> str:
    """Return the command's name, or its path in a virtual environment that is not activated."""
    beside = Path(sys.executable).with_name("tensorboard")
    return shlex.quote(_relative(str(beside))) if not shutil.which("tensorboard") and beside.exists() else "tensorboard"
