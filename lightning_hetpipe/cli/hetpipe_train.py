"""hetpipe-train: builds model, data and trainer from a Hydra configuration, trains, tests, says how it went."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from typing import Any

import hydra
import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ProgressBar, TQDMProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, open_dict

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.cli import config_checks
from lightning_hetpipe.cli.building import built
from lightning_hetpipe.cli.console_script import TRAIN
from lightning_hetpipe.cli.entry import enter, job
from lightning_hetpipe.cli.summary import summary
from lightning_hetpipe.launch import launcher

# What to leave out of the callbacks that the configuration lists, where the Trainer's own switch says so.
_SWITCHES: dict[str, type] = {
    "enable_progress_bar": ProgressBar,
    "enable_checkpointing": Checkpoint,
    "logger": LearningRateMonitor,
}


def main() -> None:
    """The console script.

    Exit codes: 0; 1 for a failure, with its traceback, or of a virtual worker without which the others went on; 2 for a
    wrong setting; 130 for Ctrl-C; 143 for SIGTERM.
    """
    enter(_application, TRAIN)


@hydra.main(config_path="pkg://lightning_hetpipe.conf", config_name="train", version_base="1.3")
def _application(config: DictConfig) -> float | None:
    """One job of Hydra's; returns the monitored metric's best value, which sweepers may optimise."""
    return job(_job, config)


def _job(config: DictConfig) -> float | None:
    """Runs, and leaves none of the processes that it has started to the next job of a sweep."""
    try:
        score = run(config)
    except BaseException:
        launcher.finish(failed=True)
        raise
    launcher.finish()
    return score


def run(config: DictConfig) -> float | None:
    """Checks the configuration, trains, tests the best checkpoint and prints the summary.

    Returns:
        The best value of what the checkpoint callback monitors, or None if it monitors nothing.

    Raises:
        SettingError: for a setting that is unknown, missing or of the wrong kind.
        SIGTERMException: if the process was told to end, with Lightning's own clean-up done.
    """
    config_checks.check(config)
    if config.get("seed") is not None:
        L.seed_everything(config.seed, workers=True, verbose=False)
    config = deepcopy(config)  # of which the caller may still want to say what stood where
    _strip(config)
    model = built(config, "model", L.LightningModule)
    data = built(config, "data", L.LightningDataModule)
    trainer = built(config, "trainer", L.Trainer, **_callbacks(config))
    try:
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
        print(
            summary(
                last_run,
                metrics,
                virtual_workers=trainer.world_size,
                torch_threads=None if isinstance(trainer.strategy, HetPipeStrategy) else torch.get_num_threads(),
                checkpoint=best,
                log_dir=trainer.log_dir if trainer.loggers else None,
            )
        )
    score = getattr(checkpoint, "best_model_score", None)
    return None if score is None else float(score)


def _callbacks(config: DictConfig) -> dict[str, Any]:
    """Lightning takes a list of callbacks; in the configuration they have names, so that each can be overridden."""
    named = config.trainer.get("callbacks")
    if not isinstance(named, DictConfig):
        return {}
    given = [name for name in map(str, named) if named[name] is not None]
    chosen = [built(config, f"trainer.callbacks.{name}", L.Callback) for name in given]
    for switch, kind in _SWITCHES.items():
        if config.trainer.get(switch) is False or config.trainer.get(switch) == []:
            chosen = [callback for callback in chosen if not isinstance(callback, kind)]
    with open_dict(config):
        del config.trainer["callbacks"]  # instantiate merges, and a mapping does not merge with a list
    return {"callbacks": chosen}


def _strip(config: DictConfig) -> None:
    """Switches off what `trainer.barebones` excludes and the configuration has; Lightning itself lists what that is."""
    if config.trainer.get("barebones") is True:
        with open_dict(config):
            config.trainer.update({**dict.fromkeys(_SWITCHES, False), "log_every_n_steps": 0})


def _end_progress_bars(trainer: L.Trainer) -> None:
    """So that what is said next begins on a line of its own, and is not drawn over."""
    shown = trainer.progress_bar_callback
    if isinstance(shown, TQDMProgressBar):
        for name in ("val_progress_bar", "train_progress_bar"):
            with suppress(TypeError):  # there is none yet
                getattr(shown, name).close()


if __name__ == "__main__":
    main()
