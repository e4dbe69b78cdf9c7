"""A quiet Trainer, for tests and for the processes that tests start; it needs nothing of ours."""

from __future__ import annotations

from typing import Any

import lightning as L

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Settings by which a Trainer prints, logs and saves nothing."""


def quiet_trainer(strategy: Any = "auto", **settings: Any) -> L.Trainer:
    """A Trainer on one CPU for one epoch, that does nothing but what ``settings`` say."""
    defaults = {**QUIET, "accelerator": "cpu", "max_epochs": 1, "num_sanity_val_steps": 0}
    return L.Trainer(strategy=strategy, **{**defaults, **settings})
