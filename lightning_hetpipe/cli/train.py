"""hetpipe-train: builds model, data and trainer from a Hydra configuration, trains, tests, says how it went."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import hydra
import lightning as L
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ProgressBar, TQDMProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightning_hetpipe.cli import settings
from lightning_hetpipe.cli.errors import INTERRUPTED, refused, report
from lightning_hetpipe.cli.overrides import settled
from lightning_hetpipe.cli.summary import summary

_FULL_ERROR = "HYDRA_FULL_ERROR"


# What to leave out of the callbacks that the configuration lists, where the Trainer's own switch says so.
_SWITCHES: dict[str, type] = {
    "enable_progress_bar": ProgressBar,
    "enable_checkpointing": Checkpoint,
    "logger": LearningRateMonitor,
}


class _WrongSetting(BaseException):
    """Carries a setting's error, its cause, out of Hydra, which would print an Exception in its own way first."""


def main() -> None:
    """The console script. Exit codes: 0; 1 for a failure, with its traceback; 2 for a wrong setting; 130 for Ctrl-C."""
    sys.path.insert(0, os.getcwd())  # so that `_target_: my_model.MyModel` finds ./my_model.py
    sys.argv[1:] = settled(sys.argv[1:])
    asked_for_all = os.environ.get(_FULL_ERROR) == "1"
    try:
        with nullcontext() if asked_for_all else _errors_passed_on():
            _application()
    except KeyboardInterrupt:
        print("\nhetpipe-train: interrupted.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except (_WrongSetting, Exception) as caught:
        error = caught.__cause__ if isinstance(caught, _WrongSetting) and caught.__cause__ else caught
        if asked_for_all:
            raise error from error.__cause__
        sys.exit(report(error))


@hydra.main(config_path="pkg://lightning_hetpipe.conf", config_name="train", version_base="1.3")
def _application(config: DictConfig) -> float | None:
    """One job of Hydra's; returns the monitored metric's best value, which sweepers may optimise."""
    try:
        return run(config)
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning turns Ctrl-C into exit code 1
            raise KeyboardInterrupt from None
        raise
    except (MisconfigurationException, OmegaConfBaseException) as error:
        raise _WrongSetting from error
    except TypeError as error:
        if (refusal := settings.refused_argument(config, error)) is None:
            raise
        raise _WrongSetting from refusal


def run(config: DictConfig) -> float | None:
    """Checks the configuration, trains, tests the best checkpoint and prints the summary.

    Returns:
        The best value of what the checkpoint callback monitors, or None if it monitors nothing.

    Raises:
        MisconfigurationException: for a setting that is unknown, missing or refused.
    """
    settings.check(config)
    # Lightning 2.6 on torch 2.13 warns so at every start, and nobody at this terminal could do anything about it.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    if config.get("seed") is not None:
        L.seed_everything(config.seed, workers=True, verbose=False)
    model: L.LightningModule = _built(config, "model")
    data: L.LightningDataModule = _built(config, "data")
    trainer: L.Trainer = _built(config, "trainer", **_callbacks(config))
    try:
        trainer.fit(model, datamodule=data, ckpt_path=config.get("ckpt_path"))
    except BaseException:
        _end_progress_bars(trainer)
        raise
    last_run = getattr(trainer.strategy, "last_run", None)
    checkpoint: Any = trainer.checkpoint_callback
    best: str = getattr(checkpoint, "best_model_path", "")
    metrics = dict(trainer.callback_metrics)
    if config.get("test", True) and is_overridden("test_step", model) and is_overridden("test_dataloader", data):
        trainer.test(model, datamodule=data, ckpt_path=best or None, verbose=False)
        metrics = dict(trainer.callback_metrics)
    if trainer.is_global_zero:
        print(summary(last_run, metrics, checkpoint=best, log_dir=trainer.log_dir if trainer.loggers else None))
    score = getattr(checkpoint, "best_model_score", None)
    return None if score is None else float(score)


def _built(config: DictConfig, key: str, **arguments: Any) -> Any:
    try:
        return instantiate(config[key], _convert_="all", **arguments)
    except InstantiationException as error:
        raise refused(error, key) from None


def _callbacks(config: DictConfig) -> dict[str, Any]:
    """Lightning takes a list of callbacks; in the configuration they have names, so that each can be overridden."""
    callbacks = config.trainer.get("callbacks")
    if not isinstance(callbacks, DictConfig):
        return {}
    chosen = [_built(callbacks, str(name)) for name, node in callbacks.items() if node is not None]
    for switch, kind in _SWITCHES.items():
        if config.trainer.get(switch) is False:
            chosen = [callback for callback in chosen if not isinstance(callback, kind)]
    with open_dict(config):
        del config.trainer["callbacks"]  # instantiate merges, and a mapping does not merge with a list
    return {"callbacks": chosen}


def _end_progress_bars(trainer: L.Trainer) -> None:
    """So that what is said next begins on a line of its own, and is not drawn over."""
    shown = trainer.progress_bar_callback
    if isinstance(shown, TQDMProgressBar):
        for name in ("val_progress_bar", "train_progress_bar"):
            with suppress(TypeError):  # there is none yet
                getattr(shown, name).close()


@contextmanager
def _errors_passed_on() -> Iterator[None]:
    """Under this variable Hydra raises what went wrong, instead of printing it in its own way and exiting."""
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        os.environ.pop(_FULL_ERROR, None)


if __name__ == "__main__":
    main()
