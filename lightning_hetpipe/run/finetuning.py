"""Weights that are frozen in the first minibatch of a fit, and trained later in it."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import BaseFinetuning


def trains_frozen_later(trainer: L.Trainer) -> bool:
    """Return True if a callback of Lightning's may unfreeze weights; which ones and when, only the callback knows."""
    callbacks = getattr(trainer, "callbacks", [])  # set by a connector, without declaring it
    return any(isinstance(callback, BaseFinetuning) for callback in callbacks)
