"""Settings of the strategy among the hyperparameters of a run, so that loggers compare runs by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_hetpipe.reporting.report import RunReport
from lightning_hetpipe.run.lifecycle import Extension
from lightning_hetpipe.run.run_settings import RunSettings
from lightning_hetpipe.workers.synchroniser import NoSynchroniser, Synchroniser

HPARAMS = "hetpipe"
"""The hyperparameter that holds them all, so that none takes the place of a user's."""


class LoggedSettings(Extension):
    """Logs them once in a fit, when its first minibatch has settled those that were "auto".

    Lightning has logged the module's own hyperparameters by then: TensorBoard's dashboard shows those that came first.

    Args:
        trainer: Whose loggers are told.
        settings: As the strategy was asked for them.
        synchroniser: Knows the settings that virtual workers share.
        report: Gives the numbers of the run so far.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        settings: RunSettings,
        synchroniser: Synchroniser | NoSynchroniser,
        report: Callable[[], RunReport],
    ) -> None:
        self._trainer = trainer
        self._settings = settings
        self._synchroniser = synchroniser
        self._report = report
        self._logged = False

    @contextmanager
    def inline_backward(self, minibatch: int) -> Iterator[None]:
        yield
        if not self._logged and (report := self._report()).stages:
            self._logged = True
            if self._trainer.enable_autolog_hparams:
                self._log({HPARAMS: self._settled(report)})

    def _log(self, hyperparameters: dict[str, Any]) -> None:
        for logger in self._trainer.loggers:
            logger.log_hyperparams(hyperparameters)
            if isinstance(logger, TensorBoardLogger) and self._trainer.is_global_zero and Path(logger.log_dir).is_dir():
                # Its own save leaves a file as it is that it has written before.
                save_hparams_to_yaml(Path(logger.log_dir, logger.NAME_HPARAMS_FILE), logger.hparams)

    def _settled(self, report: RunReport) -> dict[str, Any]:
        settings, module = self._settings, self._settings.module
        return {
            "stages": len(report.stages),
            "in_flight": report.in_flight,
            "devices": ", ".join(stage.device for stage in report.stages),
            "module": module if module is None else ", ".join(module),
            "recompute": settings.recompute,
            "compile": False if settings.compile is None else str(settings.compile) if settings.compile else True,
            **self._synchroniser.settings(),
        }
